"""The kernels of a step's bookkeeping against plain PyTorch: in Triton's interpreter, or on a device where there is
one."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.kernels.state import slot_state, slot_state_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LENGTH, VOCABULARY = 9, 40, 6


def random_state(width: int, seed: int) -> dict[str, Tensor]:
    """Rows of all kinds: with and without stop ids, near and far from their limits, finished, marked."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (SLOTS, *shape), generator=generator)

    length = numbers(1, LENGTH - 12)
    state = {
        "tokens": numbers(0, VOCABULARY, LENGTH + width),
        "length": length,
        "limit": length + numbers(1, 9),
        "finished": numbers(0, 4) == 0,
        "stopped": numbers(0, 9) == 0,
        "stop_ids": numbers(0, VOCABULARY, 3),
        "stop_count": numbers(0, 4),
        "invalid_target": numbers(0, 9) == 0,
        "invalid_draft": numbers(0, 9) == 0,
        "report": numbers(0, 99, slot_state.REPORT_HEADER + width),
    }
    return {name: tensor.to(DEVICE) for name, tensor in state.items()}


@pytest.mark.parametrize("stops", [0, 3])
def test_place_rows(stops: int) -> None:
    generator = torch.Generator().manual_seed(stops)
    prompts = [torch.randint(99, (length,), generator=generator).tolist() for length in (1, 1100, 17)]
    stop_ids = [list(range(40, 40 + min(stops, row))) for row in range(2)] + [[7, 8, 9][:stops]]
    temperatures, top_ps = [0.0, 0.9, 1e-30], [1.0, 0.95, 1e-9]
    numbers = [
        (len(prompt), 1200, 2**63 - 1 - row, len(stop_ids[row]), 5 * row, temperatures[row], top_ps[row])
        for row, prompt in enumerate(prompts)
    ]
    packed = slot_state.pack_rows(numbers, stop_ids, prompts).to(DEVICE)
    results = []
    for run in (slot_state.place_rows_reference, slot_state_triton.place_rows):
        state = {name: tensor for name, tensor in random_state(4, 0).items() if name != "report"}
        for name, dtype in (("temperature", torch.float32), ("top_p", torch.float64)):
            state[name] = torch.full((SLOTS,), 0.5, dtype=dtype, device=DEVICE)
        state |= {name: torch.full((SLOTS,), 77, device=DEVICE) for name in ("read", "seeds", "top_k")}
        state["tokens"] = torch.full((SLOTS, 1204), 5, device=DEVICE)
        before = {name: tensor.clone() for name, tensor in state.items()}
        run(packed, 2, stops, **state)
        results.append(state)
    expected, found = results
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(tensor[:2], before[name][:2])
        assert torch.equal(tensor[5:], before[name][5:])
    found = {name: tensor[2:5] for name, tensor in found.items()}
    columns = [found[name].tolist() for name in ("length", "limit", "seeds", "stop_count", "top_k")]
    assert list(zip(*columns, strict=True)) == [header[:5] for header in numbers]
    assert found["temperature"].tolist() == torch.tensor(temperatures).tolist()
    assert found["top_p"].tolist() == top_ps
    assert found["finished"].all()
    assert not found["read"].any()
    for row, prompt in enumerate(prompts):
        assert found["tokens"][row, : len(prompt)].tolist() == prompt
        assert found["tokens"][row, 1100:].tolist() == [5] * 104  # what lies past the longest stays
        assert found["stop_ids"][row, : len(stop_ids[row])].tolist() == stop_ids[row]


@pytest.mark.parametrize("width", [1, 5, 8])
@pytest.mark.parametrize("kind", ["plain", "counted", "granted", "proposed", "proposed, counted"])
def test_commit(width: int, kind: str) -> None:
    seen = set()
    for seed in range(2):
        generator = torch.Generator().manual_seed(100 + seed)
        ids = torch.randint(VOCABULARY, (SLOTS, width), generator=generator)
        proposed = torch.where(torch.rand(SLOTS, width - 1, generator=generator) < 0.8, ids[:, :-1], 0).to(DEVICE)
        count = torch.randint(0, width + 1, (SLOTS,), generator=generator)
        finite = torch.rand(SLOTS, width, generator=generator) > 0.02
        arguments = {
            "plain": (None, None),
            "counted": (count, None),
            "granted": (torch.full((SLOTS,), width), None),
            "proposed": (None, proposed),
            "proposed, counted": ((count - 1).clamp(min=0), proposed),
        }[kind]
        moved = [None if a is None else a.to(DEVICE) for a in arguments]
        expected, found = random_state(width, seed), random_state(width, seed)
        before = found["length"].clone()
        slot_state.commit_reference(ids.to(DEVICE), *moved, finite.to(DEVICE), **expected)
        slot_state_triton.commit(ids.to(DEVICE), *moved, finite.to(DEVICE), **found)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        seen |= set((found["length"] - before).tolist())
    assert seen >= ({0, 1} if width == 1 else {0, 1, 2, 3})


def test_commit_changes_its_own_slots_only() -> None:
    whole = random_state(4, 0)
    before = {name: tensor.clone() for name, tensor in whole.items()}
    ids = torch.ones(5, 4, dtype=torch.int64, device=DEVICE)
    part = {name: tensor[3:8] for name, tensor in whole.items()}
    slot_state_triton.commit(ids, None, None, ids > 0, **part)
    for name, tensor in whole.items():
        assert torch.equal(tensor[:3], before[name][:3])
        assert torch.equal(tensor[8:], before[name][8:])
    assert not torch.equal(whole["length"], before["length"])


@pytest.mark.parametrize(("width", "own", "block"), [(1, 1, 1), (7, 7, 7), (4, 1, 16), (9, 9, 8)])
def test_open_step(width: int, own: int, block: int) -> None:
    state = random_state(width, 3)
    options = {"width": width, "own": own, "block": block, "filler": 77, "window": 25}
    inputs = state["tokens"], state["length"], state["finished"]
    expected = slot_state.open_step_reference(*inputs, **options)
    for wanted, found in zip(expected, slot_state_triton.open_step(*inputs, **options), strict=True):
        assert torch.equal(found, wanted)
    rows = zip(expected[3].tolist(), expected[0].tolist(), state["finished"].tolist(), strict=True)
    for valid, anchor, finished in rows:
        assert valid == (0 if finished else min(own, 25 - anchor))
    assert 0 in expected[3]


@pytest.mark.parametrize("width", [1, 6, 700])
def test_read_prompt(width: int) -> None:
    tokens = torch.randint(99, (SLOTS, 1500), device=DEVICE)
    length = torch.randint(1, 800, (SLOTS,), device=DEVICE)
    read = torch.randint(0, 799, (SLOTS,), device=DEVICE).clamp(max=length - 1)
    whole = [tensor.clone() for tensor in (tokens, length, read)]
    part = [tensor[2:8] for tensor in (tokens, length, read)]
    expected = slot_state.read_prompt_reference(*part, width=width)
    for wanted, found in zip(expected, slot_state_triton.read_prompt(*part, width=width), strict=True):
        assert torch.equal(found, wanted)
    ids, positions, valid = expected
    for row, (first, end) in enumerate(zip(read[2:8].tolist(), length[2:8].tolist(), strict=True)):
        own = min(width, end - first)
        assert valid[row] == own
        assert ids[row, :own].tolist() == tokens[2 + row, first : first + own].tolist()
        assert positions[row].tolist() == list(range(first, first + width))
    assert all(map(torch.equal, (tokens, length, read), whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_are_not_finite_are_marked(dtype: torch.dtype) -> None:
    states = torch.randn(SLOTS, 3, 1700, dtype=torch.float32).to(dtype)
    states[2, 2, 1699], states[4, 0, 0], states[5, 1, 44] = float("nan"), float("inf"), float("-inf")
    finished, marked = torch.zeros(SLOTS, dtype=torch.bool), torch.zeros(SLOTS, dtype=torch.bool)
    finished[5], marked[8] = True, True
    expected, found = marked.to(DEVICE), marked.to(DEVICE).clone()
    slot_state.mark_not_finite_reference(states.to(DEVICE), finished.to(DEVICE), expected)
    slot_state_triton.mark_not_finite(states.to(DEVICE), finished.to(DEVICE), found)
    assert torch.equal(found, expected)
    assert found.nonzero()[:, 0].tolist() == [2, 4, 8]
