"""Domino's head: a GRU over the block's tokens so far, and a low-rank correction of the logits (arXiv 2605.29707).

For the slot that predicts token j, with the draft's state h and the GRU's state s after reading the tokens from the
anchor to j - 1: logits = b + W2 SiLU(W1 [h; s]), where b are the logits of the target's output head on h. The first
`pure_draft_prefix_len` predicting slots keep b.
"""

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor, nn

from draftsmith.drafts.checks import Bool, CountInt, PositiveInt
from draftsmith.drafts.fields import Note
from draftsmith.drafts.heads.head import HeadConfig
from draftsmith.drafts.network import DraftSizes
from draftsmith.layouts.consumers import PLAIN_LOGITS, SINKS_ONLY
from draftsmith.layouts.spelling import HeadSpelling, ModelOptimizerSpelling


class DominoHeadConfig(HeadConfig):
    """A GRU over the block's tokens and a low-rank correction. The defaults are what readers of published files take
    for an absent field."""

    architecture = "domino"
    spelling = HeadSpelling(
        "DFlashDraftModel",
        also_known_as=("DominoDraftModel",),
        projectors=("domino", "causal_v5"),  # the second is an older spelling
        repeated=("emb_dim",),
        anchor_predicts=None,
        specforge="DominoDraftModel",
        modelopt=ModelOptimizerSpelling(at_top=("emb_dim",)),
        served={"sglang": {**PLAIN_LOGITS, "head.pure_draft_prefix_len": 1}, "modelopt": SINKS_ONLY},
    )

    gru_hidden_dim: Annotated[PositiveInt, Note("G, the width of the GRU.", dimension=True)]
    emb_dim: Annotated[PositiveInt, Note("E, the rank of the correction.", dimension=True)]
    pure_draft_prefix_len: Annotated[CountInt, Note("Predicting slots before the first corrected one.")] = 0
    shift_label: Annotated[Bool, Note("Whether the anchor's own slot predicts already.")] = False

    def build(self, sizes: DraftSizes) -> "DominoHead":
        return DominoHead(self, sizes)

    def disagreements(self, sizes: DraftSizes) -> Iterable[str]:
        # What `BlockLayout` says, which stands above this room; a test holds both to one count.
        block_size = sizes.block_for("domino").size
        proposals = block_size if self.shift_label else block_size - 1
        if self.pure_draft_prefix_len >= proposals:
            yield (
                f"pure_draft_prefix_len is {self.pure_draft_prefix_len}; allowed: 0 to {proposals - 1}, so that the "
                f"head corrects something (block_size is {block_size} and shift_label {self.shift_label}: "
                f"{proposals} proposals)"
            )


class PrefixGRU(nn.GRU):
    """One layer without bias: `weight_ih_l0` [3G, H], `weight_hh_l0` [3G, G]."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, bias=False, batch_first=True)


class DominoHead(nn.Module):
    """Prefix encoder and correction; parameters are named as in files.

    In training `prefix_states` reads all tokens of a block at once; in decoding `read` takes them one by one. Both give
    the same states.
    """

    def __init__(self, fields: DominoHeadConfig, sizes: DraftSizes) -> None:
        super().__init__()
        self.pure_draft_prefix_len = fields.pure_draft_prefix_len
        self.prefix_gru = PrefixGRU(sizes.hidden_size, fields.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(sizes.hidden_size + fields.gru_hidden_dim, fields.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(fields.emb_dim, sizes.vocab_size, bias=False),
        )

    @property
    def latent_weight(self) -> Tensor:
        """W1 [E, H + G]."""
        return _weight(self.embed_proj[0])

    @property
    def output_weight(self) -> Tensor:
        """W2 [V, E]."""
        return _weight(self.embed_proj[2])

    def prefix_states(self, embeddings: Tensor) -> Tensor:
        """Embeddings [..., P, H] of the tokens from the anchor on -> the state after each of them [..., P, G]."""
        states, _ = self.prefix_gru(embeddings.flatten(0, -3))
        return states.unflatten(0, embeddings.shape[:-2])

    def empty_prefix(self, embeddings: Tensor) -> Tensor:
        """The state before any token, for rows like embeddings [..., H]: zeros [..., G]."""
        return embeddings.new_zeros(*embeddings.shape[:-1], self.prefix_gru.hidden_size)

    def read(self, state: Tensor, embeddings: Tensor) -> Tensor:
        """One more token: state [batch, G], embeddings [batch, H] -> [batch, G]."""
        return torch.gru_cell(embeddings, state, self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0)

    def latent(self, hidden: Tensor, state: Tensor) -> Tensor:
        """SiLU(W1 [h; s]): hidden [..., H], state [..., G] -> [..., E]."""
        return self.embed_proj[:2](torch.cat((hidden, state), dim=-1))

    def correct(self, logits: Tensor, latent: Tensor, output_weight: Tensor | None = None) -> Tensor:
        """logits [..., V] of any float dtype + W2 latent [..., E] -> [..., V] float32.

        output_weight: W2, where the caller needs its gradient apart from the module's parameter.
        """
        return logits.float() + self.correction(latent, output_weight).float()

    def correction(self, latent: Tensor, output_weight: Tensor | None = None) -> Tensor:
        """W2 latent: [..., E] -> [..., V]; output_weight as for `correct`."""
        return nn.functional.linear(latent, self.output_weight if output_weight is None else output_weight)


def _weight(layer: nn.Module) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return layer.weight
