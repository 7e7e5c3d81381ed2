"""The backend `hf`: the target as transformers runs it, in this process."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.data.sample import Sample
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.targets.target import Target


class HfBackend:
    """Right-padded batches through the target, with no layer above the last one needed and no output head.

    Attention is causal, so what stands to the right of a token, padding included, cannot change its features.
    """

    def __init__(self, target: Target, layout: CaptureLayout) -> None:
        self.target = target
        self.layout = layout

    def close(self) -> None:
        """Nothing is held."""

    def features(self, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """As `CaptureBackend.features`: the target's dtype, on its device, as views of the padded batch."""
        input_ids = pad_sequence([sample.input_ids for sample in samples], batch_first=True).to(self.target.device)
        positions = torch.arange(input_ids.shape[1], device=self.target.device).expand_as(input_ids)
        states = self.target.forward(
            input_ids, positions, tap_ids=self.layout.tap_ids, final_state=self.layout.final_state
        )
        padded = {TAPS: states.taps, FINAL_STATE: states.final_state}  # [batch, longest, width]
        lengths = [sample.input_ids.shape[0] for sample in samples]
        return [
            {name: tensor[row, :length] for name, tensor in padded.items() if tensor is not None}
            for row, length in enumerate(lengths)
        ]
