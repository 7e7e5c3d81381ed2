"""Which options of a command go together: what would be ignored is refused by name, before anything is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.capture.imports import ImportOptions

CHECKED_IMPORTS = 2
"""How many imported documents are compared with the target's own features, unless the user says."""


def refuse_together(option: str, given: bool, others: Mapping[str, bool], because: str) -> None:
    """Raises `DraftsmithError` where `option` is given and so are some of `others` (name -> whether it is given)."""
    found = _given(others)
    if given and found:
        raise DraftsmithError(f"{option} is given with {_listed(found)}, but {because}; leave one of them out")


def refuse_without(option: str, given: bool, others: Mapping[str, bool]) -> None:
    """Raises `DraftsmithError` where `option` is not given, and some of `others` are, which are about it."""
    found = _listed(_given(others))
    if not given and found:
        raise DraftsmithError(f"{found} would be ignored without {option}; give {option} too, or leave {found} out")


def import_request(
    directory: Path | None,
    source: str | None,
    tap_ids: str | None,
    final_state: str | None,
    check_samples: int | None,
    *,
    remask: bool,
) -> "ImportOptions | None":
    """The options of `capture` about imported files, None where `--import` is not given.

    Raises `DraftsmithError` for options that go with `--import` where it is missing, for `--remask` beside it, for what
    files do not say and nobody has said, for values that are no layers, and as `ImportOptions`.
    """
    said = {"--from": source, "--tap-ids": tap_ids, "--final-state": final_state}
    given = {name: value is not None for name, value in said.items()}
    refuse_without("--import", directory is not None, {**given, "--check-samples": check_samples is not None})
    if directory is None:
        return None
    refuse_together("--import", True, {"--remask": remask}, "each fills the store by itself")
    if source is None or tap_ids is None or final_state is None:
        missing = [name for name, present in given.items() if not present]
        raise DraftsmithError(
            f"--import needs what the files do not say: {', '.join(said)} ({', '.join(missing)} missing)"
        )
    from draftsmith.capture.imports import ImportOptions  # brings torch along, which other commands need not wait for

    checked = CHECKED_IMPORTS if check_samples is None else check_samples
    return ImportOptions(directory, source, _layers(tap_ids), final_state, checked)


def _layers(text: str) -> tuple[int, ...]:
    """Layer ids as `1,9,17`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DraftsmithError(f"--tap-ids is {text!r}; give layers separated by commas, such as 1,9,17") from None


def _given(options: Mapping[str, bool]) -> list[str]:
    return [name for name, given in options.items() if given]


def _listed(names: list[str]) -> str:
    return " and ".join(names)
