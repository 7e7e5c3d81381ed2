"""The backend `vllm`: a vLLM server runs the target and leaves hidden states in files on a directory that both see."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from draftsmith.capture.options import VllmOptions
from draftsmith.capture.vllm_server import VllmServer, served_name, server_command, server_layers
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.layouts.layer_ids import to_layer_input_ids
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.servers import VLLM_TAPS


def features_of(
    stored: dict[str, Tensor],
    sample: Sample,
    layout: CaptureLayout,
    num_layers: int,
    dtype: torch.dtype,
    norm: Callable[[Tensor], Tensor] | None,
) -> dict[str, Tensor]:
    """The layout's features of a document from a file's tensors; `norm`: the target's final norm, for a final state.

    Raises `DraftsmithError` where the file is of other tokens, layers, widths or another dtype.
    """
    layers = server_layers(layout, num_layers)
    states, token_ids = stored.get("hidden_states"), stored.get("token_ids")
    wanted = [sample.input_ids.shape[0], len(layers), layout.hidden_size]
    if states is None or token_ids is None or list(states.shape) != wanted:
        found = None if states is None else list(states.shape)
        raise DraftsmithError(
            f"the vLLM server gave hidden states {found} for sample {sample.id!r}; layers {layers} of its tokens are "
            f"{wanted}: start the server with eagle_aux_hidden_state_layer_ids {layers}"
        )
    if states.dtype != dtype:
        theirs, name = (str(each).removeprefix("torch.") for each in (states.dtype, dtype))
        raise DraftsmithError(
            f"the vLLM server runs the target in {theirs}, and target.dtype is {name}: start it with --dtype {name}"
        )
    if not torch.equal(token_ids.to(torch.int64), sample.input_ids):
        raise DraftsmithError(f"the vLLM server gave the hidden states of other tokens for sample {sample.id!r}")
    columns = [layers.index(layer) for layer in to_layer_input_ids(layout.tap_ids)]
    features = {TAPS: states[:, columns].flatten(-2)}
    if layout.final_state:
        assert norm is not None
        features[FINAL_STATE] = norm(states[:, layers.index(num_layers)])
    return features


class VllmBackend:
    """A running server; see `CaptureBackend`.

    dtype: the target's; norm: its final norm on the CPU, which a layout with a final state needs; architecture: the
    class that its configuration names, where it names one.
    """

    def __init__(
        self,
        target: TargetOptions,
        num_layers: int,
        dtype: torch.dtype,
        layout: CaptureLayout,
        options: VllmOptions,
        *,
        norm: Callable[[Tensor], Tensor] | None = None,
        architecture: str | None = None,
    ) -> None:
        if layout.final_state and norm is None:
            raise DraftsmithError(
                "the draft needs the target's final state, and no final norm was given: vLLM keeps the state before it"
            )
        self.layout = layout
        self.num_layers = num_layers
        self.dtype = dtype
        self.concurrency = options.concurrency
        self.norm = norm
        command = server_command(target, str(dtype).removeprefix("torch."), layout, num_layers, options)
        fault = VLLM_TAPS.fault(architecture)
        advice = f"{fault}: use capture.backend=hf" if fault else f"start the server with\n{command}"
        self.server = VllmServer(options, served_name(target, options), advice)

    def longest(self) -> int | None:
        """The most tokens of a document, as the running server says: one position is left for its answer."""
        window = self.server.served().window
        return None if window is None else window - 1

    def close(self) -> None:
        """Close the connections."""
        self.server.close()

    @torch.no_grad()
    def features(self, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """As `CaptureBackend.features`, on the CPU. The server's files are removed."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._features, samples))

    def _features(self, sample: Sample) -> dict[str, Tensor]:
        stored = self.server.run(sample)
        return features_of(stored, sample, self.layout, self.num_layers, self.dtype, self.norm)
