"""A method from outside the package: a chain whose state is fed back, as EAGLE's (arXiv 2503.01840), in its smallest
form. It has its own network, head over some of the target's tokens, examples, loss and drafter, and no blocks.

Slot t joins the target's features of position t with the token after it, and predicts the token after that:

    s_0 = tanh(fc(taps_t)),  s_{j+1} = cell(embedding of x_{t+1+j}, s_j),  x_{t+2+j} ~ softmax(head(s_{j+1}))

Training unrolls the chain over the document's own tokens, from every slot at once; decoding over the tokens it chose.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.drafter import Proposals, Sampler, StatesWanted
from draftsmith.algorithms.options import DecodingOptions
from draftsmith.algorithms.registry import register, unregister
from draftsmith.algorithms.section import DraftSection, with_head
from draftsmith.algorithms.serving import Serving
from draftsmith.algorithms.trainee import Computation, Corpus, Draw, Examples, Terms, Work
from draftsmith.base.tensor_fields import TensorFields
from draftsmith.blocks.accept import leading_correct
from draftsmith.drafts.checks import PositiveInt
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.fields import Note
from draftsmith.drafts.heads.head import HeadConfig
from draftsmith.drafts.network import Network, NetworkSizes
from draftsmith.drafts.vocabulary import DraftVocabulary
from draftsmith.errors import DraftsmithError
from draftsmith.features.batch import PackedBatch
from draftsmith.features.schema import TAPS
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import TargetStates

# --- the network -----------------------------------------------------------------------------------------------------


class ToyNetwork(Network):
    """The fusion of the taps, and the cell."""

    def __init__(self, sizes: NetworkSizes) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.fc = nn.Linear(len(sizes.target_layer_ids) * width, width, bias=False)
        self.cell = nn.GRUCell(width, width)

    def first(self, taps: Tensor) -> Tensor:
        """taps [n, T*H] -> the states [n, H] that chains begin with."""
        return self.fc(taps.to(self.fc.weight.dtype)).tanh()

    def step(self, embeddings: Tensor, state: Tensor) -> Tensor:
        """embeddings [n, H] of one more token, state [n, H] -> the state after it."""
        return cast(Tensor, self.cell(embeddings.to(state.dtype), state))


class ToyHeadConfig(HeadConfig):
    """A recurrent chain of `steps` tokens, over a vocabulary of the draft's own."""

    architecture = "toy_recurrent"
    needs_block = False
    own_vocabulary = True

    steps: Annotated[PositiveInt, Note("Tokens of a chain.")]

    def network(self, sizes: NetworkSizes) -> ToyNetwork:
        return ToyNetwork(sizes)


ToyDraft = Draft[None, ToyNetwork]


def vocabulary_of(draft: ToyDraft) -> DraftVocabulary:
    assert draft.vocabulary is not None  # the section has no default for it
    return draft.vocabulary


@with_head(ToyHeadConfig)
class ToySection(DraftSection):
    """The recipe's `draft` section."""

    algorithm: Literal["toy_recurrent"] = "toy_recurrent"


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chains(TensorFields, Examples):
    """A chain of K steps from every slot of the rows [R, S]: tokens [R, S, K] int64, which it reads; labels [R, S, K]
    int64, which it is to predict; mask [R, S, K] bool: whether a label is supervised and of the slot's document."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ChainMaker:
    """An `ExampleMaker`: there is nothing to draw, since every slot is an example."""

    steps: int
    flops_per_chain: float

    def examples(self, packed: PackedBatch, draw: Draw) -> Chains:
        length = packed.input_ids.shape[1]
        read = torch.arange(length).unsqueeze(1) + 1 + torch.arange(self.steps)  # [S, K]
        label = (read + 1).clamp_max(length - 1)
        own = packed.document.unsqueeze(-1) == packed.document[:, label]
        mask = own & packed.loss_mask[:, label] & (read + 1 < length)
        # What comes after a label that does not count does not count.
        return Chains(
            packed.input_ids[:, read.clamp_max(length - 1)], packed.input_ids[:, label], mask.cumprod(-1).bool()
        )

    def held_out(self, packed: PackedBatch, draw: Draw) -> Chains:
        """Whole chains only."""
        chains = self.examples(packed, draw)
        return replace(chains, mask=chains.mask & chains.mask.all(-1, keepdim=True))

    def work(self, packed: PackedBatch, examples: Chains) -> Work:
        return Work(packed.num_tokens, self.flops_per_chain * int(examples.mask.any(-1).sum()))

    def largest(self, rows: int, tokens: int) -> Chains:
        ids = torch.empty(rows, tokens, self.steps, dtype=torch.int64, device="meta")
        return Chains(ids, ids, ids.bool())


class ToyTrainee:
    """Cross-entropy over the draft's vocabulary, the mean over all labels that are in it."""

    def __init__(self, draft: ToyDraft, ends: TargetEnds) -> None:
        self._draft = draft
        self._ends = ends

    def terms(self, packed: PackedBatch, examples: Chains, progress: Tensor) -> Terms:
        network, vocabulary = self._draft.backbone, vocabulary_of(self._draft)
        place, known = vocabulary.index(examples.labels)
        mask = examples.mask & known
        state = network.first(packed.features[TAPS].flatten(0, 1))  # [R*S, H]
        losses, predicted = [], []
        for step in range(examples.labels.shape[-1]):
            embeddings = self._draft.scaled(self._ends.embedding_rows(examples.tokens[..., step].flatten()))
            state = network.step(embeddings, state)
            logits = vocabulary.logits(state).float()  # [R*S, V']
            losses.append(functional.cross_entropy(logits, place[..., step].flatten(), reduction="none"))
            predicted.append(vocabulary.target_ids(logits.argmax(-1)))
        weights = mask.float()
        loss = torch.stack(losses, dim=-1).view(mask.shape)
        numerator, denominator = (loss * weights).sum(), weights.sum()
        # A token that the draft does not know is one that it gets wrong.
        correct = torch.stack(predicted, dim=-1).view(mask.shape) == examples.labels
        counted = examples.mask[..., 0]
        accepted = leading_correct(correct & known, examples.mask, torch.zeros_like(packed.document))
        metrics = {
            "loss": (numerator.detach(), denominator),
            "accuracy": ((correct & examples.mask).sum((0, 1)).float(), examples.mask.sum((0, 1)).float()),
            "accept_length": (((accepted + 1) * counted).sum().float(), counted.sum().float()),
        }
        return Terms(numerator, denominator, metrics)


# --- decoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainState:
    """first [slots, H]: the state that each row's next chain begins with."""

    first: Tensor

    def rows(self, begin: int, end: int) -> "ChainState":
        return ChainState(self.first[begin:end])

    def erase(self, slots: Sequence[int]) -> None:
        self.first[list(slots)] = 0


class ToyDrafter:
    """A `Drafter` whose state is one vector a row, made of the features of the last position that the target read."""

    def __init__(self, draft: ToyDraft, ends: TargetEnds, steps: int) -> None:
        self._draft = draft
        self._ends = ends
        self._steps = steps
        self.wants = StatesWanted(draft.config.target_layer_ids)
        self.width = self.reach = 1 + steps

    def new_state(self, slots: int, length: int) -> ChainState:
        draft = self._draft
        return ChainState(torch.zeros(slots, draft.config.hidden_size, dtype=draft.dtype, device=draft.device))

    def read(self, state: ChainState, ids: Tensor, states: TargetStates, start: Tensor, valid: Tensor) -> None:
        self._take(state, states, valid)

    def update(self, state: ChainState, ids: Tensor, states: TargetStates, start: Tensor, count: Tensor) -> None:
        self._take(state, states, count)

    def _take(self, state: ChainState, states: TargetStates, count: Tensor) -> None:
        assert states.taps is not None  # it wants them
        last = (count - 1).clamp_min(0).view(-1, 1, 1).expand(-1, 1, states.taps.shape[-1])
        first = self._draft.backbone.first(states.taps.gather(1, last).squeeze(1))
        state.first.copy_(torch.where((count > 0).unsqueeze(-1), first, state.first))

    def propose(
        self, state: ChainState, anchors: Tensor, anchor_ids: Tensor, extent: int, sampler: Sampler
    ) -> Proposals:
        network, vocabulary = self._draft.backbone, vocabulary_of(self._draft)
        hidden, ids, draws, made = state.first, anchor_ids, [], []
        for step in range(self._steps):
            hidden = network.step(self._draft.scaled(self._ends.embedding_rows(ids)), hidden)
            chosen, q = sampler(vocabulary.logits(hidden), step)
            ids = vocabulary.target_ids(chosen)
            draws.append((ids, None if q is None else vocabulary.spread(q)))
            made.append(hidden)
        return replace(Proposals.of_draws(draws), states=torch.stack(made, dim=1))


# --- the method ------------------------------------------------------------------------------------------------------


class ToyRecurrent(Algorithm[ToySection, None, ToyNetwork]):
    """A recurrent chain over the tokens that are supervised most often."""

    name = "toy_recurrent"
    head = ToyHeadConfig
    summary = "A chain whose state is fed back"
    paper = "none"
    section = ToySection

    def examples(self, config: DraftConfig, section: ToySection) -> ChainMaker:
        steps = ToyHeadConfig.of(config).steps
        assert config.vocabulary is not None
        return ChainMaker(steps, 6.0 * steps * config.hidden_size * (6 * config.hidden_size + config.vocabulary.size))

    def initialise(self, draft: ToyDraft, ends: TargetEnds, corpus: Corpus) -> None:
        vocabulary = vocabulary_of(draft)
        counts = corpus.supervised_counts(ends.vocab_size)
        vocabulary.choose(counts.argsort(descending=True, stable=True)[: len(vocabulary.draft_ids)])

    def trainee(self, draft: ToyDraft, ends: TargetEnds, section: ToySection, how: Computation) -> ToyTrainee:
        if how.attention not in ("auto", "dense"):
            raise DraftsmithError(
                f"train.attention is {how.attention!r}, and toy_recurrent has no attention: use 'auto'"
            )
        return ToyTrainee(draft, ends)

    def num_proposals(self, config: DraftConfig) -> int:
        return ToyHeadConfig.of(config).steps

    def drafter(self, draft: ToyDraft, ends: TargetEnds, options: DecodingOptions | None = None) -> ToyDrafter:
        most = self.num_proposals(draft.config)
        count = (options or DecodingOptions()).num_proposals or most
        if count > most:
            raise DraftsmithError(f"num_proposals is {count}; this draft proposes 1 to {most} tokens")
        return ToyDrafter(draft, ends, count)

    def stepwise_drafter(self, draft: ToyDraft, ends: TargetEnds, num_proposals: int | None = None) -> ToyDrafter:
        return self.drafter(draft, ends, DecodingOptions(num_proposals=num_proposals))

    def serving(self, config: DraftConfig) -> Serving:
        return Serving(None, None)


@contextmanager
def registered() -> Iterator[type[ToyRecurrent]]:
    """While open, recipes and drafts may be of this method; afterwards the package is as it was."""
    register(ToyRecurrent)
    try:
        yield ToyRecurrent
    finally:
        unregister(ToyRecurrent.name)
