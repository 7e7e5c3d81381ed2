"""One process, or several that hold copies (DDP) or parts (FSDP2) of the draft: what the loop needs of each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name -> detached tensor, gathered from all processes where it is sharded. Every process has to call it."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in tensors.items()
    }


class Parallel:
    """Wraps the trained module for its processes.

    `forward` is the module to call. Gradients come out as the mean over the processes of each one's sum, so a gradient
    that is to be the sum over all is multiplied by `num_processes`. With FSDP2 the module is one unit: a draft's
    context path calls its layers' projections directly, and one gather before the forward serves both paths.
    """

    def __init__(self, module: nn.Module, kind: str, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.num_processes = accelerator.num_processes
        self.sharded = kind == "fsdp" and self.num_processes > 1
        self.forward: Any = module
        if self.sharded:
            mesh = init_device_mesh(accelerator.device.type, (self.num_processes,))
            self.forward = fully_shard(module, mesh=mesh)
        elif self.num_processes > 1:
            self.forward = accelerator.prepare_model(module)

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch: gradients are exchanged at the `last` one only, and
        weights that were gathered for the first serve all."""
        if self.sharded:
            module = self.forward
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
            yield
        elif last or self.num_processes == 1:
            yield
        else:
            with self.forward.no_sync():
                yield

    def after_forward_only(self) -> None:
        """Let go of weights that were gathered for a forward without a backward."""
        if self.sharded:
            assert isinstance(self.forward, FSDPModule)
            self.forward.reshard()

    def norms(self, gradients: list[Tensor]) -> Tensor:
        """The norm of every gradient [len(gradients)], of the whole one where this process holds a part."""
        norms = torch.stack(torch._foreach_norm(gradients))
        if self.sharded:
            squares = norms.square()
            torch.distributed.all_reduce(squares)
            norms = squares.sqrt()
        return norms
