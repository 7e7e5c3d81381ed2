"""The engines that `capture.backend` names. Those that are packages of their own are imported when they are used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.check import check_engine
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions
from draftsmith.data.sample import Sample
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.final_norm import load_final_norm
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.servers import architecture_of
from draftsmith.targets.target import Target


@dataclass(frozen=True)
class BackendKind:
    """loads_target: whether it runs the loaded `Target` (else a `TargetInfo` will do, and it runs the model itself).

    longest: the most tokens of a document that it takes, known before it is made; raises `DraftsmithError` where it
    cannot capture this target, or these layers. make: the backend of a target for a layout.
    """

    loads_target: bool
    longest: Callable[[Target | TargetInfo, CaptureLayout, CaptureOptions], int]
    make: Callable[[Target | TargetInfo, CaptureLayout, CaptureOptions], CaptureBackend]


def check_backend(
    backend: CaptureBackend,
    target: Target | TargetInfo,
    layout: CaptureLayout,
    options: CaptureOptions,
    samples: Sequence[Sample],
) -> None:
    """Compare the backend's features of the first `options.check_samples` samples with the target's own, unless it is
    the target itself. Raises `DraftsmithError` where they are others."""
    if BACKENDS[options.backend].loads_target or not options.check_samples:
        return

    def reference(wide: CaptureLayout) -> CaptureBackend:
        # The GPU may be full of the engine.
        loading = _info(target).loading().model_copy(update={"device": "cpu", "fuse": "off"})
        return HfBackend(Target.load(**loading.model_dump()), wide)

    check_engine(backend, reference, layout, target.num_layers, samples[: options.check_samples])


def _info(target: Target | TargetInfo) -> TargetInfo:
    return target.info if isinstance(target, Target) else target


def _longest_of_target(target: Target | TargetInfo, layout: CaptureLayout, options: CaptureOptions) -> int:
    return target.max_position_embeddings


def _hf(target: Target | TargetInfo, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    assert isinstance(target, Target)  # `loads_target`
    return HfBackend(target, layout)


def _longest_of_sglang(target: Target | TargetInfo, layout: CaptureLayout, options: CaptureOptions) -> int:
    from draftsmith.capture.sglang import RESERVED_POSITIONS, check_capture

    check_capture(layout, target.num_layers, architecture_of(target.text_config), options.sglang)
    return target.max_position_embeddings - RESERVED_POSITIONS


def _sglang(target: Target | TargetInfo, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    from draftsmith.capture.sglang import SglangBackend, check_version

    check_version()
    info = _info(target)
    return SglangBackend(info.loading(), info.loaded_dtype(), layout, options.sglang)


def _longest_of_vllm(target: Target | TargetInfo, layout: CaptureLayout, options: CaptureOptions) -> int:
    backend = _vllm(target, layout, options)
    try:
        window = backend.longest()
    finally:
        backend.close()
    longest = target.max_position_embeddings
    return longest if window is None else min(longest, window)


def _vllm(target: Target | TargetInfo, layout: CaptureLayout, options: CaptureOptions) -> Any:
    from draftsmith.capture.vllm import VllmBackend

    info = _info(target)
    options_of_target = info.loading()
    return VllmBackend(
        options_of_target,
        info.num_layers,
        info.loaded_dtype(),
        layout,
        options.vllm,
        norm=_final_norm(options_of_target) if layout.final_state else None,
        architecture=architecture_of(info.text_config),
    )


def _final_norm(target: TargetOptions) -> nn.Module:
    """On the CPU, in the dtype of the options."""
    return load_final_norm(**target.model_dump(exclude={"fuse", "device"}))


BACKENDS: dict[str, BackendKind] = {
    "hf": BackendKind(True, _longest_of_target, _hf),
    "sglang": BackendKind(False, _longest_of_sglang, _sglang),
    "vllm": BackendKind(False, _longest_of_vllm, _vllm),
}
