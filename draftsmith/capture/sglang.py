"""The backend `sglang`: SGLang's engine runs the target and returns what its capture hooks see.

Read from the source of sglang 0.5.23 (`Engine`, `ServerArgs`, `handle_aux_hidden_state_capture`): with
`enable_return_aux_hidden_states`, `speculative_algorithm` names the hook that is given the layers, DFLASH
`set_dflash_layers_to_capture` and EAGLE3 `set_eagle3_layers_to_capture`. The hooks take 0-based layers and add the one
by which SGLang's "before layer i + 1" is "after layer i" themselves (`layer_ids`). States come back in the order of
layers, whatever order they were asked for in, and as nested lists: `meta_info["hidden_states"][0]` are the rows of the
whole prompt, as long as it is not prefilled in chunks and nothing of it is cached.
"""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from draftsmith.base.devices import parse_device
from draftsmith.capture.options import SglangOptions
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import TAPS, CaptureLayout
from draftsmith.parallel.ranks import local_rank
from draftsmith.targets.options import TargetOptions

FIRST_VERSION = (0, 5, 23)
_ALGORITHMS = {"dflash": "DFLASH", "eagle3": "EAGLE3"}


def engine_arguments(target: TargetOptions, layout: CaptureLayout, options: SglangOptions) -> dict[str, Any]:
    """The keywords of `sglang.Engine`.

    Raises `DraftsmithError` for a layout that the engine cannot give, and for a device of another name.
    """
    if layout.final_state:
        raise DraftsmithError(
            "capture.backend is 'sglang', and the draft needs the target's final state; SGLang returns the tapped "
            "layers in its place: use capture.backend=hf or vllm"
        )
    device = parse_device(target.device, "target.device")
    return {
        "model_path": target.path,
        "dtype": target.dtype,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "device": None if device is None else device.type,  # None: whatever SGLang finds
        # A launcher's processes have a GPU each.
        "base_gpu_id": local_rank() if device is None or device.index is None else device.index,
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": _ALGORITHMS[options.capture_method],
        "return_aux_hidden_state_layer_ids": sorted(layout.tap_ids),
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "mem_fraction_static": options.memory_fraction,
    }


def taps_of(meta_info: dict[str, Any], sample: Sample, layout: CaptureLayout) -> Tensor:
    """The taps float32 [S, T*H] of a document, in the layout's order, from what the engine says of its request.

    Raises `DraftsmithError` where that is missing or of another shape.
    """
    chunks = meta_info.get("hidden_states")
    if not chunks:
        raise DraftsmithError(f"SGLang returned no hidden states for sample {sample.id!r}")
    rows = torch.tensor(chunks[0], dtype=torch.float32)
    wanted = [sample.input_ids.shape[0], layout.widths[TAPS]]
    if list(rows.shape) != wanted:
        raise DraftsmithError(
            f"SGLang returned hidden states {list(rows.shape)} for sample {sample.id!r}; {len(layout.tap_ids)} layers "
            f"of its tokens are {wanted}: prefill must not be chunked or cached"
        )
    by_layer = rows.unflatten(-1, (len(layout.tap_ids), layout.hidden_size))
    ascending = sorted(layout.tap_ids)
    return by_layer[:, [ascending.index(tap_id) for tap_id in layout.tap_ids]].flatten(-2)


class SglangBackend:
    """An engine in this process; see `CaptureBackend`."""

    def __init__(self, engine: Any, layout: CaptureLayout) -> None:
        self.engine = engine
        self.layout = layout

    @classmethod
    def start(cls, target: TargetOptions, layout: CaptureLayout, options: SglangOptions) -> "SglangBackend":
        """Start an engine of the recipe's target. Raises `DraftsmithError` where sglang is missing or too old."""
        arguments = engine_arguments(target, layout, options)
        check_version()
        import sglang  # type: ignore[import-not-found, unused-ignore]

        return cls(sglang.Engine(**arguments), layout)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """As `CaptureBackend.features`, on the CPU."""
        replies = self.engine.generate(
            input_ids=[sample.input_ids.tolist() for sample in samples],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_hidden_states=True,
        )
        return [
            {TAPS: taps_of(reply["meta_info"], sample, self.layout)}
            for sample, reply in zip(samples, replies, strict=True)
        ]


def check_version() -> None:
    """Raise `DraftsmithError` unless an sglang is installed whose engine returns the states of layers."""
    needed = ".".join(map(str, FIRST_VERSION))
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise DraftsmithError(
            f"capture.backend is 'sglang', and sglang is not installed; install sglang>={needed}, or use "
            "capture.backend=hf"
        ) from error
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < FIRST_VERSION:
        raise DraftsmithError(
            f"sglang is {found}, whose engine does not return the states of layers "
            f"(enable_return_aux_hidden_states); sglang>={needed} is needed"
        )
