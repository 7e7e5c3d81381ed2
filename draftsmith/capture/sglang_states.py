"""Hidden states out of SGLang's scheduler as tensors: a forward hook writes them, the backend maps them.

Read from the source of sglang 0.5.23. `ServerArgs.forward_hooks` registers a hook by module pattern and factory in each
scheduler process (`model_executor/hook_manager.py`). A model hands its `logits_processor` the token ids, the final
state after the final norm, the output head, the `ForwardBatch` and the tapped layers, in ascending order, as one packed
tensor or a list; the batch knows its requests' ids and lengths. So nothing has to go through replies, which carry
states as nested lists of Python floats.

Each request's states go into a file of raw values that both processes map: the copy from the GPU is the only one.
Nothing but torch is imported here, and sglang only in its own process.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOOK_FACTORY = "draftsmith.capture.sglang_states:make_hook"
REQUEST_PREFIX = "draftsmith-"
TAPS, FINAL = "taps", "final"


def hook_specification(directory: Path, final_state: bool) -> dict[str, Any]:
    """The entry of `forward_hooks` by which states are written below `directory`."""
    return {
        "name": "draftsmith-states",
        "target_modules": ["logits_processor", "*.logits_processor"],
        "hook_factory": HOOK_FACTORY,
        "config": {"directory": str(directory), "final_state": final_state},
    }


def state_file(directory: Path, request_id: str, name: str, dtype: torch.dtype) -> Path:
    """Where the states `name` (`TAPS` or `FINAL`) of a request lie, if the engine computes in `dtype`."""
    return directory / f"{request_id}.{name}.{str(dtype).removeprefix('torch.')}"


def write_states(path: Path, states: Tensor) -> None:
    """Write the values of a tensor on any device. Raises `OSError` where the file system has no room, before a write
    into the mapping could end the process."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(1, states.nbytes))
    finally:
        os.close(descriptor)
    mapped = torch.from_file(str(path), shared=True, size=states.numel(), dtype=states.dtype)
    mapped.view(states.shape).copy_(states)


def take_states(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor in a file, mapped; the file's name is removed, its memory is freed with the tensor.

    Raises `FileNotFoundError` where there is no file, and `ValueError` where it is of another size.
    """
    size = torch.Size(shape).numel()
    found = path.stat().st_size
    if found != max(1, size * dtype.itemsize):
        raise ValueError(f"{path} has {found} bytes, not those of {list(shape)} {dtype}")
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    path.unlink()
    return mapped.view(*shape)


def make_hook(config: dict[str, Any]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """SGLang's hook factory: a forward hook of `logits_processor`. See `hook_specification` for `config`."""
    directory, final_state = Path(config["directory"]), bool(config["final_state"])
    rank: int | None = None

    def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal rank
        if rank is None:
            from sglang.srt.distributed.parallel_state import (  # type: ignore[import-not-found, unused-ignore]
                get_tensor_model_parallel_rank,
            )

            rank = int(get_tensor_model_parallel_rank())
        if rank == 0:  # the ranks of a tensor-parallel engine all hold the whole states
            keep_states(inputs, directory, final_state)

    return hook


def keep_states(inputs: tuple[Any, ...], directory: Path, final_state: bool) -> None:
    """Write the states of draftsmith's requests in a prefill. inputs: the positional ones of `logits_processor`.

    Raises `RuntimeError` where a prefill is not of whole prompts, or no layers are tapped: either would store wrong
    features.
    """
    final, batch = inputs[1], inputs[3]
    taps = inputs[4] if len(inputs) > 4 else None
    if not batch.forward_mode.is_extend() or batch.extend_seq_lens_cpu is None:
        return
    mine = [request_id.startswith(REQUEST_PREFIX) for request_id in batch.rids]
    if not any(mine):
        return
    if taps is None:
        raise RuntimeError("the model handed no tapped layers to its logits_processor")
    packed = taps if isinstance(taps, Tensor) else torch.cat(list(taps), dim=-1)
    starts = batch.extend_prefix_lens_cpu or [0] * len(batch.rids)
    end = 0
    for request_id, length, start, own in zip(batch.rids, batch.extend_seq_lens_cpu, starts, mine, strict=False):
        begin, end = end, end + int(length)
        if not own:
            continue
        if int(start):
            raise RuntimeError(f"request {request_id} was prefilled from token {start} on: cached or in chunks")
        write_states(state_file(directory, request_id, TAPS, packed.dtype), packed[begin:end])
        if final_state:
            write_states(state_file(directory, request_id, FINAL, final.dtype), final[begin:end])
