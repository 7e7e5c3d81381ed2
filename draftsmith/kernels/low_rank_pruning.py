"""The argmax of `base + W2 u` without reading the rows of W2 that cannot win, and the same token every time.

**The bound.** Let w be a row of W2, n >= |w| its stored norm, b its base logit, t = |u| n. By Cauchy-Schwarz
b + w.u <= b + t. A kernel's score s is that sum in fp32: the products of bf16 or fp16 numbers are exact (those of fp32
numbers are off by 2^-24 of themselves), and E + 1 additions, in whatever order and with the base as first or as last
term, are each off by at most 2^-22 of the sum of the magnitudes, which allows for matrix units that truncate. That sum
is at most |b| + |w||u| <= |b| + t, so

    s <= b + t + c (|b| + t) + d,    c = (E + 16) 2^-21,    d = 2^-114.

c is twice what the additions need; the other half covers the second-order terms, the rounding of the bound itself (four
operations), and the norms, each of which is computed with a relative error below E 2^-24: n in fp64 and rounded up, |u|
in fp32 from u scaled to a largest entry of 1, so that no square underflows or overflows. d covers products that
underflow. Where the bound overflows, or a base logit is infinite, it is infinite or NaN, and the row counts as able to
win.

**The rule.** L is the score of some rows, computed by the same instructions as every other score. A row is left out
when its bound is *below* L. Its score is then below L as well, so it is neither the best nor equal to the best, and the
lowest id among the best is among the rows that are read. Scores of read rows are computed as `low_rank_argmax` computes
them, so the keys agree bit for bit. How good L is decides only how many rows are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.kernels.keys import LOWEST_KEY, key_ids_in_kernel, pack_keys, pack_keys_in_kernel
from draftsmith.kernels.low_rank_argmax import check_operands, low_rank_scores
from draftsmith.kernels.overlap import overlapping

CANDIDATES = 64
"""Rows that give the lower bound L: the best base logit of each of so many parts of the vocabulary."""

UNDERFLOW = 2.0**-114

MAX_ROW_BYTES = 1024
"""The longest row of W2 of which the kernel holds two tiles."""


def slack(rank: int) -> float:
    """c of the module's docstring."""
    return (rank + 16) * 2.0**-21


def row_norms(weight: Tensor) -> Tensor:
    """|w| of every row, rounded up: weight [V, E] -> [V] fp32."""
    parts = [part.double().norm(dim=-1) for part in weight.split(8192)]  # a copy in fp64 of the whole would be large
    return torch.nextafter(torch.cat(parts).float(), weight.new_tensor(float("inf"), dtype=torch.float32))


def upper_bounds(base: Tensor, norms: Tensor, latent: Tensor) -> Tensor:
    """What no score exceeds: base [batch, V], norms [V], latent [batch, E] -> [batch, V] fp32."""
    largest = latent.float().abs().amax(-1, keepdim=True)
    scaled = latent.float() / torch.where(largest == 0, 1.0, largest)
    reach = largest * scaled.square().sum(-1, keepdim=True).sqrt() * norms
    wide = base.float()
    return wide + reach + (slack(latent.shape[-1]) * (wide.abs() + reach) + UNDERFLOW)


def pruned_low_rank_argmax_reference(
    base: Tensor, weight: Tensor, latent: Tensor, norms: Tensor, candidates: Tensor, first_id: int = 0
) -> Tensor:
    """Plain PyTorch for `pruned_low_rank_argmax`, by the same rule: keys [batch] int64."""
    scores = low_rank_scores(base, weight, latent)
    lower = scores.gather(-1, candidates.long()).amax(-1, keepdim=True)
    left_out = upper_bounds(base, norms, latent) < lower
    ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
    return pack_keys(scores, ids).masked_fill(left_out, LOWEST_KEY).amax(-1)


def candidates_reference(base: Tensor) -> Tensor:
    """Plain PyTorch for `candidates`."""
    part = triton.cdiv(base.shape[-1], CANDIDATES)
    padded = torch.nn.functional.pad(base.float(), (0, part * CANDIDATES - base.shape[-1]), value=float("-inf"))
    offsets = torch.arange(CANDIDATES, device=base.device) * part
    ids = padded.unflatten(-1, (CANDIDATES, part)).argmax(-1) + offsets
    return ids.clamp(max=base.shape[-1] - 1).int()


@triton.jit
def _candidates_kernel(base_ptr, out_ptr, stride, vocab, part, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + index * part
    for offset in range(0, part, BLOCK):
        inside = offset + tl.arange(0, BLOCK)
        tokens = index * part + inside
        score = tl.load(base_ptr + row * stride + tokens, mask=(inside < part) & (tokens < vocab), other=float("-inf"))
        score = score.to(tl.float32)
        better = score > best
        best = tl.where(better, score, best)
        where = tl.where(better, tokens, where)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, where, 2147483647), 0)
    tl.store(out_ptr + row * COUNT + index, tl.minimum(chosen, vocab - 1))


def candidates(base: Tensor) -> Tensor:
    """The best token of each of `CANDIDATES` parts of the vocabulary: base [n, V], rows contiguous -> [n, 64] int32."""
    rows, vocab = base.shape
    out = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=base.device)
    part = triton.cdiv(vocab, CANDIDATES)
    _candidates_kernel[(rows, CANDIDATES)](
        base, out, base.stride(0), vocab, part, COUNT=CANDIDATES, BLOCK=1024, num_warps=4
    )
    return out


@triton.jit
def _likeliest_kernel(  # type: ignore[no-untyped-def]
    base_ptr, candidates_ptr, out_ptr, stride, COUNT: tl.constexpr, WANTED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.load(candidates_ptr + row * COUNT + tl.arange(0, COUNT))
    score = tl.load(base_ptr + row * stride + tokens).to(tl.float32)
    for index in tl.static_range(WANTED):
        key = pack_keys_in_kernel(score, tokens)
        top = tl.max(key, 0)
        tl.store(out_ptr + row * WANTED + index, key_ids_in_kernel(top))
        score = tl.where(key == top, float("-inf"), score)


def likeliest(base: Tensor, candidates: Tensor, wanted: int) -> Tensor:
    """The best few of the candidates, by base alone: base [n, V], candidates [n, 64] int32, both with contiguous rows
    -> [n, wanted] int64."""
    out = torch.empty(len(base), wanted, dtype=torch.int64, device=base.device)
    _likeliest_kernel[(len(base),)](base, candidates, out, base.stride(0), COUNT=CANDIDATES, WANTED=wanted, num_warps=1)
    return out


@triton.jit
def _pruned_kernel(  # type: ignore[no-untyped-def]
    base_ptr, weight_ptr, latent_ptr, previous_ptr, keys_ptr, norms_ptr, candidates_ptr, scratch_ptr, read_ptr,
    base_stride, candidates_stride, vocab, rank, first_id, slack, underflow,
    SPAN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, COUNT: tl.constexpr,
    GATHER: tl.constexpr, REPORT: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_E)
    dim_ok = dims < rank
    base_ptr += row * base_stride
    tokens = part * SPAN + tl.arange(0, SPAN)
    token_ok = tokens < vocab
    norms = tl.load(norms_ptr + tokens, mask=token_ok, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Everything that does not need the latent is asked for first: a step is a chain of waits.
    some = tl.load(candidates_ptr + row * candidates_stride + tl.arange(0, COUNT))
    latent_row = row
    if GATHER:
        latent_row = key_ids_in_kernel(tl.load(previous_ptr + row))
    base = tl.load(base_ptr + tokens, mask=token_ok, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + some.to(tl.int64)[:, None] * rank + dims[None, :], mask=dim_ok[None, :], other=0.0)
    score = tl.load(base_ptr + some).to(tl.float32)

    latent = tl.load(latent_ptr + latent_row * rank + dims, mask=dim_ok, other=0.0)
    # Every column of the product is this row's; matrix units want several.
    columns = tl.broadcast_to(latent[:, None], [BLOCK_E, 16])
    wide = latent.to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    scaled = wide / tl.where(largest == 0.0, 1.0, largest)
    length = largest * tl.sqrt(tl.sum(scaled * scaled, 0))

    # L: the best of the candidates' scores.
    score = tl.broadcast_to(score[:, None], [COUNT, 16])
    score = tl.dot(weight, columns, input_precision="ieee") + score
    lower = tl.max(tl.max(score, 1), 0)

    reach = length * norms
    bound = base + reach + (slack * (tl.abs(base) + reach) + underflow)
    keep = token_ok & ((bound < lower) == 0)
    kept = keep.to(tl.int32)
    count = tl.sum(kept, 0)
    if REPORT:
        tl.atomic_add(read_ptr + row, count)
    if count > 0:
        scratch_ptr += (row * tl.num_programs(0) + part) * SPAN
        tl.store(scratch_ptr + tl.cumsum(kept, 0) - 1, tokens, mask=keep)
        tl.debug_barrier()
        best = tl.full([BLOCK_R, 16], -9223372036854775808, tl.int64)
        for first in tl.range(0, count, BLOCK_R, num_stages=STAGES):
            index = first + tl.arange(0, BLOCK_R)
            index_ok = index < count
            left = tl.load(scratch_ptr + index, mask=index_ok, other=0)
            offset = left.to(tl.int64)[:, None] * rank + dims[None, :]
            weight = tl.load(weight_ptr + offset, mask=index_ok[:, None] & dim_ok[None, :], other=0.0)
            score = tl.load(base_ptr + left, mask=index_ok, other=0.0).to(tl.float32)
            score = tl.broadcast_to(score[:, None], [BLOCK_R, 16])
            score = tl.dot(weight, columns, input_precision="ieee") + score
            key = pack_keys_in_kernel(score, (left + first_id)[:, None])
            best = tl.maximum(best, tl.where(index_ok[:, None], key, -9223372036854775808))
        tl.atomic_max(keys_ptr + row, tl.max(tl.max(best, 1), 0))


def pruned_low_rank_argmax(
    base: Tensor,
    weight: Tensor,
    latent: Tensor,
    keys: Tensor,
    *,
    norms: Tensor,
    candidates: Tensor,
    previous: Tensor | None = None,
    first_id: int = 0,
    read: Tensor | None = None,
    span: int = 2048,
    warps: int = 4,
    stages: int = 1,
) -> None:
    """Raises `keys` to the best token's key, as `low_rank_argmax` does, reading only rows of W2 that may win.

    norms as from `row_norms` of this weight; candidates [batch, 64] int32, ids within this part of the vocabulary
    (any ids are right; the better their scores, the fewer rows are read). read [batch] int32, if given, is raised by
    the number of rows that the bound left. The other arguments as for `low_rank_argmax`.
    """
    check_operands(base, weight, latent, keys, previous)
    batch, vocab = base.shape
    if norms.shape != (vocab,) or norms.dtype != torch.float32:
        raise ValueError(f"norms must be fp32 [{vocab}], got {norms.dtype} {tuple(norms.shape)}")
    if candidates.shape != (batch, CANDIDATES) or candidates.dtype != torch.int32 or candidates.stride(1) != 1:
        raise ValueError(f"candidates must be int32 [{batch}, {CANDIDATES}], got {tuple(candidates.shape)}")
    rank = weight.shape[1]
    if rank * weight.element_size() > MAX_ROW_BYTES:
        raise ValueError(f"rows of {rank} {weight.dtype} are too long; the kernel takes up to {MAX_ROW_BYTES} bytes")
    parts = triton.cdiv(vocab, span)
    scratch = torch.empty(batch * parts * span, dtype=torch.int32, device=base.device)
    _pruned_kernel[(parts, batch)](
        base, weight, latent, keys if previous is None else previous, keys, norms, candidates, scratch,
        scratch if read is None else read, base.stride(0), candidates.stride(0), vocab, rank, first_id,
        slack(rank), UNDERFLOW,
        SPAN=span, BLOCK_R=64, BLOCK_E=max(16, triton.next_power_of_2(rank)), COUNT=CANDIDATES,
        GATHER=previous is not None, REPORT=read is not None, STAGES=stages, num_warps=warps,
        **overlapping(base.device),
    )  # fmt: skip
