"""Writing files so that a name never stands for half a file, and reading them with their checksums."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.base.files import file_sha256, replacing
from draftsmith.features.manifest import FileEntry, StoreError

SAFETENSORS_DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous on the CPU."""
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data


@dataclass(frozen=True)
class Pieces:
    """A tensor given as pieces that lie one after the other along dimension 0."""

    pieces: list[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of every piece."""
        return self.pieces[0].dtype

    @property
    def shape(self) -> list[int]:
        """Of the whole tensor."""
        return [sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:]]

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return sum(piece.numel() * piece.element_size() for piece in self.pieces)


def write_safetensors(path: Path, tensors: Mapping[str, Pieces], metadata: Mapping[str, str]) -> FileEntry:
    """Write a safetensors file from pieces, hashing it on the way.

    The library's own `save_file` wants whole tensors, which would hold a shard in memory three times; here every piece
    is hashed and written from where it lies. Returns the file's name, size and sha256.
    """
    # Wider types first: the format leaves no gaps, so this keeps every tensor aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].bytes
        dtype = SAFETENSORS_DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    digest = hashlib.sha256()
    size = 0
    # Hashing takes longer than writing; beside it, in a thread of its own, the writing costs no time.
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing, replacing(path) as file:
        hashed: list[Future[None]] = []
        for part in _parts(text, names, tensors):
            hashed.append(hashing.submit(digest.update, part))
            file.write(part)
            size += len(part)
        for future in hashed:  # before the file gets its name: what failed there is raised here
            future.result()
    return FileEntry(name=path.name, bytes=size, sha256=digest.hexdigest())


def _parts(text: bytes, names: list[str], tensors: Mapping[str, Pieces]) -> Iterator[bytes | memoryview]:
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        for piece in tensors[name].pieces:
            yield raw_bytes(piece)


def file_entry(path: Path) -> FileEntry:
    """Name, size and sha256 of a file that exists."""
    return FileEntry(name=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))


def check_size(directory: Path, entry: FileEntry) -> Path:
    """The path of `entry`, after checking that the file exists with the right size. Raises `StoreError`."""
    path = directory / entry.name
    if not path.is_file():
        raise StoreError(f"{path} is missing; the store's manifest lists it")
    found = path.stat().st_size
    if found != entry.bytes:
        raise StoreError(f"{path} has {found} bytes and should have {entry.bytes}: the file is damaged")
    return path


def check_file(directory: Path, entry: FileEntry) -> Path:
    """The path of `entry`, after checking size and checksum by reading the whole file. Raises `StoreError`."""
    path = check_size(directory, entry)
    found = file_sha256(path)
    if found != entry.sha256:
        raise StoreError(f"{path} has sha256 {found} and should have {entry.sha256}: the file is damaged")
    return path


def open_safetensors(path: Path) -> safe_open:
    """A memory-mapped safetensors file of CPU tensors. Raises `StoreError` where its header is damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise StoreError(f"{path} is not a safetensors file ({error}): the file is damaged") from error
