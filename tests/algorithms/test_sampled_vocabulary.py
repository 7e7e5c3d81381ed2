"""The sampled softmax: exact when everything is drawn, unbiased in its partition function, whole in evaluation."""

import torch

from draftsmith.algorithms.dflash import DFlashObjectiveOptions, DFlashSection
from draftsmith.algorithms.sampled_vocabulary import SampledVocabulary
from draftsmith.algorithms.trainee import Terms
from tests.algorithms.test_dflash import VOCAB, anchors_for, features_of, make_draft, terms_of
from tests.blocks.packed import ragged_batch
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft


def _logits(sample, ends, hidden, draft):
    return draft.logits(hidden, ends), sample.logits(hidden, draft)


def test_drawing_everything_is_the_whole_softmax():
    target = tiny_target(vocab_size=53)
    draft = tiny_draft(target)
    labels = torch.tensor([3, 50, 3, 17])
    sample = SampledVocabulary.draw(labels, target.ends, negatives=1000)
    assert sample.token_ids.tolist() == list(range(53))
    whole, sampled = _logits(sample, target.ends, torch.randn(4, target.hidden_size), draft)
    torch.testing.assert_close(sampled, whole)
    assert torch.equal(sample.token_ids[sample.index(labels)], labels)


def test_the_partition_function_is_estimated_without_bias():
    target = tiny_target(vocab_size=400)
    draft = tiny_draft(target)
    hidden = 0.3 * torch.randn(1, target.hidden_size)
    sums = []
    for seed in range(300):
        # Different labels seed different draws; the estimate is of the same sum over the whole vocabulary.
        sample = SampledVocabulary.draw(torch.tensor([seed % 7, 7 + seed]), target.ends, negatives=60)
        assert len(sample.token_ids) == 62
        assert torch.equal(sample.token_ids, sample.token_ids.unique())
        whole, sampled = _logits(sample, target.ends, hidden, draft)
        sums.append(sampled.exp().sum() / whole.exp().sum())
    assert abs(float(torch.stack(sums).mean()) - 1) < 0.02


def test_the_same_micro_batch_gets_the_same_sample():
    ends = tiny_target(vocab_size=200).ends
    first, again = (SampledVocabulary.draw(torch.tensor([5, 9]), ends, negatives=20) for _ in range(2))
    other = SampledVocabulary.draw(torch.tensor([5, 10]), ends, negatives=20)
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.token_ids, other.token_ids)


def test_training_samples_and_evaluation_does_not():
    target = tiny_target("llama", vocab_size=VOCAB)
    draft = make_draft(target)
    batch = ragged_batch(4)
    features = features_of(batch, draft)

    def terms(negatives: int | None) -> Terms:
        section = DFlashSection(objective=DFlashObjectiveOptions(negatives=negatives))
        return terms_of(target, draft, section, batch, features, anchors_for(batch, draft, section))

    draft.train()
    whole, everything, sampled = terms(None), terms(10_000), terms(8)
    torch.testing.assert_close(everything.numerator, whole.numerator)
    torch.testing.assert_close(everything.metrics["accuracy"], whole.metrics["accuracy"])
    assert not torch.isclose(sampled.numerator, whole.numerator, rtol=1e-4)
    draft.eval()
    torch.testing.assert_close(terms(8).numerator, whole.numerator)
