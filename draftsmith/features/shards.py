"""Writing a feature store: shards of bounded size, each complete or absent, and the manifest as the last file."""

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from draftsmith.base.files import TEMPORARY_SUFFIX, replacing
from draftsmith.errors import DraftsmithError
from draftsmith.features.files import Pieces, check_size, file_entry, open_safetensors, raw_bytes, write_safetensors
from draftsmith.features.manifest import (
    MANIFEST_FILE,
    FileEntry,
    ShardEntry,
    StoreError,
    StoreHeader,
    StoreManifest,
    header_differences,
    read_header,
    to_json,
)
from draftsmith.features.record import Record, check_record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.tables import ShardTokens, StoreIndex

HEADER_FILE = "header.json"
TOKENS_ENDING = ".tokens.safetensors"
FEATURES_ENDING = ".features.safetensors"
DEFAULT_SHARD_BYTES = 1 << 30
# Shards that are hashed, written and synced at a time, beside the one that fills: one thread is slower than a GPU.
PARALLEL_SHARDS = 3

# Metadata of a tokens file.
_FEATURES_BYTES, _FEATURES_SHA256 = "features_bytes", "features_sha256"


@dataclass(frozen=True)
class FinishedShard:
    """A shard that lies complete in a store's directory, whether or not a manifest lists it yet."""

    entry: ShardEntry
    sample_ids: list[str]
    lengths: list[int]
    supervised: list[int]


def existing_header(directory: Path) -> StoreHeader | None:
    """The header of the finished or unfinished store in `directory`, None where there is none.

    Raises `StoreError` where the header is damaged, or missing beside files of a store.
    """
    if (directory / HEADER_FILE).exists():
        return read_header(directory / HEADER_FILE)
    orphan = next(directory.glob(f"shard-*{TOKENS_ENDING}"), None)
    if orphan is not None:
        raise StoreError(f"{orphan} lies there without a {HEADER_FILE} that says of which target: delete {directory}")
    return None


def claimed_by(directory: Path, header: StoreHeader) -> bool:
    """Whether `directory` already holds (part of) a store of exactly this header; False where it holds none.

    Raises `StoreError`, naming every field that differs, where it holds another store.
    """
    existing = existing_header(directory)
    if existing is None:
        return False
    compared = header.model_copy(update={"target": header.target.beside(existing.target)})
    if existing != compared:
        raise StoreError(
            f"{directory} holds a store of something else: {header_differences(existing, compared)}. "
            "Give another directory, or delete this one"
        )
    return True


class StoreWriter:
    """Appends records to a store in `directory`, resuming what is there.

    Several writers (one a process) may fill one directory, each with its own `number`; their samples must be disjoint.
    Records become durable a shard at a time: features file, then tokens file; a shard counts once its tokens file is
    there. `finish_store` then makes the whole a store. Full shards are written by threads of their own, so that adding
    goes on meanwhile; memory holds up to `PARALLEL_SHARDS` + 1 of them. Leaving the context writes the last shard, also
    when an exception ends the work: records that were added are good whatever came after.

    Raises `StoreError` where the directory holds another store (every differing field is named) or where another
    process is writing with the same number.
    """

    def __init__(
        self, directory: Path | str, header: StoreHeader, shard_bytes: int = DEFAULT_SHARD_BYTES, number: int = 0
    ) -> None:
        if shard_bytes < 1:
            raise DraftsmithError(f"capture.shard_bytes is {shard_bytes}; it must be at least 1")
        self.directory = Path(directory)
        self.header = header
        self.layout = header.layout
        self.shard_bytes = shard_bytes
        self._prefix = f"shard-{number:04d}-"
        self._pending: list[Record] = []
        self._pending_ids: set[str] = set()
        self._pending_bytes = 0
        self._threads = ThreadPoolExecutor(PARALLEL_SHARDS, thread_name_prefix="write shard")
        self._writing: deque[_Writing] = deque()

        self.directory.mkdir(parents=True, exist_ok=True)
        new = not claimed_by(self.directory, header)
        self._lock = _lock(self.directory / _lock_name(number))
        if new:
            with replacing(self.directory / HEADER_FILE) as file:
                file.write(to_json(self.header))
        self._remove_leftovers()
        self._next_shard = 1 + max(
            (int(path.name[len(self._prefix) :].split(".")[0]) for path in self._own_files(TOKENS_ENDING)), default=-1
        )

    def _own_files(self, ending: str) -> list[Path]:
        return sorted(self.directory.glob(f"{self._prefix}*{ending}"))

    def _remove_leftovers(self) -> None:
        for path in self._own_files(TEMPORARY_SUFFIX):
            path.unlink()
        for path in self._own_files(FEATURES_ENDING):
            if not path.with_name(path.name.replace(FEATURES_ENDING, TOKENS_ENDING)).exists():
                path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the writer's number and threads. Leaving the context does it, after writing the last shard."""
        self._threads.shutdown()
        os.close(self._lock)

    def add(self, record: Record) -> None:
        """Append one record of the tensors in `CaptureLayout.stored`.

        Raises `DraftsmithError` where it does not fit the layout or its id is already pending, and what writing an
        earlier shard raised.
        """
        check_record(record, self.layout)
        if record.sample_id in self._pending_ids:
            raise DraftsmithError(f"sample {record.sample_id!r} was given twice; ids must be unique in a store")
        size = record.input_ids.shape[0] * self.layout.bytes_per_token
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._start_writing()
        self._pending.append(record)
        self._pending_ids.add(record.sample_id)
        self._pending_bytes += size
        if self._pending_bytes >= self.shard_bytes:
            self._start_writing()

    def flush(self) -> None:
        """Write the records so far as one shard, and wait until every shard is written. A shard whose writing failed
        before is tried once more; raises `StoreError` where it fails again."""
        for place, shard in enumerate(self._writing):
            if shard.done.done() and shard.done.exception() is not None:
                self._writing[place] = self._start(shard.stem, shard.records)
        if self._pending:
            self._start_writing()
        while self._writing:
            self._wait()

    def _start_writing(self) -> None:
        while len(self._writing) >= PARALLEL_SHARDS or (self._writing and self._writing[0].done.done()):
            self._wait()
        self._writing.append(self._start(f"{self._prefix}{self._next_shard:06d}", self._pending))
        self._next_shard += 1
        self._pending, self._pending_ids, self._pending_bytes = [], set(), 0

    def _start(self, stem: str, records: list[Record]) -> "_Writing":
        return _Writing(stem, records, self._threads.submit(_write_shard, self.directory, stem, records, self.layout))

    def _wait(self) -> None:
        self._writing[0].done.result()  # raises here what failed there; the shard stays for `flush`
        self._writing.popleft()


@dataclass(frozen=True)
class _Writing:
    """A shard that a thread is writing."""

    stem: str
    records: list[Record]
    done: Future[None]


def _write_shard(directory: Path, stem: str, records: list[Record], layout: CaptureLayout) -> None:
    # The documents' checksums are taken beside the writing: one after the other they would cost a third of its time.
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside:
        checksums = beside.submit(_checksums, records, list(layout.stored))
        features = write_safetensors(
            directory / f"{stem}{FEATURES_ENDING}",
            {name: Pieces([record.features[name] for record in records]) for name in layout.stored},
            metadata={},
        )
    write_tokens(directory / f"{stem}{TOKENS_ENDING}", ShardTokens.of(records, checksums.result()), features)


def write_tokens(path: Path, tokens: ShardTokens, features: FileEntry) -> None:
    """Write (or replace) the tokens file of the shard whose features file is `features`; with it the shard counts."""
    tokens.write(path, {_FEATURES_BYTES: str(features.bytes), _FEATURES_SHA256: features.sha256})


def _checksums(records: list[Record], names: list[str]) -> dict[str, list[int]]:
    return {name: [checksum(record.features[name]) for record in records] for name in names}


def checksum(tensor: Tensor) -> int:
    """CRC-32 of one document's rows of one feature: what a random access checks without reading the whole shard."""
    return zlib.crc32(raw_bytes(tensor))


def finished_shards(directory: Path | str) -> list[FinishedShard]:
    """The complete shards in `directory`, by name.

    Raises `StoreError` where one is damaged: by the order of writing that is never the trace of a killed writer.
    """
    directory = Path(directory)
    return [_finished_shard(path) for path in sorted(directory.glob(f"shard-*{TOKENS_ENDING}"))]


def _finished_shard(path: Path) -> FinishedShard:
    features = features_entry(path)
    check_size(path.parent, features)
    tokens = ShardTokens.read(path)
    supervised = tokens.supervised
    entry = ShardEntry(
        tokens_file=file_entry(path),
        features_file=features,
        samples=len(tokens.sample_ids),
        tokens=sum(tokens.lengths),
        supervised_tokens=sum(supervised),
    )
    return FinishedShard(entry, tokens.sample_ids, tokens.lengths, supervised)


def features_entry(path: Path) -> FileEntry:
    """The features file that belongs to the tokens file `path`, as the latter says. Raises `StoreError`."""
    metadata = open_safetensors(path).metadata() or {}
    try:
        return FileEntry(
            name=path.name.replace(TOKENS_ENDING, FEATURES_ENDING),
            bytes=int(metadata[_FEATURES_BYTES]),
            sha256=metadata[_FEATURES_SHA256],
        )
    except (KeyError, ValueError) as error:
        raise StoreError(f"{path} does not say what its features file is: the file is damaged") from error


def finish_store(directory: Path | str) -> StoreManifest:
    """Index the finished shards and write the manifest, once every writer has closed.

    Raises `StoreError` where there is no record at all, where two shards hold the same sample, and while one writes.
    """
    if existing_header(Path(directory)) is None:
        raise StoreError(f"{directory} holds no capture to finish")
    with sole_writer(Path(directory)):
        return write_manifest(Path(directory))


def write_manifest(directory: Path) -> StoreManifest:
    """As `finish_store`, for who is the `sole_writer` already."""
    header = read_header(directory / HEADER_FILE)
    shards = finished_shards(directory)
    if not shards:
        raise StoreError(f"{directory}: not one record was captured; an empty store is of no use")
    _check_unique(shards)
    index = _write_index(directory, shards)
    manifest = StoreManifest(
        **dict(header),
        samples=sum(shard.entry.samples for shard in shards),
        tokens=sum(shard.entry.tokens for shard in shards),
        supervised_tokens=sum(shard.entry.supervised_tokens for shard in shards),
        index=index,
        shards=tuple(shard.entry for shard in shards),
    )
    with replacing(directory / MANIFEST_FILE) as file:
        file.write(to_json(manifest))
    listed = {index.name, *(shard.entry.features_file.name for shard in shards)}
    for pattern in ("index-*.safetensors", f"*{TEMPORARY_SUFFIX}", f"shard-*{FEATURES_ENDING}"):
        for path in directory.glob(pattern):  # what older manifests and killed writers left
            if path.name not in listed:
                path.unlink()
    return manifest


def _check_unique(shards: Iterable[FinishedShard]) -> None:
    owner: dict[str, str] = {}
    for shard in shards:
        for sample_id in shard.sample_ids:
            name = shard.entry.tokens_file.name
            if sample_id in owner:
                raise StoreError(f"sample {sample_id!r} is in both {owner[sample_id]} and {name}")
            owner[sample_id] = name


def _write_index(directory: Path, shards: list[FinishedShard]) -> FileEntry:
    index = StoreIndex(
        [sample_id for shard in shards for sample_id in shard.sample_ids],
        [length for shard in shards for length in shard.lengths],
        [count for shard in shards for count in shard.supervised],
    )
    # A name of its own for every content: an old manifest keeps its index until the new manifest stands.
    content = hashlib.sha256("".join(shard.entry.tokens_file.sha256 for shard in shards).encode()).hexdigest()
    path = directory / f"index-{content[:16]}.safetensors"
    # With the content in its metadata its checksum, which tells stores apart, covers the masks too.
    return index.write(path, {"tokens": content})


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Keep every writer out of the store in `directory`: all numbers that writers have had there, and the first.

    A capture asks for the first number before any of its processes writes. Raises `StoreError` while one is at work.
    """
    with ExitStack() as held:
        for path in sorted({directory / _lock_name(0), *directory.glob(_lock_name("*"))}):
            held.callback(os.close, _lock(path))
        yield


def _lock_name(number: int | str) -> str:
    return f"writer-{number:0>4}.lock" if isinstance(number, int) else f"writer-{number}.lock"


def _lock(path: Path) -> int:
    """Hold `path` for this process; the system lets go of it when the process dies, however it dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreError(f"another process is writing into {path.parent}: wait for it or end it") from error
    return descriptor
