"""Draft directories in and out: files <-> canonical (configuration, tensors)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.layouts import files
from draftsmith.layouts.canonical import CanonicalDraft, LayoutError, TargetParts
from draftsmith.layouts.layout import Layout
from draftsmith.layouts.speculators import SpeculatorsLayout
from draftsmith.layouts.spelling import Family
from draftsmith.layouts.variants import DeepSpecLayout, ModelOptimizerLayout, SglangLayout, SpecForgeLayout
from draftsmith.layouts.zlab import ZlabLayout

__all__ = [
    "CARRY_TARGET",
    "LAYOUTS",
    "WRITABLE",
    "CanonicalDraft",
    "Family",
    "LayoutError",
    "TargetParts",
    "read_directory",
    "shortened",
    "write_directory",
]

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        SpeculatorsLayout(),
        ModelOptimizerLayout(),
        SpecForgeLayout(),
        DeepSpecLayout(),
        ZlabLayout(),
        SglangLayout(),
    )
}
"""Name -> layout; the first that recognises a directory reads it."""

WRITABLE = tuple(name for name, layout in LAYOUTS.items() if layout.writable)
"""Names of the layouts that drafts can be written in."""

CARRY_TARGET = tuple(name for name, layout in LAYOUTS.items() if layout.carries_target)
"""Names of the layouts whose files hold the target's embedding and output head."""


def read_directory(
    path: str | Path, family: Family, layout: str | None = None, *, strict: bool = False, allow_pickle: bool = False
) -> CanonicalDraft:
    """Reads a draft directory, recognising its layout from its files unless told (`drafts.directory` knows the family).

    strict: fields of the draft's section that nothing uses are errors (training input); otherwise they become notes
    (other people's drafts). The section is `dflash_config`, where there is one, and with `speculators` all of
    `config.json`. allow_pickle: weights may be a .pt, .pth, .bin or .ckpt file where there are no safetensors; only
    tensors and plain containers are taken from it. Raises `LayoutError` for whatever is missing, damaged, contradictory
    or unknown.
    """
    directory = Path(path)
    config = files.read_config(directory)
    reader = _layout(layout) if layout is not None else _recognise(config, directory, family)
    tensors = files.read_tensors(directory, allow_pickle)
    try:
        return reader.read(config, tensors, family, strict)
    except LayoutError as error:
        raise LayoutError(f"{directory}: {shortened(str(error))}") from None


def write_directory(
    path: str | Path,
    layout: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    family: Family,
    extra_files: Mapping[str, str | bytes] | None = None,
    target: TargetParts | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Writes a draft directory, whole or not at all; what was there before stays when writing fails.

    config: canonical, as `DraftConfig.to_dict` gives it; tensors: canonical names, all of the dtype that the
    configuration declares; extra_files: further files by name (a README, say); target: what the layout carries of the
    target, if it does; check: is given the new directory before it takes its place, and raises where it must not. A
    directory that holds other things than a draft is refused. Raises `LayoutError`.
    """
    writer = _layout(layout)
    if not writer.writable:
        raise LayoutError(f"layout {layout!r} is only read; allowed to write: {', '.join(map(repr, WRITABLE))}")
    wrong = sorted(name for name, tensor in tensors.items() if str(tensor.dtype) != f"torch.{config['dtype']}")
    if wrong:
        raise LayoutError(f"dtype is declared as {config['dtype']}, but {', '.join(wrong)} hold another; convert them")
    content, named = writer.write(config, tensors, family, target)
    files.write(Path(path), content, named, extra_files or {}, check)


def shortened(text: str, most: int = 4000) -> str:
    """A message without the middle of what it quotes, where that is very long."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise LayoutError(f"layout is {name!r}; allowed: {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[name]


def _recognise(config: dict[str, Any], directory: Path, family: Family) -> Layout:
    names = frozenset(path.name for path in directory.iterdir())
    for layout in LAYOUTS.values():
        if layout.recognises(config, names, family):
            return layout
    raise LayoutError(
        f"{directory / files.CONFIG} is of no layout that is known ({', '.join(LAYOUTS)}); its architectures is "
        f"{config.get('architectures')!r}. Is this the target instead of a draft?"
    )
