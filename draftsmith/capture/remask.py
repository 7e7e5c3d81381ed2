"""`capture --remask`: the data's new loss masks into a store that is there, without running the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.capture.plan import same_documents
from draftsmith.capture.refusals import Reason, Refusals, accept
from draftsmith.data.sample import Sample
from draftsmith.features.identity import Provenance
from draftsmith.features.manifest import StoreError, header_differences, read_header
from draftsmith.features.remask import rewrite_masks
from draftsmith.features.shards import HEADER_FILE, existing_header, sole_writer, write_manifest


@dataclass(frozen=True)
class RemaskReport:
    """changed: documents whose mask is another now, of `documents`; unsupervised: ids of those that have no supervised
    token any more, and count for nothing in training; finished: whether the store is whole."""

    documents: int
    changed: int
    unsupervised: tuple[str, ...]
    finished: bool

    def lines(self) -> list[str]:
        """The report for people."""
        lines = [f"{self.changed:,} of {self.documents:,} documents have a new loss mask; no feature was touched"]
        if self.unsupervised:
            lines.append(f"{len(self.unsupervised):,} have no supervised token now: {', '.join(self.unsupervised)}")
        if not self.finished:
            lines.append("samples of the data are still to be captured: `draftsmith capture` goes on")
        return lines


def remask(
    directory: Path | str,
    samples: Sequence[Sample],
    provenance: Provenance,
    *,
    max_length: int,
    max_refused_share: float,
) -> RemaskReport:
    """Give every document in the store at `directory` the loss mask of the sample with its id.

    The samples' tokens must be the stored ones: only what is supervised may have changed. Raises `DraftsmithError`,
    before anything is touched, for a directory without a store, one that another process writes into, one of another
    target or tokenizer, a document that is not among the samples or has other tokens there, and more than a share of
    `max_refused_share` without a supervised token.
    """
    directory = Path(directory)
    if existing_header(directory) is None:
        raise StoreError(f"{directory} holds no feature store to remask; run `draftsmith capture` first")
    with sole_writer(directory):  # from the first look at what is stored to the manifest
        return _remask(directory, samples, provenance, max_length, max_refused_share)


def _remask(
    directory: Path, samples: Sequence[Sample], provenance: Provenance, max_length: int, max_refused_share: float
) -> RemaskReport:
    header = read_header(directory / HEADER_FILE)
    # The template's text may differ: it decides masks too. That it gives the same tokens is checked below.
    wanted_header = header.model_copy(update={"target": provenance.target, "tokenizer": provenance.tokenizer})
    known, now = header.tokenizer, provenance.tokenizer
    same_vocabulary = known is None or (now is not None and known.vocabulary_hash == now.vocabulary_hash)
    now_target = provenance.target.beside(header.target)
    same_weights = (header.target.weights_hash, header.target.layers_hash) == (
        now_target.weights_hash,
        now_target.layers_hash,
    )
    if not same_weights or not same_vocabulary:
        raise StoreError(
            f"{directory} holds a store of something else: {header_differences(header, wanted_header)}; name the "
            "target that it was captured from"
        )
    wanted_header = wanted_header.model_copy(update={"target": header.target})
    wanted = {sample.id: sample for sample in reversed(samples)}
    stored = dict(same_documents(directory, wanted))
    refusals = Refusals(len(stored), max_refused_share)
    for sample_id in stored:
        if not bool(wanted[sample_id].loss_mask.any()):
            refusals.add(Reason.UNSUPERVISED, sample_id)
    if refusals.count:
        refusals.check_share()
    changed = sum(not torch.equal(mask, wanted[sample_id].loss_mask) for sample_id, mask in stored.items())
    rewrite_masks(directory, wanted_header, {sample_id: wanted[sample_id].loss_mask for sample_id in stored})
    usable = accept(samples, header.target.vocab_size, max_length, Refusals(len(samples), 1.0))
    finished = all(sample.id in stored for sample in usable)
    if finished:
        write_manifest(directory)
    return RemaskReport(len(stored), changed, tuple(refusals.ids.get(Reason.UNSUPERVISED, ())), finished)
