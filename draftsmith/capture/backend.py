"""What runs the target: samples in, features out."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from draftsmith.data.sample import Sample


class CaptureBackend(Protocol):
    """Computes the features of a batch of samples, as its `CaptureLayout` says."""

    def features(self, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """For every sample, in order: name -> [S, width], in any float dtype, all on one device."""
        ...

    def close(self) -> None:
        """Let go of what the backend holds beside the target: an engine, connections."""
        ...
