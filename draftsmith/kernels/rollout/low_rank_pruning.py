"""The argmax of `base + W2 u` without reading the rows of W2 that cannot win, and the same token every time.

Every row of W2 has a bound of its score that holds for any latent, rounding included (`row_bounds`).

**The rule.** L is the score of some rows, computed by the same instructions as every other score. A row is left out
when its bound is *below* L. Its score is then below L as well, so it is neither the best nor equal to the best, and the
lowest id among the best is among the rows that are read. Scores of read rows are computed as `low_rank_argmax` computes
them, so the keys agree bit for bit. How good L is decides only how many rows are read.

**Who is read when.** The rows that the rule leaves are mostly those with the best base logits, which are known before
the first step. So the vocabulary is cut into groups, and the few best of each group by base alone (`leaders`) are read
without asking, while the kernel before this one still computes the latent; L is the score of the best of them all. Rows
that the bound leaves and that are not leaders are read after it. The order decides nothing but time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.base.rounding import round_up
from draftsmith.kernels.device import cache_bytes, overlapping, shared_memory, uses_kernels
from draftsmith.kernels.rollout.low_rank_argmax import (
    check_operands,
    latents_of,
    low_rank_scores,
    padded_rank,
    tile_rows,
)
from draftsmith.kernels.rollout.row_bounds import DIRECTIONS, UNDERFLOW, RowBounds, share_beside, slack, upper_bounds
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.keys import (
    LOWEST_KEY,
    LOWEST_KEY_IN_KERNEL,
    key_ids,
    key_ids_in_kernel,
    pack_keys,
    pack_keys_in_kernel,
)

GROUP, LEADERS = 512, 4
"""Tokens of a group, and how many of them, the best by base, are always read."""
SPAN = 1024
"""Tokens of a program."""
TILING = Tiling(columns=SPAN, warps=4)
FIRSTS = 16
"""Rows that give the lower bound L: the best of the groups' best."""

MAX_BESIDE = 0.1
"""Of W2's squares, the largest share beside its strongest directions with which leaving rows out is expected to pay.
Trained heads had 0.02 to 0.04; of random numbers with E = 256 it is 0.94."""

COLUMNS = 16
"""Of the latent in a product, all of them one row's; matrix units want several."""
KEPT_BYTES = 2048
"""Of shared memory beside a product's: sums over a program's tokens."""


def widest_rank(item: int, device: torch.device) -> int:
    """The widest E, in numbers of `item` bytes, that the kernel holds on this device; 0 where it holds none."""
    for rank in (512, 256, 128, 64, 32, 16):
        rows = tile_rows(rank, item)
        listed = FIRSTS + LEADERS * (SPAN // GROUP)
        if rows >= listed and (rows + COLUMNS) * rank * item + KEPT_BYTES <= shared_memory(device):
            return rank
    return 0


def pays(weight: Tensor) -> bool:
    """Whether to expect that leaving rows of W2 [V, E] out takes less time than reading all of them.

    It does for a matrix that does not fit in its device's cache, out of which all of it is read as fast as bounds are
    computed, and of which little is beside its strongest directions, so that bounds leave few rows. Where they leave
    all, a search takes twice the time of one without.
    """
    held = weight.shape[1] <= widest_rank(weight.element_size(), weight.device)
    return held and weight.nbytes > cache_bytes(weight.device) and share_beside(weight) <= MAX_BESIDE


class Leaders(NamedTuple):
    """What base logits say of each row beforehand: groups of tokens, and the best of each.

    ids [..., n * LEADERS] int32, the best of each of n groups, best first; where a group has fewer tokens, its last one
    again. limits [..., n] int64, the key of the weakest leader of each group. firsts [..., FIRSTS] int32, the best of
    the groups' best, best first.
    """

    ids: Tensor
    limits: Tensor
    firsts: Tensor

    def of(self, index: Any) -> "Leaders":
        """The same, of some rows."""
        return Leaders(*(part[index] for part in self))

    def unflatten(self, sizes: tuple[int, ...]) -> "Leaders":
        """The same, with the rows in several dimensions."""
        return Leaders(*(part.unflatten(0, sizes) for part in self))


def pruned_low_rank_argmax_reference(
    base: Tensor, weight: Tensor, latent: Tensor, bounds: RowBounds, firsts: Tensor, first_id: int = 0
) -> Tensor:
    """Plain PyTorch for `pruned_low_rank_argmax`, by the same rule: keys [batch] int64."""
    scores = low_rank_scores(base, weight, latent)
    lower = scores.gather(-1, firsts.long()).amax(-1, keepdim=True)
    left_out = upper_bounds(base, bounds, latent) < lower
    ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
    return pack_keys(scores, ids).masked_fill(left_out, LOWEST_KEY).amax(-1)


def leaders_reference(base: Tensor) -> Leaders:
    """Plain PyTorch for `leaders`."""
    rows, vocab = base.shape
    groups = round_up(vocab, GROUP) // GROUP
    keys = pack_keys(base.float(), torch.arange(vocab, device=base.device))
    padded = torch.nn.functional.pad(keys, (0, groups * GROUP - vocab), value=LOWEST_KEY).unflatten(-1, (groups, GROUP))
    best = padded.topk(LEADERS, dim=-1).values  # [rows, groups, LEADERS]
    for place in range(1, LEADERS):
        short = best[..., place] == LOWEST_KEY
        best[..., place] = torch.where(short, best[..., place - 1], best[..., place])
    tops = torch.nn.functional.pad(best[..., 0], (0, max(0, FIRSTS - groups)), value=LOWEST_KEY)
    firsts = tops.topk(FIRSTS, dim=-1).values
    firsts = torch.where(firsts == LOWEST_KEY, firsts[:, :1], firsts)
    return Leaders(key_ids(best).int().flatten(1), best[..., -1].contiguous(), key_ids(firsts).int())


@triton.jit
def _leaders_kernel(  # type: ignore[no-untyped-def]
    base_ptr, ids_ptr, limits_ptr, tops_ptr, stride, vocab, GROUP: tl.constexpr, LEADERS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    index = row * tl.num_programs(1) + group
    tokens = group * GROUP + tl.arange(0, GROUP)
    score = tl.load(base_ptr + row * stride + tokens, mask=tokens < vocab, other=0.0).to(tl.float32)
    keys = tl.where(tokens < vocab, pack_keys_in_kernel(score, tokens), LOWEST_KEY_IN_KERNEL)
    leader = tl.max(keys, 0)
    tl.store(tops_ptr + index, leader)
    tl.store(ids_ptr + index * LEADERS, key_ids_in_kernel(leader).to(tl.int32))
    for place in tl.static_range(1, LEADERS):
        keys = tl.where(keys == leader, LOWEST_KEY_IN_KERNEL, keys)
        best = tl.max(keys, 0)
        leader = tl.where(best == LOWEST_KEY_IN_KERNEL, leader, best)
        tl.store(ids_ptr + index * LEADERS + place, key_ids_in_kernel(leader).to(tl.int32))
    tl.store(limits_ptr + index, leader)


@triton.jit
def _firsts_kernel(tops_ptr, firsts_ptr, groups, FIRSTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    keys = tl.load(tops_ptr + row * groups + index, mask=index < groups, other=LOWEST_KEY_IN_KERNEL)
    first = tl.max(keys, 0)
    for place in range(FIRSTS):
        best = tl.max(keys, 0)
        chosen = tl.where(best == LOWEST_KEY_IN_KERNEL, first, best)
        tl.store(firsts_ptr + row * FIRSTS + place, key_ids_in_kernel(chosen).to(tl.int32))
        keys = tl.where(keys == best, LOWEST_KEY_IN_KERNEL, keys)


def leaders(base: Tensor) -> Leaders:
    """The best tokens by base logits alone: base [n, V], rows contiguous, not NaN -> for every row."""
    if not uses_kernels(base):
        return leaders_reference(base)
    rows, vocab = base.shape
    groups = triton.cdiv(vocab, GROUP)
    ids = torch.empty(rows, groups * LEADERS, dtype=torch.int32, device=base.device)
    limits, tops = (torch.empty(rows, groups, dtype=torch.int64, device=base.device) for _ in range(2))
    firsts = torch.empty(rows, FIRSTS, dtype=torch.int32, device=base.device)
    _leaders_kernel[(rows, groups)](
        base, ids, limits, tops, base.stride(0), vocab, GROUP=GROUP, LEADERS=LEADERS, num_warps=1
    )
    _firsts_kernel[(rows,)](tops, firsts, groups, FIRSTS=FIRSTS, BLOCK=triton.next_power_of_2(groups), num_warps=4)
    return Leaders(ids, limits, firsts)


@triton.jit
def _pruned_kernel(  # type: ignore[no-untyped-def]
    base_ptr, weight_ptr, latent_ptr, previous_ptr, keys_ptr,
    directions_ptr, along_ptr, beside_ptr, sizes_ptr, ids_ptr, limits_ptr, firsts_ptr, scratch_ptr, read_ptr,
    base_stride, ids_stride, limits_stride, firsts_stride, vocab, rank, groups, first_id, slack, underflow,
    SPAN: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr, LEADERS: tl.constexpr, FIRSTS: tl.constexpr, DIRECTIONS: tl.constexpr,
    COLUMNS: tl.constexpr, GATHER: tl.constexpr, REPORT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_E)
    dim_ok = dims < rank
    base_ptr += row * base_stride
    # What is known before the step, on its way while the latent is still being made: the first rows of a tile are those
    # that give L, the next ones this span's leaders.
    place = tl.arange(0, TILE)
    own = part * (SPAN // GROUP * LEADERS) + place - FIRSTS
    is_first = place < FIRSTS
    is_own = (is_first == 0) & (place < FIRSTS + SPAN // GROUP * LEADERS) & (own < groups * LEADERS)
    some = tl.load(firsts_ptr + row * firsts_stride + place, mask=is_first, other=0)
    some += tl.load(ids_ptr + row * ids_stride + own, mask=is_own, other=0)
    listed = is_first | is_own
    weight = tl.load(
        weight_ptr + some.to(tl.int64)[:, None] * rank + dims[None, :],
        mask=listed[:, None] & dim_ok[None, :], other=0.0,
    )  # fmt: skip
    some_base = tl.load(base_ptr + some, mask=listed, other=0.0).to(tl.float32)
    tokens = part * SPAN + tl.arange(0, SPAN)
    token_ok = tokens < vocab
    beside = tl.load(beside_ptr + tokens, mask=token_ok, other=0.0)
    sizes = tl.load(sizes_ptr + tokens, mask=token_ok, other=0.0)
    ways = tl.arange(0, DIRECTIONS)
    directions = tl.load(directions_ptr + ways[:, None] * rank + dims[None, :], mask=dim_ok[None, :], other=0.0)
    along_offset = tokens.to(tl.int64)[:, None] * DIRECTIONS + ways[None, :]
    along = tl.load(along_ptr + along_offset, mask=token_ok[:, None], other=0.0)
    base = tl.load(base_ptr + tokens, mask=token_ok, other=0.0).to(tl.float32)
    limit = tl.load(limits_ptr + row * limits_stride + tokens // GROUP, mask=token_ok, other=0)
    behind = token_ok & (pack_keys_in_kernel(base, tokens) < limit)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    latent_row = row
    if GATHER:
        latent_row = key_ids_in_kernel(tl.load(previous_ptr + row))
    latent = tl.load(latent_ptr + latent_row * rank + dims, mask=dim_ok, other=0.0)
    columns = tl.broadcast_to(latent[:, None], [BLOCK_E, COLUMNS])
    wide = latent.to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    scaled = wide / tl.where(largest == 0.0, 1.0, largest)
    length = tl.sqrt(tl.sum(scaled * scaled, 0))

    score = tl.dot(weight, columns, input_precision="ieee") + tl.broadcast_to(some_base[:, None], [TILE, COLUMNS])
    score = tl.max(score, 1)
    lower = tl.max(tl.where(is_first, score, float("-inf")), 0)
    key = tl.where(listed, pack_keys_in_kernel(score, some + first_id), LOWEST_KEY_IN_KERNEL)
    best = tl.max(key, 0)

    turned = tl.sum(directions.to(tl.float32) * scaled[None, :], 1)
    reach = largest * (tl.sum(along.to(tl.float32) * turned[None, :], 1) + length * beside)
    bound = base + (reach + (slack * (tl.abs(base) + length * sizes * largest) + underflow))
    able = (bound < lower) == 0
    if REPORT:
        tl.atomic_add(read_ptr + row, tl.sum((token_ok & able).to(tl.int32), 0))
    keep = behind & able
    kept = keep.to(tl.int32)
    count = tl.sum(kept, 0)
    if count > 0:
        scratch_ptr += (row * tl.num_programs(0) + part) * SPAN
        tl.store(scratch_ptr + tl.cumsum(kept, 0) - 1, tokens, mask=keep)
        tl.debug_barrier()
        found = tl.full([TILE, COLUMNS], LOWEST_KEY_IN_KERNEL, tl.int64)
        for first in tl.range(0, count, TILE, num_stages=1):  # whose rows come from a list that was only just made
            index = first + tl.arange(0, TILE)
            index_ok = index < count
            left = tl.load(scratch_ptr + index, mask=index_ok, other=0)
            offset = left.to(tl.int64)[:, None] * rank + dims[None, :]
            rest = tl.load(weight_ptr + offset, mask=index_ok[:, None] & dim_ok[None, :], other=0.0)
            left_base = tl.load(base_ptr + left, mask=index_ok, other=0.0).to(tl.float32)
            left_base = tl.broadcast_to(left_base[:, None], [TILE, COLUMNS])
            left_score = tl.dot(rest, columns, input_precision="ieee") + left_base
            left_key = pack_keys_in_kernel(left_score, (left + first_id)[:, None])
            found = tl.maximum(found, tl.where(index_ok[:, None], left_key, LOWEST_KEY_IN_KERNEL))
        best = tl.maximum(best, tl.max(tl.max(found, 1), 0))
        tl.atomic_max(keys_ptr + row, best)
    else:
        # The first span speaks for the rows that gave L; another has something to say if one of its own is better.
        top = tl.max(tl.where(is_first, key, LOWEST_KEY_IN_KERNEL), 0)
        tl.atomic_max(keys_ptr + row, best, mask=(part == 0) | (best > top))


def pruned_low_rank_argmax(
    base: Tensor,
    weight: Tensor,
    latent: Tensor,
    keys: Tensor,
    *,
    bounds: RowBounds,
    leaders: Leaders,
    previous: Tensor | None = None,
    first_id: int = 0,
    read: Tensor | None = None,
    tiling: Tiling = TILING,
    overlap: bool = True,
) -> None:
    """Raises `keys` to the best token's key, as `low_rank_argmax` does, reading only rows of W2 that may win.

    bounds as from `row_bounds` of this weight; leaders as from `leaders` of this base, for part of a vocabulary of this
    part. Any `firsts` are right; the better their scores, the fewer rows are read. read [batch] int32, if given, is
    raised by the number of rows that the bound left. Base, bounds and leaders are read before the kernel's predecessor
    has ended: they must have been made before the chain of launches began, whose first has overlap=False. tiling:
    columns (tokens of a program), warps. The other arguments as for `low_rank_argmax`.
    """
    if not uses_kernels(base):
        latents = latents_of(latent, previous)
        assert latents is not None
        found = pruned_low_rank_argmax_reference(base, weight, latents, bounds, leaders.firsts, first_id)
        keys.copy_(torch.maximum(keys, found))
        return
    check_operands(base, weight, latent, keys, previous)
    batch, vocab = base.shape
    rank = weight.shape[1]
    span, tile = tiling.columns, tile_rows(rank, weight.element_size())
    wanted = ((DIRECTIONS, rank), (vocab, DIRECTIONS), (vocab,), (vocab,))
    for name, shape, given in zip(RowBounds._fields, wanted, bounds, strict=True):
        if given.shape != shape or not given.is_contiguous():
            raise ValueError(f"{name} of the bounds must be contiguous {list(shape)}, got {list(given.shape)}")
    groups = triton.cdiv(vocab, GROUP)
    sizes = (("ids", torch.int32, groups * LEADERS), ("limits", torch.int64, groups), ("firsts", torch.int32, FIRSTS))
    for (name, dtype, size), given in zip(sizes, leaders, strict=True):
        if given.shape != (batch, size) or given.dtype != dtype or given.stride(1) != 1:
            raise ValueError(
                f"{name} of the leaders must be {dtype} [{batch}, {size}], got {given.dtype} {tuple(given.shape)}"
            )
    widest = widest_rank(weight.element_size(), base.device)
    if rank > widest:
        raise ValueError(f"rows of {rank} {weight.dtype} are too long; on this device the kernel takes up to {widest}")
    if span % GROUP or span // GROUP * LEADERS + FIRSTS > tile:
        raise ValueError(f"span is {span}; allowed: a multiple of {GROUP} whose leaders fit a tile of {tile}")
    parts = triton.cdiv(vocab, span)
    scratch = torch.empty(batch * parts * span, dtype=torch.int32, device=base.device)
    _pruned_kernel[(parts, batch)](
        base, weight, latent, keys if previous is None else previous, keys, *bounds, *leaders, scratch,
        scratch if read is None else read, base.stride(0), *(part.stride(0) for part in leaders), vocab, rank, groups,
        first_id, slack(rank), UNDERFLOW,
        SPAN=span, TILE=tile, BLOCK_E=padded_rank(rank), COLUMNS=COLUMNS,
        GROUP=GROUP, LEADERS=LEADERS, FIRSTS=FIRSTS, DIRECTIONS=DIRECTIONS,
        GATHER=previous is not None, REPORT=read is not None, num_warps=tiling.warps,
        **overlapping(base.device, overlap),
    )  # fmt: skip
