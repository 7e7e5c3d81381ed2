"""DFlash 2's parts beside the backbone: convolutions around the sublayers, and a selector among each slot's candidates.

The selector rescores the likeliest tokens c of slot k, given the token before it:

    S_k(prev, c) = U_k(c) + <A[prev] * (P h_k), B[c]>

with U_k the slot's own (unary) logits and h_k its state; A and B have a row of `selector_rank` numbers for every token.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.drafts.checks import PositiveInt
from draftsmith.drafts.convolution import BlockConvolution
from draftsmith.drafts.fields import Note
from draftsmith.drafts.heads.head import HeadConfig
from draftsmith.drafts.network import DraftSizes
from draftsmith.drafts.wrapper import SublayerWrapper
from draftsmith.layouts.consumers import BARE
from draftsmith.layouts.spelling import HeadSpelling, SpeculatorsSpelling

_PAIRS = (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k"))


class DFlash2HeadConfig(HeadConfig):
    """Convolutions around the sublayers, and a selector among each slot's candidates. Recipes have the sizes of
    published drafts; a file has to say them all."""

    architecture = "dflash2"
    spelling = HeadSpelling(
        "DFlash2DraftModel",
        # Published files hold the bare names; a module that keeps the codebooks as embeddings writes the longer ones.
        other_names=tuple(
            (f"candidate_selector.{name}.weight", f"candidate_selector.{name}")
            for name in ("predecessor_codebook", "successor_codebook")
        ),
        speculators=SpeculatorsSpelling("DFlash2DraftModel", sample_from_anchor=False, sliding_non_causal=True),
        # Multiplier and soft-cap keep the order of logits, so that a plain argmax is the same without them.
        served={"sglang": {}, "vllm": {}, "speculators": BARE, "vllm-speculators": BARE},
    )

    conv_kernel_size: Annotated[PositiveInt, Note("Taps of a convolution, in slots.", dimension=True, recipe_default=2)]
    conv_group_size: Annotated[
        PositiveInt, Note("Channels that share a convolution's taps.", dimension=True, recipe_default=16)
    ]
    selector_rank: Annotated[PositiveInt, Note("Rank of the selector's scores.", dimension=True, recipe_default=256)]
    selector_top_k: Annotated[PositiveInt, Note("Candidates of a slot that the selector rescores.", recipe_default=16)]

    def build(self, sizes: DraftSizes) -> "DFlash2Head":
        return DFlash2Head(self, sizes)

    def wrappers(self, sizes: DraftSizes) -> dict[str, SublayerWrapper]:
        """The convolutions of one layer."""
        return {name: self._convolution(sizes) for name in ("attention_conv", "mlp_conv")}

    def _convolution(self, sizes: DraftSizes) -> BlockConvolution:
        return BlockConvolution(sizes.hidden_size, self.conv_kernel_size, self.conv_group_size)

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

    def disagreements(self, sizes: DraftSizes) -> Iterable[str]:
        if sizes.hidden_size % self.conv_group_size:
            yield (
                f"conv_group_size is {self.conv_group_size}; allowed: a divisor of hidden_size, which is "
                f"{sizes.hidden_size}"
            )
        block_size = sizes.block_for("dflash2").size
        if self.conv_kernel_size > block_size:
            yield (
                f"conv_kernel_size is {self.conv_kernel_size}; allowed: 1 to {block_size}, the slots of a block "
                "(block_size), since nothing is convolved across its edge"
            )
        if self.selector_top_k > sizes.vocab_size:
            yield (
                f"selector_top_k is {self.selector_top_k}; allowed: 1 to {sizes.vocab_size}, the tokens there are "
                "(vocab_size)"
            )


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
    """Holds the selector; the convolutions are in the layers."""

    def __init__(self, fields: DFlash2HeadConfig, sizes: DraftSizes) -> None:
        super().__init__()
        self.candidate_selector = CandidateSelector(
            sizes.vocab_size, sizes.hidden_size, fields.selector_rank, fields.selector_top_k
        )
