"""DSpark's objective and filler against the formulas, written as loops over documents, blocks and slots."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.dspark import DSparkObjectiveOptions, DSparkSection
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, UniformWeighting
from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.layout import BlockKind
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.targets.target import Target
from tests.algorithms import reference
from tests.blocks.packed import Batch, Document, anchors_of, blocks_of, owner, pack, ragged_batch
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import dspark_head as head
from tests.support.tiny_draft import tiny_draft

VOCAB, SIZE = 61, 5  # the tests' mask token is the last id
METHOD = algorithm("dspark")


WITHOUT_MARKOV = head("vanilla", with_markov=False, rank=0)
HEADS = [
    head("vanilla"),
    head("gated", with_markov=False),
    head("rnn"),
    WITHOUT_MARKOV,
    head("gated"),
    head("rnn", False, False),
    head("rnn", False, False, rank=0),
]
NAMES = ["vanilla", "gated, confidence alone", "rnn", "no markov head", "gated", "rnn, no confidence", "no head"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab_size=VOCAB)


def make_draft(target: Target, fields: dict[str, Any], **options: Any) -> Draft:
    return tiny_draft(target, **({"block_size": SIZE, "architecture": "dspark", "head": fields} | options))


def batch_with_gaps(seed: int) -> Batch:
    """A ragged batch whose supervised runs have holes of one token."""
    batch = ragged_batch(seed)
    for documents in batch.rows:
        for document in documents:
            document.loss_mask = [kept and position % 7 != 5 for position, kept in enumerate(document.loss_mask)]
    return pack(batch.rows, batch.input_ids.shape[1])


def states(batch: Batch, width: int, seed: int) -> Tensor:
    return torch.randn(*batch.input_ids.shape, width, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """A draft over a ragged batch: what it trains on and what comes out."""

    target: Target
    draft: Draft
    batch: Batch
    section: DSparkSection = field(default_factory=DSparkSection)

    def __post_init__(self) -> None:
        self.features = states(self.batch, 2 * 32, 0)
        self.final = states(self.batch, 32, 1)
        self.layout = METHOD.block_layout(self.draft.config)
        self.anchors: Anchors = anchors_of(self.batch, self.layout, 5)
        self.blocks: Blocks = blocks_of(self.batch, self.layout, self.anchors)

    def hidden(self) -> Tensor:
        attend = training_attention(
            self.blocks, self.batch.document, self.draft.attention_kinds, AttentionBackend.DENSE
        )
        context = self.draft.context_keys_values(self.features, self.batch.positions)
        embeddings = self.target.ends.embedding_rows(self.blocks.input_ids)
        return self.draft(embeddings, self.blocks.positions, context, attend)

    def terms(self) -> Terms:
        outputs = BlockOutputs(self.hidden(), self.blocks, self.final, torch.zeros(()))
        return METHOD.objective(self.draft.config, self.section).terms(self.draft, self.target.ends, outputs)


# --- the formulas ---------------------------------------------------------------------------------------------------


def slot_logits(draft: Draft, target: Target, hidden: list[Tensor], previous: list[int]) -> tuple[list, list, list]:
    """Per slot: unary logits, final logits, confidence logit (or None), by the equations of DSpark (2607.05147)."""
    parameters = {name.removeprefix("head."): p for name, p in draft.named_parameters() if name.startswith("head.")}
    none = torch.zeros(VOCAB, 0)  # of a head of rank 0, which adds nothing
    w1, w2 = (parameters.get(f"markov_head.markov_{name}.weight", none) for name in ("w1", "w2"))
    state = torch.zeros(w1.shape[1])
    unary, final, confidence = [], [], []
    for h, token in zip(hidden, previous, strict=True):
        w = w1[token]
        latent = w
        if "markov_head.gate_proj.weight" in parameters:
            g, bias = parameters["markov_head.gate_proj.weight"], parameters["markov_head.gate_proj.bias"]
            latent = w / (1 + torch.exp(-(g @ torch.cat([h, w]) + bias)))
        if "markov_head.joint_proj.weight" in parameters:
            j, bias = parameters["markov_head.joint_proj.weight"], parameters["markov_head.joint_proj.bias"]
            g, c, o = (j @ torch.cat([state, w, h]) + bias).split(len(w))
            keep = 1 / (1 + torch.exp(-g))
            state = keep * state + (1 - keep) * torch.tanh(c)
            latent = torch.tanh(o)
        unary.append(target.ends.head_weight @ h)
        final.append(unary[-1] + w2 @ latent)
        if "confidence_head.proj.weight" in parameters:
            weight, bias = parameters["confidence_head.proj.weight"][0], parameters["confidence_head.proj.bias"][0]
            seen = torch.cat([h, w]) if len(weight) > len(h) else h
            confidence.append(weight @ seen + bias)
        else:
            confidence.append(None)
    return unary, final, confidence


@dataclass
class Expected:
    numerator: Tensor = field(default_factory=lambda: torch.zeros(()))
    weights: float = 0.0
    blocks: int = 0
    accepted: int = 0
    base_accepted: int = 0
    expected_length: float = 0.0
    error: float = 0.0
    labels: int = 0
    confidences: list[tuple[float, float]] = field(default_factory=list)


def add_block(sums: Expected, case: Case, document: Document, hidden: Tensor, anchor: int, final: Tensor) -> None:
    options = case.section.objective
    previous = [document.ids[min(anchor + k, len(document.ids) - 1)] for k in range(SIZE)]
    unary, logits, confidence = slot_logits(case.draft, case.target, list(hidden), previous)
    right: list[bool] = []
    base_right: list[bool] = []
    reach, length = 1.0, 1.0
    for k in range(SIZE):
        label = anchor + k + 1
        if label >= len(document.ids) or not document.loss_mask[label]:
            break  # this slot does not count, and none after it
        decay = options.weighting.kind == "decay"
        weight = math.exp(-k / options.weighting.gamma) if decay else 1.0
        log_p = logits[k] - torch.logsumexp(logits[k], 0)
        teacher = (case.target.ends.head_weight @ final[label - 1]).softmax(0)
        l1 = sum((log_p[v].exp() - teacher[v]).abs() for v in range(VOCAB))
        accept = min(max(1.0 - float(l1.detach()) / 2, 0.0), 1.0)
        loss = -options.cross_entropy_weight * log_p[document.ids[label]] + options.l1_weight * l1
        if confidence[k] is not None:
            p = 1 / (1 + torch.exp(-confidence[k]))
            bce = -(accept * torch.log(p) + (1 - accept) * torch.log(1 - p))
            loss = loss + (options.confidence_weight or 1.0) * bce
            sums.confidences.append((float(p.detach()), accept))
        sums.numerator = sums.numerator + weight * loss
        sums.weights += weight
        sums.labels += 1
        right.append(int(logits[k].argmax()) == document.ids[label])
        base_right.append(int(unary[k].argmax()) == document.ids[label])
        reach *= accept
        length += reach
    if right:
        sums.blocks += 1
        sums.expected_length += length
        sums.accepted += 1 + [*right, False].index(False)
        sums.base_accepted += 1 + [*base_right, False].index(False)


def expected(case: Case) -> Expected:
    sums = Expected()
    for row, (documents, starts) in enumerate(zip(case.batch.rows, case.batch.starts, strict=True)):
        for document, start in zip(documents, starts, strict=True):
            own = slice(start, start + len(document.ids))
            for n in case.anchors.valid[row].nonzero().flatten().tolist():
                place = owner(case.batch, row, int(case.anchors.index[row, n]))
                if place is None or place[0] is not document:
                    continue
                features, final = case.features[row, own], case.final[row, own]
                hidden = reference.block_hidden(case.draft, case.target.ends, document, features, place[1], 1)
                add_block(sums, case, document, hidden, place[1], final)
    return sums


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", HEADS, ids=NAMES)
@pytest.mark.parametrize("seed", [6, 7])
def test_the_objective_equals_loops_over_documents(target: Target, fields: dict[str, Any], seed: int) -> None:
    case = Case(target, make_draft(target, fields), batch_with_gaps(seed))
    options: dict[str, Any] = {"weighting": DecayWeighting(gamma=3.0), "head_chunk": 7}
    if seed == 7:
        options = {"weighting": UniformWeighting(), "cross_entropy_weight": 0.3, "l1_weight": 0.5, "head_chunk": 1000}
        options |= {"confidence_weight": 2.0} if fields["enable_confidence_head"] else {}
    case.section = DSparkSection(
        enable_confidence_head=fields["enable_confidence_head"], objective=DSparkObjectiveOptions(**options)
    )
    terms, wanted = case.terms(), expected(case)
    assert terms.numerator.item() == pytest.approx(wanted.numerator.item(), rel=1e-4)
    assert terms.denominator.item() == pytest.approx(wanted.weights, rel=1e-5)

    found_grads = torch.autograd.grad(terms.numerator / terms.denominator, list(case.draft.parameters()))
    wanted_grads = torch.autograd.grad(wanted.numerator / wanted.weights, list(case.draft.parameters()))
    for (name, _), found, grad in zip(case.draft.named_parameters(), found_grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        assert grad.abs().max() > 0

    def metric(name: str) -> float:
        numerator, count = terms.metrics[name]
        assert not numerator.requires_grad
        return (numerator.sum() / count.sum()).item()

    assert metric("loss") == pytest.approx(terms.numerator.item() / terms.denominator.item())
    assert metric("accept_length") == pytest.approx(wanted.accepted / wanted.blocks)
    assert metric("base_accept_length") == pytest.approx(wanted.base_accepted / wanted.blocks)
    assert metric("expected_accept_length") == pytest.approx(wanted.expected_length / wanted.blocks, rel=1e-4)
    assert terms.metrics["accuracy"][1].sum() == terms.metrics["acceptance"][1].sum() == wanted.labels
    assert {t.dtype for pair in terms.metrics.values() for t in pair} == {torch.float32}
    assert ("confidence" in terms.metrics) == fields["enable_confidence_head"]
    if fields["enable_confidence_head"]:
        assert metric("confidence") == pytest.approx(sum(p for p, _ in wanted.confidences) / wanted.labels, rel=1e-4)
        assert metric("acceptance") == pytest.approx(sum(a for _, a in wanted.confidences) / wanted.labels, rel=1e-4)
        off = sum(abs(p - a) for p, a in wanted.confidences) / wanted.labels
        assert metric("confidence_error") == pytest.approx(off, rel=1e-4)
        for tenth in range(10):
            inside = [pair for pair in wanted.confidences if min(int(pair[0] * 10), 9) == tenth]
            for name, index in (("calibration_expected", 0), ("calibration_observed", 1)):
                numerator, count = terms.metrics[name]
                assert count[tenth] == len(inside)
                assert numerator[tenth].item() == pytest.approx(sum(pair[index] for pair in inside), rel=1e-4)


def test_only_final_states_before_a_counted_label_matter(target: Target) -> None:
    case = Case(target, make_draft(target, head()), batch_with_gaps(6))
    before = case.terms().numerator
    rows, valid = torch.arange(3).view(3, 1, 1), case.blocks.label_mask.long().cumprod(-1).bool()
    used = torch.zeros_like(case.batch.loss_mask)
    used[rows.expand_as(valid)[valid], case.blocks.label_index[valid] - 1] = True
    original = case.final
    case.final = torch.where(used.unsqueeze(-1), original, -7.0)
    torch.testing.assert_close(case.terms().numerator, before)
    first = used.nonzero()[0]
    case.final = original.clone()
    case.final[first[0], first[1]] += 5.0
    assert (case.terms().numerator - before).abs() > 1e-3


def test_labels_behind_a_gap_in_the_loss_mask_do_not_count(target: Target) -> None:
    case = Case(target, make_draft(target, head("rnn")), batch_with_gaps(6))
    mask = case.blocks.label_mask
    gaps = mask & ~mask.long().cumprod(-1).bool()
    assert gaps.any()
    before = case.terms()
    case.blocks.labels[gaps] = (case.blocks.labels[gaps] + 1) % VOCAB
    after = case.terms()
    torch.testing.assert_close(after.numerator, before.numerator)
    assert before.metrics["accuracy"][1].sum() == (mask & ~gaps).sum()


@pytest.mark.parametrize("fields", HEADS, ids=NAMES)
def test_a_batch_without_candidates_adds_nothing(target: Target, fields: dict[str, Any]) -> None:
    batch = ragged_batch(6)
    batch.loss_mask.zero_()
    case = Case(target, make_draft(target, fields), batch)
    terms = case.terms()
    assert (terms.numerator.item(), terms.denominator.item()) == (0.0, 0.0)
    terms.numerator.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in case.draft.parameters())
    assert all((numerator == 0).all() and (count == 0).all() for numerator, count in terms.metrics.values())


@pytest.mark.parametrize("fields", HEADS[:4], ids=NAMES[:4])
def test_mixed_precision_stays_near_fp32(target: Target, fields: dict[str, Any]) -> None:
    case = Case(target, make_draft(target, fields), batch_with_gaps(6))
    exact = case.terms()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = case.terms()
    assert rounded.numerator.dtype == torch.float32
    assert rounded.numerator.item() == pytest.approx(exact.numerator.item(), rel=0.05)
    assert rounded.numerator.item() != exact.numerator.item()
    rounded.numerator.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in case.draft.parameters())


def test_it_asks_for_the_target_s_final_state(target: Target) -> None:
    case = Case(target, make_draft(target, head()), ragged_batch(6))
    layout = METHOD.capture(case.draft.config)
    assert layout.widths == {TAPS: 2 * 32, FINAL_STATE: 32}
    assert algorithm("dflash").capture(case.draft.config).final_state is False
    outputs = BlockOutputs(case.hidden(), case.blocks, None, torch.zeros(()))
    with pytest.raises(DraftsmithError, match="final states"):
        METHOD.objective(case.draft.config, case.section).terms(case.draft, target.ends, outputs)


# --- decoding -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fields", HEADS, ids=NAMES)
def test_step_by_step_logits_are_those_of_training(target: Target, fields: dict[str, Any]) -> None:
    """The filler, led along the true tokens, sees at each step what the objective saw of that slot."""
    case = Case(target, make_draft(target, fields), ragged_batch(7))
    hidden = case.hidden()
    valid = case.blocks.label_mask.all(-1)
    assert valid.sum() > 3
    seen: list[Tensor] = []

    def forced(logits: Tensor, draw: int) -> tuple[Tensor, None]:
        assert draw == len(seen)
        seen.append(logits)
        return case.blocks.labels[valid][:, draw], None

    filler = filler_of(METHOD, case.draft, target.ends)
    found = filler.fill(hidden[valid], case.blocks.input_ids[valid][:, 0], forced)
    assert torch.equal(found.token_ids, case.blocks.labels[valid])
    for row, (states_of_row, previous) in enumerate(
        zip(hidden[valid], case.blocks.previous_ids[valid].tolist(), strict=True)
    ):
        _, wanted, _ = slot_logits(case.draft, target, list(states_of_row), previous)
        for slot in range(SIZE):
            torch.testing.assert_close(seen[slot][row], wanted[slot], rtol=1e-5, atol=1e-5)
    # The objective's own numbers, too: its cross-entropy is that of these logits.
    module = case.draft.head
    embedded = module.markov_head.embed(case.blocks.previous_ids)
    latents = module.markov_head.latents(embedded, hidden)[valid]
    bias = latents @ module.markov_head.output_weight.T
    together = case.draft.logits(hidden[valid], target.ends) + bias
    torch.testing.assert_close(torch.stack(seen, dim=1), together, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("num_proposals", [None, 1, 3])
@pytest.mark.parametrize("fields", HEADS[:4], ids=NAMES[:4])
def test_proposals_follow_the_tokens_chosen(target: Target, fields: dict[str, Any], num_proposals: int | None) -> None:
    draft = make_draft(target, fields)
    hidden, anchors = torch.randn(4, SIZE, 32, generator=torch.Generator().manual_seed(2)), torch.tensor([1, 9, 30, 9])

    def greedy(logits: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        return logits.argmax(-1), logits.softmax(-1)

    filler = filler_of(METHOD, draft, target.ends, num_proposals, min_survival=0.3)
    found = filler.fill(hidden, anchors, greedy)
    width = filler.num_proposals
    assert width == (num_proposals or SIZE)
    assert found.q is not None
    assert found.count is not None
    assert found.q.shape == (4, width, VOCAB)
    for row in range(4):
        previous, survival, count = [int(anchors[row])], 1.0, 0
        for slot in range(width):
            _, final, confidence = slot_logits(draft, target, list(hidden[row, : slot + 1]), previous)
            torch.testing.assert_close(found.q[row, slot], final[-1].softmax(-1))
            assert found.token_ids[row, slot] == final[-1].argmax()
            previous.append(int(final[-1].argmax()))
            survival *= float(confidence[-1].sigmoid())
            count += survival >= 0.3
        assert found.count[row] == count
    plain = filler_of(METHOD, draft, target.ends, num_proposals).fill(hidden, anchors, greedy)
    assert torch.equal(plain.token_ids, found.token_ids)
    assert plain.count is None
    strict = filler_of(METHOD, draft, target.ends, num_proposals, min_survival=1.0).fill(hidden, anchors, greedy)
    assert strict.count is not None
    assert (strict.count == 0).all()


def test_block_geometry_is_anchor_first(target: Target) -> None:
    layout = METHOD.block_layout(make_draft(target, head()).config)
    assert layout.kind is BlockKind.ANCHOR_FIRST
    assert (layout.max_proposals, layout.verify_width(layout.max_proposals)) == (SIZE, SIZE + 1)


@torch.no_grad()
def test_a_draft_without_a_markov_head_proposes_each_slots_own_token(target: Target) -> None:
    draft = make_draft(target, WITHOUT_MARKOV)
    assert [name for name, _ in draft.named_parameters() if "markov" in name] == []
    hidden, anchors = torch.randn(4, SIZE, 32, generator=torch.Generator().manual_seed(3)), torch.tensor([1, 9, 30, 9])
    found = filler_of(METHOD, draft, target.ends).fill(hidden, anchors, lambda logits, draw: (logits.argmax(-1), None))
    assert torch.equal(found.token_ids, draft.argmax(hidden, target.ends))
    for option in ({"rollout": "dense"}, {"rollout": "pruned"}, {"tensor_parallel": True}):
        with pytest.raises(DraftsmithError, match=r"no Markov head \(markov_rank is 0\)"):
            filler_of(METHOD, draft, target.ends, **option)
