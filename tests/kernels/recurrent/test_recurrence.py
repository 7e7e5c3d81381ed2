"""Linear recurrences token by token, in a kernel and in chunks; and tentative tokens, some of which stand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.recurrent import recurrence as module
from draftsmith.kernels.recurrent.kept import Pass, Standing
from draftsmith.kernels.recurrent.recurrence import KeptTokens, Tokens, recurrence, recurrence_reference

SHAPES = [(3, 4, 2, 16, 8), (1, 3, 3, 5, 7), (2, 6, 1, 33, 40)]
"""slots, heads, key heads, key_dim, value_dim"""
KINDS = [(True, False), (True, True), (False, False), (False, True)]
"""with the delta rule, with a decay a channel"""
WIDTH = 6


def draw(shape: tuple[int, ...], width: int, kind: tuple[bool, bool], dtype: torch.dtype = torch.float32) -> Tokens:
    slots, heads, key_heads, key_dim, value_dim = shape
    decays = (key_dim,) if kind[1] else ()
    return Tokens(
        torch.randn(slots, width, key_heads, key_dim).to(dtype),
        torch.randn(slots, width, key_heads, key_dim).to(dtype),
        torch.randn(slots, width, heads, value_dim).to(dtype),
        -torch.rand(slots, width, heads, *decays),
        torch.rand(slots, width, heads) if kind[0] else None,
    )


def storage(
    shape: tuple[int, ...], kind: tuple[bool, bool], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, KeptTokens, Standing]:
    slots, heads, key_heads, key_dim, value_dim = shape
    decays = (key_dim,) if kind[1] else ()
    kept = KeptTokens(
        torch.randn(slots, 2, WIDTH, key_heads, key_dim).to(dtype),
        torch.randn(slots, 2, WIDTH, heads, value_dim).to(dtype),
        -torch.rand(slots, 2, WIDTH, heads, *decays),
        torch.rand(slots, 2, WIDTH, heads) if kind[0] else None,
    )
    standing = Standing(torch.randint(0, WIDTH + 1, (slots,)), torch.randint(0, 2, (slots,)))
    return torch.randn(slots, heads, key_dim, value_dim), kept, standing


def copies(*given: object) -> list[object]:
    def copy(x: object) -> object:
        if isinstance(x, Tensor):
            return x.clone()
        return replace(x, **{n: copy(v) for n, v in vars(x).items() if isinstance(v, Tensor)})  # type: ignore[type-var]

    return [copy(x) for x in given]


def part(tokens: Tokens, begin: int, end: int) -> Tokens:
    return Tokens(*(None if t is None else t[:, begin:end].contiguous() for t in vars(tokens).values()))


def whole(tokens: Tokens, options: dict[str, object]) -> tuple[Tensor, Tensor]:
    """Outputs and last states of a text from its beginning, by the equations, in float64."""
    slots, width, heads, value_dim = tokens.value.shape
    key_dim = tokens.key.shape[-1]
    out = torch.empty(slots, width, heads, value_dim, dtype=torch.float64)
    last = torch.zeros(slots, heads, key_dim, value_dim, dtype=torch.float64)
    for b in range(slots):
        for h in range(heads):
            k_head = h * tokens.key.shape[2] // heads
            for t in range(width):
                q, k = tokens.query[b, t, k_head].double(), tokens.key[b, t, k_head].double()
                if options["normalise"]:
                    q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
                state = last[b, h] * tokens.log_decay[b, t, h].double().exp().reshape(-1, 1)
                added = tokens.value[b, t, h].double()
                if tokens.rate is not None:
                    added = tokens.rate[b, t, h].double() * (added - state.T @ k)
                last[b, h] = state + torch.outer(k, added)
                out[b, t, h] = last[b, h].T @ q * options["scale"]
    return out, last


OPTIONS: list[dict[str, object]] = [{"scale": 0.3, "normalise": True}, {"scale": 1.0, "normalise": False}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tentative_passes_of_which_some_tokens_stand_give_the_text_that_stands(
    shape: tuple[int, ...], kind: tuple[bool, bool]
) -> None:
    """A prompt, then verifies with other tokens behind those that stand, is the recurrence over what stood."""
    options = OPTIONS[0]
    text = draw(shape, 40, kind)
    slots = shape[0]
    state, kept, standing = storage(shape, kind)
    expected, _ = whole(text, options)
    prompt = torch.randint(1, 8, (slots,))
    first = part(text, 0, 8)
    out = recurrence(state, first, kept, standing, Pass(torch.ones(slots, dtype=torch.bool), prompt, False), **options)
    standing.passed(0)
    at = prompt.clone()
    for b in range(slots):
        torch.testing.assert_close(out[b, : prompt[b]].double(), expected[b, : prompt[b]], atol=1e-4, rtol=1e-4)
    for _ in range(4):
        rejected = draw(shape, WIDTH, kind)
        stands = torch.randint(0, WIDTH + 1, (slots,))
        for b in range(slots):
            for given, mixed in zip(vars(text).values(), vars(rejected).values(), strict=True):
                if given is not None:
                    mixed[b, : stands[b]] = given[b, at[b] : at[b] + stands[b]]
        never = torch.zeros(slots, dtype=torch.bool)
        out = recurrence(state, rejected, kept, standing, Pass(never, None, True), **options)
        standing.passed(stands)
        for b in range(slots):
            n = int(stands[b])
            torch.testing.assert_close(out[b, :n].double(), expected[b, at[b] : at[b] + n], atol=2e-4, rtol=1e-3)
        at += stands


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tentative", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_is_the_reference(
    shape: tuple[int, ...],
    kind: tuple[bool, bool],
    tentative: bool,
    options: dict[str, object],
    dtype: torch.dtype,
) -> None:
    if not options["normalise"] and dtype == torch.float16:
        pytest.skip("unnormalised keys make states beyond what fp16 compares")
    slots = shape[0]
    state, kept, standing = storage(shape, kind, dtype)
    tokens = draw(shape, 5, kind, dtype)
    tokens = replace(tokens, key=tokens.key / 4, query=tokens.query / 4) if not options["normalise"] else tokens
    begins = torch.arange(slots) % 3 == 1
    run = Pass(begins, None if tentative else torch.randint(0, 6, (slots,)), tentative)
    twins = copies(state, kept)
    out = module._launch(state, tokens, kept, standing, run, options["scale"], options["normalise"])
    expected = recurrence_reference(twins[0], tokens, twins[1], standing, run, **options)  # type: ignore[arg-type]
    close = dict(atol=1e-4, rtol=1e-4) if dtype == torch.float32 else dict(atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(state, twins[0], atol=1e-4, rtol=1e-4)
    for found, wanted in zip(kept.tensors, twins[1].tensors, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_text_token_by_token(shape: tuple[int, ...], kind: tuple[bool, bool]) -> None:
    slots, options = shape[0], OPTIONS[0]
    state, kept, standing = storage(shape, kind)
    tokens = draw(shape, 150, kind)
    run = Pass(torch.arange(slots) % 2 == 1, torch.randint(70, 151, (slots,)), False)
    twin_state, twin_kept = copies(state, kept)
    out = recurrence(state, tokens, kept, standing, run, **options)
    expected = recurrence_reference(twin_state, tokens, twin_kept, standing, run, **options)  # type: ignore[arg-type]
    for b in range(slots):
        torch.testing.assert_close(out[b, : run.valid[b]], expected[b, : run.valid[b]], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(state, twin_state, atol=1e-4, rtol=1e-3)


def test_every_input_counts() -> None:
    """Changing any of a token's numbers, or what stands, changes what comes out."""
    shape, kind, options = SHAPES[0], KINDS[1], OPTIONS[0]
    state, kept, standing = storage(shape, kind)
    standing.count.fill_(2)
    tokens = draw(shape, 4, kind)
    run = Pass(torch.zeros(3, dtype=torch.bool), None, True)

    def result(tokens: Tokens, kept: KeptTokens, standing: Standing) -> Tensor:
        own, twin = copies(state, kept)
        return recurrence(own, tokens, twin, standing, run, **options)  # type: ignore[arg-type]

    before = result(tokens, kept, standing)
    for name in vars(tokens):
        changed = replace(tokens, **{name: getattr(tokens, name) + 0.25})
        assert not torch.allclose(result(changed, kept, standing), before), name
    for name in vars(kept):
        assert not torch.allclose(result(tokens, replace(kept, **{name: getattr(kept, name) + 0.25}), standing), before)
    assert not torch.allclose(result(tokens, kept, Standing(standing.count + 1, standing.half)), before)
    assert not torch.allclose(result(tokens, kept, Standing(standing.count, 1 - standing.half)), before)


def test_operands_that_do_not_fit_are_refused() -> None:
    shape, kind = SHAPES[0], KINDS[0]
    state, kept, standing = storage(shape, kind)
    tokens = draw(shape, WIDTH + 1, kind)
    tentative = Pass(torch.zeros(3, dtype=torch.bool), None, True)
    with pytest.raises(ValueError, match="room is kept for 6"):
        recurrence(state, tokens, kept, standing, tentative, scale=1.0, normalise=True)
    wrong = replace(tokens, value=tokens.value[..., :-1])
    with pytest.raises(ValueError, match="value is"):
        recurrence(state, wrong, kept, standing, tentative, scale=1.0, normalise=True)
    wrong = replace(tokens, key=tokens.key.transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(ValueError, match="contiguous"):
        recurrence(state, wrong, kept, standing, tentative, scale=1.0, normalise=True)
