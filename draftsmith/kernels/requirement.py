"""What the modules of kernels import and not every machine has: to be asked for before one of them is imported."""

from importlib.util import find_spec

from draftsmith.errors import DraftsmithError


def need_triton(what: str, otherwise: str = "") -> None:
    """Raises `DraftsmithError` where the package triton is not installed. what: that which needs it; otherwise: another
    way out than to install it, after a comma."""
    if find_spec("triton") is None:
        raise DraftsmithError(
            f"{what} needs the package triton, which is not installed; install it (pip install triton){otherwise}"
        )
