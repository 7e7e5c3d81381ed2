"""Domino's prefix GRU and latent, one token further, in a few launches.

PyTorch's gate order r, z, n, no bias; x the embedding of the token just chosen, s the state before it, h the slot's
hidden state:

    r = sigmoid(W_ir x + W_hr s),  z = sigmoid(W_iz x + W_hz s),  n = tanh(W_in x + r * (W_hn s)),  s' = (1 - z) n + z s
    latent = SiLU(W1_h h + W1_s s')

Only W_i x needs the token. W1_h h is known for all slots before the first step, and the state's side W_h s of a step
can be computed as soon as the step before has made s. So a step is: W_i x (`input_gates`), then `advance`, which makes
s' and multiplies it with W1_s, for the latent, and with W_h, for the next step.
"""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.rollout.input_gates import check_keys, tile_depth
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.keys import key_ids, key_ids_in_kernel

MAX_WIDTH = 8192
"""The widest G that the kernel holds."""
LINES = 16
"""Of the weights, in a program of `advance` that makes the state itself."""
FEW_ROWS = 2
"""Up to so many rows every program of `advance` makes the whole state itself; more have a launch of their own."""

# --- references -----------------------------------------------------------------------------------------------------


def advance_reference(
    gates_i: Tensor,
    gates_h: Tensor,
    state: Tensor,
    from_hidden: Tensor,
    weight_state: Tensor,
    weight_hh: Tensor,
    *,
    previous: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch for `advance`, in fp32 from the inputs as they are: (state, latent, gates of the state)."""
    if previous is not None:
        gates_i = gates_i[key_ids(previous)][None]
    (ri, zi, ni), (rh, zh, nh) = gates_i.float().sum(0).chunk(3, -1), gates_h.chunk(3, -1)
    r, z = torch.sigmoid(ri + rh), torch.sigmoid(zi + zh)
    n = torch.tanh(ni + r * nh)
    state = (n + z * (state.float() - n)).to(state.dtype)
    latent = torch.nn.functional.silu(from_hidden.float() + state.float() @ weight_state.float().T).to(state.dtype)
    return state, latent, state.float() @ weight_hh.float().T


# --- the state, the latent, and the state's side of the next step ---------------------------------------------------


def start(batch: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Before any token: the state [batch, G] in `dtype` and its side of the gates [batch, 3G] fp32, all zeros, in one
    launch."""
    count = batch * width
    zeros = torch.zeros(4 * count, dtype=torch.float32, device=device)
    return zeros[3 * count :].view(dtype)[:count].view(batch, width), zeros[: 3 * count].view(batch, 3 * width)


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
def _new_state(  # type: ignore[no-untyped-def]
    from_input, from_state, old_ptr, columns, ok, width, addend_stride, SPLITS: tl.constexpr
):
    """Some units of one row's s', fp32."""
    old = tl.load(old_ptr + columns, mask=ok, other=0.0).to(tl.float32)
    r = tl.sigmoid(
        _load_gate(from_input, columns, ok, addend_stride, SPLITS) + _load_gate(from_state, columns, ok, 0, 1)
    )
    z = tl.sigmoid(
        _load_gate(from_input + width, columns, ok, addend_stride, SPLITS)
        + _load_gate(from_state + width, columns, ok, 0, 1)
    )
    n = _tanh(
        _load_gate(from_input + 2 * width, columns, ok, addend_stride, SPLITS)
        + r * _load_gate(from_state + 2 * width, columns, ok, 0, 1)
    )
    return n + z * (old - n)


@triton.jit
def _state_kernel(  # type: ignore[no-untyped-def]
    previous_ptr, gates_i_ptr, gates_h_ptr, state_ptr, new_state_ptr, width, addend_stride,
    BLOCK: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = columns < width
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gates_row = row
    if TABLE:
        gates_row = key_ids_in_kernel(tl.load(previous_ptr + row))
    from_input, from_state = gates_i_ptr + gates_row * (3 * width), gates_h_ptr + row * (3 * width)
    state = _new_state(from_input, from_state, state_ptr + row * width, columns, ok, width, addend_stride, SPLITS)
    tl.store(new_state_ptr + row * width + columns, state.to(new_state_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _load_columns(weight_ptr, line, line_ok, stride, first, width, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    inner = first + tl.arange(0, BLOCK_K)
    offset = line.to(tl.int64)[:, None] * stride + inner[None, :]
    return tl.load(weight_ptr + offset, mask=line_ok[:, None] & (inner < width)[None, :], other=0.0)


@triton.jit
def _load_states(state_ptr, rows, row_ok, first, width, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    inner = first + tl.arange(0, BLOCK_K)
    offset = rows[None, :] * width + inner[:, None]
    return tl.load(state_ptr + offset, mask=(inner < width)[:, None] & row_ok[None, :], other=0.0)


@triton.jit
def _state_products_kernel(  # type: ignore[no-untyped-def]
    state_ptr, hidden_ptr, weight_state_ptr, weight_hh_ptr, latent_ptr, new_gates_ptr, hidden_stride, weight_stride,
    width, rank, latent_programs, batch,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    for_latent = program < latent_programs
    weight_ptr = weight_hh_ptr
    stride = width
    lines = 3 * width
    first_program = latent_programs
    if for_latent:
        weight_ptr = weight_state_ptr
        stride = weight_stride
        lines = rank
        first_program = 0
    line = (program - first_program) * BLOCK_N + tl.arange(0, BLOCK_N)
    line_ok = line < lines
    weight = _load_columns(weight_ptr, line, line_ok, stride, 0, width, BLOCK_K)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    row_ok = rows < batch
    total = tl.dot(weight, _load_states(state_ptr, rows, row_ok, 0, width, BLOCK_K), input_precision="ieee")
    if WHOLE == 0:
        for first in tl.range(BLOCK_K, width, BLOCK_K, num_stages=STAGES):
            weight = _load_columns(weight_ptr, line, line_ok, stride, first, width, BLOCK_K)
            states = _load_states(state_ptr, rows, row_ok, first, width, BLOCK_K)
            total = tl.dot(weight, states, total, input_precision="ieee")
    ok = line_ok[:, None] & row_ok[None, :]
    if for_latent:
        total += tl.load(hidden_ptr + rows[None, :] * hidden_stride + line[:, None], mask=ok, other=0.0).to(tl.float32)
        latent = (total * tl.sigmoid(total)).to(latent_ptr.dtype.element_ty)
        tl.store(latent_ptr + rows[None, :] * rank + line[:, None], latent, mask=ok)
    else:
        tl.store(new_gates_ptr + rows[None, :] * (3 * width) + line[:, None], total, mask=ok)


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
        old = state_ptr + row * width
        state = _new_state(from_input, from_state, old, columns, column_ok, width, addend_stride, SPLITS).to(dtype)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """One token further: (state [batch, G], latent [batch, E], the state's side of the next gates [batch, 3G] fp32).

    gates_i: addends [S, batch, 3G] fp32 as from `input_gates`, or, with `previous` [batch] int64, keys of tokens, the
    `token_table` [V, 3G]. gates_h [batch, 3G] fp32, W_h times `state` [batch, G]. from_hidden [batch, E], rows
    contiguous, any float dtype: W1_h h. weight_state W1_s [E, G], rows contiguous; weight_hh [3G, G]. Weights, states
    and the latent are of one dtype; what is not said otherwise is contiguous.
    """
    if not uses_kernels(state):
        return advance_reference(gates_i, gates_h, state, from_hidden, weight_state, weight_hh, previous=previous)
    batch, width = state.shape
    rank = weight_state.shape[0]
    _check_advance(gates_i, gates_h, state, from_hidden, weight_state, weight_hh, previous)
    table, splits = previous is not None, 1 if previous is not None else gates_i.shape[0]
    keys = state if previous is None else previous
    new_state, latent, new_gates = torch.empty_like(state), state.new_empty(batch, rank), torch.empty_like(gates_h)
    overlap = overlapping(state.device)
    if batch > FEW_ROWS:
        block_b = min(64, triton.next_power_of_2(batch))
        product_lines, depth = _product_tile(width, block_b, weight_hh)
        _state_kernel[(batch, triton.cdiv(width, 256))](
            keys, gates_i, gates_h, state, new_state, width, batch * 3 * width,
            BLOCK=256, TABLE=table, SPLITS=splits, num_warps=4, **overlap,
        )  # fmt: skip
        latent_programs = triton.cdiv(rank, product_lines)
        programs = latent_programs + triton.cdiv(3 * width, product_lines)
        _state_products_kernel[(programs, triton.cdiv(batch, block_b))](
            new_state, from_hidden, weight_state, weight_hh, latent, new_gates, from_hidden.stride(0),
            weight_state.stride(0), width, rank, latent_programs, batch,
            BLOCK_N=product_lines, BLOCK_K=depth, BLOCK_B=block_b, WHOLE=depth >= width, STAGES=4,
            num_warps=4, **overlap,
        )  # fmt: skip
        return new_state, latent, new_gates
    block_k = triton.next_power_of_2(width)
    block_n = max(1, min(LINES, 16384 // block_k))
    latent_programs = triton.cdiv(rank, block_n)
    _advance_kernel[(latent_programs + triton.cdiv(3 * width, block_n),)](
        keys, gates_i, gates_h, state, new_state, from_hidden, weight_state, weight_hh, latent, new_gates,
        from_hidden.stride(0), weight_state.stride(0), width, rank, latent_programs, batch, batch * 3 * width,
        BLOCK_N=block_n, BLOCK_K=block_k, TABLE=table, SPLITS=splits, num_warps=8, **overlap,
    )  # fmt: skip
    return new_state, latent, new_gates


def _product_tile(width: int, block_b: int, weight: Tensor) -> tuple[int, int]:
    """Lines and columns of a weight's tile for the products of more rows. Where they fit, a program holds its lines
    whole, and so has fetched them before the state is there."""
    columns = max(16, triton.next_power_of_2(width))
    if weight.element_size() < 4 and columns <= 1024 and block_b * columns <= 16384:
        return 32, columns
    return 32, tile_depth(256, width, weight)


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
        check_keys(previous)
    wanted = {
        "gates_i": (gates_i, (len(gates_i), *([batch] if previous is None else []), 3 * width)),
        "gates_h": (gates_h, (batch, 3 * width)),
        "from_hidden": (from_hidden, (batch, rank)),
        "weight_state": (weight_state, (rank, width)),
        "weight_hh": (weight_hh, (3 * width, width)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for a state {list(state.shape)}, got {list(tensor.shape)}")
    if weight_state.dtype != state.dtype or weight_hh.dtype != state.dtype or gates_h.dtype != torch.float32:
        raise ValueError(f"dtypes {weight_state.dtype}, {weight_hh.dtype}, {state.dtype} must be one, gates_h fp32")
    rows_ok = weight_state.stride(1) == 1 and from_hidden.stride(1) == 1
    if not rows_ok or not all(tensor.is_contiguous() for tensor in (gates_i, gates_h, state, weight_hh)):
        raise ValueError("gates, state and weight_hh, and the rows of weight_state and from_hidden, must be contiguous")
