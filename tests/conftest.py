"""What every test shares: one torch thread a process (tests run beside each other), a fixed seed, and hypothesis'
profile."""

import os

import pytest
import torch
from hypothesis import settings

# Without a GPU, Triton kernels run in Triton's interpreter. It reads this when it is first imported, by whichever test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

# The same examples in every run; and no deadline, because tests run beside each other and never judge times.
settings.register_profile("draftsmith", deadline=None, derandomize=True)
settings.load_profile("draftsmith")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
