"""The tensors of a store that are not features: names, dtypes and sizes of its tokens files and its index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.features.files import Pieces, open_safetensors, raw_bytes, write_safetensors
from draftsmith.features.manifest import FileEntry, StoreError
from draftsmith.features.record import Record

_INPUT_IDS, _LOSS_MASK, _OFFSETS = "input_ids", "loss_mask", "offsets"
_SAMPLE_IDS, _SAMPLE_ID_OFFSETS = "sample_ids", "sample_id_offsets"
_LENGTHS, _SUPERVISED = "lengths", "supervised"
_CHECKSUM = "crc32."
_DTYPES = {
    _INPUT_IDS: torch.int32,
    _LOSS_MASK: torch.uint8,
    _OFFSETS: torch.int64,
    _SAMPLE_IDS: torch.uint8,
    _SAMPLE_ID_OFFSETS: torch.int64,
    _LENGTHS: torch.int64,
    _SUPERVISED: torch.int64,
}

TOKEN_BYTES = _DTYPES[_INPUT_IDS].itemsize + _DTYPES[_LOSS_MASK].itemsize
"""What a token takes beside its features."""
SAMPLE_BYTES = 96
"""About what a document takes: offsets, checksums and an id of twenty letters in its shard, and a line of the index."""


@dataclass(frozen=True)
class ShardTokens:
    """A tokens file: N tokens of n documents that lie end to end.

    input_ids [N] int32; loss_mask [N] uint8; lengths: tokens of each document; sample_ids: their ids; checksums: name
    of a stored feature tensor -> CRC-32 of each document's rows.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: list[int]
    sample_ids: list[str]
    checksums: dict[str, list[int]]

    @classmethod
    def of(cls, records: Sequence[Record], checksums: dict[str, list[int]]) -> "ShardTokens":
        """What is to be written of `records`."""
        return cls(
            torch.cat([record.input_ids for record in records]).to(_DTYPES[_INPUT_IDS]),
            torch.cat([record.loss_mask for record in records]).to(_DTYPES[_LOSS_MASK]),
            [record.input_ids.shape[0] for record in records],
            [record.sample_id for record in records],
            checksums,
        )

    @classmethod
    def read(cls, path: Path) -> "ShardTokens":
        """Raises `StoreError` where the file does not hold what a tokens file holds."""
        file = open_safetensors(path)
        offsets = _tensor(file, path, _OFFSETS)
        input_ids, loss_mask = _tensor(file, path, _INPUT_IDS), _tensor(file, path, _LOSS_MASK)
        lengths = offsets.diff()
        tokens = input_ids.shape[0]
        if not loss_mask.shape == (tokens,) or not _bounds(offsets, tokens) or bool((lengths < 1).any()):
            raise StoreError(
                f"{path}: its offsets do not divide {tokens} tokens and {loss_mask.shape[0]} entries of the loss mask "
                "into documents: the file is damaged"
            )
        sample_ids = _sample_ids(file, path, lengths.shape[0])
        names = sorted(name for name in file.keys() if name.startswith(_CHECKSUM))  # noqa: SIM118
        checksums = {name.removeprefix(_CHECKSUM): _integers(file, path, name, lengths.shape[0]) for name in names}
        return cls(input_ids, loss_mask, lengths.tolist(), sample_ids, checksums)

    def write(self, path: Path, metadata: Mapping[str, str]) -> FileEntry:
        """As `write_safetensors`."""
        offsets = torch.tensor([0, *self.lengths], dtype=_DTYPES[_OFFSETS]).cumsum(0)
        tensors = {
            _INPUT_IDS: self.input_ids,
            _LOSS_MASK: self.loss_mask,
            _OFFSETS: offsets,
            **_packed(self.sample_ids),
            **{_CHECKSUM + name: torch.tensor(values, dtype=torch.int64) for name, values in self.checksums.items()},
        }
        return write_safetensors(path, {name: Pieces([tensor]) for name, tensor in tensors.items()}, metadata)

    @property
    def supervised(self) -> list[int]:
        """The tokens under the loss mask of each document."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return torch.cat([ends.new_zeros(1), self.loss_mask.cumsum(0, dtype=torch.int64)])[ends].diff().tolist()


@dataclass(frozen=True)
class StoreIndex:
    """The index of a store: of every document its id, its tokens and those under the loss mask."""

    sample_ids: list[str]
    lengths: list[int]
    supervised: list[int]

    @classmethod
    def read(cls, path: Path) -> "StoreIndex":
        """Raises `StoreError` where the file does not hold what an index holds."""
        file = open_safetensors(path)
        count = _tensor(file, path, _LENGTHS).shape[0]
        sample_ids = _sample_ids(file, path, count)
        return cls(sample_ids, _integers(file, path, _LENGTHS, count), _integers(file, path, _SUPERVISED, count))

    def write(self, path: Path, metadata: Mapping[str, str]) -> FileEntry:
        """As `write_safetensors`."""
        tensors = {
            **_packed(self.sample_ids),
            _LENGTHS: torch.tensor(self.lengths, dtype=_DTYPES[_LENGTHS]),
            _SUPERVISED: torch.tensor(self.supervised, dtype=_DTYPES[_SUPERVISED]),
        }
        return write_safetensors(path, {name: Pieces([tensor]) for name, tensor in tensors.items()}, metadata)


def _tensor(file: safe_open, path: Path, name: str) -> Tensor:
    if name not in file.keys():  # noqa: SIM118
        raise StoreError(f"{path} does not hold {name}: the file is damaged")
    tensor: Tensor = file.get_tensor(name)
    wanted = _DTYPES.get(name, torch.int64)
    if tensor.dtype != wanted or tensor.dim() != 1:
        raise StoreError(
            f"{path}: {name} is {tensor.dtype} {list(tensor.shape)} and should be {wanted} of one dimension: the file "
            "is damaged"
        )
    return tensor


def _integers(file: safe_open, path: Path, name: str, count: int) -> list[int]:
    values = _tensor(file, path, name)
    if values.shape[0] != count:
        raise StoreError(f"{path}: {name} has {values.shape[0]} entries for {count} documents: the file is damaged")
    return values.tolist()


def _bounds(offsets: Tensor, end: int) -> bool:
    """Whether `offsets` rise from 0 to `end`."""
    if offsets.shape[0] < 1:
        return False
    return int(offsets[0]) == 0 and int(offsets[-1]) == end and not bool((offsets.diff() < 0).any())


def _packed(texts: list[str]) -> dict[str, Tensor]:
    """Strings as UTF-8 end to end, and where each begins."""
    encoded = [text.encode() for text in texts]
    offsets = torch.tensor([0, *map(len, encoded)], dtype=_DTYPES[_SAMPLE_ID_OFFSETS]).cumsum(0)
    joined = torch.frombuffer(bytearray(b"".join(encoded)), dtype=_DTYPES[_SAMPLE_IDS])
    return {_SAMPLE_IDS: joined, _SAMPLE_ID_OFFSETS: offsets}


def _sample_ids(file: safe_open, path: Path, count: int) -> list[str]:
    """The inverse of `_packed`."""
    joined, offsets = bytes(raw_bytes(_tensor(file, path, _SAMPLE_IDS))), _tensor(file, path, _SAMPLE_ID_OFFSETS)
    if offsets.shape[0] != count + 1 or not _bounds(offsets, len(joined)):
        raise StoreError(f"{path}: its ids are not those of {count} documents: the file is damaged")
    try:
        return [joined[start:end].decode() for start, end in pairwise(offsets.tolist())]
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}: its ids are not text ({error}): the file is damaged") from error
