"""Domino's prefix GRU and latent, one token further, in two launches or, with a token table, in one.

PyTorch's gate order r, z, n, no bias; x the embedding of the token just chosen, s the state before it, h the slot's
hidden state:

    r = sigmoid(W_ir x + W_hr s),  z = sigmoid(W_iz x + W_hz s),  n = tanh(W_in x + r * (W_hn s)),  s' = (1 - z) n + z s
    latent = SiLU(W1_h h + W1_s s')

Only W_i x needs the token. W1_h h is known for all slots before the first step, and the state's side W_h s of a step
can be computed as soon as the step before has made s. So a step is: `input_gates`, W_i x, or one row of a `token_table`
that holds it for every token; then `advance`, in which every program makes the whole s' (it is small) and multiplies
it with its own rows of W1_s, for the latent, or of W_h, for the next step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.kernels.keys import key_ids_in_kernel
from draftsmith.kernels.overlap import overlapping

MAX_WIDTH = 8192
"""The widest G that the kernel holds."""

# --- references -----------------------------------------------------------------------------------------------------


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


def advance_reference(
    gates_i: Tensor, gates_h: Tensor, state: Tensor, from_hidden: Tensor, weight_state: Tensor, weight_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch for `advance`, in fp32 from the inputs as they are: (state, latent, gates of the state)."""
    (ri, zi, ni), (rh, zh, nh) = gates_i.float().sum(0).chunk(3, -1), gates_h.chunk(3, -1)
    r, z = torch.sigmoid(ri + rh), torch.sigmoid(zi + zh)
    n = torch.tanh(ni + r * nh)
    state = (n + z * (state.float() - n)).to(state.dtype)
    latent = torch.nn.functional.silu(from_hidden.float() + state.float() @ weight_state.float().T).to(state.dtype)
    return state, latent, state.float() @ weight_hh.float().T


# --- the input's side -----------------------------------------------------------------------------------------------


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
    previous_ptr, embedding_ptr, weight_ptr, out_ptr, scale, hidden, lines, batch, part,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    line = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line_ok = line < lines
    start = split * part
    weight = _load_lines(weight_ptr, line, line_ok, start, hidden, BLOCK_K)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = (tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    row_ok = rows < batch
    token = key_ids_in_kernel(tl.load(previous_ptr + rows, mask=row_ok, other=0xFFFFFFFF))
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    x = _load_embedding(embedding_ptr, token, row_ok, start, hidden, scale, dtype, SCALED, BLOCK_K)
    total = tl.dot(weight, x, input_precision="ieee")
    for first in tl.range(start + BLOCK_K, tl.minimum(start + part, hidden), BLOCK_K, num_stages=STAGES):
        weight = _load_lines(weight_ptr, line, line_ok, first, hidden, BLOCK_K)
        x = _load_embedding(embedding_ptr, token, row_ok, first, hidden, scale, dtype, SCALED, BLOCK_K)
        total = tl.dot(weight, x, total, input_precision="ieee")
    offset = (split * batch + rows)[None, :] * lines + line[:, None]
    tl.store(out_ptr + offset, total, mask=line_ok[:, None] & row_ok[None, :])


def input_gates(
    previous: Tensor,
    embedding: Tensor,
    weight_ih: Tensor,
    *,
    scale: float = 1.0,
    splits: int = 4,
    lines: int = 64,
    depth: int = 256,
    warps: int = 4,
    stages: int = 3,
) -> Tensor:
    """W_i x of the tokens in `previous` as S addends [S, batch, 3G] fp32.

    previous [batch] int64, keys (`keys`); embedding [V, H], any float dtype, and weight_ih [3G, H], both contiguous.
    scale: what embeddings are multiplied with. The inner dimension is split so that enough programs read the matrix.
    """
    outputs, hidden = weight_ih.shape
    batch = len(previous)
    if embedding.shape[1] != hidden or not (embedding.is_contiguous() and weight_ih.is_contiguous()):
        raise ValueError(
            f"embedding {tuple(embedding.shape)} and weight {tuple(weight_ih.shape)} must be contiguous and agree on "
            "the hidden size"
        )
    _check_keys(previous)
    depth = _depth(depth, hidden, weight_ih)
    part = triton.cdiv(triton.cdiv(hidden, splits), depth) * depth
    splits = triton.cdiv(hidden, part)
    block_b = min(64, triton.next_power_of_2(batch))
    out = torch.empty(splits, batch, outputs, dtype=torch.float32, device=weight_ih.device)
    _input_kernel[(triton.cdiv(outputs, lines), splits, triton.cdiv(batch, block_b))](
        previous, embedding, weight_ih, out, scale, hidden, outputs, batch, part,
        BLOCK_N=lines, BLOCK_K=depth, BLOCK_B=block_b, SCALED=scale != 1.0, STAGES=stages,
        num_warps=warps, **overlapping(weight_ih.device),
    )  # fmt: skip
    return out


# --- the state, the latent, and the state's side of the next step ---------------------------------------------------


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _load_gate(ptr, columns, ok, addend_stride, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a gate's addends, fp32."""
    value = tl.load(ptr + columns, mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(ptr + columns + split * addend_stride, mask=ok, other=0.0).to(tl.float32)
    return value


@triton.jit
def _advance_kernel(  # type: ignore[no-untyped-def]
    previous_ptr, gates_i_ptr, gates_h_ptr, state_ptr, new_state_ptr, hidden_ptr, weight_state_ptr, weight_hh_ptr,
    latent_ptr, new_gates_ptr, hidden_stride, weight_stride, width, rank, latent_programs, batch, addend_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_K)
    column_ok = columns < width
    for_latent = program < latent_programs
    dtype = new_state_ptr.dtype.element_ty
    # A program's rows of W1_s or of W_h stay in registers for all rows of the batch.
    if for_latent:
        line = program * BLOCK_N + tl.arange(0, BLOCK_N)
        line_ok = line < rank
        weight_offset = line[:, None] * weight_stride + columns[None, :]
        weight_ok = line_ok[:, None] & column_ok[None, :]
        weight = tl.load(weight_state_ptr + weight_offset, mask=weight_ok, other=0.0)
    else:
        line = (program - latent_programs) * BLOCK_N + tl.arange(0, BLOCK_N)
        line_ok = line < 3 * width
        weight_offset = line[:, None] * width + columns[None, :]
        weight_ok = line_ok[:, None] & column_ok[None, :]
        weight = tl.load(weight_hh_ptr + weight_offset, mask=weight_ok, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for row in range(batch):
        gates_row = row
        if TABLE:
            gates_row = key_ids_in_kernel(tl.load(previous_ptr + row))
        from_input = gates_i_ptr + gates_row * (3 * width)
        from_state = gates_h_ptr + row * (3 * width)
        old = tl.load(state_ptr + row * width + columns, mask=column_ok, other=0.0).to(tl.float32)
        r = tl.sigmoid(
            _load_gate(from_input, columns, column_ok, addend_stride, SPLITS)
            + _load_gate(from_state, columns, column_ok, 0, 1)
        )
        z = tl.sigmoid(
            _load_gate(from_input + width, columns, column_ok, addend_stride, SPLITS)
            + _load_gate(from_state + width, columns, column_ok, 0, 1)
        )
        n = _tanh(
            _load_gate(from_input + 2 * width, columns, column_ok, addend_stride, SPLITS)
            + r * _load_gate(from_state + 2 * width, columns, column_ok, 0, 1)
        )
        state = (n + z * (old - n)).to(dtype)
        if program == 0:
            tl.store(new_state_ptr + row * width + columns, state, mask=column_ok)
        state = tl.where(column_ok, state.to(tl.float32), 0.0)
        total = tl.sum(weight.to(tl.float32) * state[None, :], 1)
        if for_latent:
            total += tl.load(hidden_ptr + row * hidden_stride + line, mask=line_ok, other=0.0).to(tl.float32)
            tl.store(latent_ptr + row * rank + line, (total * tl.sigmoid(total)).to(dtype), mask=line_ok)
        else:
            tl.store(new_gates_ptr + row * (3 * width) + line, total, mask=line_ok)


def advance(
    gates_i: Tensor,
    gates_h: Tensor,
    state: Tensor,
    from_hidden: Tensor,
    weight_state: Tensor,
    weight_hh: Tensor,
    *,
    previous: Tensor | None = None,
    lines: int = 16,
    warps: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token further: (state [batch, G], latent [batch, E], the state's side of the next gates [batch, 3G] fp32).

    gates_i: addends [S, batch, 3G] fp32 as from `input_gates`, or, with `previous` [batch] int64, keys of tokens, the
    `token_table` [V, 3G]. gates_h [batch, 3G] fp32, W_h times `state` [batch, G]. from_hidden [batch, E], rows
    contiguous, any float dtype: W1_h h. weight_state W1_s [E, G], rows contiguous; weight_hh [3G, G]. Weights, states
    and the latent are of one dtype; what is not said otherwise is contiguous.
    """
    batch, width = state.shape
    rank = weight_state.shape[0]
    _check_advance(gates_i, gates_h, state, from_hidden, weight_state, weight_hh, previous)
    block_k = triton.next_power_of_2(width)
    block_n = max(1, min(lines, 16384 // block_k))
    latent_programs = triton.cdiv(rank, block_n)
    new_state, latent, new_gates = torch.empty_like(state), state.new_empty(batch, rank), torch.empty_like(gates_h)
    _advance_kernel[(latent_programs + triton.cdiv(3 * width, block_n),)](
        state if previous is None else previous, gates_i, gates_h, state, new_state, from_hidden, weight_state,
        weight_hh, latent, new_gates, from_hidden.stride(0), weight_state.stride(0), width, rank, latent_programs,
        batch, batch * 3 * width,
        BLOCK_N=block_n, BLOCK_K=block_k, TABLE=previous is not None,
        SPLITS=1 if previous is not None else gates_i.shape[0],
        num_warps=warps, **overlapping(state.device),
    )  # fmt: skip
    return new_state, latent, new_gates


def _depth(depth: int, inner: int, weight: Tensor) -> int:
    """Columns of a weight's tile: no more than there are, and half as many of twice the size."""
    return max(16, min(depth if weight.element_size() < 4 else min(depth, 128), triton.next_power_of_2(inner)))


def _check_keys(previous: Tensor) -> None:
    if previous.dim() != 1 or previous.dtype != torch.int64 or not previous.is_contiguous():
        raise ValueError(f"keys must be contiguous int64 [batch], got {previous.dtype} {tuple(previous.shape)}")


def _check_advance(
    gates_i: Tensor,
    gates_h: Tensor,
    state: Tensor,
    from_hidden: Tensor,
    weight_state: Tensor,
    weight_hh: Tensor,
    previous: Tensor | None,
) -> None:
    batch, width = state.shape
    rank = weight_state.shape[0]
    if width > MAX_WIDTH:
        raise ValueError(f"a GRU of {width} units is too wide; the kernel takes up to {MAX_WIDTH}")
    if previous is not None:
        _check_keys(previous)
    wanted = {
        "gates_i": (gates_i, (gates_i.shape[0], 3 * width) if previous is not None else (*gates_i.shape[:1], batch, 3 * width)),
        "gates_h": (gates_h, (batch, 3 * width)),
        "from_hidden": (from_hidden, (batch, rank)),
        "weight_state": (weight_state, (rank, width)),
        "weight_hh": (weight_hh, (3 * width, width)),
    }  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for a state {list(state.shape)}, got {list(tensor.shape)}")
    if weight_state.dtype != state.dtype or weight_hh.dtype != state.dtype or gates_h.dtype != torch.float32:
        raise ValueError(f"dtypes {weight_state.dtype}, {weight_hh.dtype}, {state.dtype} must be one, gates_h fp32")
    rows_ok = weight_state.stride(1) == 1 and from_hidden.stride(1) == 1
    if not rows_ok or not all(tensor.is_contiguous() for tensor in (gates_i, gates_h, state, weight_hh)):
        raise ValueError("gates, state and weight_hh, and the rows of weight_state and from_hidden, must be contiguous")
