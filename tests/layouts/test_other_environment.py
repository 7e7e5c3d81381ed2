"""What other projects' packages compute from directories that draftsmith wrote, in an environment of their own.

`make interop` makes that environment (`.venv-interop`; DRAFTSMITH_INTEROP_PYTHON names another interpreter): those
packages want other versions of the common dependencies. Inputs and outputs are exchanged as files.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.drafts.attention import DenseBlockAttention
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.domino import DominoHead
from draftsmith.drafts.heads.dspark import DSparkHead, corrected_logits
from draftsmith.layouts import TargetParts
from draftsmith.targets.ends import TargetEnds
from tests.layouts.drafts import HEADS, TARGET, simple_draft
from tests.support.fillers import filler_of

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DRAFTSMITH_INTEROP_PYTHON", ROOT / ".venv-interop/bin/python"))
pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make interop` makes"),
]

YARN = {"rope": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
JOBS: list[tuple[str, str, str, int, dict[str, Any]]] = [
    *(("speculators", "speculators", "dspark", head, {}) for head in range(len(HEADS["dspark"]))),
    ("speculators", "speculators", "dflash", 0, {"num_layers": 3, "num_taps": 4}),
    ("speculators", "speculators", "dflash", 0, YARN),
    ("speculators", "speculators", "dflash2", 0, {"block_size": 5}),
    *(("nvidia-modelopt", "modelopt", "dspark", head, {}) for head in (0, 2, 3, 5, 6, 8)),
    ("nvidia-modelopt", "modelopt", "domino", 0, {"num_layers": 3}),
    ("nvidia-modelopt", "modelopt", "dflash", 0, YARN),
    ("dflash", "zlab", "dflash", 0, YARN),
    ("dflash", "zlab", "dflash2", 0, {"block_size": 6, "num_taps": 3}),
]
CONTEXT = 13


def inputs(draft: Draft, seed: int) -> dict[str, Tensor]:
    """features [1, S, T*H], the target's ends [V, H], an anchor [1], what precedes each slot's label [1, B], and the
    block's embeddings [1, B, H]."""
    g = torch.Generator().manual_seed(seed)
    config = draft.config
    embedding, head = (torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=g) for _ in range(2))
    previous = torch.randint(TARGET.vocab_size, (1, config.block.size), generator=g)
    block = torch.full((1, config.block.size), config.block.mask_token_id)
    block[:, 0] = previous[:, 0]
    return {
        "features": torch.randn(1, CONTEXT, len(config.target_layer_ids) * config.hidden_size, generator=g),
        "embedding": embedding,
        "head": head,
        "previous": previous,
        "anchor": previous[:, 0].clone(),
        "embeddings": embedding[block],
    }


@torch.no_grad()
def outputs(draft: Draft, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same by draftsmith, with the head's correction teacher-forced by `previous`."""
    size, ends = draft.config.block.size, TargetEnds(given["embedding"], given["head"])
    positions = torch.arange(CONTEXT + size)[None]
    mask = torch.ones(1, 1, size, CONTEXT + size, dtype=torch.bool)
    attend = DenseBlockAttention(dict.fromkeys(draft.attention_kinds, mask))
    context = draft.context_keys_values(given["features"], positions[:, :CONTEXT])
    hidden = draft(given["embeddings"][:, None], positions[:, None, CONTEXT:], context, attend)[:, 0]  # [1, B, H]
    logits = draft.logits(hidden, ends)
    found = {"hidden": hidden, "logits": logits}
    if draft.config.architecture == "dspark":
        head = cast(DSparkHead, draft.head)
        embedded = head.markov_head.embed(given["previous"])
        latents = head.markov_head.latents(embedded, hidden)
        found["corrected"] = corrected_logits(logits, latents, head.markov_head.markov_w2.weight)
        if head.confidence_head is not None:
            found["confidence"] = head.confidence(hidden, embedded)
    if draft.config.architecture == "domino":
        domino = cast(DominoHead, draft.head)
        states = domino.prefix_states(given["embedding"][given["previous"]][:, None])[:, 0]
        found["corrected"] = domino.correct(logits, domino.latent(hidden, states))
    if draft.config.architecture == "dflash2":

        def choose(scores: Tensor, draw: int) -> tuple[Tensor, None]:
            return scores.argmax(-1), None

        filler = filler_of(algorithm_for(draft.config), draft, ends)
        found["path"] = filler.fill(hidden, given["anchor"], choose).token_ids
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all jobs, run in one process of the other environment."""
    root = tmp_path_factory.mktemp("jobs")
    for number, (package, layout, architecture, head, options) in enumerate(JOBS):
        directory = root / f"{number:02}"
        draft = simple_draft(architecture, head, seed=number, **options)
        given = inputs(draft, number)
        parts = TargetParts(None, (), given["embedding"], given["head"])
        draft.save(directory / "draft", layout, target=parts)
        save_file(given, directory / "inputs.safetensors")
        (directory / "job.json").write_text(json.dumps({"package": package, "architecture": architecture}))
    script = ROOT / "tests/interop_env/foreign.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([PYTHON, script, root], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    print(json.loads((root / "versions.json").read_text()))
    return root


@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda n: f"{JOBS[n][0]}-{JOBS[n][2]}-{n}")
def test_their_numbers_are_ours(results: Path, number: int) -> None:
    draft = Draft.load(results / f"{number:02}/draft").eval()
    given = load_file(results / f"{number:02}/inputs.safetensors")
    theirs, mine = load_file(results / f"{number:02}/outputs.safetensors"), outputs(draft, given)
    assert set(theirs) == set(mine)
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    given["features"][0, -1, 0] += 1.0
    assert not torch.allclose(outputs(draft, given)["logits"], theirs["logits"], atol=1e-3)
