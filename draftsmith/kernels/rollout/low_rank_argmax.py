"""The best token under `base + W2 u`: the last part of a step of a sequential head.

`low_rank_argmax` reads W2 [V, E] once, adds the product to the base logits in fp32 and keeps, per row of the batch, the
best token as a key (`keys`): the [V] scores are written nowhere. `low_rank_sample` divides the scores by a temperature
and adds Gumbel noise, after which the best token is a draw from the softmax (Gumbel, 1954), and writes the scores as
they were, for the verifier needs that softmax. The memory traffic of W2 is the bill, so a fixed number of programs walk
it in tiles of rows, with several tiles in flight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.base.dtypes import DTYPES
from draftsmith.kernels.device import overlapping, shared_memory, stages_that_fit, uses_kernels
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.keys import (
    LOWEST_KEY_IN_KERNEL,
    key_ids,
    key_ids_in_kernel,
    pack_keys,
    pack_keys_in_kernel,
)
from draftsmith.kernels.vocabulary.noise import LEAST_TEMPERATURE, Stream, gumbel_noise

MAX_RANK = 512
"""The widest E that the kernels hold."""


def low_rank_scores(base: Tensor, weight: Tensor | None, latent: Tensor | None) -> Tensor:
    """base [batch, V] + latent [batch, E] W2^T [E, V] in fp32: products of the inputs as they are, summed in fp32."""
    if weight is None or latent is None:
        return base.float()
    return base.float() + latent.float() @ weight.float().T


def latents_of(latent: Tensor | None, previous: Tensor | None) -> Tensor | None:
    """The latents [batch, E], where a table [*, E] may be given and the keys of the tokens whose rows they are."""
    return latent if latent is None or previous is None else latent[key_ids(previous)]


def low_rank_argmax_reference(base: Tensor, weight: Tensor | None, latent: Tensor | None, first_id: int = 0) -> Tensor:
    """Plain PyTorch for `low_rank_argmax`: keys [batch] int64."""
    scores = low_rank_scores(base, weight, latent)
    ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
    return pack_keys(scores, ids).amax(-1)


def low_rank_sample_reference(
    base: Tensor,
    weight: Tensor | None,
    latent: Tensor | None,
    noise: Tensor,
    temperature: Tensor,
    first_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch for `low_rank_sample`: (keys [batch] int64, scores [batch, V] fp32); noise [batch, V] as from
    `noise.gumbel_noise`."""
    scores = low_rank_scores(base, weight, latent)
    ids = torch.arange(first_id, first_id + scores.shape[-1], device=scores.device)
    return pack_keys(perturbed(scores, noise, temperature), ids).amax(-1), scores


def perturbed(scores: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
    """scores / temperature + noise, [batch, V], whose best token is a draw; the scores themselves in greedy rows, whose
    temperature [batch] is 0. One below `LEAST_TEMPERATURE` counts as that."""
    column = temperature[:, None]
    return torch.where(column == 0.0, scores, scores / column.clamp(min=LEAST_TEMPERATURE) + noise)


class Draw(NamedTuple):
    """One draw of every row: temperature [batch] fp32, 0 in rows that take the best token without noise; seeds [batch]
    int64 and positions [batch] int64 in [0, 2^32), which with `number` number the noise as `noise.gumbel_noise`
    does."""

    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    number: int


@triton.jit
def _gumbel(high, low):  # type: ignore[no-untyped-def]
    """`noise.gumbel_from_words` of uint32 tensors in a kernel."""
    u = high.to(tl.float32) * 2.3283064365386963e-10 + (low.to(tl.float32) + 0.5) * 5.421010862427522e-20
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * (0.2 + u * 0.16666666666666666)))))
    exponential = tl.where(u < 0.0625, series, -tl.log(tl.maximum(1.0 - u, 2.9802322387695312e-08)))
    return -tl.log(exponential)


@triton.jit
def _load_weight(weight_ptr, tile, vocab, rank, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of W2, [BLOCK_V, BLOCK_E]."""
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    dims = tl.arange(0, BLOCK_E)
    offset = tokens.to(tl.int64)[:, None] * rank + dims[None, :]
    return tl.load(weight_ptr + offset, mask=(tokens < vocab)[:, None] & (dims < rank)[None, :], other=0.0)


@triton.jit
def _tile_keys(  # type: ignore[no-untyped-def]
    base_ptr, scores_ptr, weight, latent, rows, row_ok, tile, divisor, greedy, seed, position,
    base_stride, scores_stride, vocab, first_id, draw,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, CORRECT: tl.constexpr, SAMPLE: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Keys of a tile's tokens in every row, [BLOCK_V, BLOCK_B]."""
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    token_ok = tokens < vocab
    both_ok = token_ok[:, None] & row_ok[None, :]
    base_offset = rows[None, :] * base_stride + tokens[:, None]
    score = tl.load(base_ptr + base_offset, mask=both_ok, other=0.0).to(tl.float32)
    if CORRECT:
        score = tl.dot(weight, latent, input_precision="ieee") + score
    ids = (tokens + first_id)[:, None]
    if SAMPLE:
        tl.store(scores_ptr + rows[None, :] * scores_stride + tokens[:, None], score, mask=both_ok)
        zero = tl.zeros([BLOCK_V, BLOCK_B], tl.uint32)
        word = zero + (ids + 1).to(tl.uint32)
        high, low, _, _ = tl.philox(seed, zero + position, zero + draw, zero + STREAM, word)
        score = tl.where(greedy, score, score / divisor + _gumbel(high, low))
    return tl.where(token_ok[:, None], pack_keys_in_kernel(score, ids), LOWEST_KEY_IN_KERNEL)


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    base_ptr, weight_ptr, latent_ptr, previous_ptr, keys_ptr,
    scores_ptr, temperature_ptr, seeds_ptr, positions_ptr,
    base_stride, scores_stride, vocab, rank, batch, first_id, tiles, draw, least,
    BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
    CORRECT: tl.constexpr, GATHER: tl.constexpr, SAMPLE: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr,
    STREAM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if REVERSE:
        tile = tiles - 1 - tile
    weight = 0.0
    if CORRECT:
        weight = _load_weight(weight_ptr, tile, vocab, rank, BLOCK_V, BLOCK_E)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    row_ok = rows < batch
    latent = 0.0
    if CORRECT:
        latent_row = rows
        if GATHER:
            # The latent is the previous token's row of a table.
            latent_row = key_ids_in_kernel(tl.load(previous_ptr + rows, mask=row_ok, other=0xFFFFFFFF))
        dims = tl.arange(0, BLOCK_E)
        latent_offset = latent_row[None, :] * rank + dims[:, None]
        latent = tl.load(latent_ptr + latent_offset, mask=(dims < rank)[:, None] & row_ok[None, :], other=0.0)
    divisor = 1.0
    greedy = False
    seed = 0
    position = 0
    if SAMPLE:
        temperature = tl.load(temperature_ptr + rows, mask=row_ok, other=1.0)[None, :]
        greedy = temperature == 0.0
        divisor = tl.where(greedy, 1.0, tl.maximum(temperature, least))
        seed = tl.load(seeds_ptr + rows, mask=row_ok, other=0)[None, :]
        position = tl.load(positions_ptr + rows, mask=row_ok, other=0).to(tl.uint32)[None, :]

    best = _tile_keys(
        base_ptr, scores_ptr, weight, latent, rows, row_ok, tile, divisor, greedy, seed, position,
        base_stride, scores_stride, vocab, first_id, draw, BLOCK_V, BLOCK_B, CORRECT, SAMPLE, STREAM,
    )  # fmt: skip
    for step in tl.range(tl.program_id(0) + tl.num_programs(0), tiles, tl.num_programs(0), num_stages=STAGES):
        tile = step
        if REVERSE:
            tile = tiles - 1 - step
        if CORRECT:
            weight = _load_weight(weight_ptr, tile, vocab, rank, BLOCK_V, BLOCK_E)
        keys = _tile_keys(
            base_ptr, scores_ptr, weight, latent, rows, row_ok, tile, divisor, greedy, seed, position,
            base_stride, scores_stride, vocab, first_id, draw, BLOCK_V, BLOCK_B, CORRECT, SAMPLE, STREAM,
        )  # fmt: skip
        best = tl.maximum(best, keys)
    tl.atomic_max(keys_ptr + rows, tl.max(best, 0), mask=row_ok)


GREEDY_TILING = Tiling(stages=3, programs=2)
FEW_ROWS, FEW_ROWS_TILING = 2, Tiling(stages=2, programs=3)
"""Of greedy searches of up to so many rows; each was slower with the other's."""
SAMPLING_TILING = Tiling(stages=2, programs=3)
MAX_TILE_ROWS, FP32_TILE_BYTES = 64, 32768


def tile_rows(rank: int, item: int) -> int:
    """Rows of W2 in one product, of numbers of `item` bytes. All searches of a matrix take the same: another number
    would take other instructions, whose sums round differently, and two searches could disagree on a score's last bit.
    """
    if item == 2:
        return MAX_TILE_ROWS
    return max(16, min(MAX_TILE_ROWS, FP32_TILE_BYTES // (item * padded_rank(rank))))


def padded_rank(rank: int) -> int:
    """Columns that a tile of W2 has in a kernel."""
    return max(16, triton.next_power_of_2(rank))


def low_rank_argmax(
    base: Tensor,
    weight: Tensor | None,
    latent: Tensor | None,
    keys: Tensor,
    *,
    previous: Tensor | None = None,
    first_id: int = 0,
    reverse: bool = False,
    overlap: bool = True,
) -> None:
    """Raises `keys` to the best token's key under base + W2 u, ties to the lowest id.

    base [batch, V], rows contiguous, bf16, fp16 or fp32; weight W2 [V, E] contiguous and latent u [batch, E]
    contiguous, of one dtype (accumulation is in fp32), or both None: the best of base alone. With `previous` [batch]
    int64, keys of tokens, latent is a table [*, E] and u its rows of these tokens. keys [batch] int64 in place: start
    from `LOWEST_KEY`. first_id: the id of row 0, for a part of a vocabulary. reverse: tiles from the last to the
    first, so that alternating calls find in the cache what the call before read last. overlap: begin before the
    kernel before this one has ended (`device.overlapping`).
    """
    if not uses_kernels(base):
        found = low_rank_argmax_reference(base, weight, latents_of(latent, previous), first_id)
        keys.copy_(torch.maximum(keys, found))
        return
    _scan(base, weight, latent, keys, previous, first_id, reverse, overlap, None)


def low_rank_sample(
    base: Tensor,
    weight: Tensor | None,
    latent: Tensor | None,
    keys: Tensor,
    scores: Tensor,
    draw: Draw,
    *,
    previous: Tensor | None = None,
    first_id: int = 0,
) -> None:
    """`low_rank_argmax` of (base + W2 u) / temperature + Gumbel noise; base + W2 u goes to `scores` [batch, V] fp32,
    rows contiguous. The other arguments as for `low_rank_argmax`."""
    if not uses_kernels(base):
        noise = gumbel_noise(draw.seeds, draw.positions, draw.number, base.shape[1], first_id)
        latent = latents_of(latent, previous)
        found, written = low_rank_sample_reference(base, weight, latent, noise, draw.temperature, first_id)
        scores.copy_(written)
        keys.copy_(torch.maximum(keys, found))
        return
    _scan(base, weight, latent, keys, previous, first_id, False, True, (scores, draw))


def _scan(
    base: Tensor,
    weight: Tensor | None,
    latent: Tensor | None,
    keys: Tensor,
    previous: Tensor | None,
    first_id: int,
    reverse: bool,
    overlap: bool,
    sampling: tuple[Tensor, Draw] | None,
) -> None:
    check_operands(base, weight, latent, keys, previous)
    batch, vocab = base.shape
    rank, item = (16, 2) if weight is None else (weight.shape[1], weight.element_size())
    greedy_tiling = FEW_ROWS_TILING if batch <= FEW_ROWS else GREEDY_TILING
    tiling = greedy_tiling if sampling is None else SAMPLING_TILING
    # Noise is made for every column of a tile, so there are no more than needed; products alone come by sixteen.
    least_columns = 16 if sampling is None else 1
    block_b = min(64, max(least_columns, triton.next_power_of_2(batch)))
    block_e, block_v = padded_rank(rank), tile_rows(rank, item)
    # A tile of the matrix beside the latents of a few rows fits everywhere; of many, with their scores, it does not.
    while block_b > 16 and (block_v + block_b) * block_e * item + 4 * block_v * block_b > shared_memory(base.device):
        block_b //= 2
    stages = tiling.stages if block_e * item <= 512 else 2
    stages = stages_that_fit(stages, block_v * block_e * item, base.device, held_bytes=block_e * block_b * item)
    tiles = triton.cdiv(vocab, block_v)
    programs = min(tiles, tiling.programs * multiprocessors(base.device))
    scores, (temperature, seeds, positions, number) = sampling or (keys, Draw(keys, keys, keys, 0))  # else not read
    _scan_kernel[(programs, triton.cdiv(batch, block_b))](
        base, base if weight is None else weight, base if latent is None else latent,
        keys if previous is None else previous, keys, scores, temperature, seeds, positions,
        base.stride(0), scores.stride(0), vocab, rank, batch, first_id, tiles, number,
        LEAST_TEMPERATURE, BLOCK_V=block_v, BLOCK_E=block_e, BLOCK_B=block_b,
        CORRECT=weight is not None, GATHER=previous is not None, SAMPLE=sampling is not None,
        REVERSE=reverse, STAGES=stages, STREAM=int(Stream.PROPOSAL), num_warps=tiling.warps,
        **overlapping(base.device, overlap),
    )  # fmt: skip


def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; two of an interpreter, so that programs share the work there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def check_operands(
    base: Tensor, weight: Tensor | None, latent: Tensor | None, keys: Tensor, previous: Tensor | None
) -> None:
    """`ValueError` for shapes, dtypes or strides that the kernels do not take."""
    batch, vocab = base.shape
    if base.stride(1) != 1 or base.dtype not in DTYPES.values():
        raise ValueError(f"base must have contiguous rows of bf16, fp16 or fp32, got {base.dtype}, {base.stride()}")
    if (weight is None) != (latent is None):
        raise ValueError("weight and latent go together: give both or neither")
    if weight is not None and latent is not None:
        if weight.shape[0] != vocab or latent.shape[-1] != weight.shape[1]:
            raise ValueError(f"shapes {tuple(weight.shape)}, {tuple(latent.shape)} do not fit base {tuple(base.shape)}")
        if weight.shape[1] > MAX_RANK:
            raise ValueError(f"a correction of rank {weight.shape[1]} is too wide; the kernels take up to {MAX_RANK}")
        if weight.dtype not in DTYPES.values() or latent.dtype != weight.dtype:
            raise ValueError(f"dtypes {weight.dtype}, {latent.dtype}: both must be one of bf16, fp16, fp32")
        if not (weight.is_contiguous() and latent.is_contiguous()):
            raise ValueError("weight and latent must be contiguous")
        if previous is None and latent.shape[0] != batch:
            raise ValueError(f"latent has {latent.shape[0]} rows, base {batch}; they must agree")
    for given in (keys, previous):
        if given is not None and (given.shape != (batch,) or given.dtype != torch.int64 or not given.is_contiguous()):
            raise ValueError(f"keys must be contiguous int64 [{batch}], got {given.dtype} {tuple(given.shape)}")
