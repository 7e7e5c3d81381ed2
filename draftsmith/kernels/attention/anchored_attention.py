"""Training attention: slots of anchored blocks over one run of context tokens and one run of their own block's slots.

Flash attention for that shape of mask. A program takes the query heads of one key head together, so that its tile of
rows spans few blocks: their contexts nearly coincide, and their own keys are one small tile. Tiles of keys that every
row of the tile sees whole are multiplied without a mask.

The reference is `drafts.attention.DenseBlockAttention`; `blocks.anchored` makes the runs and picks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.attention.anchored_backward import key_gradient_kernel, query_gradient_kernel
from draftsmith.kernels.attention.anchored_forward import forward_kernel
from draftsmith.kernels.attention.block_rows import rows_of_a_block
from draftsmith.kernels.attention.exponents import LOG2_E
from draftsmith.kernels.strides import outer_strides
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import TensorDescriptor, triton


@dataclass(frozen=True)
class Runs:
    """What the slots see, int32: context_first, context_end, own_first, own_end [R, T], first key and end of each run,
    own keys counted as slots; by_key [R, ceil(S / keys), 4], for every tile of `keys` context tokens: the first slot
    and the end of those that see any of it, and of those that see all of it. Slots of one block see the same context,
    or (sliding) nearly; blocks are in the order of their anchors."""

    context_first: Tensor
    context_end: Tensor
    own_first: Tensor
    own_end: Tensor
    by_key: Tensor
    block_size: int
    keys: int


class Operands(NamedTuple):
    """Queries [R, heads, T, d], and keys and values of the context [R, kv_heads, S, d] and of the slots [R, kv_heads,
    T, d]; d a power of two of at least 16."""

    q: Tensor
    context_k: Tensor
    context_v: Tensor
    block_k: Tensor
    block_v: Tensor


class AnchoredTiling(NamedTuple):
    """Rows (slots times query heads of a key head) and columns (keys) of a tile, warps and stages, of the kernels for
    the forward, for the gradient of queries and for the gradient of keys and values."""

    forward: Tiling = Tiling(rows=64, columns=64, stages=3)
    queries: Tiling = Tiling(rows=64, columns=64, stages=3)
    keys: Tiling = Tiling(rows=64, columns=64, stages=2)


def anchored_tiling(head_dim: int, element_size: int, block_rows: int) -> AnchoredTiling:
    """The tiles for heads of this size, of elements of `element_size` bytes, and blocks of `block_rows` rows
    (`rows_of_a_block`)."""
    if element_size == 4:  # what fits into shared memory
        return AnchoredTiling(
            forward=Tiling(rows=64, columns=32, warps=8),
            queries=Tiling(rows=64, columns=32),
            keys=Tiling(rows=16, columns=64, warps=8),
        )
    # Two programs a multiprocessor, each of four warps, hide more of each other's waits than one of eight.
    tiles = AnchoredTiling(keys=Tiling(rows=128 if head_dim <= 64 else 64, columns=64, stages=2))
    if block_rows <= tiles.forward.rows:
        return tiles
    wide = {"rows": 128, "warps": 8}
    return tiles._replace(forward=tiles.forward._replace(**wide), queries=tiles.queries._replace(**wide))


def _shape(q: Tensor, kv_heads: int, rows: int, block_size: int) -> dict[str, int]:
    """The compile-time sizes that the kernels over rows share."""
    group = q.shape[1] // kv_heads
    padded = triton.next_power_of_2(group)
    rows = max(rows, rows_of_a_block(group, block_size), 16 * padded)
    own = rows // padded
    return {
        "STEP": own // block_size * block_size,
        "GROUP": group,
        "PADDED": padded,
        "ROWS": rows,
        "OWN": own,
        "DIM": q.shape[-1],
    }


def _like(rows: int, heads: int, tokens: int, like: Tensor) -> Tensor:
    """[rows, heads, tokens, d], laid out so that the heads of a token are side by side."""
    return like.new_empty(rows, tokens, heads, like.shape[-1]).transpose(1, 2)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, copied where a descriptor cannot describe it: channels must be side by side, and all other steps
    multiples of 16 bytes."""
    steps = [step * tensor.element_size() for step in _steps(tensor)[:-1]]
    described = tensor.stride(-1) == 1 and all(step > 0 and step % 16 == 0 for step in steps)
    return tensor if described and tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _steps(tensor: Tensor) -> list[int]:
    """Strides, with a possible one where it does not matter."""
    dim = tensor.shape[-1]
    return [step if size > 1 else dim for step, size in zip(tensor.stride()[:-1], tensor.shape, strict=False)] + [1]


def _keys_descriptor(tensor: Tensor, keys: int) -> TensorDescriptor:
    """Of [R, kv_heads, tokens, d], by so many keys."""
    return TensorDescriptor(tensor, list(tensor.shape), _steps(tensor), [1, 1, keys, tensor.shape[-1]])


def _rows_descriptor(tensor: Tensor, kv_heads: int, rows: int, padded: int) -> TensorDescriptor:
    """Of [R, heads, T, d] as [R, kv_heads, T, group, d], by so many rows."""
    count, heads, slots, dim = tensor.shape
    row, head, slot, _ = _steps(tensor)
    group = heads // kv_heads
    return TensorDescriptor(
        tensor,
        [count, kv_heads, slots, group, dim],
        [row, head * group, slot, head, 1],
        [1, 1, rows // padded, padded, dim],
    )


def attend(operands: Operands, runs: Runs, scale: float, tiles: AnchoredTiling) -> tuple[Tensor, Tensor]:
    """(mixed [R, heads, T, d], log2 of the softmax's denominator); see `anchored_attention`."""
    q, ck, cv, bk, bv = operands
    rows, heads, slots, _ = q.shape
    kv_heads, context = ck.shape[1:3]
    shape = _shape(q, kv_heads, tiles.forward.rows, runs.block_size)
    out = _like(rows, heads, slots, q)
    lse = torch.empty(rows, kv_heads, slots, heads // kv_heads, dtype=torch.float32, device=q.device)
    grid: Any = (triton.cdiv(slots, shape["STEP"]), kv_heads, rows)
    forward_kernel[grid](
        _rows_descriptor(q, kv_heads, shape["ROWS"], shape["PADDED"]),
        *(_keys_descriptor(tensor, tiles.forward.columns) for tensor in (ck, cv)),
        *(_keys_descriptor(tensor, shape["OWN"]) for tensor in (bk, bv)),
        out, lse, runs.context_first, runs.context_end, runs.own_first, runs.own_end, *outer_strides(out),
        slots, context, kv_heads, scale * LOG2_E,
        **shape, KEYS=tiles.forward.columns, num_warps=tiles.forward.warps, num_stages=tiles.forward.stages,
    )  # fmt: skip
    return out, lse


def attend_backward(
    gradients: tuple[Tensor, Tensor | None],
    operands: Operands,
    found: tuple[Tensor, Tensor],
    runs: Runs,
    scale: float,
    tiles: AnchoredTiling,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the operands, laid out as they are; found: what `attend` gave; gradients: of both of that, the
    second's may be absent."""
    (grad, lse_grad), (q, ck, cv, bk, bv), (out, lse) = gradients, operands, found
    rows, _, slots, _ = q.shape
    kv_heads, context = ck.shape[1:3]
    grad = _dense(grad)
    dq, dck, dcv, dbk, dbv = (torch.empty_like(tensor) for tensor in (q, ck, cv, bk, bv))
    delta = torch.empty_like(lse)
    shape = _shape(q, kv_heads, tiles.queries.rows, runs.block_size)
    padded = shape["PADDED"]
    grid: Any = (triton.cdiv(slots, shape["STEP"]), kv_heads, rows)
    query_gradient_kernel[grid](
        *(_rows_descriptor(tensor, kv_heads, shape["ROWS"], padded) for tensor in (q, grad)),
        *(_keys_descriptor(tensor, tiles.queries.columns) for tensor in (ck, cv)),
        *(_keys_descriptor(tensor, shape["OWN"]) for tensor in (bk, bv)),
        out, lse, lse if lse_grad is None else lse_grad.contiguous(), delta, dq, dbk, dbv,
        runs.context_first, runs.context_end, runs.own_first, runs.own_end,
        *outer_strides(out), *outer_strides(dq, dbk, dbv),
        slots, context, kv_heads, scale * LOG2_E, scale, HAS_LSE_GRAD=lse_grad is not None,
        **shape, KEYS=tiles.queries.columns, num_warps=tiles.queries.warps, num_stages=tiles.queries.stages,
    )  # fmt: skip
    tile = max(tiles.keys.rows, 16, padded)
    grid = (triton.cdiv(context, runs.keys), kv_heads, rows)
    key_gradient_kernel[grid](
        *(_rows_descriptor(tensor, kv_heads, tile, padded) for tensor in (q, grad)),
        *(_keys_descriptor(tensor, runs.keys) for tensor in (ck, cv)),
        lse, delta, dck, dcv, runs.context_first, runs.context_end, runs.by_key, *outer_strides(dck, dcv),
        slots, context, kv_heads, scale * LOG2_E, scale,
        GROUP=shape["GROUP"], PADDED=padded, ROWS=tile, KEYS=runs.keys, DIM=q.shape[-1],
        num_warps=tiles.keys.warps, num_stages=tiles.keys.stages,
    )  # fmt: skip
    return dq, dck, dcv, dbk, dbv


class _AnchoredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        ck: Tensor,
        cv: Tensor,
        bk: Tensor,
        bv: Tensor,
        runs: Runs,
        scale: float,
        tiles: AnchoredTiling,
    ) -> tuple[Tensor, Tensor]:
        operands = Operands(*(_dense(tensor) for tensor in (q, ck, cv, bk, bv)))
        out, lse = attend(operands, runs, scale, tiles)
        ctx.save_for_backward(*operands, out, lse)
        ctx.settings = (runs, scale, tiles)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad, lse_grad = gradients
        *operands, out, lse = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        found = attend_backward((grad, lse_grad), Operands(*operands), (out, lse), *ctx.settings)
        return *found, None, None, None


def anchored_attention(operands: Operands, runs: Runs, *, scale: float, tiles: AnchoredTiling) -> tuple[Tensor, Tensor]:
    """(mixed [R, heads, T, d], log2 of the softmax's denominator [R, kv_heads, T, heads a key head] float32),
    differentiable both; scale > 0; runs: who sees what, for tiles of `tiles.keys.columns` keys."""
    return _AnchoredAttention.apply(*operands, runs, scale, tiles)
