"""The engines that `capture.backend` names. Those that are packages of their own are imported when they are used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.check import check_engine
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions
from draftsmith.data.sample import Sample
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.servers import architecture_of
from draftsmith.targets.target import Target


@dataclass(frozen=True)
class BackendKind:
    """loads_target: whether it runs the loaded `Target` (else it needs its outline only, and runs the model itself).

    longest: the most tokens of a document that it takes, known before it is made; raises `DraftsmithError` where it
    cannot capture this target, or these layers. make: the backend of a target (or outline) for a layout.
    """

    loads_target: bool
    longest: Callable[[Any, CaptureLayout, CaptureOptions], int]
    make: Callable[[Any, CaptureLayout, CaptureOptions], CaptureBackend]


def check_backend(
    backend: CaptureBackend, target: Any, layout: CaptureLayout, options: CaptureOptions, samples: Sequence[Sample]
) -> None:
    """Compare the backend's features of the first `options.check_samples` samples with the target's own, unless it is
    the target itself. Raises `DraftsmithError` where they are others."""
    if BACKENDS[options.backend].loads_target or not options.check_samples:
        return

    def reference(wide: CaptureLayout) -> CaptureBackend:
        # The GPU may be full of the engine.
        loading = target.loading().model_copy(update={"device": "cpu", "fuse": "off"})
        return HfBackend(Target.load(**loading.model_dump()), wide)

    check_engine(backend, reference, layout, target.num_layers, samples[: options.check_samples])


def _longest_of_target(target: Any, layout: CaptureLayout, options: CaptureOptions) -> int:
    return int(target.max_position_embeddings)


def _hf(target: Any, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    return HfBackend(target, layout)


def _longest_of_sglang(target: Any, layout: CaptureLayout, options: CaptureOptions) -> int:
    from draftsmith.capture.sglang import RESERVED_POSITIONS, check_capture

    check_capture(layout, target.num_layers, architecture_of(target.text_config), options.sglang)
    return int(target.max_position_embeddings) - RESERVED_POSITIONS


def _sglang(target: Any, layout: CaptureLayout, options: CaptureOptions) -> CaptureBackend:
    from draftsmith.capture.sglang import SglangBackend, check_version

    check_version()
    return SglangBackend(target.loading(), target.ends.embedding_weight.dtype, layout, options.sglang)


def _longest_of_vllm(target: Any, layout: CaptureLayout, options: CaptureOptions) -> int:
    backend = _vllm(target, layout, options)
    try:
        window = backend.longest()
    finally:
        backend.close()
    longest = int(target.max_position_embeddings)
    return longest if window is None else min(longest, window)


def _vllm(target: Any, layout: CaptureLayout, options: CaptureOptions) -> Any:
    from draftsmith.capture.vllm import VllmBackend

    return VllmBackend(
        target.loading(),
        target.num_layers,
        target.ends.embedding_weight.dtype,
        layout,
        options.vllm,
        norm=target.final_norm() if layout.final_state else None,
        architecture=architecture_of(target.text_config),
    )


BACKENDS: dict[str, BackendKind] = {
    "hf": BackendKind(True, _longest_of_target, _hf),
    "sglang": BackendKind(False, _longest_of_sglang, _sglang),
    "vllm": BackendKind(False, _longest_of_vllm, _vllm),
}
