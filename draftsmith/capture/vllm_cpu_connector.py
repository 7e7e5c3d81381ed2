"""vLLM's `ExampleHiddenStatesConnector` for its CPU build; imported by vLLM's own processes, from
`kv_connector_module_path`.

The connector of vllm 0.32.0 copies states to page-locked memory on a CUDA stream of its own and asks CUDA events
whether they have arrived. Without CUDA it fails there at the first request. Here states are in the CPU's memory
already; files, locks and the reply are the base class's own.
"""

import fcntl
import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # type: ignore[import-not-found, unused-ignore]
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Arrived:
    """In place of a CUDA event: the copy is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc, unused-ignore]
    """The connector to name as `kv_connector` of a server on a CPU."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """As the base class's, without streams and events."""
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.int64)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        future = self._executor.submit(self._write_tensors, tensors, _Arrived(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = _Arrived()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
