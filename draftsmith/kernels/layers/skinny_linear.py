"""A few rows times a weight matrix, at the speed of reading the matrix once."""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, stages_that_fit, uses_kernels
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton

MAX_ROWS = 32
"""Most rows that a tile of the matrix takes along for free: tensor cores read weights from shared memory no faster than
they multiply them by 32 rows (sm_90: 64 x 16 numbers of 16 bits in 16 cycles). More belong to a general product."""


def skinny_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Plain PyTorch for `skinny_linear`: one addend."""
    return torch.nn.functional.linear(x.float(), weight.float())[None]


@triton.jit
def _weights(source, output_ok, columns, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN:  # a mask along the contiguous dimension would break its loads into small ones
        weights = tl.load(source)
    else:
        weights = tl.load(source, mask=output_ok[:, None] & (columns < inner)[None, :], other=0.0)
    return weights


@triton.jit
def _inputs(source, row_ok, columns, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN:
        inputs = tl.load(source, mask=row_ok[None, :], other=0.0)
    else:
        inputs = tl.load(source, mask=row_ok[None, :] & (columns < inner)[:, None], other=0.0)
    return inputs


@triton.jit
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, num_rows, x_stride, weight_stride, num_outputs, inner, part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr, ALL_HELD: tl.constexpr,
    EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    output_ok = outputs < num_outputs
    rows = tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    columns = split * part + tl.arange(0, BLOCK_K)
    weights = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    inputs = x_ptr + rows[None, :] * x_stride + columns[:, None]
    # The first weights are on their way while the kernel before this one still computes x.
    held = (_weights(weights, output_ok, columns, inner, EVEN),)
    for index in tl.static_range(1, HELD):
        offset = index * BLOCK_K
        held += (_weights(weights + offset, output_ok, columns + offset, inner, EVEN),)  # type: ignore[assignment]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begun = (_inputs(inputs, row_ok, columns, inner, EVEN),)
    for index in tl.static_range(1, HELD):
        offset = index * BLOCK_K
        begun += (_inputs(inputs + offset, row_ok, columns + offset, inner, EVEN),)  # type: ignore[assignment]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for index in tl.static_range(HELD):
        acc = tl.dot(held[index], begun[index], acc, input_precision="ieee")
    if not ALL_HELD:  # the loop's buffers take shared memory
        for offset in range(HELD * BLOCK_K, part, BLOCK_K):
            w = _weights(weights + offset, output_ok, columns + offset, inner, EVEN)
            x = _inputs(inputs + offset, row_ok, columns + offset, inner, EVEN)
            acc = tl.dot(w, x, acc, input_precision="ieee")
    target = out_ptr + (split * num_rows + rows[None, :]).to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(target, acc, mask=output_ok[:, None] & row_ok[None, :])


def skinny_linear(x: Tensor, weight: Tensor, *, tiling: Tiling | None = None) -> Tensor:
    """x W^T as S addends [S, ..., N] in fp32, to be summed in order by whoever reads them next.

    x [..., K] contiguous, at most `MAX_ROWS` rows in all; weight [N, K], rows contiguous, same dtype. The inner
    dimension is split into parts so that enough programs read the matrix at once; each addend is the sum over its part,
    so the result does not depend on timing, and a row's not on the other rows. Up to 16 rows share a tile of 16 and
    more one of 32; on sm_90 a row's bits are the same in both, and in any tile sizes with the same parts. tiling: rows,
    columns (outputs), depth, splits (parts), held (no more than the tiles of a part), warps, stages; None: as
    `skinny_tiling` says. Raises `ValueError` for more rows, or shapes or dtypes that do not fit.
    """
    if not uses_kernels(x):
        return skinny_linear_reference(x, weight)
    outputs, inner = weight.shape
    rows = x.numel() // inner
    if x.shape[-1] != inner or x.dtype != weight.dtype or weight.stride(1) != 1 or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if rows > MAX_ROWS:
        raise ValueError(f"skinny_linear takes at most {MAX_ROWS} rows, got {rows}")
    tiling = tiling or skinny_tiling(x, weight)
    if rows > tiling.rows:
        raise ValueError(f"a tile of {tiling.rows} rows does not hold {rows}")
    block_n, block_k = tiling.columns, tiling.depth
    part, splits = _parts(inner, tiling.splits, block_k)
    held = min(tiling.held, part // block_k)
    out = torch.empty(splits, *x.shape[:-1], outputs, dtype=torch.float32, device=x.device)
    _skinny_kernel[(triton.cdiv(outputs, block_n), splits)](
        x, weight, out, rows, inner, weight.stride(0), outputs, inner, part,
        BLOCK_M=tiling.rows, BLOCK_N=block_n, BLOCK_K=block_k, HELD=held, ALL_HELD=held * block_k == part,
        EVEN=outputs % block_n == 0 and inner % part == 0, num_warps=tiling.warps, num_stages=tiling.stages,
        **overlapping(x.device),
    )  # fmt: skip
    return out


def linear_or_addends(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, bool]:
    """x W^T + b in x's dtype, and False; or, of few rows in bf16 or fp16 and without bias, where kernels run, the
    addends of `skinny_linear`, and True. Shapes as there; of more rows, x [..., K] need not be contiguous."""
    rows = x.numel() // x.shape[-1]
    if bias is None and rows <= MAX_ROWS and x.dtype != torch.float32 and uses_kernels(x):
        return skinny_linear(x, weight), True
    return torch.nn.functional.linear(x, weight, bias), False


def skinny_tiling(x: Tensor, weight: Tensor) -> Tiling:
    """The tiling of `skinny_linear` for these operands.

    Enough programs to keep a large device's memory busy, and no more, because each split's addends are written and
    read again; the splits are the same for any rows. Parts are whole blocks wherever the inner dimension allows it: a
    mask along it would break the loads into small ones.
    """
    outputs, inner = weight.shape
    block_m = 16 if x.numel() // inner <= 16 else MAX_ROWS
    block_n, block_k = 64, 128 if inner % 128 == 0 else 64
    programs, blocks = triton.cdiv(outputs, block_n), triton.cdiv(inner, block_k)
    splits = 1
    for factor in (2, 3):
        while programs * splits < 192 and blocks % (splits * factor) == 0 and blocks // (splits * factor) >= 3:
            splits *= factor
    if block_m > 16 and splits == 1:
        block_k = 64  # of 128 columns with 32 rows only two programs fit a multiprocessor
    part, splits = _parts(inner, splits, block_k)
    blocks, block_bytes = part // block_k, (block_n + block_m) * block_k * x.element_size()
    # A short part is fetched whole before the wait. With 16 rows that was not faster for most shapes.
    whole = block_m > 16 and blocks <= 5 and stages_that_fit(blocks, block_bytes, x.device) == blocks
    # Where parts are short, three programs of three stages on a multiprocessor beat two of four. With 32 rows of 128
    # columns in each stage, four leave room for one program only.
    wanted = 3 if splits > 1 or block_m * block_k > 2048 else 4
    return Tiling(
        rows=block_m,
        columns=block_n,
        depth=block_k,
        splits=splits,
        held=blocks if whole else 1,
        stages=stages_that_fit(wanted, block_bytes, x.device, block_bytes),  # the first tile is held beside them
    )


def _parts(inner: int, splits: int, block_k: int) -> tuple[int, int]:
    """Columns of a part, in whole blocks, and how many parts there are."""
    part = triton.cdiv(triton.cdiv(inner, splits), block_k) * block_k
    return part, triton.cdiv(inner, part)
