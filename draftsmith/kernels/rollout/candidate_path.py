"""DFlash 2's greedy path through each slot's candidates (`drafts.heads.dflash2`), without a vocabulary of scores.

`top_candidates` finds the likeliest tokens of every slot in two passes: the best of each group of tokens, then the best
of those. `candidate_path` walks the slots in one program a row of the batch: what a step reads from memory (its
candidates' rows of both codebooks) does not depend on the token before, so it is fetched a step ahead, and the row of
the token before is one of the rows fetched for the step before.
"""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.keys import (
    LOWEST_KEY_IN_KERNEL,
    key_ids,
    key_ids_in_kernel,
    key_scores,
    key_scores_in_kernel,
    pack_keys,
    pack_keys_in_kernel,
)

GROUP = 512
"""Tokens of a group in the first pass of `top_candidates`."""
MAX_CANDIDATES = 64
"""Of a slot: the best are found one after the other, which takes longer than a sort for many."""
MAX_TILE = 2**14
"""Numbers in the codebook rows of one slot's candidates, both counted up to powers of two, that a program holds."""


def fits(count: int, rank: int) -> bool:
    """Whether the kernels take `count` candidates a slot and codebooks of `rank` columns."""
    return count <= MAX_CANDIDATES and _padded(count) * triton.next_power_of_2(rank) <= MAX_TILE


def _padded(count: int) -> int:
    return max(2, triton.next_power_of_2(count))


def top_candidates_reference(logits: Tensor, count: int) -> Tensor:
    """Plain PyTorch for `top_candidates`."""
    return pack_keys(logits.float(), torch.arange(logits.shape[-1], device=logits.device)).topk(count, dim=-1).values


def candidate_path_reference(
    candidates: Tensor, anchor_ids: Tensor, projected: Tensor, predecessor: Tensor, successor: Tensor
) -> Tensor:
    """Plain PyTorch for `candidate_path`."""
    tokens, previous = [], anchor_ids
    for slot in range(candidates.shape[1]):
        offered = candidates[:, slot]
        latent = (predecessor[previous] * projected[:, slot]).float()  # [batch, rank]
        transition = (latent.unsqueeze(1) * successor[key_ids(offered)].float()).sum(-1)  # [batch, K]
        previous = key_ids(pack_keys(key_scores(offered) + transition, key_ids(offered)).amax(-1))
        tokens.append(previous)
    return torch.stack(tokens, dim=1)


@triton.jit
def _store_best(keys, out_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The COUNT largest of distinct keys, largest first."""
    for place in tl.static_range(COUNT):
        best = tl.max(keys, 0)
        tl.store(out_ptr + place, best)
        keys = tl.where(keys == best, LOWEST_KEY_IN_KERNEL, keys)


@triton.jit
def _group_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, vocab, GROUP: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = group * GROUP + tl.arange(0, GROUP)
    score = tl.load(logits_ptr + row * vocab + tokens, mask=tokens < vocab, other=0.0).to(tl.float32)
    keys = tl.where(tokens < vocab, pack_keys_in_kernel(score, tokens), LOWEST_KEY_IN_KERNEL)
    _store_best(keys, out_ptr + (row * tl.num_programs(1) + group) * COUNT, COUNT)


@triton.jit
def _merge_kernel(keys_ptr, out_ptr, found, BLOCK: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * found + index, mask=index < found, other=LOWEST_KEY_IN_KERNEL)
    _store_best(keys, out_ptr + row * COUNT, COUNT)


def top_candidates(logits: Tensor, count: int) -> Tensor:
    """Keys (`keys.pack_keys`) of the `count` largest logits, largest first and ties to the lowest id.

    logits [..., V] contiguous, bf16, fp16 or fp32, no NaN; count 1 to min(V, `MAX_CANDIDATES`) -> [..., count] int64.
    Raises `ValueError` for others.
    """
    if not uses_kernels(logits):
        return top_candidates_reference(logits, count)
    vocab = logits.shape[-1]
    if not 1 <= count <= min(vocab, MAX_CANDIDATES):
        raise ValueError(f"count is {count}; allowed: 1 to {min(vocab, MAX_CANDIDATES)}")
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    rows, groups = logits.numel() // vocab, triton.cdiv(vocab, GROUP)
    found = torch.empty(rows, groups * count, dtype=torch.int64, device=logits.device)
    out = torch.empty(*logits.shape[:-1], count, dtype=torch.int64, device=logits.device)
    options = overlapping(logits.device)
    _group_kernel[(rows, groups)](logits, found, vocab, GROUP=GROUP, COUNT=count, num_warps=1, **options)
    block = triton.next_power_of_2(groups * count)
    _merge_kernel[(rows,)](
        found, out, groups * count, BLOCK=block, COUNT=count, num_warps=min(8, max(1, block // 256)), **options
    )
    return out


@triton.jit
def _rows(table_ptr, ids, rank, dims, ok):  # type: ignore[no-untyped-def]
    return tl.load(
        table_ptr + ids[:, None] * rank + dims[None, :], mask=ok[:, None] & (dims < rank)[None, :], other=0.0
    )


@triton.jit
def _fetch(  # type: ignore[no-untyped-def]
    keys_ptr, projected_ptr, predecessor_ptr, successor_ptr, slot, count, rank, wanted,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """What a step at `slot` reads beside the token before it; wanted: 1, or 0 to read nothing."""
    places, dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    ok = places < count * wanted
    keys = tl.load(keys_ptr + slot * count + places, mask=ok, other=0xFFFFFFFF)
    ids = key_ids_in_kernel(keys)
    successors = _rows(successor_ptr, ids, rank, dims, ok)
    predecessors = _rows(predecessor_ptr, ids, rank, dims, ok)
    projected = tl.load(projected_ptr + slot * rank + dims, mask=dims < rank * wanted, other=0.0)
    return keys, ids, successors, predecessors, projected


@triton.jit
def _path_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, anchors_ptr, projected_ptr, predecessor_ptr, successor_ptr, out_ptr, steps, count, rank,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * steps  # of this row's slots
    places, dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    ok, dim_ok = places < count, dims < rank
    dtype: tl.constexpr = predecessor_ptr.dtype.element_ty
    anchor = tl.load(anchors_ptr + tl.program_id(0))
    before = tl.load(predecessor_ptr + anchor * rank + dims, mask=dim_ok, other=0.0).to(tl.float32)
    keys, ids, successors, predecessors, projected = _fetch(
        keys_ptr, projected_ptr, predecessor_ptr, successor_ptr, first, count, rank, 1, BLOCK_K, BLOCK_R
    )
    for step in range(steps):
        # The next step's, before anything of this one is waited for.
        more = tl.minimum(steps - 1 - step, 1)  # 0 in the last step, where there is nothing to fetch
        next_keys, next_ids, next_successors, next_predecessors, next_projected = _fetch(
            keys_ptr, projected_ptr, predecessor_ptr, successor_ptr, first + step + 1, count, rank, more,
            BLOCK_K, BLOCK_R,
        )  # fmt: skip
        latent = (before * projected.to(tl.float32)).to(dtype).to(tl.float32)
        transition = tl.sum(latent[None, :] * successors.to(tl.float32), 1)
        scored = pack_keys_in_kernel(key_scores_in_kernel(keys) + transition, ids)
        best = tl.max(tl.where(ok, scored, LOWEST_KEY_IN_KERNEL), 0)
        token = key_ids_in_kernel(best)
        tl.store(out_ptr + first + step, token)
        chosen = ok & (ids == token)
        before = tl.sum(tl.where(chosen[:, None], predecessors.to(tl.float32), 0.0), 0)
        keys, ids, projected = next_keys, next_ids, next_projected
        successors, predecessors = next_successors, next_predecessors


def candidate_path(
    candidates: Tensor, anchor_ids: Tensor, projected: Tensor, predecessor: Tensor, successor: Tensor
) -> Tensor:
    """The greedy path: at each slot the candidate c with the largest U(c) + <A[prev] * (P h), B[c]>, ties to the lowest
    id, prev being the token of the slot before and first the anchor.

    candidates [batch, P, K] int64 contiguous, from `top_candidates`, whose scores are U; anchor_ids [batch] int64
    contiguous; projected P h [batch, P, rank]; predecessor A and successor B [V, rank]; the last three contiguous and
    of one dtype, to which A * (P h) is rounded; sums are in fp32 -> token ids [batch, P] int64. Raises `ValueError` for
    operands that do not fit.
    """
    if not uses_kernels(candidates):
        return candidate_path_reference(candidates, anchor_ids, projected, predecessor, successor)
    batch, steps, count = candidates.shape
    rank = predecessor.shape[1]
    sizes_fit = projected.shape == (batch, steps, rank) and successor.shape == predecessor.shape
    if not sizes_fit or anchor_ids.shape != (batch,) or not fits(count, rank):
        raise ValueError(
            f"candidates {tuple(candidates.shape)}, anchors {tuple(anchor_ids.shape)}, projected "
            f"{tuple(projected.shape)}, codebooks {tuple(predecessor.shape)} and {tuple(successor.shape)}"
        )
    operands = (candidates, anchor_ids, projected, predecessor, successor)
    if not all(operand.is_contiguous() for operand in operands):
        raise ValueError("all operands must be contiguous")
    if not projected.dtype == predecessor.dtype == successor.dtype:
        raise ValueError(f"dtypes {projected.dtype}, {predecessor.dtype}, {successor.dtype}: they must agree")
    out = torch.empty(batch, steps, dtype=torch.int64, device=candidates.device)
    _path_kernel[(batch,)](
        *operands, out, steps, count, rank, BLOCK_K=_padded(count), BLOCK_R=triton.next_power_of_2(rank), num_warps=4,
        **overlapping(candidates.device),
    )  # fmt: skip
    return out
