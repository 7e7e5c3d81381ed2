"""The precisions that a target or a draft may have, by the names that options and files give them."""

import torch

from draftsmith.errors import DraftsmithError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A name in `DTYPES`, or a torch dtype, as torch's; "auto": None, whatever the files hold. Raises `DraftsmithError`
    for another name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise DraftsmithError(f"dtype is {dtype!r}; allowed: 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[dtype]
