"""A fingerprint of a target's layers from a few rows of their matrices: what two fine-tunes of one model differ in."""

import hashlib

import torch
from torch import Tensor

from draftsmith.targets.location import Location
from draftsmith.targets.tensors import open_tensors, stored_files

_ROWS = 4
# Matrices of single experts are too many to read one by one; a fine-tune changes attention too.
_LEFT_OUT = (".experts.",)


def layers_fingerprint(location: Location) -> str | None:
    """sha256 of sampled rows of every matrix of the numbered layers, as the files hold them.

    Floats are rounded to bfloat16, so that a copy of another precision is the same model. None for a model on the hub,
    whose commit says which weights it has, and for files without such matrices. Raises `DraftsmithError` for files that
    are missing or damaged.
    """
    if location.directory is None:
        return None
    names_in: dict[str, list[str]] = {}
    for name, file in stored_files(location, None).items():
        in_a_layer = any(part.isdigit() for part in name.split("."))
        if in_a_layer and not any(part in name for part in _LEFT_OUT):
            names_in.setdefault(file, []).append(name)
    digests: dict[str, bytes] = {}
    for file, names in names_in.items():
        with open_tensors(location.directory / file) as tensors:
            for name in names:
                matrix = tensors.get_slice(name)
                shape = matrix.get_shape()
                if len(shape) < 2 or 0 in shape:
                    continue
                rows = sorted({row * (shape[0] - 1) // (_ROWS - 1) for row in range(_ROWS)})
                digests[name] = b"".join(_bytes(matrix[row : row + 1]) for row in rows)
    if not digests:
        return None
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(name.encode() + b"\0" + hashlib.sha256(digests[name]).digest())
    return total.hexdigest()


def _bytes(rows: Tensor) -> bytes:
    wide = rows.is_floating_point() and rows.element_size() > 1
    rounded = rows.to(torch.bfloat16) if wide else rows
    return rounded.contiguous().view(torch.uint8).numpy().tobytes()
