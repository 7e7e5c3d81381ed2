"""What a capture did."""

import json
from dataclasses import dataclass
from pathlib import Path

from draftsmith.base.files import replacing
from draftsmith.base.readable import readable_bytes
from draftsmith.capture.plan import SizeEstimate
from draftsmith.capture.refusals import Reason, shown_ids
from draftsmith.features.manifest import StoreManifest

REPORT_FILE = "report.json"


@dataclass(frozen=True)
class CaptureReport:
    """The outcome of one capture.

    directory: the store; manifest: what it holds now; estimate: the work that this run began with; captured: samples
    that this run added; resumed: samples that were there before; refused: the ids of unusable samples by reason;
    seconds: how long this run took.
    """

    directory: Path
    manifest: StoreManifest
    estimate: SizeEstimate
    captured: int
    resumed: int
    refused: dict[Reason, tuple[str, ...]]
    seconds: float

    def lines(self) -> list[str]:
        """The report for people; of many ids the first ones, all of which `report.json` lists."""
        store = self.manifest
        lines = [
            f"{store.samples:,} samples, {store.tokens:,} tokens ({store.supervised_tokens:,} supervised), "
            f"{readable_bytes(store.bytes)} in {len(store.shards)} shards at {self.directory}",
            f"{self.captured:,} captured in {self.seconds:.1f} s, {self.resumed:,} there before",
        ]
        return lines + [f"{len(ids):,} refused: {reason}: {shown_ids(ids)}" for reason, ids in self.refused.items()]

    def write(self) -> None:
        """Leave the report beside the store it is about, as `report.json`."""
        values = {
            "captured": self.captured,
            "resumed": self.resumed,
            "seconds": round(self.seconds, 3),
            "refused": {reason.name.lower(): list(ids) for reason, ids in self.refused.items()},
        }
        with replacing(self.directory / REPORT_FILE) as file:
            file.write((json.dumps(values, indent=1) + "\n").encode())
