from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.dflash import DFlashObjectiveOptions, DFlashSection
from draftsmith.algorithms.dta import DTASection
from draftsmith.algorithms.options import Options
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, DPaceWeighting, UniformWeighting
from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import TAPS
from draftsmith.targets.target import Target
from tests.algorithms import reference
from tests.blocks.packed import Batch, anchors_of, blocks_of, owner, ragged_batch
from tests.blocks.test_weights import VARIANTS, dpace_reference
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

VOCAB = 61  # the tests' mask token is the last id


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab_size=VOCAB)


def make_draft(target: Target, **options: Any) -> Draft:
    return tiny_draft(target, **({"block_size": 5, "num_layers": 2} | options))


def features_of(batch: Batch, draft: Draft, seed: int = 0) -> Tensor:
    width = len(draft.config.target_layer_ids) * draft.config.hidden_size
    return torch.randn(*batch.input_ids.shape, width, generator=torch.Generator().manual_seed(seed))


def anchors_for(batch: Batch, draft: Draft, section: Any, num_anchors: int = 5) -> Anchors:
    method = algorithm(section.algorithm)
    visible = method.visible_slots(section, draft.config.block.size)
    return anchors_of(batch, method.block_layout(draft.config), num_anchors, visible_slots=visible)


def terms_of(target: Target, draft: Draft, section: Any, batch: Batch, features: Tensor, anchors: Anchors) -> Terms:
    method = algorithm(section.algorithm)
    blocks = blocks_of(batch, method.block_layout(draft.config), anchors)
    attend = training_attention(blocks, batch.document, draft.attention_kinds, AttentionBackend.DENSE)
    context = draft.context_keys_values(features, batch.positions)
    hidden = draft(target.ends.embedding_rows(blocks.input_ids), blocks.positions, context, attend)
    outputs = BlockOutputs(hidden, blocks, None, torch.zeros(()))
    return method.objective(draft.config, section).terms(draft, target.ends, outputs)


def expected(
    target: Target, draft: Draft, batch: Batch, features: Tensor, anchors: Anchors, weigh: reference.Weigh
) -> reference.Sums:
    documents = []
    for row, (row_documents, starts) in enumerate(zip(batch.rows, batch.starts, strict=True)):
        for document, start in zip(row_documents, starts, strict=True):
            own = []
            for n in anchors.valid[row].nonzero().flatten().tolist():
                place = owner(batch, row, int(anchors.index[row, n]))
                if place is not None and place[0] is document:
                    own.append((place[1], int(anchors.visible[row, n])))
            documents.append((document, features[row, start : start + len(document.ids)], own))
    return reference.objective(draft, target.ends, documents, weigh)


WEIGHTINGS: list[tuple[Options, reference.Weigh]] = [
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


@pytest.mark.parametrize(("weighting", "weigh"), WEIGHTINGS)
@pytest.mark.parametrize("section_class", [DFlashSection, DTASection])
def test_the_objective_equals_loops_over_documents(
    target: Target, section_class: Any, weighting: Any, weigh: reference.Weigh
) -> None:
    section = section_class(objective=DFlashObjectiveOptions(weighting=weighting, head_chunk=7))
    draft, batch = make_draft(target), ragged_batch(6)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    terms = terms_of(target, draft, section, batch, features, anchors)
    wanted = expected(target, draft, batch, features, anchors, weigh)
    denominator = wanted.blocks if isinstance(weighting, DPaceWeighting) else wanted.weights
    assert terms.numerator.item() == pytest.approx(wanted.numerator.item(), rel=1e-4)
    assert terms.denominator.item() == pytest.approx(denominator, rel=1e-5)

    found_grads = torch.autograd.grad(terms.numerator / terms.denominator, list(draft.parameters()))
    wanted_grads = torch.autograd.grad(wanted.numerator / denominator, list(draft.parameters()))
    for (name, _), found, grad in zip(draft.named_parameters(), found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    numerator, count = terms.metrics["accept_length"]
    assert (numerator.item(), count.item()) == (wanted.accepted, wanted.blocks)
    numerator, count = terms.metrics["accuracy"]
    assert (numerator.tolist(), count.tolist()) == (wanted.correct, wanted.counted)
    numerator, count = terms.metrics["loss"]
    assert (numerator.item(), count.item()) == (terms.numerator.item(), terms.denominator.item())
    assert not any(t.requires_grad for pair in terms.metrics.values() for t in pair)
    assert {t.dtype for pair in terms.metrics.values() for t in pair} == {torch.float32}


@pytest.mark.parametrize("causal", [None, False, True])
def test_it_does_so_for_sliding_layers(target: Target, causal: bool | None) -> None:
    draft = make_draft(target, layer_types=("sliding_attention", "full_attention"), sliding_window=3, causal=causal)
    section, batch = DFlashSection(), ragged_batch(7)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    terms = terms_of(target, draft, section, batch, features, anchors)
    wanted = expected(target, draft, batch, features, anchors, reference.decay(7.0))
    assert terms.numerator.item() == pytest.approx(wanted.numerator.item(), rel=1e-4)


def test_the_accept_length_is_that_of_prefixes(target: Target) -> None:
    """Labels that the draft gets right, all but the first of every other block: averages would say otherwise."""
    draft, batch, section = make_draft(target), ragged_batch(6), DFlashSection()
    method, anchors = algorithm("dflash"), anchors_for(batch, draft, section)
    blocks = blocks_of(batch, method.block_layout(draft.config), anchors)
    hidden = torch.randn(*blocks.input_ids.shape, draft.config.hidden_size)
    right = draft.logits(hidden, target.ends).argmax(-1)[:, :, 1:]
    labels = right.clone()
    labels[:, ::2, 0] = (labels[:, ::2, 0] + 1) % VOCAB
    label_mask = blocks.valid.unsqueeze(-1).expand_as(right)
    blocks = replace(blocks, labels=labels, label_mask=label_mask, max_labels=int(label_mask.sum()))
    terms = method.objective(draft.config, section).terms(
        draft, target.ends, BlockOutputs(hidden, blocks, None, torch.zeros(()))
    )
    numerator, count = terms.metrics["accept_length"]
    lengths = torch.where(torch.arange(blocks.valid.shape[1]) % 2 == 0, 1, 5).expand_as(blocks.valid)
    assert numerator.item() == lengths[blocks.valid].sum().item()
    assert count.item() == blocks.valid.sum().item()


@pytest.mark.parametrize("weighting", [weighting for weighting, _ in WEIGHTINGS])
def test_a_batch_without_candidates_adds_nothing(target: Target, weighting: Any) -> None:
    section = DFlashSection(objective=DFlashObjectiveOptions(weighting=weighting))
    draft, batch = make_draft(target), ragged_batch(6)
    batch.loss_mask.zero_()
    terms = terms_of(target, draft, section, batch, features_of(batch, draft), anchors_for(batch, draft, section))
    assert (terms.numerator.item(), terms.denominator.item()) == (0.0, 0.0)
    terms.numerator.backward()
    assert all((p.grad == 0).all() for p in draft.parameters())
    assert all((numerator == 0).all() and (count == 0).all() for numerator, count in terms.metrics.values())


@pytest.mark.parametrize("weighting", [weighting for weighting, _ in WEIGHTINGS])
def test_sums_over_micro_batches_are_the_sums_of_the_whole(target: Target, weighting: Any) -> None:
    section = DFlashSection(objective=DFlashObjectiveOptions(weighting=weighting))
    draft, batch = make_draft(target), ragged_batch(6)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    whole = terms_of(target, draft, section, batch, features, anchors)
    parts = []
    for row in range(3):
        tensors = (batch.input_ids, batch.loss_mask, batch.positions, batch.document)
        part = Batch(
            *(t[row : row + 1] for t in tensors),
            batch.sample_ids[row : row + 1],
            batch.rows[row : row + 1],
            batch.starts[row : row + 1],
        )
        parts.append(terms_of(target, draft, section, part, features[row : row + 1], anchors_for(part, draft, section)))
    torch.testing.assert_close(sum(p.numerator for p in parts), whole.numerator)
    torch.testing.assert_close(sum(p.denominator for p in parts), whole.denominator)
    for name, (numerator, count) in whole.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name][0] for p in parts), numerator)
        torch.testing.assert_close(sum(p.metrics[name][1] for p in parts), count)


def test_more_anchors_do_not_make_a_larger_loss(target: Target) -> None:
    draft, batch, section = make_draft(target), ragged_batch(6), DFlashSection()
    features = features_of(batch, draft)
    losses = []
    for num_anchors in (2, 12):
        anchors = anchors_for(batch, draft, section, num_anchors)
        terms = terms_of(target, draft, section, batch, features, anchors)
        losses.append((terms.numerator / terms.denominator).item())
    assert losses[0] == pytest.approx(losses[1], rel=0.5)
    assert losses[0] != losses[1]


def test_features_from_the_anchor_on_do_not_matter(target: Target) -> None:
    draft, batch, section = make_draft(target), ragged_batch(6), DFlashSection()
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    before = terms_of(target, draft, section, batch, features, anchors).numerator
    seen = torch.zeros_like(batch.loss_mask)
    for row, n in anchors.valid.nonzero().tolist():
        index = int(anchors.index[row, n])
        place = owner(batch, row, index)
        assert place is not None
        seen[row, index - place[1] : index] = True
    after = terms_of(target, draft, section, batch, torch.where(seen.unsqueeze(-1), features, 9.0), anchors).numerator
    torch.testing.assert_close(before, after)
    moved = terms_of(target, draft, section, batch, torch.where(seen.unsqueeze(-1), 9.0, features), anchors).numerator
    assert (before - moved).abs() > 1e-3


def test_what_it_needs_of_the_target_is_the_taps(target: Target) -> None:
    draft = make_draft(target, num_taps=3)
    layout = algorithm("dflash").capture(draft.config)
    assert layout.tap_ids == draft.config.target_layer_ids
    assert layout.widths == {TAPS: 3 * 32}


# --- decoding -------------------------------------------------------------------------------------------------------


def no_sampler(logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
    raise AssertionError("DFlash does not sample its proposals")


@pytest.mark.parametrize("num_proposals", [None, 1, 3])
def test_proposals_are_each_slot_s_own_argmax(target: Target, num_proposals: int | None) -> None:
    draft = make_draft(target, final_logit_softcapping=4.0, output_multiplier=0.7)
    filler = filler_of("dflash", draft, target.ends, num_proposals)
    hidden = torch.randn(3, 5, 32)
    found = filler.fill(hidden, torch.tensor([1, 2, 3]), no_sampler)
    assert filler.num_proposals == (num_proposals or 4)
    assert found.token_ids.shape == (3, filler.num_proposals)
    assert (found.q, found.count) == (None, None)
    for row in range(3):
        for j in range(filler.num_proposals):
            assert found.token_ids[row, j] == draft.logits(hidden[row, j + 1], target.ends).argmax()


def test_proposals_line_up_with_training_labels(target: Target) -> None:
    """What training scores as label j of a block is what decoding proposes as token j."""
    draft, batch, section = make_draft(target), ragged_batch(6), DFlashSection()
    method = algorithm("dflash")
    anchors = anchors_for(batch, draft, section)
    blocks = blocks_of(batch, method.block_layout(draft.config), anchors)
    hidden = torch.randn(*blocks.input_ids.shape, 32)
    filler = filler_of(method, draft, target.ends)
    proposed = filler.fill(hidden.flatten(0, 1), blocks.input_ids[..., 0].flatten(), no_sampler).token_ids
    perfect = replace(blocks, labels=proposed.view(blocks.labels.shape))
    terms = method.objective(draft.config, section).terms(
        draft, target.ends, BlockOutputs(hidden, perfect, None, torch.zeros(()))
    )
    assert torch.equal(*terms.metrics["accuracy"])


def test_ties_go_to_the_lowest_id(target: Target) -> None:
    draft = make_draft(target)
    found = filler_of("dflash", draft, target.ends).fill(torch.zeros(2, 5, 32), torch.zeros(2), no_sampler)
    assert (found.token_ids == 0).all()


@pytest.mark.parametrize("num_proposals", [0, 5, True, 2.0])
def test_a_number_of_proposals_that_the_block_has_no_room_for_is_refused(target: Target, num_proposals: Any) -> None:
    with pytest.raises(DraftsmithError, match="num_proposals is"):
        filler_of("dflash", make_draft(target), target.ends, num_proposals)


def test_decoding_options_of_other_methods_are_refused(target: Target) -> None:
    with pytest.raises(DraftsmithError, match=r"dflash has no decoding options of its own; remove threshold=0\.5"):
        filler_of("dflash", make_draft(target), target.ends, threshold=0.5)
