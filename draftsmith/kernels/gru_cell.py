"""One step of a GRU over token embeddings, for a batch of rows whose next token stands in device memory as a key.

PyTorch's gate order r, z, n, no bias:

    r = sigmoid(W_ir x + W_hr s),  z = sigmoid(W_iz x + W_hz s),  n = tanh(W_in x + r * (W_hn s)),  s' = (1 - z) n + z s

with x the token's embedding. The input side W_i x depends on the token alone: `token_table` computes it for all tokens
once, 3 G numbers a token, and a step then reads one row instead of the whole of W_i.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.kernels.keys import key_ids_in_kernel


def gru_cell_reference(
    ids: Tensor, embedding: Tensor, weight_ih: Tensor | None, weight_hh: Tensor, state: Tensor, scale: float = 1.0
) -> Tensor:
    """Plain PyTorch for `gru_cell`, in fp32 from the inputs as they are; ids [batch] int64. With weight_ih None,
    `embedding` is the token table."""
    rows = embedding[ids]
    if weight_ih is None:
        gates_i = rows.float()
    else:
        gates_i = scaled_embeddings(rows, weight_ih.dtype, scale).float() @ weight_ih.float().T
    gates_h = state.float() @ weight_hh.float().T
    (ri, zi, ni), (rh, zh, nh) = gates_i.chunk(3, -1), gates_h.chunk(3, -1)
    r, z = torch.sigmoid(ri + rh), torch.sigmoid(zi + zh)
    n = torch.tanh(ni + r * nh)
    return (n + z * (state.float() - n)).to(state.dtype)


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


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _pick(values, gate, which: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_B: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of one gate: [4 * BLOCK_U, BLOCK_B] -> [BLOCK_U, BLOCK_B]."""
    chosen = tl.where(gate[:, None] == which, values, 0.0)
    return tl.sum(tl.reshape(chosen, [4, BLOCK_U, BLOCK_B]), 0)


@triton.jit
def _gru_kernel(  # type: ignore[no-untyped-def]
    previous_ptr, embedding_ptr, weight_ih_ptr, weight_hh_ptr, state_ptr, out_ptr, scale, hidden, width, batch,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
    TABLE: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    row_ok = rows < batch
    rows = rows.to(tl.int64)
    token = key_ids_in_kernel(tl.load(previous_ptr + rows, mask=row_ok, other=0xFFFFFFFF))
    # Lines of a tile: the rows of gates r, z, n for BLOCK_U units each, and as many unused ones.
    lines = tl.arange(0, 4 * BLOCK_U)
    gate = lines // BLOCK_U
    unit = tl.program_id(0) * BLOCK_U + lines % BLOCK_U
    line = gate * width + unit
    line_ok = (gate < 3) & (unit < width)
    depth = tl.arange(0, BLOCK_K)
    dtype = weight_hh_ptr.dtype.element_ty

    from_state = tl.zeros([4 * BLOCK_U, BLOCK_B], tl.float32)
    for first in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        inner = first + depth
        inner_ok = inner < width
        weight_offset = line.to(tl.int64)[:, None] * width + inner[None, :]
        weight = tl.load(weight_hh_ptr + weight_offset, mask=line_ok[:, None] & inner_ok[None, :], other=0.0)
        state_offset = rows[None, :] * width + inner[:, None]
        state = tl.load(state_ptr + state_offset, mask=inner_ok[:, None] & row_ok[None, :], other=0.0)
        from_state = tl.dot(weight, state, from_state, input_precision="ieee")

    if TABLE:
        offset = token[None, :] * (3 * width) + line[:, None]
        from_input = tl.load(embedding_ptr + offset, mask=line_ok[:, None] & row_ok[None, :], other=0.0).to(tl.float32)
    else:
        from_input = tl.zeros([4 * BLOCK_U, BLOCK_B], tl.float32)
        for first in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
            inner = first + depth
            inner_ok = inner < hidden
            weight_offset = line.to(tl.int64)[:, None] * hidden + inner[None, :]
            weight = tl.load(weight_ih_ptr + weight_offset, mask=line_ok[:, None] & inner_ok[None, :], other=0.0)
            x_offset = token[None, :] * hidden + inner[:, None]
            x = tl.load(embedding_ptr + x_offset, mask=inner_ok[:, None] & row_ok[None, :], other=0.0).to(dtype)
            if SCALED:
                x = (x.to(tl.float32) * scale).to(dtype)
            from_input = tl.dot(weight, x, from_input, input_precision="ieee")

    both = from_input + from_state
    r = tl.sigmoid(_pick(both, gate, 0, BLOCK_U, BLOCK_B))
    z = tl.sigmoid(_pick(both, gate, 1, BLOCK_U, BLOCK_B))
    new = _tanh(_pick(from_input, gate, 2, BLOCK_U, BLOCK_B) + r * _pick(from_state, gate, 2, BLOCK_U, BLOCK_B))
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    offset = rows[None, :] * width + units[:, None]
    ok = (units < width)[:, None] & row_ok[None, :]
    old = tl.load(state_ptr + offset, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, (new + z * (old - new)).to(dtype), mask=ok)


def gru_cell(
    previous: Tensor,
    embedding: Tensor,
    weight_ih: Tensor | None,
    weight_hh: Tensor,
    state: Tensor,
    out: Tensor,
    *,
    scale: float = 1.0,
    units: int = 16,
    depth: int = 256,
    warps: int = 4,
    stages: int = 4,
) -> None:
    """Reads one more token in every row: `out` = the state after it.

    previous [batch] int64, keys of the tokens (`keys`); embedding [V, H] and weight_ih [3G, H], or with weight_ih None
    the token table [V, 3G]; weight_hh [3G, G]; state, out [batch, G], two tensors. Weights, table, state and out are of
    one dtype (bf16, fp16 or fp32; fp32 accumulation), the embedding of any; all contiguous. scale: what embeddings are
    multiplied with. units, depth: of a tile.
    """
    batch, width = state.shape
    _check(previous, embedding, weight_ih, weight_hh, state, out)
    block_b = min(32, max(16, triton.next_power_of_2(batch)))
    depth = max(16, min(depth, triton.next_power_of_2(embedding.shape[1] if weight_ih is not None else width)))
    if weight_hh.element_size() == 4:
        depth = min(depth, 128)
    _gru_kernel[(triton.cdiv(width, units), triton.cdiv(batch, block_b))](
        previous, embedding, weight_hh if weight_ih is None else weight_ih, weight_hh, state, out, scale,
        embedding.shape[1], width, batch,
        BLOCK_U=units, BLOCK_K=depth, BLOCK_B=block_b, TABLE=weight_ih is None, SCALED=scale != 1.0, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip


def _check(
    previous: Tensor, embedding: Tensor, weight_ih: Tensor | None, weight_hh: Tensor, state: Tensor, out: Tensor
) -> None:
    batch, width = state.shape
    if weight_hh.shape != (3 * width, width) or out.shape != state.shape:
        raise ValueError(f"shapes {tuple(weight_hh.shape)}, {tuple(out.shape)} do not fit state {tuple(state.shape)}")
    wanted = (3 * width, embedding.shape[1])
    if weight_ih is None and embedding.shape[1] != 3 * width:
        raise ValueError(f"a token table for {width} units has {3 * width} columns, got {embedding.shape[1]}")
    if weight_ih is not None and weight_ih.shape != wanted:
        raise ValueError(f"weight_ih must be {wanted}, got {tuple(weight_ih.shape)}")
    given = [tensor for tensor in (weight_ih, weight_hh, state, out) if tensor is not None]
    if any(tensor.dtype != weight_hh.dtype for tensor in given):
        raise ValueError(f"dtypes {[tensor.dtype for tensor in given]}: weights and states must be of one")
    if not all(tensor.is_contiguous() for tensor in (*given, embedding, previous)):
        raise ValueError("all operands must be contiguous")
    if previous.shape != (batch,) or previous.dtype != torch.int64:
        raise ValueError(f"previous must be int64 keys [{batch}], got {previous.dtype} {tuple(previous.shape)}")
    if out.data_ptr() == state.data_ptr():
        raise ValueError("out must be another tensor than state: programs still read the old state")
