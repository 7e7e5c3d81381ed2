"""Grouped dynamic causal convolution inside a block, around a layer's sublayers (DFlash 2).

    out_t = sum_i (base_i + delta_i(x_t)) * x_{t-i},  i = 0 .. K-1

base_i has one weight a channel; delta_i, computed from the slot's own state, one a group of channels. Slots before the
block's first one count as zero: nothing crosses the block's edge.
"""

import torch
from torch import Tensor, nn

from draftsmith.drafts.wrapper import SublayerWrapper
from draftsmith.kernels.layers.block_convolution import convolve


class BlockConvolution(SublayerWrapper):
    """The two convolutions around one sublayer: `before` on its input, `after` on its output.

    Both sets of deltas come from the sublayer's layer-normed input. Parameters, named as in files: `base_kernel`
    [2, K, H] (before, after) and `kernel_projection` H -> 2*K*groups. Fresh ones change nothing.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        """group_size: a divisor of hidden_size, as the head's configuration sees to."""
        super().__init__()
        self.kernel_size = kernel_size
        self.groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.groups, bias=False)

    def reset_parameters(self) -> None:
        """The identity: every slot keeps its own state and takes nothing from earlier ones."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [R, N, B, H] -> (the sublayer's input [R, N, B, H], the deltas of `after` [R, N, B, K, groups])."""
        deltas = self.kernel_projection(hidden).unflatten(-1, (2, self.kernel_size, self.groups))
        return convolve(hidden, self.base_kernel[0], deltas[..., 0, :, :]), deltas[..., 1, :, :]

    def after(self, hidden: Tensor, state: Tensor) -> Tensor:
        """The sublayer's output [R, N, B, H] and what `before` kept -> [R, N, B, H]."""
        return convolve(hidden, self.base_kernel[1], state)
