"""vLLM decodes exported drafts: the same tokens as without one, and the same number of verifies as draftsmith's engine.

vLLM's first model runner drafts for DFlash; the second one, for DFlash 2 and DSpark, needs Triton, whose interpreter
stands for a GPU here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.decoding.generate import generate
from draftsmith.drafts.draft import Draft
from draftsmith.export.options import ExportOptions
from draftsmith.export.run import export_run
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target

from .drafts import random_prompts, saved_target, trained
from .environment import MARKS, run_jobs

pytestmark = MARKS

LAYOUTS = ("zlab", "speculators")
FIRST, SECOND = ("dflash", "dta"), ("dflash2", "dspark")
NEW_TOKENS = 32


def command_of(card: Path) -> dict[str, Any]:
    """What the card tells vLLM's user to give as `--speculative-config`."""
    (line,) = [line for line in card.read_text().splitlines() if line.startswith("  --speculative-config")]
    config: dict[str, Any] = json.loads(line.partition("'")[2].rpartition("'")[0])
    return config


def job(speculative: dict[str, Any] | None, prompts: list[list[int]]) -> dict[str, Any]:
    llm: dict[str, Any] = {
        "model": str(saved_target()),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }
    if speculative is not None:
        llm["speculative_config"] = speculative
    return {"llm": llm, "prompts": prompts, "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}


def served(directory: Path, methods: tuple[str, ...], *, interpreted: bool) -> dict[str, dict[str, Any]]:
    """vLLM's answers: without a draft under "plain", and with each method's export under METHOD-LAYOUT."""
    target = TargetOptions(path=str(saved_target()))
    prompts = random_prompts(8, 2, Target.load(saved_target()).vocab_size)
    jobs = {"plain": job(None, prompts)}
    for method in methods:
        for layout in LAYOUTS:
            out = directory / f"{method}-{layout}"
            export_run(trained(method), ExportOptions(which="last", layout=layout), out, target=target)
            jobs[out.name] = job(command_of(out / "README.md"), prompts)
    return run_jobs(directory, jobs, interpreted=interpreted)


@pytest.fixture(scope="module")
def first_runner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("first")
    return directory, served(directory, FIRST, interpreted=False)


@pytest.fixture(scope="module")
def second_runner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("second")
    return directory, served(directory, SECOND, interpreted=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", [*FIRST, *SECOND])
def test_tokens_and_verifies_are_those_of_draftsmiths_engine(
    method: str, layout: str, request: pytest.FixtureRequest
) -> None:
    directory, answers = request.getfixturevalue("first_runner" if method in FIRST else "second_runner")
    target, draft = Target.load(saved_target()), Draft.load(directory / f"{method}-{layout}")
    prompts = random_prompts(8, 2, target.vocab_size)
    plain = [each.token_ids for each in generate(target, None, prompts, max_new_tokens=NEW_TOKENS)]
    ours = generate(target, draft, prompts, max_new_tokens=NEW_TOKENS)
    theirs = answers[f"{method}-{layout}"]
    assert [each.token_ids for each in ours] == plain
    assert theirs["token_ids"] == answers["plain"]["token_ids"] == plain
    lengths = [length for each in ours for length in each.accept_lengths]
    assert theirs["counters"]["vllm:spec_decode_num_drafts"] == len(lengths)
    # The draft must be right at times and wrong at times, or equal numbers show nothing.
    assert len(set(lengths)) >= 3
