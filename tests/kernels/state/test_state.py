"""What changes the state of the slots, by kernels, against plain PyTorch: in Triton's interpreter, or on a device where
there is one."""

from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.state.commit import commit, commit_reference
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.state.mark_not_finite import mark_not_finite, mark_not_finite_reference
from draftsmith.kernels.state.open_step import open_step, open_step_reference
from draftsmith.kernels.state.place_rows import pack_rows, place_rows, place_rows_reference
from draftsmith.kernels.state.read_prompt import read_prompt, read_prompt_reference
from draftsmith.kernels.state.report import REPORT_HEADER

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LENGTH, VOCABULARY = 9, 40, 6


def random_state(width: int, seed: int) -> DecodingState:
    """Rows of all kinds: with and without stop ids, near and far from their limits, finished, marked."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (SLOTS, *shape), generator=generator).to(DEVICE)

    length = numbers(1, LENGTH - 12)
    return DecodingState(
        tokens=numbers(0, VOCABULARY, LENGTH + width),
        length=length,
        limit=length + numbers(1, 9),
        finished=numbers(0, 4) == 0,
        stopped=numbers(0, 9) == 0,
        stop_ids=numbers(0, VOCABULARY, 3),
        stop_count=numbers(0, 4),
        invalid_target=numbers(0, 9) == 0,
        invalid_draft=numbers(0, 9) == 0,
        report=numbers(0, 99, REPORT_HEADER + width),
        read=numbers(0, 99),
        seeds=numbers(0, 99),
        temperature=numbers(0, 9) / 8,
        top_k=numbers(0, 99),
        top_p=numbers(0, 9).double() / 8,
    )


def tensors(state: DecodingState) -> dict[str, torch.Tensor]:
    return {field.name: getattr(state, field.name) for field in fields(state)}


def copies(state: DecodingState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(state).items()}


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
    packed = pack_rows(numbers, stop_ids, prompts).to(DEVICE)
    results = []
    for run in (place_rows_reference, place_rows):
        state = replace(random_state(4, 0), tokens=torch.full((SLOTS, 1204), 5, device=DEVICE))
        before = copies(state)
        run(state, packed, 2, stops)
        results.append(tensors(state))
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
        before = found.length.clone()
        commit_reference(expected, ids.to(DEVICE), moved[0], finite.to(DEVICE), moved[1])
        commit(found, ids.to(DEVICE), moved[0], finite.to(DEVICE), moved[1])
        for name, tensor in tensors(expected).items():
            assert torch.equal(tensors(found)[name], tensor), name
        seen |= set((found.length - before).tolist())
    assert seen >= ({0, 1} if width == 1 else {0, 1, 2, 3})


def test_commit_changes_its_own_slots_only() -> None:
    whole = random_state(4, 0)
    before = copies(whole)
    ids = torch.ones(5, 4, dtype=torch.int64, device=DEVICE)
    commit(whole.rows(3, 8), ids, None, ids > 0)
    for name, tensor in tensors(whole).items():
        assert torch.equal(tensor[:3], before[name][:3])
        assert torch.equal(tensor[8:], before[name][8:])
    assert not torch.equal(whole.length, before["length"])


@pytest.mark.parametrize(("width", "own", "num_ids"), [(1, 1, 1), (7, 7, 7), (4, 1, 16), (9, 9, 8)])
def test_open_step(width: int, own: int, num_ids: int) -> None:
    state = random_state(width, 3)
    options = {"width": width, "own": own, "num_ids": num_ids, "window": 25}
    expected = open_step_reference(state, **options)
    for wanted, found in zip(expected, open_step(state, **options), strict=True):
        assert torch.equal(found, wanted)
    rows = zip(expected[3].tolist(), expected[0].tolist(), state.finished.tolist(), strict=True)
    for valid, anchor, finished in rows:
        assert valid == (0 if finished else min(own, 25 - anchor))
    assert 0 in expected[3]


@pytest.mark.parametrize("width", [1, 6, 700])
def test_read_prompt(width: int) -> None:
    length = torch.randint(1, 800, (SLOTS,), device=DEVICE)
    state = replace(
        random_state(width, 3),
        tokens=torch.randint(99, (SLOTS, 1500), device=DEVICE),
        length=length,
        read=torch.randint(0, 799, (SLOTS,), device=DEVICE).clamp(max=length - 1),
    )
    before, part = copies(state), state.rows(2, 8)
    expected = read_prompt_reference(part, width)
    for wanted, found in zip(expected, read_prompt(part, width), strict=True):
        assert torch.equal(found, wanted)
    ids, positions, valid = expected
    for row, (first, end) in enumerate(zip(part.read.tolist(), part.length.tolist(), strict=True)):
        own = min(width, end - first)
        assert valid[row] == own
        assert ids[row, :own].tolist() == state.tokens[2 + row, first : first + own].tolist()
        assert positions[row].tolist() == list(range(first, first + width))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(state).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_are_not_finite_are_marked(dtype: torch.dtype) -> None:
    states = torch.randn(SLOTS, 3, 1700, dtype=torch.float32).to(dtype)
    states[2, 2, 1699], states[4, 0, 0], states[5, 1, 44] = float("nan"), float("inf"), float("-inf")
    results = []
    for run in (mark_not_finite_reference, mark_not_finite):
        state = random_state(4, 0)
        state.finished.fill_(False)
        state.invalid_draft.fill_(False)
        state.finished[5], state.invalid_draft[8] = True, True
        run(state, states.to(DEVICE))
        results.append(state.invalid_draft)
    expected, found = results
    assert torch.equal(found, expected)
    assert found.nonzero()[:, 0].tolist() == [2, 4, 8]
