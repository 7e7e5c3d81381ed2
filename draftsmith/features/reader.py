"""Reading a feature store: any document in constant time, from memory-mapped shards, checked as it is read."""

import bisect
from collections import OrderedDict
from collections.abc import Collection, Iterator
from copy import copy
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.features.encoding import decode
from draftsmith.features.files import SAFETENSORS_DTYPES, check_file, check_size, open_safetensors
from draftsmith.features.manifest import ShardEntry, StoreError, StoreManifest, read_manifest
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import checksum
from draftsmith.features.tables import ShardTokens, StoreIndex

# Open shards that a store keeps mapped; far below what an operating system allows a process.
MAX_OPEN_SHARDS = 256


class Store:
    """A finished feature store, read-only: `len(store)` records, `store[i] -> Record`, in the order of its shards.

    Every record is checked against its checksums when it is first read: `StoreError` names the damaged file. Damage
    that comes later, while the store is open, is not noticed. Instances can be pickled (a data loader's workers map the
    files anew).
    """

    def __init__(
        self,
        directory: Path,
        manifest: StoreManifest,
        index: StoreIndex,
        features: tuple[str, ...],
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.sample_ids = index.sample_ids
        """The id of every document."""
        self.lengths = index.lengths
        """The number of tokens of every document."""
        self.supervised = index.supervised
        """The number of supervised tokens of every document."""
        self.features = features
        """The names of the feature tensors that records carry."""
        self.checked = torch.zeros(manifest.samples, dtype=torch.bool)
        """Which documents were read and found whole; in shared memory, processes tell each other."""
        self._first = [0, *accumulate(shard.samples for shard in manifest.shards)]  # first document of each shard
        self._position: dict[str, int] = {}
        self._open: OrderedDict[int, _Shard] = OrderedDict()

    @classmethod
    def open(cls, directory: Path | str, features: Collection[str] | None = None) -> "Store":
        """Open a store. `features` limits what records carry (None: all that it holds).

        Raises `StoreError` where the manifest or the index is missing, damaged or of an unknown version.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        names = _held(directory, manifest, features)
        return cls(directory, manifest, _read_index(directory, manifest), names)

    def carrying(self, features: Collection[str]) -> "Store":
        """The same store, opened apart from this one; its records carry these features. Raises `StoreError` for one
        that it does not hold."""
        other = copy(self)
        other.features = _held(self.directory, self.manifest, features)
        other.checked = torch.zeros_like(self.checked)
        other._open = OrderedDict()
        return other

    def __len__(self) -> int:
        return self.manifest.samples

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Record:
        """The record at `index` (negative: from the end). Raises `IndexError` past the end, `StoreError` for damage."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"document {index} of a store of {len(self)}")
        shard_number = bisect.bisect_right(self._first, number) - 1
        shard = self._shard(shard_number)
        record = shard.record(
            number - self._first[shard_number],
            self.sample_ids[number],
            self.lengths[number],
            check=not self.checked[number],
        )
        self.checked[number] = True
        return record

    def index_of(self, sample_id: str) -> int:
        """The number of the document with this id. Raises `DraftsmithError` where the store has none."""
        if not self._position:
            self._position = {name: number for number, name in enumerate(self.sample_ids)}
        if sample_id not in self._position:
            raise DraftsmithError(f"{self.directory} has no sample {sample_id!r} among its {len(self)}")
        return self._position[sample_id]

    def _shard(self, number: int) -> "_Shard":
        if number in self._open:
            self._open.move_to_end(number)
        else:
            self._open[number] = _Shard(
                self.directory, self.manifest.shards[number], self.manifest.layout, self.features
            )
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[number]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict()}  # mapped files do not travel between processes


def _held(directory: Path, manifest: StoreManifest, features: Collection[str] | None) -> tuple[str, ...]:
    """The features meant by `features`, in the store's order."""
    held = tuple(manifest.layout.widths)
    missing = sorted(set(features or ()) - set(held))
    if missing:
        raise StoreError(f"{directory} does not hold {', '.join(missing)}; it holds {', '.join(held)}")
    return held if features is None else tuple(name for name in held if name in features)


class _Shard:
    """One open shard: its tokens in memory (checked as a whole), its features mapped (checked by document)."""

    def __init__(self, directory: Path, entry: ShardEntry, layout: CaptureLayout, features: tuple[str, ...]) -> None:
        self.path = check_size(directory, entry.features_file)
        tokens = ShardTokens.read(check_file(directory, entry.tokens_file))
        self.input_ids = tokens.input_ids
        self.loss_mask = tokens.loss_mask
        self.offsets = [0, *accumulate(tokens.lengths)]
        self.layout = layout
        self.features = features
        stored = {name: kind for feature in features for name, kind in layout.stored_of(feature).items()}
        self.checksums = tokens.checksums
        file = open_safetensors(self.path)
        for path, names in ((self.path, set(file.keys())), (directory / entry.tokens_file.name, set(self.checksums))):
            missing = sorted(set(stored) - names)
            if missing:
                raise StoreError(f"{path} does not hold {', '.join(missing)}: the file is damaged")
        self.stored = {name: file.get_slice(name) for name in stored}
        # The checksums cover the values; shape and dtype, which say how to read them, are the manifest's to know.
        for name, (width, dtype) in stored.items():
            rows = self.stored[name]
            found = (rows.get_dtype(), rows.get_shape())
            should = (SAFETENSORS_DTYPES[dtype], [entry.tokens, width])
            if found != should:
                raise StoreError(f"{self.path}: {name} is {found} and should be {should}: the file is damaged")

    def record(self, number: int, sample_id: str, length: int, *, check: bool) -> Record:
        start, end = self.offsets[number], self.offsets[number + 1]
        stored: dict[str, Tensor] = {name: rows[start:end] for name, rows in self.stored.items()}
        for name in stored if check else ():
            found = checksum(stored[name])
            if found != self.checksums[name][number] or stored[name].shape[0] != length:
                raise StoreError(
                    f"{self.path}: {name} of sample {sample_id!r} has CRC-32 {found:08x} and should have "
                    f"{self.checksums[name][number]:08x}: the file is damaged; delete the two files "
                    "of this shard and capture again into this directory to replace only its samples"
                )
        return Record(
            sample_id,
            self.input_ids[start:end].to(torch.int64),
            self.loss_mask[start:end].to(torch.bool),
            decode(stored, self.layout, self.features),
        )


def _read_index(directory: Path, manifest: StoreManifest) -> StoreIndex:
    path = check_file(directory, manifest.index)
    index = StoreIndex.read(path)
    if len(index.sample_ids) != manifest.samples:
        raise StoreError(f"{path} lists {len(index.sample_ids)} samples; the manifest says {manifest.samples}")
    return index
