"""Which samples cannot be captured, why, and how many are too many."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError

SHOWN_IDS = 5


class Reason(StrEnum):
    """Why a sample is refused."""

    EMPTY = "no tokens"
    DUPLICATE = "an id that an earlier sample has"
    OUTSIDE_VOCABULARY = "token ids outside the target's vocabulary"
    UNSUPERVISED = "no supervised token"
    TOO_LONG = "more tokens than the target has positions"
    NOT_FINITE = "features with NaN or Inf"
    WITHOUT_MASK = "no loss mask of their own and no conversation with the same tokens"


@dataclass
class Refusals:
    """The refused samples' ids by reason, of `total` samples, and the share of them that is allowed."""

    total: int
    max_share: float
    ids: dict[Reason, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many samples are refused."""
        return sum(map(len, self.ids.values()))

    def add(self, reason: Reason, sample_id: str) -> None:
        """Refuse one sample; `check_share` says when they are too many."""
        self.ids.setdefault(reason, []).append(sample_id)

    def check_share(self) -> None:
        """Raise `DraftsmithError` where more than the allowed share is refused, or all are."""
        if self.count <= self.max_share * self.total and self.count < self.total:
            return
        reasons = "; ".join(f"{len(ids)} with {reason} ({shown_ids(ids)})" for reason, ids in self.ids.items())
        raise DraftsmithError(
            f"{self.count} of {self.total} samples cannot be captured: {reasons}. At most a share of "
            f"{self.max_share:g} is allowed (capture.max_refused_share), never all: mend the data or raise the share"
        )


def shown_ids(ids: Sequence[str]) -> str:
    """The first of some ids, for a line of text."""
    return ", ".join(ids[:SHOWN_IDS]) + (", ..." if len(ids) > SHOWN_IDS else "")


def accept(samples: Sequence[Sample], vocab_size: int, max_length: int, refusals: Refusals) -> list[Sample]:
    """The samples that a target of `vocab_size` tokens and `max_length` positions takes; the rest go to `refusals`."""
    accepted: list[Sample] = []
    seen: set[str] = set()
    for sample in samples:
        reason = refusal(sample, vocab_size, max_length, seen)
        seen.add(sample.id)
        if reason is None:
            accepted.append(sample)
        else:
            refusals.add(reason, sample.id)
    return accepted


def refusal(sample: Sample, vocab_size: int, max_length: int, seen: set[str]) -> Reason | None:
    """Why a sample cannot be captured, None where it can; `seen`: the ids of the samples before it."""
    if sample.id in seen:
        return Reason.DUPLICATE
    if sample.input_ids.numel() == 0:
        return Reason.EMPTY
    if int(sample.input_ids.min()) < 0 or int(sample.input_ids.max()) >= vocab_size:
        return Reason.OUTSIDE_VOCABULARY
    if not bool(sample.loss_mask.any()):
        return Reason.UNSUPERVISED
    if sample.input_ids.shape[0] > max_length:
        return Reason.TOO_LONG
    return None
