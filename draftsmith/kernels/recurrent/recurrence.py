"""Linear recurrences over a matrix state a head, for the tokens of one pass.

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  o = scale S^T q      with rates b: the gated delta rule
    S <- exp(g) S;  S <- S + k v^T;                o = scale S^T q      without

S is [key_dim, value_dim]; the log decay g is one number a head or one a key channel. With rates and a number a head
this is Gated DeltaNet (arXiv 2412.06464), with rates and a number a channel Kimi Delta Attention (arXiv 2510.26692);
without rates it is Lightning Attention (arXiv 2401.04658), and Mamba 2 (arXiv 2405.21060) with k = B, q = C, v = dt x.

States are fp32 and change in place. A tentative pass keeps its tokens (`kernels.recurrent.kept`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.recurrent.chunked import chunked_recurrence
from draftsmith.kernels.recurrent.kept import Pass, Standing
from draftsmith.kernels.triton import tl, triton

SEQUENTIAL = 64
"""Longest pass that is taken token by token; longer ones are computed in chunks of products."""

EPSILON = 1e-6
"""Added to a squared norm before queries and keys are divided by it."""


@dataclass(frozen=True)
class Tokens:
    """What a layer computes of w tokens, or buffers of such.

    query, key [slots, w, key_heads, key_dim] and value [slots, w, heads, value_dim], in the model's dtype, the last
    dimension contiguous; log_decay [slots, w, heads] or [slots, w, heads, key_dim] float32, at most 0; rate [slots, w,
    heads] float32, None: no delta rule. Head h reads key head h // (heads / key_heads).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor | None


@dataclass(frozen=True)
class KeptTokens:
    """Room for tentative tokens: key [slots, 2, width, key_heads, key_dim], value [slots, 2, width, heads, value_dim],
    log_decay [slots, 2, width, heads(, key_dim)] and rate [slots, 2, width, heads], or None, as in `Tokens`."""

    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All storage."""
        return tuple(t for t in (self.key, self.value, self.log_decay, self.rate) if t is not None)

    def rows(self, begin: int, end: int) -> "KeptTokens":
        """The same storage, seen for slots begin .. end - 1 only."""
        rate = None if self.rate is None else self.rate[begin:end]
        return KeptTokens(self.key[begin:end], self.value[begin:end], self.log_decay[begin:end], rate)


def recurrence(
    state: Tensor,
    tokens: Tokens,
    kept: KeptTokens,
    standing: Standing,
    run: Pass,
    *,
    scale: float,
    normalise: bool,
) -> Tensor:
    """Outputs [slots, w, heads, value_dim] of the pass's tokens, in the values' dtype.

    state [slots, heads, key_dim, value_dim] float32 advances over the kept tokens that stand, and in a pass that is not
    tentative over the pass's own (`run.valid`). A tentative pass writes the other half of `kept`. Call
    `Standing.passed` after the last layer. normalise: queries and keys are divided by their norms. Outputs of tokens
    beyond `run.valid` mean nothing. Raises `ValueError` for shapes that do not fit.
    """
    _check(state, tokens, kept, run)
    if tokens.value.shape[1] > SEQUENTIAL and not run.tentative:
        return _in_chunks(state, tokens, kept, standing, run, scale, normalise)
    if uses_kernels(state):
        return _launch(state, tokens, kept, standing, run, scale, normalise)
    return recurrence_reference(state, tokens, kept, standing, run, scale=scale, normalise=normalise)


def recurrence_reference(
    state: Tensor,
    tokens: Tokens,
    kept: KeptTokens,
    standing: Standing,
    run: Pass,
    *,
    scale: float,
    normalise: bool,
) -> Tensor:
    """`recurrence` as plain PyTorch, token by token."""
    _settle(state, kept, standing, run, normalise)
    running, width = state.clone(), tokens.value.shape[1]
    out = []
    for t in range(width):
        after = _advanced(running, _token(tokens, t), normalise)
        own = None if run.tentative or run.valid is None else t < run.valid
        running = after if own is None else after.where(own[:, None, None, None], running)
        query = _spread(tokens.query[:, t], state.shape[1], normalise)
        out.append(torch.einsum("bhk,bhkv->bhv", query * scale, after))
    if run.tentative:
        _keep(tokens, kept, standing)
    else:
        state.copy_(running)
    return torch.stack(out, dim=1).to(tokens.value.dtype)


def _settle(state: Tensor, kept: KeptTokens, standing: Standing, run: Pass, normalise: bool) -> None:
    """Brings the states up to date in place: zeros where a text begins, else over the kept tokens that stand."""
    index = torch.arange(len(state), device=state.device)
    count = standing.count.where(~run.begins, 0)
    running = state.where(~run.begins[:, None, None, None], 0)
    half = KeptTokens(*(None if t is None else t[index, standing.half] for t in _fields(kept)))  # type: ignore[arg-type]
    for t in range(kept.key.shape[2]):
        token = (half.key[:, t], half.value[:, t], half.log_decay[:, t], None if half.rate is None else half.rate[:, t])
        running = _advanced(running, token, normalise).where((t < count)[:, None, None, None], running)
    state.copy_(running)


def _fields(kept: KeptTokens) -> tuple[Tensor | None, ...]:
    return kept.key, kept.value, kept.log_decay, kept.rate


def _keep(tokens: Tokens, kept: KeptTokens, standing: Standing) -> None:
    index, width = torch.arange(len(standing.half), device=standing.half.device), tokens.value.shape[1]
    given = (tokens.key, tokens.value, tokens.log_decay, tokens.rate)
    for room, states in zip(_fields(kept), given, strict=True):
        if room is not None and states is not None:
            room[index, 1 - standing.half, :width] = states


_Token = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _token(tokens: Tokens, t: int) -> _Token:
    rate = None if tokens.rate is None else tokens.rate[:, t]
    return tokens.key[:, t], tokens.value[:, t], tokens.log_decay[:, t], rate


def _spread(states: Tensor, heads: int, normalise: bool) -> Tensor:
    """Queries or keys [..., key_heads, key_dim] -> [..., heads, key_dim] float32."""
    states = states.float()
    if normalise:
        states = states * torch.rsqrt(states.square().sum(-1, keepdim=True) + EPSILON)
    return states.repeat_interleave(heads // states.shape[-2], dim=-2)


def _advanced(state: Tensor, token: _Token, normalise: bool) -> Tensor:
    """The states after one more token."""
    key, value, log_decay, rate = token
    key = _spread(key, state.shape[1], normalise)
    decay = log_decay.exp() if log_decay.dim() == 3 else log_decay.exp()[:, :, None]  # [slots, heads, key_dim or 1]
    state = state * decay[..., None]
    value = value.float()
    if rate is not None:
        value = (value - torch.einsum("bhk,bhkv->bhv", key, state)) * rate[..., None]
    return state + key[..., None] * value[:, :, None]


def _in_chunks(
    state: Tensor,
    tokens: Tokens,
    kept: KeptTokens,
    standing: Standing,
    run: Pass,
    scale: float,
    normalise: bool,
) -> Tensor:
    """A long pass that is not tentative."""
    heads, width = state.shape[1], tokens.value.shape[1]
    _settle(state, kept, standing, run, normalise)
    key, value, log_decay, rate = tokens.key, tokens.value, tokens.log_decay, tokens.rate
    if run.valid is not None:  # a token that neither decays the state nor adds to it
        own = torch.arange(width, device=state.device) < run.valid[:, None]
        log_decay = log_decay * own.view(*own.shape, *[1] * (log_decay.dim() - 2))
        value = value * own[..., None, None]
        rate = None if rate is None else rate * own[..., None]
    out, last = chunked_recurrence(
        _spread(tokens.query, heads, normalise) * scale, _spread(key, heads, normalise), value, log_decay, rate, state
    )
    state.copy_(last)
    return out.to(tokens.value.dtype)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@triton.jit
def _unit(x, NORMALISE: tl.constexpr, EPSILON: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [n] float32, divided by its norm if that is wanted."""
    if NORMALISE:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) + EPSILON)
    return x


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    state, key_at, value_at, decay_at, rate_at, rows, columns, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """The state's tile [key_dim, columns] after one more token, whose numbers lie at the pointers."""
    key = tl.load(key_at + rows, mask=rows < KEY_DIM, other=0.0).to(tl.float32)
    key = _unit(key, NORMALISE, EPSILON)
    value = tl.load(value_at + columns, mask=columns < VALUE_DIM, other=0.0).to(tl.float32)
    if CHANNELS:
        decay = tl.load(decay_at + rows, mask=rows < KEY_DIM, other=0.0)
        state = state * tl.exp(decay)[:, None]
    else:
        state = state * tl.exp(tl.load(decay_at))
    if DELTA:
        value = (value - tl.sum(state * key[:, None], axis=0)) * tl.load(rate_at)
    return state + key[:, None] * value[None, :]


@triton.jit
def _recurrence_kernel(  # type: ignore[no-untyped-def]
    state_ptr, query_ptr, key_ptr, value_ptr, decay_ptr, rate_ptr,
    kept_key_ptr, kept_value_ptr, kept_decay_ptr, kept_rate_ptr,
    count_ptr, half_ptr, begins_ptr, valid_ptr, out_ptr, width, capacity, scale,
    query_slot, query_token, key_slot, key_token, value_slot, value_token,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, NORMALISE: tl.constexpr, EPSILON: tl.constexpr,
    TENTATIVE: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    rows, columns = tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS)
    half = tl.load(half_ptr + slot)
    begins = tl.load(begins_ptr + slot) != 0
    count = tl.where(begins, 0, tl.load(count_ptr + slot)).to(tl.int32)
    DECAYS: tl.constexpr = KEY_DIM if CHANNELS else 1  # numbers a head

    state_at = state_ptr + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + rows[:, None] * VALUE_DIM + columns[None, :]
    inside = (rows < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    former = (rows < tl.where(begins, 0, KEY_DIM))[:, None] & (columns < VALUE_DIM)[None, :]
    state = tl.load(state_at, mask=former, other=0.0)
    old = (slot * 2 + half) * capacity
    for t in range(count):
        state = _advance(
            state, kept_key_ptr + ((old + t) * KEY_HEADS + key_head) * KEY_DIM,
            kept_value_ptr + ((old + t) * HEADS + head) * VALUE_DIM,
            kept_decay_ptr + ((old + t) * HEADS + head) * DECAYS, kept_rate_ptr + (old + t) * HEADS + head,
            rows, columns, KEY_DIM, VALUE_DIM, DELTA, CHANNELS, NORMALISE, EPSILON,
        )  # fmt: skip
    if TENTATIVE:
        tl.store(state_at, state, mask=inside)

    own = width
    if VALID:
        own = tl.load(valid_ptr + slot).to(tl.int32)
    new = (slot * 2 + 1 - half) * capacity
    for t in range(width):
        query = tl.load(
            query_ptr + slot * query_slot + t * query_token + key_head * KEY_DIM + rows, mask=rows < KEY_DIM, other=0.0
        ).to(tl.float32)
        query = _unit(query, NORMALISE, EPSILON) * scale
        key_at = key_ptr + slot * key_slot + t * key_token + key_head * KEY_DIM
        value_at = value_ptr + slot * value_slot + t * value_token + head * VALUE_DIM
        decay_at = decay_ptr + ((slot * width + t) * HEADS + head) * DECAYS
        rate_at = rate_ptr + (slot * width + t) * HEADS + head
        after = _advance(
            state, key_at, value_at, decay_at, rate_at,
            rows, columns, KEY_DIM, VALUE_DIM, DELTA, CHANNELS, NORMALISE, EPSILON,
        )  # fmt: skip
        out = tl.sum(after * query[:, None], axis=0)
        out_at = out_ptr + ((slot * width + t) * HEADS + head) * VALUE_DIM + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
        if TENTATIVE:
            state = after
            kept_value_at = kept_value_ptr + ((new + t) * HEADS + head) * VALUE_DIM + columns
            value = tl.load(value_at + columns, mask=columns < VALUE_DIM, other=0.0)
            tl.store(kept_value_at, value, mask=columns < VALUE_DIM)
            if part == 0:
                if DELTA:
                    tl.store(kept_rate_ptr + (new + t) * HEADS + head, tl.load(rate_at))
                if CHANNELS:
                    decay = tl.load(decay_at + rows, mask=rows < KEY_DIM, other=0.0)
                    tl.store(kept_decay_ptr + ((new + t) * HEADS + head) * DECAYS + rows, decay, mask=rows < KEY_DIM)
                else:
                    tl.store(kept_decay_ptr + (new + t) * HEADS + head, tl.load(decay_at))
                if head % (HEADS // KEY_HEADS) == 0:
                    key = tl.load(key_at + rows, mask=rows < KEY_DIM, other=0.0)
                    tl.store(
                        kept_key_ptr + ((new + t) * KEY_HEADS + key_head) * KEY_DIM + rows, key, mask=rows < KEY_DIM
                    )
        else:
            state = tl.where(t < own, after, state)
    if not TENTATIVE:
        tl.store(state_at, state, mask=inside)


def _launch(
    state: Tensor,
    tokens: Tokens,
    kept: KeptTokens,
    standing: Standing,
    run: Pass,
    scale: float,
    normalise: bool,
) -> Tensor:
    slots, heads, key_dim, value_dim = state.shape
    query, key, value = tokens.query, tokens.key, tokens.value
    width = value.shape[1]
    rows = triton.next_power_of_2(key_dim)
    columns = min(triton.next_power_of_2(value_dim), 32 if slots * heads < 256 else 64)
    out = torch.empty((slots, width, heads, value_dim), dtype=value.dtype, device=value.device)
    # Without rates the kernel reads none; a pointer it has to have.
    rate = tokens.log_decay if tokens.rate is None else tokens.rate
    kept_rate = kept.log_decay if kept.rate is None else kept.rate
    _recurrence_kernel[(slots, heads, triton.cdiv(value_dim, columns))](
        state, query, key, value, tokens.log_decay, rate, kept.key, kept.value, kept.log_decay, kept_rate,
        standing.count, standing.half, run.begins, run.valid, out, width, kept.key.shape[2], scale,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=heads, KEY_HEADS=key.shape[2], KEY_DIM=key_dim, VALUE_DIM=value_dim,
        DELTA=tokens.rate is not None, CHANNELS=tokens.log_decay.dim() == 4, NORMALISE=normalise, EPSILON=EPSILON,
        TENTATIVE=run.tentative, VALID=run.valid is not None, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


def _check(state: Tensor, tokens: Tokens, kept: KeptTokens, run: Pass) -> None:
    slots, heads, key_dim, value_dim = state.shape
    width, key_heads = tokens.value.shape[1], tokens.key.shape[2]
    decays = (key_dim,) if tokens.log_decay.dim() == 4 else ()
    wanted = {
        "query": (tokens.query, (slots, width, key_heads, key_dim)),
        "key": (tokens.key, (slots, width, key_heads, key_dim)),
        "value": (tokens.value, (slots, width, heads, value_dim)),
        "log_decay": (tokens.log_decay, (slots, width, heads, *decays)),
        "rate": (tokens.rate, (slots, width, heads)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the state {tuple(state.shape)} asks for {shape}")
    if heads % key_heads:
        raise ValueError(f"{heads} heads do not share {key_heads} key heads evenly")
    for name, tensor in (("query", tokens.query), ("key", tokens.key), ("value", tokens.value)):
        if tensor.stride(3) != 1 or tensor.stride(2) != tensor.shape[3]:
            raise ValueError(f"the heads of {name} must be contiguous")
    if not tokens.log_decay.is_contiguous() or (tokens.rate is not None and not tokens.rate.is_contiguous()):
        raise ValueError("log_decay and rate must be contiguous")
    if run.tentative and width > kept.key.shape[2]:
        raise ValueError(f"a tentative pass of {width} tokens, and room is kept for {kept.key.shape[2]}")
