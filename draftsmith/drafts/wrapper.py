"""What a head may put around a layer's sublayers."""

from torch import Tensor, nn


class SublayerWrapper(nn.Module):
    """A module around one sublayer, inside the block: `before` on its input, `after` on its output."""

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [R, N, B, H] -> (the sublayer's input [R, N, B, H], whatever `after` needs of it)."""
        raise NotImplementedError

    def after(self, hidden: Tensor, state: Tensor) -> Tensor:
        """The sublayer's output [R, N, B, H] and what `before` kept -> [R, N, B, H]."""
        raise NotImplementedError
