"""DSpark's head: a low-rank bias from the token before (Markov head), and how sure the draft is (arXiv 2607.05147).

Slot k's logits are those of the target's output head on h_k plus `W2 z_k`, where the latent `z_k` [R] is made of h_k
and of the embedding `w = W1[x_prev]` of the token before the slot's label, by the head's kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.drafts.checks import Bool, CountInt, one_of
from draftsmith.drafts.fields import Note
from draftsmith.drafts.heads.head import HeadConfig
from draftsmith.drafts.network import DraftSizes
from draftsmith.layouts.attention_fields import attention_mode
from draftsmith.layouts.canonical import LayoutError
from draftsmith.layouts.consumers import BARE, PLAIN_LOGITS, SINKS_ONLY, UNSCALED, AtLeast
from draftsmith.layouts.fields import Fields
from draftsmith.layouts.spelling import HeadSpelling, ModelOptimizerSpelling, SpeculatorsSpelling

# --- files ----------------------------------------------------------------------------------------------------------

_HEAD = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_VANILLA = {"head.markov_head_type": "vanilla"}
_CONFIDENCE_WEIGHT = "confidence_head.proj.weight"

# Model-Optimizer writes the head's modules flat.
_FLAT_NAMES = (
    ("markov_w1.", "markov_head.markov_w1."),
    ("markov_w2.", "markov_head.markov_w2."),
    ("gate_proj.", "markov_head.gate_proj."),
    ("joint_proj.", "markov_head.joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
)


def _read_head(fields: Fields, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The canonical head fields. What files leave out: the head type is vanilla, and the weights show whether there is
    a confidence head and whether it reads the Markov embedding.

    Raises `LayoutError` for blocks that do not predict from the anchor's slot.
    """
    for name in ("sample_from_anchor", "shift_label"):
        value = fields.get(name)
        if value is not None and value is not True:
            raise LayoutError(
                f"{name} is {value!r}; allowed: true, since the anchor's slot of a DSpark block predicts the next token"
            )
    for name in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"):
        # SGLang reads the longer name first; two different answers are an error.
        fields.get(name, f"dspark_{'noise_token_id' if name == 'mask_token_id' else name}")
    fields.get("confidence_head_alpha")  # a weight of the training loss: nothing to apply
    head_type = fields.get("markov_head_type")
    weight = tensors.get(_CONFIDENCE_WEIGHT)
    enabled = fields.get("enable_confidence_head", "use_confidence_head")
    if enabled is None:
        enabled = weight is not None
    with_markov = fields.get("confidence_head_with_markov")
    if with_markov is None or enabled is False:  # without a confidence head the field says nothing
        hidden_size = fields.get("hidden_size")
        with_markov = weight is not None and isinstance(hidden_size, int) and weight.shape[-1:] > (hidden_size,)
    head = {
        "markov_rank": fields.get("markov_rank"),
        "markov_head_type": "vanilla" if head_type is None else head_type,
        "enable_confidence_head": enabled,
        "confidence_head_with_markov": with_markov,
    }
    return {name: value for name, value in head.items() if value is not None}


def _write_head(config: dict[str, Any]) -> dict[str, Any]:
    """Nested fields beside the canonical ones, by which other readers know the same."""
    return {
        "use_confidence_head": config["head"]["enable_confidence_head"],  # Model-Optimizer
        "shift_label": True,  # Model-Optimizer
        "attention_mode": attention_mode(config["num_attention_heads"], config["num_key_value_heads"]),  # SpecForge
    }


# --- configuration --------------------------------------------------------------------------------------------------


class DSparkHeadConfig(HeadConfig):
    """A Markov head of rank R (0: none, as the package speculators has it), and perhaps a confidence head."""

    architecture = "dspark"
    spelling = HeadSpelling(
        "Qwen3DSparkModel",  # what SGLang looks for
        also_known_as=("Qwen3DSparkModel", "DSparkDraftModel"),
        projectors=("dspark",),
        repeated=_HEAD,
        # SGLang and vLLM read it here; vLLM takes the nested one for DFlash's, and does not start.
        at_top=(("sample_from_anchor", True),),
        read_head=_read_head,
        write_head=_write_head,
        other_names=_FLAT_NAMES,
        anchor_predicts=True,
        specforge="DSparkDraftModel",
        deepspec="markov_rank",
        speculators=SpeculatorsSpelling("DSparkSpeculator", sample_from_anchor=True),
        modelopt=ModelOptimizerSpelling(
            own="use_confidence_head",
            instead_of="enable_confidence_head",
            left_out=("enable_confidence_head", "confidence_head_with_markov", "attention_mode"),
            tensor_names=_FLAT_NAMES,
        ),
        served={
            "sglang": {**PLAIN_LOGITS, "head.markov_rank": AtLeast(1)},
            "vllm": {**PLAIN_LOGITS, **_VANILLA, **UNSCALED},
            "speculators": BARE,
            "vllm-speculators": {**BARE, **_VANILLA},
            "modelopt": {**SINKS_ONLY, "head.markov_rank": AtLeast(1)},
        },
    )

    markov_rank: Annotated[
        CountInt, Note("R, the rank of the bias from the token before; 0: there is no bias.", dimension=True)
    ]
    markov_head_type: Annotated[
        str,
        one_of(lambda: MARKOV_HEADS),
        Note("How the bias is made of token and state: vanilla, gated or rnn.", recipe_default="vanilla"),
    ]
    enable_confidence_head: Annotated[
        Bool, Note("Whether a head says how sure the draft is of each slot.", recipe_default=True)
    ]
    confidence_head_with_markov: Annotated[
        Bool, Note("Whether the confidence head reads the token before; left out: where there is one, it does.")
    ]

    def build(self, sizes: DraftSizes) -> "DSparkHead":
        return DSparkHead(self, sizes)

    def disagreements(self, sizes: DraftSizes) -> Iterable[str]:
        if self.confidence_head_with_markov and not self.enable_confidence_head:
            yield (
                "confidence_head_with_markov is True, but there is no confidence head (enable_confidence_head is "
                "False); allowed: False, or enable_confidence_head True"
            )
        if self.confidence_head_with_markov and self.markov_rank == 0:
            yield (
                "confidence_head_with_markov is True, but there is no Markov embedding to read (markov_rank is 0); "
                "allowed: False"
            )


# --- modules --------------------------------------------------------------------------------------------------------


class MarkovHead(nn.Module, ABC):
    """The latent of every slot, left to right. Subclasses say how one step goes."""

    latent_is_embedding: ClassVar[bool] = False
    """Whether z is w itself, a row of a table."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """W2 [V, R]."""
        return self.markov_w2.weight

    def embed(self, previous_ids: Tensor) -> Tensor:
        """Token ids [...] int64 -> w = W1[ids] [..., R]."""
        return self.markov_w1(previous_ids)

    def start(self, previous: Tensor) -> Tensor:
        """The state before the first slot: zeros like its w [..., R]."""
        return torch.zeros_like(previous)

    @abstractmethod
    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: state [..., R], its w [..., R] and h [..., H] -> (latent z [..., R], the next state [..., R])."""

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """All slots of blocks whose tokens are known: w [..., P, R] and h [..., P, H] -> z [..., P, R]."""
        state, latents = self.start(previous[..., 0, :]), []
        for w, h in zip(previous.unbind(-2), hidden.unbind(-2), strict=True):
            latent, state = self.step(state, w, h)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


class VanillaMarkovHead(MarkovHead):
    """z = w."""

    latent_is_embedding = True

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return previous, state

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        return previous


class GatedMarkovHead(MarkovHead):
    """z = sigmoid(G [h; w]) * w, G with bias."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.latents(previous, hidden), state

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Slots do not depend on each other: all at once."""
        return torch.sigmoid(self.gate_proj(torch.cat((hidden, previous), dim=-1))) * previous


class RnnMarkovHead(MarkovHead):
    """[g, c, o] = J [s; w; h], J with bias; s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c); z = tanh(o)."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat((state, previous, hidden), dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1.0 - keep) * torch.tanh(candidate)


class NoMarkovHead(MarkovHead):
    """The head of rank 0: every w, z and bias is of no numbers or of zeros, and there are no parameters."""

    nothing: Tensor

    def __init__(self, vocab_size: int) -> None:
        nn.Module.__init__(self)
        self.rank = 0
        # On the CPU also while a draft is made on the meta device: no file holds it.
        self.register_buffer("nothing", torch.empty(vocab_size, 0, device="cpu"), persistent=False)

    @property
    def output_weight(self) -> Tensor:
        return self.nothing

    def embed(self, previous_ids: Tensor) -> Tensor:
        return self.nothing.new_zeros(*previous_ids.shape, 0)

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return previous, state

    def latents(self, previous: Tensor, hidden: Tensor) -> Tensor:
        return previous


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": VanillaMarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}
"""`markov_head_type` -> the module."""


class ConfidenceHead(nn.Module):
    """c = w_c . features + b: the logit of the chance that the verifier accepts the slot's token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [...]."""
        return self.proj(features).squeeze(-1)


class DSparkHead(nn.Module):
    """Markov head and, if configured, confidence head; parameters are named as in files."""

    def __init__(self, fields: DSparkHeadConfig, sizes: DraftSizes) -> None:
        super().__init__()
        self.markov_head: MarkovHead
        if fields.markov_rank == 0:
            self.markov_head = NoMarkovHead(sizes.vocab_size)
        else:
            markov = MARKOV_HEADS[fields.markov_head_type]
            self.markov_head = markov(sizes.vocab_size, fields.markov_rank, sizes.hidden_size)
        self.confidence_head: ConfidenceHead | None = None
        self.confidence_with_markov = fields.confidence_head_with_markov
        if fields.enable_confidence_head:
            extra = fields.markov_rank if fields.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(sizes.hidden_size + extra)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] float32 of slots with h [..., H] and w [..., R]; there must be a confidence head."""
        assert self.confidence_head is not None
        features = torch.cat((hidden, previous), dim=-1) if self.confidence_with_markov else hidden
        return self.confidence_head(features).float()


def corrected_logits(base: Tensor, latent: Tensor, output_weight: Tensor) -> Tensor:
    """base [..., V] + W2 z: latent [..., R], output_weight W2 [V, R] -> [..., V] float32.

    Training and decoding both add in float32: a small bias must not vanish in the rounding of bf16 logits.
    """
    return base.float() + nn.functional.linear(latent, output_weight).float()
