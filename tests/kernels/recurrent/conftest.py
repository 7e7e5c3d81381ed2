"""Here kernels are launched by name, and public operations run as their references: texts are too long for Triton's
interpreter."""

import pytest


@pytest.fixture(autouse=True)
def _kernels() -> None:
    """In place of the fixture of all kernels' tests."""
