"""DFlash 2's objective and filler against loops over documents, blocks, slots and candidates."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.dflash2 import DFlash2ObjectiveOptions, DFlash2Section
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, DPaceWeighting, UniformWeighting
from draftsmith.blocks.anchors import Anchors
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import SamplingOptions, distribution
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.dflash2 import CandidateSelector, DFlash2Head
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import TAPS
from draftsmith.targets.target import Target
from tests.algorithms import reference
from tests.algorithms.facts import llama
from tests.algorithms.test_dflash import anchors_for, features_of, terms_of
from tests.blocks.packed import Batch, blocks_of, owner, ragged_batch
from tests.blocks.test_weights import VARIANTS, dpace_reference
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

VOCAB = 61  # the tests' mask token is the last id
HEAD: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 7}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab_size=VOCAB)


def make_draft(target: Target, head: dict[str, Any] = HEAD, **options: Any) -> Draft:
    draft = tiny_draft(target, **({"block_size": 5, "architecture": "dflash2", "head": head} | options))
    with torch.no_grad():  # the selector has to matter beside unary logits
        selector_of(draft).successor_codebook.mul_(4.0)
        selector_of(draft).predecessor_codebook.mul_(4.0)
    return draft


def selector_of(draft: Draft) -> CandidateSelector:
    assert isinstance(draft.head, DFlash2Head)
    return draft.head.candidate_selector


def own_blocks(batch: Batch, anchors: Anchors, features: Tensor) -> list[Any]:
    """(document, its features, anchors in it)."""
    documents = []
    for row, (row_documents, starts) in enumerate(zip(batch.rows, batch.starts, strict=True)):
        for document, start in zip(row_documents, starts, strict=True):
            own = []
            for n in anchors.valid[row].nonzero().flatten().tolist():
                place = owner(batch, row, int(anchors.index[row, n]))
                if place is not None and place[0] is document:
                    own.append(place[1])
            documents.append((document, features[row, start : start + len(document.ids)], own))
    return documents


def score(draft: Draft, logits: Tensor, hidden: Tensor, previous: int, token: int) -> Tensor:
    """S_k(prev, c) of one token."""
    selector = selector_of(draft)
    projected = selector.hidden_projection.weight @ hidden
    return (
        logits[token] + (selector.predecessor_codebook[previous] * projected * selector.successor_codebook[token]).sum()
    )


class Reference:
    """Sums of the objective, block by block."""

    def __init__(self, draft: Draft, target: Target, documents: list[Any], weigh: reference.Weigh, share: float):
        labels, top_k = draft.config.block.size - 1, selector_of(draft).top_k
        self.numerator, self.weights, self.blocks = torch.zeros(()), 0.0, 0
        self.accepted = {"": 0, "base_": 0}
        self.correct = {"": [0] * labels, "base_": [0] * labels}
        self.counted, self.recalled = [0] * labels, [0] * labels
        for document, features, anchors in documents:
            for anchor in anchors:
                hidden = reference.block_hidden(draft, target.ends, document, features, anchor, 1)
                unary, selected, mask = [], [], []
                right: dict[str, list[bool]] = {"": [], "base_": []}
                for j in range(labels):
                    position = anchor + 1 + j
                    counts = position < len(document.ids) and document.loss_mask[position]
                    label, previous = (document.ids[position], document.ids[position - 1]) if counts else (0, 0)
                    logits = draft.logits(hidden[j + 1], target.ends)
                    unary.append(torch.logsumexp(logits, -1) - logits[label])
                    values = logits.tolist()
                    candidates = sorted(range(VOCAB), key=lambda token, x=values: -x[token])[:top_k]
                    offered = [score(draft, logits, hidden[j + 1], previous, c) for c in candidates]
                    choice = candidates[max(range(top_k), key=lambda i, s=offered: float(s[i].detach()))]
                    present = label in candidates
                    trained = candidates if present else [*candidates[:-1], label]
                    scores = torch.stack([score(draft, logits, hidden[j + 1], previous, c) for c in trained])
                    selected.append(torch.logsumexp(scores, -1) - scores[trained.index(label)])
                    mask.append(counts)
                    right[""].append(counts and choice == label)
                    right["base_"].append(counts and candidates[0] == label)
                    self.counted[j] += counts
                    self.recalled[j] += counts and present
                for losses, factor in ((unary, 1.0), (selected, share)):
                    weights = weigh([float(x.detach()) for x in losses], mask, 0)
                    for j in range(labels):
                        if mask[j]:
                            self.numerator = self.numerator + factor * weights[j] * losses[j]
                            self.weights += weights[j] * (losses is unary)
                self.blocks += any(mask)
                for name, hits in right.items():
                    self.correct[name] = [a + b for a, b in zip(self.correct[name], hits, strict=True)]
                    self.accepted[name] += ([*hits, False].index(False) + 1) if any(mask) else 0


WEIGHTINGS: list[tuple[Any, reference.Weigh]] = [
    (UniformWeighting(), reference.uniform),
    (DecayWeighting(gamma=3.0), reference.decay(3.0)),
    *(
        (
            DPaceWeighting(alpha=0.4, variant=variant),  # type: ignore[arg-type]
            lambda losses, mask, first, variant=variant: dpace_reference(losses, mask, 0.4, variant),
        )
        for variant in VARIANTS
    ),
]


def section_with(weighting: Any = WEIGHTINGS[1][0], share: float = 0.6, head_chunk: int = 9) -> DFlash2Section:
    options = DFlash2ObjectiveOptions(weighting=weighting, selector_weight=share, head_chunk=head_chunk)
    return DFlash2Section(objective=options)


@pytest.mark.parametrize(("weighting", "weigh"), WEIGHTINGS, ids=lambda x: getattr(x, "variant", None) or type(x))
def test_the_objective_equals_loops_over_documents(target: Target, weighting: Any, weigh: reference.Weigh) -> None:
    section, batch = section_with(weighting), ragged_batch(6)
    draft = make_draft(target, output_multiplier=0.8, final_logit_softcapping=6.0, input_embedding_scale=1.3)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    terms = terms_of(target, draft, section, batch, features, anchors)
    wanted = Reference(draft, target, own_blocks(batch, anchors, features), weigh, share=0.6)
    denominator = wanted.blocks if isinstance(weighting, DPaceWeighting) else wanted.weights
    assert terms.numerator.item() == pytest.approx(wanted.numerator.item(), rel=1e-4)
    assert terms.denominator.item() == pytest.approx(denominator, rel=1e-5)

    found_grads = torch.autograd.grad(terms.numerator / terms.denominator, list(draft.parameters()))
    wanted_grads = torch.autograd.grad(wanted.numerator / denominator, list(draft.parameters()))
    for (name, _), found, grad in zip(draft.named_parameters(), found_grads, wanted_grads, strict=True):
        assert grad.abs().max() > 1e-5, name
        near = 2e-5 * max(1.0, grad.abs().max().item())
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=near, msg=lambda m, name=name: f"{name}: {m}")

    for name in ("", "base_"):
        numerator, count = terms.metrics[f"{name}accept_length"]
        assert (numerator.item(), count.item()) == (wanted.accepted[name], wanted.blocks)
        numerator, count = terms.metrics[f"{name}accuracy"]
        assert (numerator.tolist(), count.tolist()) == (wanted.correct[name], wanted.counted)
    numerator, count = terms.metrics["candidate_recall"]
    assert (numerator.tolist(), count.tolist()) == (wanted.recalled, wanted.counted)
    assert 0 < numerator.sum() < count.sum()  # labels among the candidates, and others
    parts = terms.metrics["base_loss"][0] + 0.6 * terms.metrics["selector_loss"][0]
    torch.testing.assert_close(parts, terms.metrics["loss"][0])
    assert not any(t.requires_grad for pair in terms.metrics.values() for t in pair)
    assert {t.dtype for pair in terms.metrics.values() for t in pair} == {torch.float32}


def test_the_selector_s_weight_matters_and_chunks_do_not(target: Target) -> None:
    draft, batch = make_draft(target), ragged_batch(6)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section_with())

    def terms(**options: Any) -> Terms:
        return terms_of(target, draft, section_with(**options), batch, features, anchors)

    whole = terms(head_chunk=1000)
    for chunk in (1, 13):
        torch.testing.assert_close(terms(head_chunk=chunk).numerator, whole.numerator)
    assert not torch.allclose(terms(share=0.7).numerator, whole.numerator)


@pytest.mark.parametrize("weighting", [weighting for weighting, _ in WEIGHTINGS], ids=str)
def test_a_batch_without_candidates_adds_nothing(target: Target, weighting: Any) -> None:
    draft, batch, section = make_draft(target), ragged_batch(6), section_with(weighting)
    batch.loss_mask.zero_()
    terms = terms_of(target, draft, section, batch, features_of(batch, draft), anchors_for(batch, draft, section))
    assert (terms.numerator.item(), terms.denominator.item()) == (0.0, 0.0)
    terms.numerator.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in draft.parameters())
    assert all((numerator == 0).all() and (count == 0).all() for numerator, count in terms.metrics.values())


@pytest.mark.parametrize("weighting", [WEIGHTINGS[1][0], WEIGHTINGS[2][0]], ids=str)
def test_sums_over_micro_batches_are_the_sums_of_the_whole(target: Target, weighting: Any) -> None:
    draft, batch, section = make_draft(target), ragged_batch(6), section_with(weighting)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    whole = terms_of(target, draft, section, batch, features, anchors)
    parts = []
    for row in range(3):
        own = slice(row, row + 1)
        tensors = (batch.input_ids, batch.loss_mask, batch.positions, batch.document)
        part = Batch(*(t[own] for t in tensors), batch.sample_ids[own], batch.rows[own], batch.starts[own])
        parts.append(terms_of(target, draft, section, part, features[own], anchors_for(part, draft, section)))
    torch.testing.assert_close(sum(p.numerator for p in parts), whole.numerator)
    torch.testing.assert_close(sum(p.denominator for p in parts), whole.denominator)
    for name, (numerator, count) in whole.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name][0] for p in parts), numerator)
        torch.testing.assert_close(sum(p.metrics[name][1] for p in parts), count)


def test_what_it_needs_of_the_target_is_the_taps(target: Target) -> None:
    assert algorithm("dflash2").capture(make_draft(target, num_taps=3).config).widths == {TAPS: 3 * 32}


# --- decoding ---------------------------------------------------------------------------------------------------------


class Recording:
    """A sampler that keeps what it was asked."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        assert draw == len(self.logits)
        self.logits.append(logits)
        return self.sampler(logits, draw)


def sampler(rows: int, temperature: float) -> Recording:
    seeds = torch.arange(rows, dtype=torch.int64) * 7919 + 13
    return Recording(RowSampler(SamplingOptions(temperature), seeds, torch.arange(rows)))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_proposals", [None, 2])
def test_a_path_is_chosen_left_to_right(target: Target, temperature: float, num_proposals: int | None) -> None:
    draft = make_draft(target, final_logit_softcapping=4.0, output_multiplier=0.7)
    filler = filler_of("dflash2", draft, target.ends, num_proposals)
    hidden, anchors = torch.randn(6, 5, 32), torch.randint(VOCAB, (6,))
    found = filler.fill(hidden, anchors, sampler(6, temperature))
    assert found.token_ids.shape == (6, num_proposals or 4)
    assert found.count is None
    differs = 0
    for row in range(6):
        previous = int(anchors[row])
        for j in range(filler.num_proposals):
            logits = draft.logits(hidden[row, j + 1], target.ends)
            candidates = logits.topk(7).indices.tolist()
            scores = torch.full((VOCAB,), float("-inf"))
            for c in candidates:
                scores[c] = score(draft, logits, hidden[row, j + 1], previous, c)
            token = int(found.token_ids[row, j])
            if temperature == 0.0:
                assert token == int(scores.argmax())
                assert found.q is None
            else:
                assert found.q is not None
                torch.testing.assert_close(found.q[row, j], distribution(scores, SamplingOptions(temperature)))
                assert set(found.q[row, j].nonzero().flatten().tolist()) <= set(candidates)
                assert found.q[row, j, token] > 0
            differs += token != int(logits.argmax())
            previous = token
    assert differs > 3  # the selector's choices, not the slots' own


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_in_decoding_are_those_of_training(target: Target, temperature: float) -> None:
    """The proposals' path taken as the truth: training scores every label of it as decoding did."""
    draft, batch, section = make_draft(target), ragged_batch(6), section_with()
    method = algorithm("dflash2")
    blocks = blocks_of(batch, method.block_layout(draft.config), anchors_for(batch, draft, section))
    hidden = torch.randn(*blocks.input_ids.shape, 32)
    flat, anchor_ids = hidden.flatten(0, 1), blocks.input_ids[..., 0].flatten()
    recorded = sampler(len(flat), temperature)
    path = filler_of(method, draft, target.ends).fill(flat, anchor_ids, recorded).token_ids  # [R*N, P]
    previous = torch.cat((anchor_ids[:, None], path[:, :-1]), dim=1)
    selector = selector_of(draft)
    unary = draft.logits(flat[:, 1:], target.ends)
    candidates = selector.candidates(unary).sort(-1).values
    scores = selector.scores(unary, selector.latent(flat[:, 1:], previous), candidates)
    decoded = torch.stack(recorded.logits, dim=1)  # [R*N, P, K]
    torch.testing.assert_close(decoded, scores, rtol=1e-6, atol=1e-6)

    perfect = replace(blocks, labels=path.view(blocks.labels.shape), previous_ids=previous.view(blocks.labels.shape))
    terms = method.objective(draft.config, section).terms(
        draft, target.ends, BlockOutputs(hidden, perfect, None, torch.zeros(()))
    )
    chosen = (candidates == path.unsqueeze(-1)).int().argmax(-1, keepdim=True)
    own = decoded.log_softmax(-1).gather(-1, chosen).squeeze(-1).view(blocks.labels.shape)
    wanted = (-own * DecayWeighting(gamma=3.0).weights(perfect)).sum()
    torch.testing.assert_close(terms.metrics["selector_loss"][0], wanted)
    if temperature == 0.0:
        assert torch.equal(*terms.metrics["accuracy"])
        assert terms.metrics["base_accuracy"][0].sum() < terms.metrics["base_accuracy"][1].sum()
    assert torch.equal(*terms.metrics["candidate_recall"])


@torch.no_grad()
def test_ties_go_to_the_lowest_id(target: Target) -> None:
    draft = make_draft(target, head={**HEAD, "selector_top_k": VOCAB})
    selector_of(draft).successor_codebook.zero_()
    filler = filler_of("dflash2", draft, target.ends)
    found = filler.fill(torch.zeros(2, 5, 32), torch.zeros(2, dtype=torch.int64), sampler(2, 0.0))
    assert (found.token_ids == 0).all()


@torch.no_grad()
def test_with_all_tokens_as_candidates_and_no_transitions_it_is_dflash(target: Target) -> None:
    draft, hidden = make_draft(target), torch.randn(4, 5, 32)
    selector_of(draft).successor_codebook.zero_()
    found = filler_of("dflash2", draft, target.ends).fill(hidden, torch.arange(4), sampler(4, 0.0))
    assert torch.equal(found.token_ids, draft.logits(hidden[:, 1:], target.ends).argmax(-1))


@pytest.mark.parametrize("num_proposals", [0, 5, True, 2.0])
def test_a_number_of_proposals_that_the_block_has_no_room_for_is_refused(target: Target, num_proposals: Any) -> None:
    with pytest.raises(DraftsmithError, match="num_proposals is"):
        filler_of("dflash2", make_draft(target), target.ends, num_proposals)


def test_decoding_options_of_other_methods_are_refused(target: Target) -> None:
    with pytest.raises(DraftsmithError, match=r"dflash2 has no decoding options of its own; remove min_survival=0\.5"):
        filler_of("dflash2", make_draft(target), target.ends, min_survival=0.5)


# --- options ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"mask_token_id": 98, "block_size": 7, "num_hidden_layers": 2}


def test_the_published_sizes_are_the_default() -> None:
    head = draft_config(DFlash2Section(**SMALL), llama()).head.model_dump()
    assert head == {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def test_the_section_says_the_sizes_of_a_fresh_draft() -> None:
    config = draft_config(DFlash2Section(**SMALL, **HEAD), llama())
    assert (config.architecture, config.head.model_dump()) == ("dflash2", HEAD)


def test_what_the_section_leaves_out_comes_from_the_checkpoint() -> None:
    checkpoint = draft_config(DFlash2Section(**SMALL, **HEAD), llama())
    section = DFlash2Section(init_from="somewhere", selector_top_k=9)
    assert draft_config(section, llama(), checkpoint).head.model_dump() == {**HEAD, "selector_top_k": 9}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conv_group_size": 5}, "conv_group_size is 5; allowed: a divisor of hidden_size, which is 48"),
        ({"conv_kernel_size": 8}, "conv_kernel_size is 8; allowed: 1 to 7"),
        ({"selector_top_k": 100}, "selector_top_k is 100; allowed: 1 to 99"),
    ],
)
def test_sizes_that_do_not_fit_the_draft_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftsmithError, match=said):
        draft_config(DFlash2Section(**SMALL, **fields), llama())


@pytest.mark.parametrize(
    "fields",
    [
        *[{name: bad} for name in HEAD for bad in (0, True, 2.0, "4", None)],
        {"emb_dim": 4},
        {"objective": {"selector_weight": 0.0}},
        {"objective": {"selector_weight": float("inf")}},
        {"objective": {"alpha": 0.5}},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DFlash2Section(**fields)
