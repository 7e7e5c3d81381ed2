"""The architectures: one file each, with a typed configuration of the head and its modules."""

import pkgutil
from importlib import import_module

from draftsmith.drafts.heads.head import HeadConfig
from draftsmith.errors import DraftsmithError

__all__ = ["HEADS", "HeadConfig", "register_head"]

HEADS: dict[str, type[HeadConfig]] = {}
"""Architecture (`DraftConfig.architecture`) -> what it adds to the backbone."""


def register_head(head: type[HeadConfig]) -> None:
    """Makes an architecture known by its name; `DraftsmithError` where another one has it."""
    if HEADS.setdefault(head.architecture, head) is not head:
        raise DraftsmithError(
            f"architecture {head.architecture!r} is {HEADS[head.architecture].__name__}; {head.__name__} needs "
            "another name"
        )


def _own_heads() -> list[type[HeadConfig]]:
    """The subclasses of `HeadConfig` that the modules of this package define."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [head for head in dict.fromkeys(values) if issubclass(head, HeadConfig) and head is not HeadConfig]


for _head in _own_heads():
    register_head(_head)
