"""Draft directories in and out: files <-> canonical (configuration, tensors)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.layouts import files
from draftsmith.layouts.canonical import CanonicalDraft, Layout, LayoutError
from draftsmith.layouts.zlab import ZlabLayout

__all__ = ["LAYOUTS", "CanonicalDraft", "LayoutError", "read_directory", "write_directory"]

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (ZlabLayout(),)}
"""Name -> layout; the first that recognises a `config.json` reads it."""


def read_directory(path: str | Path, layout: str | None = None, *, strict: bool = False) -> CanonicalDraft:
    """Reads a draft directory, recognising its layout from `config.json` unless told.

    strict: fields of the draft's section that nothing uses are errors (training input); otherwise they become notes
    (other people's drafts). Raises `LayoutError` for whatever is missing, damaged, contradictory or unknown.
    """
    directory = Path(path)
    config = files.read_config(directory)
    reader = _layout(layout) if layout is not None else _recognise(config, directory)
    tensors = files.read_tensors(directory)
    try:
        return reader.read(config, tensors, strict)
    except LayoutError as error:
        raise LayoutError(f"{directory}: {error}") from None


def write_directory(
    path: str | Path,
    layout: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    extra_files: Mapping[str, str | bytes] | None = None,
) -> None:
    """Writes a draft directory, whole or not at all; what was there before stays when writing fails.

    config: canonical, as `DraftConfig.to_dict` gives it; tensors: canonical names, all of the dtype that the
    configuration declares; extra_files: further files by name (a README, say). A directory that holds other things
    than a draft is refused. Raises `LayoutError`.
    """
    wrong = sorted(name for name, tensor in tensors.items() if str(tensor.dtype) != f"torch.{config['dtype']}")
    if wrong:
        raise LayoutError(f"dtype is declared as {config['dtype']}, but {', '.join(wrong)} hold another; convert them")
    content, named = _layout(layout).write(config, tensors)
    files.write(Path(path), content, named, extra_files or {})


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise LayoutError(f"layout is {name!r}; allowed: {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[name]


def _recognise(config: dict[str, Any], directory: Path) -> Layout:
    for layout in LAYOUTS.values():
        if layout.recognises(config):
            return layout
    raise LayoutError(
        f"{directory / files.CONFIG} is of no layout that is known ({', '.join(LAYOUTS)}); its architectures is "
        f"{config.get('architectures')!r}. Is this the target instead of a draft?"
    )
