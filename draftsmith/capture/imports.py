"""`capture --import`: feature files of another project into a store, without running the target over them."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.foreign import FORMATS, ForeignDocument
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.plan import SizeEstimate, estimate_of, stored_documents
from draftsmith.capture.refusals import Reason, Refusals, refusal
from draftsmith.capture.report import CaptureReport
from draftsmith.capture.room import check_room
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.encoding import encode, finite_rows
from draftsmith.features.identity import Provenance
from draftsmith.features.manifest import STORE_DTYPES, StoreHeader
from draftsmith.features.record import Record
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.features.shards import StoreWriter, claimed_by, finish_store
from draftsmith.targets.taps import tap_fault

_log = logging.getLogger(__name__)

FINAL_STATES = ("post_norm", "pre_norm", "none")

# Two engines' bfloat16 features differ by a few percent; other layers, or another norm, by about their whole length.
LARGEST_DIFFERENCE = 0.25


@dataclass(frozen=True)
class ImportOptions:
    """What the files do not say. directory, source: where they lie and whose they are (a name in `foreign.FORMATS`);
    tap_ids: the 0-based layers whose outputs they hold, in their order; final_state: `post_norm`, `pre_norm`, or
    `none` where they hold none or it is not to be used; check_samples: so many documents are compared with what the
    target computes. Raises `DraftsmithError` for names that are not known."""

    directory: Path
    source: str
    tap_ids: tuple[int, ...]
    final_state: str
    check_samples: int = 0

    def __post_init__(self) -> None:
        if self.source not in FORMATS:
            raise DraftsmithError(f"--from is {self.source!r}; feature files are read of {', '.join(FORMATS)}")
        if self.final_state not in FINAL_STATES:
            raise DraftsmithError(f"--final-state is {self.final_state!r}; it is one of {', '.join(FINAL_STATES)}")
        fault = tap_fault(self.tap_ids, None, "--tap-ids")
        if fault is not None:
            raise DraftsmithError(fault)
        if self.check_samples < 0:
            raise DraftsmithError(
                f"--check-samples is {self.check_samples}; give a number of documents, or 0 to compare none"
            )
        if not self.directory.is_dir():
            raise DraftsmithError(f"--import: there is no directory {self.directory}")


def import_features(
    source: ImportOptions,
    layout: CaptureLayout,
    directory: Path | str,
    options: CaptureOptions,
    provenance: Provenance,
    *,
    max_length: int,
    samples: Sequence[Sample] = (),
    norm: Callable[[Tensor], Tensor] | None = None,
    check: CaptureBackend | None = None,
    progress: Progress | None = None,
) -> CaptureReport:
    """Write the files of `source` into a store of `layout` (in `options.dtype`), resuming what is there by id.

    `provenance` and `max_length` (the target's positions) are taken on the caller's word. `samples` give loss masks to
    files that have none, found by equal tokens. `norm` turns a state before the target's final norm into the one after
    it. `check` is the target itself, for the first `source.check_samples` documents, which are computed and compared
    with the files.

    Raises `DraftsmithError` for a file that is damaged or has other fields or widths, for layers or a final state that
    `layout` needs and the files do not hold, where a document differs from what `check` computes, where documents are
    to be compared and `check` is missing, and as `capture`.
    """
    start = time.monotonic()
    directory = Path(directory)
    layout = replace(layout, dtype=STORE_DTYPES[options.dtype])
    header = StoreHeader.for_layout(layout, provenance.target, provenance.tokenizer)
    _check_holds(source, layout)
    files = FORMATS[source.source].files(source.directory)
    reader = _Reader(source, layout, norm, {_key(sample.input_ids): sample for sample in reversed(samples)})
    finished: dict[str, bytes] = {}
    if claimed_by(directory, header):
        finished = {stored.id: _digest(stored.input_ids, stored.loss_mask) for stored in stored_documents(directory)}
    estimate = _estimate(files, reader, directory)
    _log.info("import: about %s (%d samples finished before)", estimate, len(finished))
    check_room(estimate, layout, directory, options.force)
    for path in islice(files, source.check_samples):
        if check is None:
            raise DraftsmithError(f"{source.check_samples} documents are to be compared, and `check` is None")
        compare(check, reader.read(path), path, reader, layout)

    refusals = Refusals(len(files), options.max_refused_share)
    intake = _Intake(reader, refusals, finished, directory, provenance.target.vocab_size, max_length)
    captured = 0
    with (
        StoreWriter(directory, header, options.shard_bytes) as writer,
        (progress or SilentProgress()).stage("import", total=len(files), unit="files") as stage,
    ):
        for document in map(reader.read, files):
            stage.advance()
            record = intake.new_record(document)
            if record is not None:
                writer.add(record)
                captured += 1
    report = CaptureReport(
        directory=directory,
        manifest=finish_store(directory),
        estimate=estimate,
        captured=captured,
        resumed=len(finished.keys() & intake.seen),
        refused={reason: tuple(ids) for reason, ids in refusals.ids.items()},
        seconds=time.monotonic() - start,
    )
    report.write()
    return report


def _check_holds(source: ImportOptions, layout: CaptureLayout) -> None:
    """Raise `DraftsmithError` for what the draft needs and the files do not hold."""
    missing = sorted(set(layout.tap_ids) - set(source.tap_ids))
    if missing:
        raise DraftsmithError(
            f"the draft taps layers {list(layout.tap_ids)} and the files hold {list(source.tap_ids)} (--tap-ids): "
            f"{missing} are missing; set draft.target_layer_ids to layers that are there"
        )
    if layout.final_state and source.final_state == "none":
        raise DraftsmithError(
            "the draft needs the target's final state and --final-state is 'none'; choose another method"
        )


def _estimate(files: Sequence[Path], reader: "_Reader", directory: Path) -> SizeEstimate:
    """The size of the store, from the tokens of the first file and the sizes of all."""
    first = reader.read(files[0])
    size = sum(path.stat().st_size for path in files)
    tokens = round(first.input_ids.shape[0] * size / files[0].stat().st_size)
    return estimate_of(len(files), tokens, reader.layout, directory)


class _Reader:
    """Documents of files, checked for what the command line says of them, and their features as the layout wants."""

    def __init__(
        self,
        source: ImportOptions,
        layout: CaptureLayout,
        norm: Callable[[Tensor], Tensor] | None,
        sample_by_tokens: Mapping[bytes, Sample],
    ) -> None:
        self.source = source
        self.layout = layout
        self.norm = norm
        self.sample_by_tokens = sample_by_tokens

    def read(self, path: Path) -> ForeignDocument:
        """One file. Raises `DraftsmithError` where it is not what it is said to be."""
        document = FORMATS[self.source.source].read(path)
        length, hidden = document.input_ids.shape[0], self.layout.hidden_size
        wanted = [length, len(self.source.tap_ids) * hidden]
        if list(document.taps.shape) != wanted:
            raise DraftsmithError(
                f"{path} holds features {list(document.taps.shape)}; {length} tokens of {len(self.source.tap_ids)} "
                f"layers (--tap-ids) of the target's width {hidden} are {wanted}"
            )
        if document.loss_mask is not None and document.loss_mask.shape[0] != length:
            raise DraftsmithError(f"{path}: loss_mask has {document.loss_mask.shape[0]} entries for {length} tokens")
        if not self.layout.final_state:
            return replace(document, final_state=None)
        if document.final_state is None or list(document.final_state.shape) != [length, hidden]:
            found = None if document.final_state is None else list(document.final_state.shape)
            raise DraftsmithError(f"{path}: the final state is {found}; the draft needs it as {[length, hidden]}")
        said = self.source.final_state == "pre_norm"
        if document.pre_norm is not None and document.pre_norm != said:
            raise DraftsmithError(
                f"{path} holds a final state {'before' if document.pre_norm else 'after'} the final norm, and "
                f"--final-state is {self.source.final_state!r}"
            )
        return document

    def features(self, document: ForeignDocument) -> dict[str, Tensor]:
        """name -> [S, width], in the layout's order of layers, the final state after the final norm."""
        by_layer = document.taps.unflatten(-1, (-1, self.layout.hidden_size))
        columns = [self.source.tap_ids.index(tap_id) for tap_id in self.layout.tap_ids]
        features = {TAPS: by_layer[:, columns].flatten(-2)}
        if document.final_state is not None:
            final = document.final_state
            if self.source.final_state == "pre_norm":
                if self.norm is None:
                    raise DraftsmithError("the files' final state is before the final norm, and no norm was given")
                final = self.norm(final)
            features[FINAL_STATE] = final
        return features

    def loss_mask(self, document: ForeignDocument) -> Tensor | None:
        """The document's own, or that of the sample with the same tokens."""
        if document.loss_mask is not None:
            return document.loss_mask
        sample = self.sample_by_tokens.get(_key(document.input_ids))
        return None if sample is None else sample.loss_mask


@dataclass
class _Intake:
    """Which documents become records of the store, and why the others do not.

    finished: id -> digest of what the store at `directory` holds already; vocab_size, max_length: the target's. `seen`
    holds the ids of all documents so far.
    """

    reader: _Reader
    refusals: Refusals
    finished: Mapping[str, bytes]
    directory: Path
    vocab_size: int
    max_length: int
    seen: set[str] = field(default_factory=set)

    def new_record(self, document: ForeignDocument) -> Record | None:
        """The record to store; None for a document that is refused or there already.

        Raises `DraftsmithError` for too many refused ones, and for one that the store holds with another content.
        """
        record, reason = self._record(document)
        self.seen.add(document.sample_id)
        if reason is not None:
            self.refusals.add(reason, document.sample_id)
            self.refusals.check_share()
        if record is None or record.sample_id not in self.finished:
            return record
        if self.finished[record.sample_id] != _digest(record.input_ids, record.loss_mask):
            raise DraftsmithError(
                f"{self.directory} holds sample {record.sample_id!r} with other tokens or another loss mask: the files "
                "have changed since, or the store is damaged; import into another directory, or delete "
                f"{self.directory}"
            )
        return None

    def _record(self, document: ForeignDocument) -> tuple[Record | None, Reason | None]:
        loss_mask = self.reader.loss_mask(document)
        if loss_mask is None:
            return None, Reason.WITHOUT_MASK
        sample = Sample(document.sample_id, document.input_ids, loss_mask)
        reason = refusal(sample, self.vocab_size, self.max_length, self.seen)
        if reason is not None:
            return None, reason
        stored = encode(self.reader.features(document), self.reader.layout)
        if not bool(finite_rows(stored).all()):
            return None, Reason.NOT_FINITE
        return Record(sample.id, sample.input_ids, sample.loss_mask, stored), None


def compare(
    target: CaptureBackend, document: ForeignDocument, path: Path, reader: _Reader, layout: CaptureLayout
) -> None:
    """Raise `DraftsmithError` where a document's features are not about what the target computes for its tokens."""
    sample = Sample(document.sample_id, document.input_ids, torch.ones_like(document.input_ids, dtype=torch.bool))
    (computed,) = target.features([sample])
    for what, found, wanted in _layers(reader.features(document), computed, layout):
        difference = float((found - wanted).norm() / wanted.norm())
        if not difference <= LARGEST_DIFFERENCE:
            raise DraftsmithError(
                f"{path}: {what} differs from what the target computes there by {difference:.0%} of its length (at "
                f"most {LARGEST_DIFFERENCE:.0%} is allowed): see that the target, --tap-ids and --final-state are "
                "those that the files were made with (other projects often count layers one higher)"
            )


def _layers(
    found: Mapping[str, Tensor], computed: Mapping[str, Tensor], layout: CaptureLayout
) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in layout.widths:
        pairs = [t[name].float().cpu().unflatten(-1, (-1, layout.hidden_size)).unbind(1) for t in (found, computed)]
        for number, (ours, theirs) in enumerate(zip(*pairs, strict=True)):
            yield (f"layer {layout.tap_ids[number]}" if name == TAPS else "the final state"), ours, theirs


def _key(input_ids: Tensor) -> bytes:
    return input_ids.to(torch.int64).numpy().tobytes()


def _digest(input_ids: Tensor, loss_mask: Tensor) -> bytes:
    return hashlib.sha256(_key(input_ids) + loss_mask.numpy().tobytes()).digest()
