"""The engines that `capture.backend` names. Those that are packages of their own are imported when they are used."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions
from draftsmith.features.schema import CaptureLayout


@dataclass(frozen=True)
class BackendKind:
    """loads_target: whether it runs the loaded `Target` (else it needs its outline only, and runs the model itself);
    make: the backend of a target (or outline) for a layout."""

    loads_target: bool
    make: Callable[[Any, CaptureLayout, CaptureOptions], CaptureBackend]


def _hf(target: Any, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    return HfBackend(target, layout)


def _sglang(target: Any, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    from draftsmith.capture.sglang import SglangBackend

    return SglangBackend.start(target.loading(), layout, options.sglang)


def _vllm(target: Any, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    from draftsmith.capture.vllm import VllmBackend

    norm = target.final_norm() if layout.final_state else None
    return VllmBackend(target.source, target.num_layers, layout, options.vllm, norm)


BACKENDS: dict[str, BackendKind] = {
    "hf": BackendKind(True, _hf),
    "sglang": BackendKind(False, _sglang),
    "vllm": BackendKind(False, _vllm),
}
