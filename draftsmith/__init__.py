"""draftsmith: train, convert and run DFlash-family drafters for lossless speculative decoding.

The names below are the stable Python interface. They are imported on first use, so that `import draftsmith` and
`draftsmith --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.decoding.generate import Generation, generate
    from draftsmith.drafts.draft import Draft
    from draftsmith.errors import DraftsmithError
    from draftsmith.targets.target import Target

__version__ = "0.1.0"
__all__ = ["Draft", "DraftsmithError", "Generation", "Target", "generate"]

_HOMES = {
    "Draft": "draftsmith.drafts.draft",
    "DraftsmithError": "draftsmith.errors",
    "Generation": "draftsmith.decoding.generate",
    "Target": "draftsmith.targets.target",
    "generate": "draftsmith.decoding.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
