"""DFlash 2's parts beside the backbone: convolutions around the sublayers, and a selector among each slot's candidates.

The selector rescores the likeliest tokens c of slot k, given the token before it:

    S_k(prev, c) = U_k(c) + <A[prev] * (P h_k), B[c]>

with U_k the slot's own (unary) logits and h_k its state; A and B have a row of `selector_rank` numbers for every token.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.drafts.checks import PositiveInt
from draftsmith.drafts.convolution import BlockConvolution
from draftsmith.drafts.heads.head import HeadConfig

if TYPE_CHECKING:
    from draftsmith.drafts.config import DraftConfig

_PAIRS = (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k"))


class DFlash2HeadConfig(HeadConfig):
    """Taps and channels a group of the convolutions; rank of the selector, and how many candidates of a slot it
    rescores. Published drafts: 2, 16, 256 and 16; a file has to say them all."""

    conv_kernel_size: PositiveInt
    conv_group_size: PositiveInt
    selector_rank: PositiveInt
    selector_top_k: PositiveInt

    @model_validator(mode="before")
    @classmethod
    def _whole_pairs(cls, fields: Any) -> Any:
        for pair in _PAIRS:
            for given, missing in (pair, pair[::-1]):
                if fields.get(given) is not None and fields.get(missing) is None:
                    raise ValueError(
                        f"{given} is {fields[given]!r}, but {missing} is missing; allowed: both, as integers >= 1"
                    )
        return fields

    def disagreements(self, config: "DraftConfig") -> Iterable[str]:
        if config.hidden_size % self.conv_group_size:
            yield (
                f"conv_group_size is {self.conv_group_size}; allowed: a divisor of hidden_size, which is "
                f"{config.hidden_size}"
            )
        block_size = config.block_for("dflash2").size
        if self.conv_kernel_size > block_size:
            yield (
                f"conv_kernel_size is {self.conv_kernel_size}; allowed: 1 to {block_size}, the slots of a block "
                "(block_size), since nothing is convolved across its edge"
            )
        if self.selector_top_k > config.vocab_size:
            yield (
                f"selector_top_k is {self.selector_top_k}; allowed: 1 to {config.vocab_size}, the tokens there are "
                "(vocab_size)"
            )


def convolutions(config: "DraftConfig") -> dict[str, nn.Module]:
    """The wrappers of one layer's sublayers."""
    fields = cast(DFlash2HeadConfig, config.head_config)

    def convolution() -> BlockConvolution:
        return BlockConvolution(config.hidden_size, fields.conv_kernel_size, fields.conv_group_size)

    return {"attention_conv": convolution(), "mlp_conv": convolution()}


class CandidateSelector(nn.Module):
    """The codebooks A and B [V, rank] and the projection P [rank, H], named as in files.

    Training scores all slots at once, decoding one after the other; both through `latent` and `scores`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def reset_parameters(self) -> None:
        """Scores begin as the unary logits (B is zero); A[prev] * (P h) has length 1, about, whatever the sizes, so
        that B learns at the same pace."""
        rank, hidden_size = self.hidden_projection.weight.shape
        nn.init.normal_(self.predecessor_codebook, std=rank**-0.5)
        nn.init.normal_(self.hidden_projection.weight, std=hidden_size**-0.5)
        nn.init.zeros_(self.successor_codebook)

    def latent(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """A[prev] * (P h): hidden [..., H], previous_ids [...] int64 -> [..., rank]."""
        return functional.embedding(previous_ids, self.predecessor_codebook) * self.hidden_projection(hidden)

    def candidates(self, unary: Tensor) -> Tensor:
        """The likeliest tokens of each slot, likeliest first: unary [..., V] -> ids [..., top_k] int64."""
        return unary.topk(self.top_k, dim=-1).indices

    def scores(self, unary: Tensor, latent: Tensor, ids: Tensor, successor: Tensor | None = None) -> Tensor:
        """S of some tokens: unary [..., V], latent [..., rank], ids [..., C] int64 -> [..., C] float32.

        successor: B, where the caller needs its gradient apart from the module's parameter.
        """
        rows = functional.embedding(ids, self.successor_codebook if successor is None else successor)  # [..., C, rank]
        # Not as a matrix product, which autocast would round to bf16.
        transition = (latent.float().unsqueeze(-2) * rows.float()).sum(-1)
        return unary.gather(-1, ids).float() + transition


class DFlash2Head(nn.Module):
    """Holds the selector; the convolutions are in the layers (`convolutions`)."""

    def __init__(self, config: "DraftConfig") -> None:
        super().__init__()
        fields = cast(DFlash2HeadConfig, config.head_config)
        self.candidate_selector = CandidateSelector(
            config.vocab_size, config.hidden_size, fields.selector_rank, fields.selector_top_k
        )
