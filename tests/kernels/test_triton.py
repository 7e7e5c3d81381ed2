"""Without the package triton every module of kernels can be imported and its references run; a launch says what is
missing."""

import subprocess
import sys

WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import draftsmith.kernels
for module in pkgutil.walk_packages(draftsmith.kernels.__path__, "draftsmith.kernels."):
    importlib.import_module(module.name)
import torch
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import interpreted
from draftsmith.kernels.layers import gated_activation as gate
from draftsmith.kernels.rollout.low_rank_pruning import leaders_reference
x = torch.randn(2, 8)
assert torch.equal(gate.gated_activation(x, "silu"), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
assert leaders_reference(torch.randn(2, 1000)).limits.shape == (2, 2)
for launch in (lambda: gate._gated_kernel[(1,)](x), lambda: gate.gated_activation(x, "silu")):
    try:
        with interpreted():
            launch()
    except DraftsmithError as error:
        print(error)
"""


def test_without_triton_kernels_can_be_imported_and_a_launch_names_the_package() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    launched, prepared = run.stdout.splitlines()
    assert launched.startswith("the kernel _gated_kernel needs the package triton, which is not installed; install it")
    assert prepared.startswith("triton's cdiv needs the package triton")
