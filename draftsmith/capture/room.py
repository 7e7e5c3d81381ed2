"""Whether what is going to be written fits on the disk."""

import logging
from pathlib import Path

from draftsmith.base.readable import readable_bytes
from draftsmith.capture.plan import SizeEstimate
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout

_log = logging.getLogger(__name__)


def check_room(estimate: SizeEstimate, layout: CaptureLayout, directory: Path, force: bool) -> None:
    """Raise `DraftsmithError` where the estimated bytes do not fit on the disk; with `force`, only warn."""
    if estimate.bytes <= estimate.free_bytes:
        return
    shortage = (
        f"{directory} needs {readable_bytes(estimate.bytes)} for {estimate.tokens:,} tokens of "
        f"{layout.bytes_per_token:,} bytes, and {readable_bytes(estimate.free_bytes)} are free"
    )
    if not force:
        raise DraftsmithError(
            f"{shortage}: free some, capture fewer samples or fewer layers, or start anyway with capture.force=true"
        )
    _log.warning("%s; started anyway (capture.force)", shortage)
