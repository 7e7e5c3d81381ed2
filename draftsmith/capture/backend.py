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


class CaptureTarget(Protocol):
    """What a capture needs to know of a target: a loaded `Target`, or its outline where an engine runs it."""

    @property
    def source(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
