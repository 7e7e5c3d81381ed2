"""`regenerate` from a real vLLM server gives the local engine's answers, whatever generation_config.json says."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.prompts import Prompt
from draftsmith.export.options import ExportOptions
from draftsmith.export.run import export_run
from draftsmith.regenerate import EndpointOptions, RegenerateOptions, regenerate
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target

from .drafts import saved_target, trained
from .environment import MARKS, SCRIPTS, Server, free_port

pytestmark = MARKS

PROMPTS = [
    *(Prompt(f"p{n}", (f"the user said {n} two",)) for n in range(8)),
    Prompt("turns", ("the one", "two the two", "one"), system="the system"),
]
WINDOW = 512
TARGET = partial(saved_target, talkative=True)


class Served:
    """A server that chats."""

    def __init__(self, directory: Path, *more: str) -> None:
        port = free_port()
        command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET())]
        command += ["--dtype", "float32", "--port", str(port), "--max-model-len", str(WINDOW)]
        self.server = Server(command, port, directory, *more)
        self.endpoint = EndpointOptions(base_url=f"{self.server.url}/v1", model=str(TARGET()), retries=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that speculates with a draft of draftsmith's, of a target of the same sizes."""
    directory = tmp_path_factory.mktemp("served")
    export_run(trained("dflash"), ExportOptions(which="last"), directory / "draft", target=_target())
    speculative = {"method": "dflash", "model": str(directory / "draft"), "num_speculative_tokens": 5}
    running = Served(directory, "--speculative-config", json.dumps(speculative))
    with running.server:
        yield running


def _target() -> TargetOptions:
    return TargetOptions(path=str(TARGET()))


def answers(out: Path, prompts: list[Prompt] = PROMPTS, **options: Any) -> list[dict[str, Any]]:
    target = None if "endpoint" in options else Target.load(TARGET())
    regenerate(target, prompts, out, RegenerateOptions(max_new_tokens=24, **options))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_greedy_answers_are_the_local_engines(served: Served, tmp_path: Path) -> None:
    ours = answers(tmp_path / "ours.jsonl")
    theirs = answers(tmp_path / "theirs.jsonl", endpoint=served.endpoint)
    assert theirs == ours
    assert all(record["answer_token_ids"] for record in theirs)  # the very tokens, their stop token included
    assert {record["finish_reason"] for record in ours} == {"stop", "length"}
    assert len({str(record["answer_token_ids"]) for record in ours}) > len(ours) / 2


def test_sampled_answers_are_sampled(served: Served, tmp_path: Path) -> None:
    """The target's generation_config.json says top_k 1, which would make them all the greedy ones. (Speculating, vLLM
    does not repeat them for the same seeds.) A sampled answer may be empty, and is left out then."""
    greedy, first, second = (
        answers(
            tmp_path / f"{n}.jsonl",
            endpoint=served.endpoint,
            temperature=temperature,
            seed=seed,
            max_refused_share=0.8,
        )
        for n, (temperature, seed) in enumerate(((0.0, 0), (1.0, 0), (1.0, 1)))
    )
    assert greedy != first != second != greedy


def test_a_prompt_beyond_the_window_is_left_out(served: Served, tmp_path: Path) -> None:
    prompts = [*PROMPTS, Prompt("long", ("x" * WINDOW,))]
    found = answers(tmp_path / "out.jsonl", prompts, endpoint=served.endpoint, max_refused_share=0.2)
    assert [record["id"] for record in found] == [prompt.id for prompt in PROMPTS]
    (refused,) = map(json.loads, (tmp_path / "out.refused.jsonl").read_text().splitlines())
    assert refused["id"] == "long"
    assert "HTTP 400" in refused["reason"]


@pytest.mark.slow
def test_reasoning_is_kept(tmp_path: Path) -> None:
    plugin = ["--reasoning-parser-plugin", str(SCRIPTS / "first_word_reasoning.py")]
    running = Served(tmp_path, *plugin, "--reasoning-parser", "first_word")
    asked = PROMPTS[:-1]
    with running.server:
        found = answers(tmp_path / "theirs.jsonl", asked, endpoint=running.endpoint)
    for theirs, ours in zip(found, answers(tmp_path / "ours.jsonl", asked), strict=True):
        message, whole = theirs["messages"][-1], ours["messages"][-1]["content"]
        parts = [message.get("reasoning_content", ""), message["content"]]
        assert " ".join(part for part in parts if part) == whole.strip()
    assert any("reasoning_content" in record["messages"][-1] for record in found)
