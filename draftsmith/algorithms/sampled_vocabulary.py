"""Cross-entropy over a sample of the vocabulary: what makes training on a CPU bearable.

The output head costs more than a small draft itself. Its softmax needs the label of each slot and an estimate of the
rest: the labels of the micro-batch, and tokens drawn at random whose share of the partition function is scaled up to
that of all tokens that are no label (importance-sampled softmax; Jean et al., arXiv 1412.2007, with uniform proposals).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafts.draft import Draft
from draftsmith.targets.ends import TargetEnds


@dataclass(frozen=True)
class SampledVocabulary:
    """token_ids [n] int64, ascending: every label of the micro-batch, and the drawn ones. offset [n] float32, added to
    their logits: 0 for labels, log(tokens that are no label / tokens drawn) for the drawn ones. ends: the target's
    ends with only these rows."""

    token_ids: Tensor
    offset: Tensor
    ends: TargetEnds

    @classmethod
    def draw(cls, labels: Tensor, ends: TargetEnds, negatives: int) -> "SampledVocabulary":
        """labels [m] int64; `negatives` other tokens at the most, drawn with a generator seeded by the labels, so that
        the same micro-batch gets the same sample in every run."""
        kept = torch.zeros(ends.vocab_size, dtype=torch.bool, device=labels.device)
        kept[labels] = True
        others = (~kept).nonzero().squeeze(-1)  # [V - labels]
        generator = torch.Generator().manual_seed(int(labels.sum()))
        count = min(negatives, len(others))
        drawn = others[torch.randperm(len(others), generator=generator)[:count].to(others.device)]
        token_ids = torch.cat((kept.nonzero().squeeze(-1), drawn)).sort().values
        scale = math.log(len(others) / count) if count else 0.0
        offset = torch.where(kept[token_ids], 0.0, scale)
        return cls(token_ids, offset, ends.rows(token_ids))

    def logits(self, hidden: Tensor, draft: Draft) -> Tensor:
        """hidden [..., H] -> logits of the sample, corrected for what it leaves out, [..., n]."""
        return draft.logits(hidden, self.ends) + self.offset

    def index(self, token_ids: Tensor) -> Tensor:
        """Tokens of the sample -> their index in it; any index for other tokens."""
        return torch.searchsorted(self.token_ids, token_ids).clamp(max=len(self.token_ids) - 1)
