"""The side of Domino's GRU that depends on the token alone: W_i x, with x the embedding of the token just chosen.

`input_gates` computes it, or takes it from guesses that were worked out before the first step; a `token_table` holds it
for every token. What a step makes of it is in `prefix_gru`.
"""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.keys import key_ids, key_ids_in_kernel

TILING = Tiling(columns=64, depth=256, splits=4, warps=4, stages=3)
SHARED_BYTES = 200_000
"""What the tiles in flight may take of a multiprocessor's shared memory."""
GUESSED_ROWS = 2
"""The most rows of a batch for which guessing pays: the guesses of all of them have to be right."""


def guessing_pays(keys: Tensor) -> bool:
    """Whether gates of some likely tokens, worked out for all steps in one pass over the matrix, save later passes:
    where a kernel reads the matrix, for keys [batch] of few rows."""
    return uses_kernels(keys) and len(keys) <= GUESSED_ROWS


def scaled_embeddings(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Embeddings as the GRU reads them: in the draft's dtype, times the draft's scale."""
    rows = rows.to(dtype)
    return rows if scale == 1.0 else rows * scale


def token_table(embedding: Tensor, weight_ih: Tensor, scale: float = 1.0, chunk: int = 8192) -> Tensor:
    """W_i x of every token: embedding [V, H], weight_ih [3G, H] -> [V, 3G] in weight_ih's dtype."""
    parts = [
        torch.nn.functional.linear(scaled_embeddings(rows, weight_ih.dtype, scale), weight_ih)
        for rows in embedding.split(chunk)
    ]
    return torch.cat(parts)


def input_gates_reference(ids: Tensor, embedding: Tensor, weight_ih: Tensor, scale: float = 1.0) -> Tensor:
    """Plain PyTorch for `input_gates`: ids [batch] int64 -> one addend [1, batch, 3G] fp32."""
    return (scaled_embeddings(embedding[ids], weight_ih.dtype, scale).float() @ weight_ih.float().T)[None]


@triton.jit
def _load_lines(weight_ptr, line, line_ok, first, hidden, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    inner = first + tl.arange(0, BLOCK_K)
    offset = line.to(tl.int64)[:, None] * hidden + inner[None, :]
    return tl.load(weight_ptr + offset, mask=line_ok[:, None] & (inner < hidden)[None, :], other=0.0)


@triton.jit
def _load_embedding(  # type: ignore[no-untyped-def]
    embedding_ptr, token, row_ok, first, hidden, scale, dtype: tl.constexpr, SCALED: tl.constexpr, BLOCK_K: tl.constexpr
):
    inner = first + tl.arange(0, BLOCK_K)
    offset = token[None, :] * hidden + inner[:, None]
    x = tl.load(embedding_ptr + offset, mask=(inner < hidden)[:, None] & row_ok[None, :], other=0.0).to(dtype)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(dtype)
    return x


@triton.jit
def _input_kernel(  # type: ignore[no-untyped-def]
    previous_ptr, embedding_ptr, weight_ptr, out_ptr, guess_ptr, known_ptr, scale, hidden, lines, batch, part,
    guess_stride, known_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, GUESSES: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line_ok = line < lines
    start = split * part
    if GUESSES == 0:
        weight = _load_lines(weight_ptr, line, line_ok, start, hidden, BLOCK_K)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = (tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    row_ok = rows < batch
    token = key_ids_in_kernel(tl.load(previous_ptr + rows, mask=row_ok, other=0xFFFFFFFF))
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    ok = line_ok[:, None] & row_ok[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    if GUESSES == 0:
        x = _load_embedding(embedding_ptr, token, row_ok, start, hidden, scale, dtype, SCALED, BLOCK_K)
        total = tl.dot(weight, x, input_precision="ieee")
        for first in tl.range(start + BLOCK_K, tl.minimum(start + part, hidden), BLOCK_K, num_stages=STAGES):
            weight = _load_lines(weight_ptr, line, line_ok, first, hidden, BLOCK_K)
            x = _load_embedding(embedding_ptr, token, row_ok, first, hidden, scale, dtype, SCALED, BLOCK_K)
            total = tl.dot(weight, x, total, input_precision="ieee")
    else:
        found = tl.full([BLOCK_B], -1, tl.int64)
        for index in tl.static_range(GUESSES):
            guess = tl.load(guess_ptr + rows * guess_stride + index, mask=row_ok, other=-1)
            found = tl.where(guess == token, index, found)
        guessed = (found >= 0) & row_ok
        if tl.sum((row_ok & (found < 0)).to(tl.int32), 0) > 0:
            for first in tl.range(start, tl.minimum(start + part, hidden), BLOCK_K, num_stages=STAGES):
                weight = _load_lines(weight_ptr, line, line_ok, first, hidden, BLOCK_K)
                x = _load_embedding(embedding_ptr, token, row_ok, first, hidden, scale, dtype, SCALED, BLOCK_K)
                total = tl.dot(weight, x, total, input_precision="ieee")
        # A row with a right guess takes its gates from there whatever its neighbours do; they are the first addend.
        known_offset = (rows * known_stride + found * lines)[None, :] + line[:, None]
        first_addend = guessed & (tl.zeros([BLOCK_B], tl.int32) + split == 0)
        known = tl.load(known_ptr + known_offset, mask=line_ok[:, None] & first_addend[None, :], other=0.0)
        total = tl.where(guessed[None, :], known, total)
    tl.store(out_ptr + (split * batch + rows)[None, :] * lines + line[:, None], total, mask=ok)


def input_gates(
    previous: Tensor,
    embedding: Tensor,
    weight_ih: Tensor,
    *,
    scale: float = 1.0,
    guesses: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling = TILING,
) -> Tensor:
    """W_i x of the tokens in `previous` as S addends [S, batch, 3G] fp32.

    previous [batch] int64, keys (`keys`); embedding [V, H], any float dtype, and weight_ih [3G, H], both contiguous.
    scale: what embeddings are multiplied with. guesses: tokens [batch, M] int64 and what W_i x is for them [batch, M,
    3G] fp32, rows contiguous: where all rows' tokens are among their guesses, the matrix is not read. The inner
    dimension is split so that enough programs read it. tiling: columns (outputs), depth and splits, of which fewer or
    smaller ones are taken where these do not fit, warps, stages.
    """
    if not uses_kernels(previous):
        return input_gates_reference(key_ids(previous), embedding, weight_ih, scale)
    outputs, hidden = weight_ih.shape
    batch = len(previous)
    if embedding.shape[1] != hidden or not (embedding.is_contiguous() and weight_ih.is_contiguous()):
        raise ValueError(
            f"embedding {tuple(embedding.shape)} and weight {tuple(weight_ih.shape)} must be contiguous and agree on "
            "the hidden size"
        )
    check_keys(previous)
    tokens, known = guesses or (previous[:, None], embedding)
    if guesses is not None and (known.shape != (*tokens.shape, outputs) or known.dtype != torch.float32):
        raise ValueError(f"gates of guesses must be fp32 {[*tokens.shape, outputs]}, got {known.dtype}, {known.shape}")
    block_b = min(64, triton.next_power_of_2(batch))
    lines, depth = tiling.columns, tile_depth(tiling.depth, hidden, weight_ih)
    while (lines + block_b) * depth * weight_ih.element_size() * (tiling.stages + 1) > SHARED_BYTES and depth > 16:
        depth //= 2
    part = triton.cdiv(triton.cdiv(hidden, tiling.splits), depth) * depth
    splits = triton.cdiv(hidden, part)
    out = torch.empty(splits, batch, outputs, dtype=torch.float32, device=weight_ih.device)
    _input_kernel[(triton.cdiv(outputs, lines), splits, triton.cdiv(batch, block_b))](
        previous, embedding, weight_ih, out, tokens, known, scale, hidden, outputs, batch, part,
        tokens.stride(0), known.stride(0),
        BLOCK_N=lines, BLOCK_K=depth, BLOCK_B=block_b, GUESSES=0 if guesses is None else tokens.shape[1],
        SCALED=scale != 1.0, STAGES=tiling.stages, num_warps=tiling.warps, **overlapping(weight_ih.device),
    )  # fmt: skip
    return out


def tile_depth(depth: int, inner: int, weight: Tensor) -> int:
    """Columns of a weight's tile: no more than there are, and half as many of twice the size."""
    return max(16, min(depth if weight.element_size() < 4 else min(depth, 128), triton.next_power_of_2(inner)))


def check_keys(previous: Tensor) -> None:
    """`ValueError` unless these are keys, one a row."""
    if previous.dim() != 1 or previous.dtype != torch.int64 or not previous.is_contiguous():
        raise ValueError(f"keys must be contiguous int64 [batch], got {previous.dtype} {tuple(previous.shape)}")
