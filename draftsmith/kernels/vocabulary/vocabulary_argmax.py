"""The most likely token of each state, straight from the output head: no logits are written."""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, shared_memory, uses_kernels
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.few_states import head_tile_in_kernel


def vocabulary_argmax_reference(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Plain PyTorch for `vocabulary_argmax`."""
    logits = torch.nn.functional.linear(hidden, weight)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits.argmax(-1), logits.amax(-1).isfinite()


@triton.jit
def _tile_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, best_ptr, index_ptr, num_rows, num_tiles, x_stride, weight_stride, softcap,
    vocabulary, inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, HAS_CAP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token_ok = tokens < vocabulary
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    acc = head_tile_in_kernel(
        x_ptr, weight_ptr, rows.to(tl.int64), row_ok, tokens, vocabulary, inner, x_stride, weight_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN, OVERLAP,
    )  # fmt: skip
    # Rounded wherever `TargetEnds.project` rounds, so that both have the same ties.
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    logits = acc.to(dtype).to(tl.float32)
    if HAS_CAP:
        scaled = (logits / softcap).to(dtype).to(tl.float32)
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        curved = (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0)).to(dtype).to(tl.float32)
        logits = (curved * softcap).to(dtype).to(tl.float32)
    # A NaN becomes infinite: it wins, and shows as not finite.
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where(token_ok[:, None], logits, float("-inf"))
    best = tl.max(logits, 0)
    index = tl.min(tl.where((logits == best[None, :]) & token_ok[:, None], tokens[:, None], vocabulary), 0)
    tl.store(best_ptr + rows.to(tl.int64) * num_tiles + tile, best, mask=row_ok)
    tl.store(index_ptr + rows.to(tl.int64) * num_tiles + tile, index, mask=row_ok)


@triton.jit
def _choose_kernel(best_ptr, index_ptr, id_ptr, finite_ptr, num_tiles, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK)
    inside = tiles < num_tiles
    values = tl.load(best_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    indices = tl.load(index_ptr + row * num_tiles + tiles, mask=inside, other=2147483647)
    best = tl.max(values, 0)
    tl.store(id_ptr + row, tl.min(tl.where(values == best, indices, 2147483647), 0).to(tl.int64))
    tl.store(finite_ptr + row, (best < float("inf")) & (best > float("-inf")))


def vocabulary_argmax(
    hidden: Tensor, weight: Tensor, softcap: float | None = None, *, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Argmax over the vocabulary of softcap(hidden W^T), ties to the lowest id.

    hidden [..., K] in bf16, fp16 or fp32; weight [V, K] of the same dtype, rows contiguous; softcap c: logits are
    c * tanh(logits / c). tiling: rows (states), columns (tokens), depth, warps, stages; None: as `argmax_tiling` says.
    Returns (ids [...] int64, finite [...] bool: False where a logit is NaN or plus infinity, or all are minus
    infinity). Logits are rounded to the dtype before they are compared, as they would be if they were written. Raises
    `ValueError` for shapes or dtypes that do not fit.
    """
    if not uses_kernels(hidden):
        return vocabulary_argmax_reference(hidden, weight, softcap)
    vocabulary, inner = weight.shape
    if hidden.shape[-1] != inner or hidden.dtype != weight.dtype or weight.stride(1) != 1:
        raise ValueError(f"states {tuple(hidden.shape)} {hidden.dtype}, head {tuple(weight.shape)} {weight.dtype}")
    x = hidden.reshape(-1, inner).contiguous()
    rows = x.shape[0]
    tiling = tiling or argmax_tiling(x)
    tiles = triton.cdiv(vocabulary, tiling.columns)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    index = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
    ids = torch.empty(rows, dtype=torch.int64, device=x.device)
    finite = torch.empty(rows, dtype=torch.bool, device=x.device)
    _tile_kernel[(triton.cdiv(rows, tiling.rows), tiles)](
        x, weight, best, index, rows, tiles, inner, weight.stride(0), softcap or 1.0,
        vocabulary, inner, BLOCK_M=tiling.rows, BLOCK_N=tiling.columns, BLOCK_K=tiling.depth,
        EVEN=inner % tiling.depth == 0, HAS_CAP=softcap is not None, num_warps=tiling.warps, num_stages=tiling.stages,
        **overlapping(x.device),
    )  # fmt: skip
    _choose_kernel[(rows,)](
        best, index, ids, finite, tiles, BLOCK=triton.next_power_of_2(tiles), num_warps=4, **overlapping(x.device)
    )
    return ids.view(hidden.shape[:-1]), finite.view(hidden.shape[:-1])


def argmax_tiling(x: Tensor) -> Tiling:
    """The tiling of `vocabulary_argmax` for states x [rows, K]."""
    rows, inner = x.shape
    wide = x.dtype == torch.float32
    many = rows > 256 and shared_memory(x.device) >= 3 * 64 * (256 + 128) * x.element_size()  # of a pipeline of 3 tiles
    block_m = max(16, min(32 if wide else 256 if many else 128, triton.next_power_of_2(rows)))
    few = block_m <= 32
    return Tiling(
        rows=block_m,
        columns=64 if few else 128,
        depth=128 if few and not wide and inner % 128 == 0 else 64,
        warps=8 if block_m >= 128 else 4,
        stages=3,
    )
