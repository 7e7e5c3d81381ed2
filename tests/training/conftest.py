"""One tiny target and one store of the counting language for all training tests."""

from pathlib import Path

import pytest

from draftsmith.features.reader import Store
from draftsmith.targets.target import Target
from tests.training.counting import counting_store, counting_target


@pytest.fixture(scope="session")
def target() -> Target:
    return counting_target()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Store:
    return counting_store(tmp_path_factory.mktemp("features"), target)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
