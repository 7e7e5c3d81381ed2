"""The backend `sglang`: SGLang's engine runs the target, and a hook of ours in it hands over what its hooks capture.

Read from the source of sglang 0.5.23 (`Engine`, `ServerArgs`, `handle_aux_hidden_state_capture`): with
`enable_return_aux_hidden_states`, `speculative_algorithm` names the hook that is given the layers, DFLASH
`set_dflash_layers_to_capture` and EAGLE3 `set_eagle3_layers_to_capture`. The hooks take 0-based layers and add the one
by which SGLang's "before layer i + 1" is "after layer i" themselves (`layouts.layer_ids`). Layers come in ascending
order, whatever order they were asked for in. How states leave the engine: `capture.sglang_states`.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from draftsmith.base.devices import parse_device
from draftsmith.capture import sglang_states
from draftsmith.capture.options import SglangOptions
from draftsmith.capture.sglang_process import EngineProcess, start_sglang
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.parallel.ranks import local_rank
from draftsmith.targets.location import locate
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.servers import SGLANG_DFLASH_TAPS, SGLANG_EAGLE3_TAPS

FIRST_VERSION = "0.5.23"
RESERVED_POSITIONS = 7
"""Positions of the target's window that SGLang takes no prompt for (`tp_worker.get_worker_info`: 1 and 5, and one more
since a prompt has to be shorter than that)."""

_ALGORITHMS = {"dflash": "DFLASH", "eagle3": "EAGLE3"}
_INTERFACES = {"dflash": SGLANG_DFLASH_TAPS, "eagle3": SGLANG_EAGLE3_TAPS}


def check_capture(layout: CaptureLayout, num_layers: int, architecture: str | None, options: SglangOptions) -> None:
    """Raise `DraftsmithError` for layers that the engine cannot give, before it is started."""
    if num_layers - 1 in layout.tap_ids:
        raise DraftsmithError(
            f"the draft taps layer {num_layers - 1}, the target's last one. SGLang captures what a layer hands to the "
            "next, so it cannot give that one, and its engine would end at the first batch: use capture.backend=hf or "
            "vllm, or other draft.target_layer_ids"
        )
    fault = _INTERFACES[options.capture_method].fault(architecture)
    if fault is not None:
        other = next(name for name in _INTERFACES if name != options.capture_method)
        fix = "use capture.backend=hf"
        if _INTERFACES[other].fault(architecture) is None:
            fix += f", or capture.sglang.capture_method={other}"
        raise DraftsmithError(f"{fault}: {fix}")


def engine_arguments(
    target: TargetOptions, dtype: torch.dtype, layout: CaptureLayout, options: SglangOptions, directory: Path
) -> dict[str, Any]:
    """The keywords of `sglang.Engine`. dtype: the target's, never left to SGLang, whose `auto` turns float32 into 16
    bits; directory: where states are handed over. Raises `DraftsmithError` for a device of another name, and for
    keywords in `options.engine` that are not the recipe's to choose."""
    device = parse_device(target.device, "target.device")
    arguments = {
        "model_path": locate(target.path).name,
        "dtype": str(dtype).removeprefix("torch."),
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "device": None if device is None else device.type,  # None: whatever SGLang finds
        # A launcher's processes have a GPU each.
        "base_gpu_id": local_rank() if device is None or device.index is None else device.index,
        "skip_tokenizer_init": True,  # ids go in, and nobody reads the text
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": _ALGORITHMS[options.capture_method],
        "return_aux_hidden_state_layer_ids": sorted(layout.tap_ids),
        "forward_hooks": [sglang_states.hook_specification(directory, layout.final_state)],
        # Prompts are prefilled whole, and run through the model's code: a graph would not call the hook.
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "disable_cuda_graph": True,
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": options.memory_fraction,
    }
    own = sorted(arguments.keys() & options.engine.keys())
    if own:
        raise DraftsmithError(
            f"capture.sglang.engine names {', '.join(own)}, which a capture sets itself; leave them out"
        )
    return {**arguments, **options.engine}


class SglangBackend:
    """An engine in a process of its own; see `CaptureBackend`.

    dtype: what the engine computes in. `start` is given in tests; it makes the engine from its keywords.
    """

    def __init__(
        self,
        target: TargetOptions,
        dtype: torch.dtype,
        layout: CaptureLayout,
        options: SglangOptions,
        *,
        start: Callable[[Mapping[str, Any]], Any] = start_sglang,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self._requests = 0
        self._directory = Path(tempfile.mkdtemp(prefix="draftsmith-states-", dir=options.storage))
        try:
            arguments = engine_arguments(target, dtype, layout, options, self._directory)
            self._engine = EngineProcess(start, arguments, options.timeout_seconds)
        except DraftsmithError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def features(self, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """As `CaptureBackend.features`, on the CPU, as memory that the engine has written."""
        names = []
        for _ in samples:
            names.append(f"{sglang_states.REQUEST_PREFIX}{self._requests}")
            self._requests += 1
        job = [(name, sample.input_ids.tolist()) for name, sample in zip(names, samples, strict=True)]
        self._engine.prefill(job)
        return [self._take(name, sample) for name, sample in zip(names, samples, strict=True)]

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _take(self, name: str, sample: Sample) -> dict[str, Tensor]:
        length = sample.input_ids.shape[0]
        taps = self._states(name, sglang_states.TAPS, [length, self.layout.widths[TAPS]], sample)
        by_layer = taps.unflatten(-1, (len(self.layout.tap_ids), self.layout.hidden_size))
        ascending = sorted(self.layout.tap_ids)
        columns = [ascending.index(tap_id) for tap_id in self.layout.tap_ids]
        in_order = columns == list(range(len(columns)))
        features = {TAPS: taps if in_order else by_layer[:, columns].flatten(-2)}
        if self.layout.final_state:
            features[FINAL_STATE] = self._states(name, sglang_states.FINAL, [length, self.layout.hidden_size], sample)
        return features

    def _states(self, name: str, kind: str, shape: list[int], sample: Sample) -> Tensor:
        path = sglang_states.state_file(self._directory, name, kind, self.dtype)
        try:
            return sglang_states.take_states(path, shape, self.dtype)
        except (FileNotFoundError, ValueError) as error:
            left = sorted(each.name for each in self._directory.glob(f"{name}.*"))
            raise DraftsmithError(
                f"SGLang's engine left no {kind} {shape} in {self.dtype} for sample {sample.id!r} ({error}); of that "
                f"request there is {', '.join(left) or 'nothing'}: its model does not call a `logits_processor` as "
                f"sglang {FIRST_VERSION}'s does; use capture.backend=hf"
            ) from error


def check_version() -> None:
    """Raise `DraftsmithError` unless an sglang is installed whose engine returns the states of layers."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise DraftsmithError(
            f"capture.backend is 'sglang', and sglang is not installed; install sglang>={FIRST_VERSION}, or use "
            "capture.backend=hf"
        ) from error
    if Version(found) < Version(FIRST_VERSION):
        raise DraftsmithError(
            f"sglang is {found}, whose engine does not return the states of layers "
            f"(enable_return_aux_hidden_states); sglang>={FIRST_VERSION} is needed"
        )
