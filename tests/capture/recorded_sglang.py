"""An engine that calls draftsmith's hook as sglang 0.5.23's scheduler does: what the child process of a test starts.

Its model is a formula, so that the child has little to import.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftsmith.capture.sglang_states import keep_states

HIDDEN = 32
FINAL = -1


def states(ids: Sequence[int], layer: int) -> Tensor:
    """What the model computes: [S, HIDDEN], another row for every token, position and layer."""
    tokens = torch.tensor(list(ids), dtype=torch.float32)
    rows = tokens + 1000 * layer + torch.arange(len(ids)) / 64
    return rows[:, None] + torch.arange(HIDDEN) / 4096


class _Prefill:
    """`ForwardMode.EXTEND`."""

    def is_extend(self) -> bool:
        return True


class RecordedEngine:
    """`sglang.Engine` as far as a capture uses it. The hook gets the positional inputs of `LogitsProcessor.forward`:
    ids, final state, head, batch, and the tapped layers in ascending order, packed or as a list; the batch ends with a
    request of somebody else."""

    packed = True

    def __init__(self, **arguments: Any) -> None:
        print("engine is starting", flush=True)
        assert arguments["enable_return_aux_hidden_states"]
        (self.hook,) = arguments["forward_hooks"]
        module, name = self.hook["hook_factory"].split(":")
        assert callable(getattr(import_module(module), name))
        self.layer_ids = arguments["return_aux_hidden_state_layer_ids"]

    def generate(self, *, rid: list[str], input_ids: list[list[int]], sampling_params: dict[str, Any]) -> None:
        assert sampling_params == {"temperature": 0.0, "max_new_tokens": 1}
        prompts = [*input_ids, [7, 8, 9]]
        by_layer = [torch.cat([states(ids, layer) for ids in prompts]) for layer in sorted(self.layer_ids)]
        batch = SimpleNamespace(
            rids=[*rid, "HEALTH_CHECK"],
            forward_mode=_Prefill(),
            extend_seq_lens_cpu=[len(ids) for ids in prompts],
            extend_prefix_lens_cpu=[0] * len(prompts),
        )
        final = torch.cat([states(ids, FINAL) for ids in prompts])
        taps = torch.cat(by_layer, dim=-1) if self.packed else by_layer
        config = self.hook["config"]
        token_ids = torch.tensor([token for ids in prompts for token in ids])
        keep_states((token_ids, final, None, batch, taps), Path(config["directory"]), True)

    def shutdown(self) -> None:
        print("engine is shutting down", flush=True)


class _Listing(RecordedEngine):
    packed = False


def start_with_lists(arguments: Mapping[str, Any]) -> RecordedEngine:
    """An engine that hands layers over as a list."""
    return _Listing(**arguments)


def fail_to_start(arguments: Mapping[str, Any]) -> RecordedEngine:
    """An engine that raises, and whose output goes on after it."""
    try:
        raise ValueError("The model captured 3 aux hidden states, but names 4 layers")
    finally:
        print("Received sigquit from a child process", file=sys.stderr)


class _Dying(RecordedEngine):
    """Killed with everything of its process, at its second batch; as SGLang does when its scheduler fails."""

    batches = 0

    def generate(self, **job: Any) -> None:
        self.batches += 1
        if self.batches > 1:
            print("Traceback (most recent call last):\n  File x\nCUDA error: out of memory\nkill_process_tree called")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        super().generate(**job)


def start_and_die(arguments: Mapping[str, Any]) -> RecordedEngine:
    """An engine that is killed at its second batch."""
    return _Dying(**arguments)


class _Silent(RecordedEngine):
    batches = 0

    def generate(self, **job: Any) -> None:
        self.batches += 1
        if self.batches > 1:
            time.sleep(600)


def start_without_states(arguments: Mapping[str, Any]) -> RecordedEngine:
    """An engine whose model does not call the hooked module, and that does not answer a second time."""
    return _Silent(**arguments)
