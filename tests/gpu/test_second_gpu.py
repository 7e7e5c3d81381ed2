"""Everything on the second GPU while the first one is current: as on the first, and current it stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from draftsmith.training.record import find_checkpoint
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.support.tiny import tiny_model
from tests.support.tiny_draft import tiny_draft
from tests.training.counting import QUIET, counting_store, counting_target, options, section

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
PROMPTS = [[5, 6, 7], [1], list(range(40, 63)), [9, 3, 3, 80, 2, 11, 13, 17]]


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    torch.cuda.set_device(FIRST)
    yield
    torch.cuda.set_device(FIRST)


def models(device: torch.device, *, fuse: bool) -> tuple[Target, Draft]:
    target = Target.from_model(tiny_model("qwen3", hidden_size=256, initializer_range=0.06).to(device))
    if fuse:
        target.fuse()
    return target, tiny_draft(target, num_layers=2, block_size=7, head_dim=64).to(device)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "own modules"])
@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_decodes_there_what_it_decodes_here(
    fuse: bool, graphs: Literal["on", "off"], temperature: float
) -> None:
    asked = Request.of(PROMPTS, max_new_tokens=40, sampling=SamplingOptions(temperature), seed=4)
    found = []
    for device in (FIRST, SECOND):
        target, draft = models(device, fuse=fuse)
        engine = Engine(target, draft, EngineOptions(graphs=graphs))
        found += [engine.decode(asked), engine.decode(asked)]  # again, from graphs where they are on
        assert engine.runner.pool is not None
        assert engine.runner.pool.state.tokens.device == device
    assert found[0] == found[1] == found[2] == found[3]
    assert torch.cuda.current_device() == 0


def test_states_and_choices_are_the_same_there() -> None:
    found = []
    for device in (FIRST, SECOND):
        target, _ = models(device, fuse=True)
        ids = torch.tensor([PROMPTS[3]], device=device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        alone = target.forward(ids, positions, tap_ids=(0, 2))
        cached = target.forward(ids, positions, tap_ids=(0, 2), cache=target.new_cache(1, 32))
        assert cached.final_state is not None
        choice = target.ends.argmax(cached.final_state)
        found.append([alone.taps, alone.final_state, cached.taps, cached.final_state, choice.ids])
    for here, there in zip(*found, strict=True):
        assert here is not None
        assert there is not None
        assert there.device == SECOND
        assert torch.equal(here.cpu(), there.cpu())


def test_a_draft_is_trained_there(tmp_path: Path) -> None:
    target = counting_target()
    store = counting_store(tmp_path / "store", target, documents=12)
    for name in ("cuda:0", "cuda:1"):
        train(
            section=section(head_dim=16),  # the least that the attention kernels take
            target=target,
            source=StoreSource(store),
            run_dir=tmp_path / name,
            options=options(max_steps=4, device=name, precision="fp32", compile=False, attention="anchored"),
            track=QUIET,
        )
    here, there = (find_checkpoint(tmp_path / name, "last").weights() for name in ("cuda:0", "cuda:1"))
    for name, weight in here.items():
        torch.testing.assert_close(there[name], weight, rtol=0, atol=1e-5)
