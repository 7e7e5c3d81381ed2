"""What every test shares: one torch thread a process (tests run beside each other), and a fixed seed."""

import os

import pytest
import torch

# Without a GPU, Triton kernels run in Triton's interpreter. It reads this when it is first imported, by whichever test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
