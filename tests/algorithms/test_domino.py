"""Domino's objective, filler and section against plain loops."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.domino import DominoFiller, DominoObjectiveOptions, DominoSection
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, UniformWeighting
from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from tests.algorithms.reference import block_hidden
from tests.algorithms.test_dflash import anchors_for, features_of
from tests.blocks.packed import Batch, blocks_of, owner, ragged_batch
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

VOCAB = 61  # the tests' mask token is the last id
METHOD = algorithm("domino")
LAYOUTS = [(True, 0), (True, 1), (True, 4), (False, 0), (False, 1), (False, 3)]
"""(shift_label, pure_draft_prefix_len), the largest prefixes of a block of 5 among them."""


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab_size=VOCAB)


def make_draft(target: Target, shift: bool = True, prefix: int = 1, **options: Any) -> Draft:
    head = {"gru_hidden_dim": 11, "emb_dim": 6, "shift_label": shift, "pure_draft_prefix_len": prefix}
    draft = tiny_draft(target, **({"architecture": "domino", "head": head, "block_size": 5} | options))
    with torch.no_grad():
        for parameter in draft.head.parameters():
            parameter.mul_(3.0)  # so that the correction decides tokens
    return draft


def outputs_of(
    target: Target, draft: Draft, batch: Batch, features: Tensor, anchors: Anchors, progress: float
) -> BlockOutputs:
    blocks = blocks_of(batch, METHOD.block_layout(draft.config), anchors)
    attend = training_attention(blocks, batch.document, draft.attention_kinds, AttentionBackend.DENSE)
    context = draft.context_keys_values(features, batch.positions)
    hidden = draft(target.ends.embedding_rows(blocks.input_ids), blocks.positions, context, attend)
    return BlockOutputs(hidden, blocks, None, torch.tensor(progress, dtype=torch.float64))


def terms_of(target: Target, draft: Draft, section: DominoSection, outputs: BlockOutputs) -> Terms:
    return METHOD.objective(draft.config, section).terms(draft, target.ends, outputs)


# --- the same from the equations, one block, one slot, one gate at a time ---------------------------------------------


def read_token(draft: Draft, state: Tensor, x: Tensor) -> Tensor:
    """One GRU step: r, z, n in this order, no bias."""
    w, u = draft.head.prefix_gru.weight_ih_l0, draft.head.prefix_gru.weight_hh_l0
    size = len(state)
    r = torch.sigmoid(w[:size] @ x + u[:size] @ state)
    z = torch.sigmoid(w[size : 2 * size] @ x + u[size : 2 * size] @ state)
    n = torch.tanh(w[2 * size :] @ x + r * (u[2 * size :] @ state))
    return (1 - z) * n + z * state


def block_logits(target: Target, draft: Draft, hidden: Tensor, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """(base, corrected) logits of every label; hidden [B, H]; tokens: the anchor and those after it, as far as there
    are any."""
    fields = draft.config.head.model_dump()
    first_slot = 0 if fields["shift_label"] else 1
    w1, w2 = draft.head.embed_proj[0].weight, draft.head.embed_proj[2].weight
    state, found = torch.zeros(fields["gru_hidden_dim"]), []
    for j in range(min(draft.config.block.size - first_slot, len(tokens))):
        x = target.ends.embedding_weight[tokens[j]] * draft.config.input_embedding_scale
        state = read_token(draft, state, x)
        h = hidden[first_slot + j]
        base = target.ends.head_weight @ h
        inner = w1 @ torch.cat((h, state))
        correction = w2 @ (inner * torch.sigmoid(inner))
        found.append((base, base + correction if j >= fields["pure_draft_prefix_len"] else base))
    return found


def expected(
    target: Target, draft: Draft, batch: Batch, features: Tensor, anchors: Anchors, share: float, gamma: float
) -> SimpleNamespace:
    labels = METHOD.block_layout(draft.config).num_labels
    zeros = lambda: [0] * labels  # noqa: E731
    sums = SimpleNamespace(loss=torch.zeros(()), base=0.0, final=0.0, weights=0.0, blocks=0, counted=zeros())
    sums.right, sums.accepted = {"": zeros(), "base_": zeros()}, {"": 0, "base_": 0}
    for row in range(len(batch.rows)):
        for n in anchors.valid[row].nonzero().flatten().tolist():
            index = int(anchors.index[row, n])
            place = owner(batch, row, index)
            assert place is not None
            document, a = place
            own = features[row, index - a : index - a + len(document.ids)]
            hidden = block_hidden(draft, target.ends, document, own, a, visible=1)
            chain, any_label = {"": True, "base_": True}, False
            for j, (base, final) in enumerate(block_logits(target, draft, hidden, document.ids[a:])):
                here = a + 1 + j < len(document.ids) and document.loss_mask[a + 1 + j]
                label = document.ids[a + 1 + j] if here else 0
                weight = math.exp(-j / gamma) if here else 0.0
                losses = [torch.logsumexp(logits, 0) - logits[label] for logits in (base, final)]
                sums.loss = sums.loss + weight * (share * losses[0] + (1 - share) * losses[1])
                sums.base += weight * losses[0].item()
                sums.final += weight * losses[1].item()
                sums.weights += weight
                sums.counted[j] += here
                any_label |= here
                for name, logits in (("base_", base), ("", final)):
                    right = here and int(logits.argmax()) == label
                    sums.right[name][j] += right
                    chain[name] = chain[name] and right
                    sums.accepted[name] += chain[name]
            if any_label:
                sums.blocks += 1
                for name in chain:
                    sums.accepted[name] += 1
    return sums


@pytest.mark.parametrize(("shift", "prefix"), LAYOUTS)
@pytest.mark.parametrize("progress", [0.0, 0.3, 0.9])
def test_the_objective_equals_loops_over_documents(target: Target, shift: bool, prefix: int, progress: float) -> None:
    """Odd lengths, documents without a candidate, blocks that reach past the end of their document."""
    options = DominoObjectiveOptions(
        weighting=DecayWeighting(gamma=3.0), lambda_start=0.8, lambda_decay_ratio=0.5, head_chunk=7
    )
    share = 0.8 * max(0.0, 1.0 - progress / 0.5)
    section = DominoSection(objective=options)
    draft, batch = make_draft(target, shift, prefix, input_embedding_scale=1.5), ragged_batch(6)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    terms = terms_of(target, draft, section, outputs_of(target, draft, batch, features, anchors, progress))
    wanted = expected(target, draft, batch, features, anchors, share, 3.0)

    assert terms.numerator.item() == pytest.approx(wanted.loss.item(), rel=1e-4)
    assert terms.denominator.item() == pytest.approx(wanted.weights, rel=1e-5)
    parameters = dict(draft.named_parameters())
    found_grads = torch.autograd.grad(terms.numerator / terms.denominator, list(parameters.values()))
    wanted_grads = torch.autograd.grad(wanted.loss / wanted.weights, list(parameters.values()))
    for name, found, grad in zip(parameters, found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    metrics = {name: (top.tolist(), bottom.tolist()) for name, (top, bottom) in terms.metrics.items()}
    for name in ("", "base_"):
        assert metrics[f"{name}accuracy"] == (wanted.right[name], wanted.counted)
        assert metrics[f"{name}accept_length"] == (wanted.accepted[name], wanted.blocks)
    for name, value in (("base_loss", wanted.base), ("final_loss", wanted.final), ("loss", wanted.loss.item())):
        assert metrics[name][0] == pytest.approx(value, rel=1e-4)
    assert metrics["lambda"][0] / metrics["lambda"][1] == pytest.approx(share, rel=1e-6)
    assert not any(t.requires_grad for pair in terms.metrics.values() for t in pair)
    assert {t.dtype for pair in terms.metrics.values() for t in pair} == {torch.float32}


def test_the_reference_sees_a_misplaced_prefix(target: Target) -> None:
    """Mutated: the GRU reads each slot's own label instead of the token before it."""
    section, draft, batch = DominoSection(), make_draft(target), ragged_batch(6)
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    outputs = outputs_of(target, draft, batch, features, anchors, 0.5)
    leaked = replace(outputs, blocks=replace(outputs.blocks, previous_ids=outputs.blocks.labels))
    wanted = expected(target, draft, batch, features, anchors, 0.5, 7.0)
    assert terms_of(target, draft, section, outputs).numerator.item() == pytest.approx(wanted.loss.item(), rel=1e-4)
    assert terms_of(target, draft, section, leaked).numerator.item() != pytest.approx(wanted.loss.item(), rel=1e-3)


def test_the_chunk_changes_nothing_but_memory(target: Target) -> None:
    draft, batch = make_draft(target), ragged_batch(8)
    section = DominoSection()
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    results = []
    for chunk in (1, 5, 10_000):
        section = DominoSection(objective=DominoObjectiveOptions(weighting=UniformWeighting(), head_chunk=chunk))
        terms = terms_of(target, draft, section, outputs_of(target, draft, batch, features, anchors, 0.4))
        results.append((terms.numerator, torch.autograd.grad(terms.numerator, list(draft.parameters()))))
    for numerator, grads in results[1:]:
        torch.testing.assert_close(numerator, results[0][0], rtol=1e-5, atol=0)
        for found, grad in zip(grads, results[0][1], strict=True):
            torch.testing.assert_close(found, grad, rtol=1e-4, atol=5e-5)


def test_a_batch_without_a_label_adds_zero(target: Target) -> None:
    draft, batch, section = make_draft(target), ragged_batch(8), DominoSection()
    batch.loss_mask[:] = False
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    terms = terms_of(target, draft, section, outputs_of(target, draft, batch, features, anchors, 0.4))
    terms.numerator.backward()
    assert (terms.numerator.item(), terms.denominator.item()) == (0.0, 0.0)
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())
    assert all(not top.any() for top, _ in terms.metrics.values())


@pytest.mark.parametrize(
    ("start", "ratio", "progress", "share"),
    [(1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 0.75, 0.25), (0.6, 0.5, 0.25, 0.3), (1.0, 0.5, 0.5, 0.0), (1.0, 0.2, 0.9, 0.0)],
)
def test_the_curriculum(start: float, ratio: float, progress: float, share: float) -> None:
    options = DominoObjectiveOptions(lambda_start=start, lambda_decay_ratio=ratio)
    found = options.base_share(torch.tensor(progress, dtype=torch.float64))
    assert found.item() == start * max(0.0, 1.0 - progress / ratio)
    assert found.item() == pytest.approx(share)
    # A scalar on the device weighs rows to the same bits as the host's number does.
    rows = torch.randn(257, generator=torch.Generator().manual_seed(3))
    assert torch.equal((1.0 - found) * rows, (1.0 - found.item()) * rows)
    assert torch.equal(found * rows, found.item() * rows)


# --- decoding ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A token sampler that keeps the logits it is shown, and answers with tokens given beforehand or the argmax."""

    def __init__(self, answers: Tensor | None = None) -> None:
        self.answers, self.logits, self.draws = answers, [], []

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        self.logits.append(logits)
        self.draws.append(draw)
        return (logits.argmax(-1), None) if self.answers is None else (self.answers[:, draw], logits.softmax(-1))


@pytest.mark.parametrize(("shift", "prefix"), LAYOUTS)
@torch.no_grad()
def test_decoding_step_by_step_reproduces_the_training_logits(target: Target, shift: bool, prefix: int) -> None:
    """Fed with a document's own tokens, the filler sees tensor for tensor the logits of the objective."""
    draft, batch, section = make_draft(target, shift, prefix), ragged_batch(6), DominoSection()
    features, anchors = features_of(batch, draft), anchors_for(batch, draft, section)
    outputs = outputs_of(target, draft, batch, features, anchors, 0.0)
    layout, blocks = METHOD.block_layout(draft.config), outputs.blocks
    hidden, head = layout.predicting(outputs.hidden, dim=2), draft.head
    states = head.prefix_states(target.ends.embedding_rows(blocks.previous_ids))
    corrected = head.correct(draft.logits(hidden, target.ends), head.latent(hidden, states))
    base = draft.logits(hidden, target.ends)
    label = torch.arange(layout.num_labels)[:, None]
    training = torch.where(label < prefix, base, corrected).flatten(0, 1)  # [R*N, P, V]

    recorder = Recorder(blocks.labels.flatten(0, 1))
    filler = filler_of(METHOD, draft, target.ends)
    proposals = filler.fill(outputs.hidden.flatten(0, 1), blocks.input_ids[..., 0].flatten(), recorder)
    assert recorder.draws == list(range(layout.num_labels))
    torch.testing.assert_close(torch.stack(recorder.logits, dim=1), training, rtol=1e-5, atol=1e-5)
    assert torch.equal(proposals.token_ids, blocks.labels.flatten(0, 1))
    torch.testing.assert_close(proposals.q, training.softmax(-1))
    # Mutated: other tokens in the block change what comes after them, if corrected, and nothing before.
    other = Recorder((blocks.labels.flatten(0, 1) + 1) % VOCAB)
    filler.fill(outputs.hidden.flatten(0, 1), blocks.input_ids[..., 0].flatten(), other)
    for j, (one, two) in enumerate(zip(recorder.logits, other.logits, strict=True)):
        assert torch.equal(one, two) == (j == 0 or j < prefix)


@pytest.mark.parametrize(("shift", "prefix"), LAYOUTS)
@torch.no_grad()
def test_greedy_proposals_equal_a_loop(target: Target, shift: bool, prefix: int) -> None:
    draft = make_draft(target, shift, prefix, seed=3)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 5, draft.config.hidden_size, generator=generator)
    anchors = torch.randint(VOCAB, (4,), generator=generator)
    proposals = filler_of(METHOD, draft, target.ends).fill(hidden, anchors, Recorder())
    assert proposals.q is None
    for row in range(4):
        tokens = [int(anchors[row])]
        for _ in range(proposals.token_ids.shape[1]):
            tokens.append(int(block_logits(target, draft, hidden[row], tokens)[-1][1].argmax()))
        assert proposals.token_ids[row].tolist() == tokens[1:]
    for fewer in (1, 3):
        short = filler_of(METHOD, draft, target.ends, fewer)
        assert short.num_proposals == fewer
        assert torch.equal(short.fill(hidden, anchors, Recorder()).token_ids, proposals.token_ids[:, :fewer])


@torch.no_grad()
def test_ties_go_to_the_lowest_id(target: Target) -> None:
    """Over the whole vocabulary: tokens 3 and 40 have equal rows at both ends of the correction, and win."""
    draft = make_draft(target, prefix=0)
    draft.head.embed_proj[2].weight.zero_()
    ends = Target.from_model(target.model).ends
    hidden = torch.randn(2, 5, draft.config.hidden_size, generator=torch.Generator().manual_seed(5))
    ends.head_weight = ends.head_weight.clone()
    ends.head_weight[[3, 40]] = 50.0 * hidden[0, 2] / hidden[0, 2].norm()
    proposals = filler_of(METHOD, draft, ends).fill(hidden, torch.tensor([1, 2]), Recorder())
    assert proposals.token_ids[0, 2] == 3


@torch.no_grad()
def test_a_proposal_never_looks_at_values_on_the_host(target: Target) -> None:
    """With tensors that have shapes and no values, whatever asks for a value raises."""
    filler = filler_of(METHOD, make_draft(target), target.ends)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, anchors = torch.empty(3, 5, target.hidden_size), torch.empty(3, dtype=torch.int64)
        proposals = filler.fill(hidden, anchors, Recorder(torch.empty(3, 5, dtype=torch.int64)))
        with pytest.raises(DataDependentOutputException):
            proposals.token_ids.tolist()
    assert proposals.q is not None
    assert (proposals.token_ids.shape, proposals.q.shape) == ((3, 5), (3, 5, VOCAB))


def test_what_the_proposer_refuses(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted, unshifted = make_draft(target, True), make_draft(target, False)
    with pytest.raises(DraftsmithError, match=r"num_proposals is 6; .*5 slots \(anchor_first\) proposes 1 to 5"):
        filler_of(METHOD, shifted, target.ends, 6)
    with pytest.raises(DraftsmithError, match=r"num_proposals is 5; .*5 slots \(anchor_known\) proposes 1 to 4"):
        filler_of(METHOD, unshifted, target.ends, 5)
    with pytest.raises(DraftsmithError, match=r"unknown field 'min_survival' in the decoding options of domino"):
        filler_of(METHOD, shifted, target.ends, min_survival=0.5)
    other = tiny_target("llama", vocab_size=VOCAB + 3).ends
    with pytest.raises(DraftsmithError, match=r"logits of 61 tokens \(vocab_size\).*has 64; both must be the same"):
        filler_of(METHOD, shifted, other)
    with pytest.raises(DraftsmithError, match="domino's head is on meta and the target's output head on cpu"):
        filler_of(METHOD, make_draft(target).to("meta"), target.ends)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(DraftsmithError, match="2 processes cannot share a vocabulary of 61 tokens evenly"):
        filler_of(METHOD, shifted, target.ends, tensor_parallel=True)
    assert isinstance(filler_of(METHOD, shifted, target.ends), DominoFiller)  # each process by itself


# --- the recipe's section ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gru_hidden_dim": 0}, "gru_hidden_dim"),
        ({"gru_hidden_dim": True}, "gru_hidden_dim"),
        ({"emb_dim": 2.5}, "emb_dim"),
        ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len"),
        ({"shift_label": 1}, "shift_label"),
        ({"markov_rank": 4}, "markov_rank"),
        ({"objective": {"lambda_start": 1.5}}, "lambda_start"),
        ({"objective": {"lambda_decay_ratio": 0}}, "lambda_decay_ratio"),
        ({"objective": {"head_chunk": 0}}, "head_chunk"),
        ({"objective": {"weighting": {"kind": "dpace"}}}, "dpace"),
        ({"objective": {"alpha": 1}}, "alpha"),
    ],
)
def test_a_wrong_option_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DominoSection(**fields)


def test_the_section_says_the_heads_fields() -> None:
    section = DominoSection(gru_hidden_dim=9, emb_dim=4, shift_label=False)
    assert METHOD.head_config(section) == {"gru_hidden_dim": 9, "emb_dim": 4, "shift_label": False}
    assert section.objective.weighting == DecayWeighting(gamma=7.0)
    assert (section.objective.lambda_start, section.objective.lambda_decay_ratio) == (1.0, 1.0)
