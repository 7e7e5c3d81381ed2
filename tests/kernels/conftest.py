"""Here every public operation runs as its kernel: on a CPU in Triton's interpreter. References are called by name."""

from collections.abc import Iterator

import pytest

from draftsmith.kernels.device import interpreted


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with interpreted():
        yield
