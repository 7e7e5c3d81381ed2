"""The README.md of an exported draft: what it is, what it learnt from, how it measures, how it is served."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.algorithms.registry import algorithm
from draftsmith.drafts.config import DraftConfig
from draftsmith.export.serve import NotServed, ServedTarget, is_hub_id, serve_commands
from draftsmith.training.record import RunRecord
from draftsmith.training.sums import Averages

CARD_FILE = "README.md"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Measured:
    """What a benchmark found: the accept length, over so many prompts of a source as `bench.prompts` names it, sampled
    at this temperature."""

    accept_length: float
    prompts: int
    source: str
    temperature: float

    def __str__(self) -> str:
        # Of a file the name: where it lies on some disk means nothing to readers.
        asked = f"{self.prompts:,} prompt{'s' * (self.prompts != 1)} of {Path(self.source).name}"
        return f"{_length(self.accept_length)} on {asked}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Training:
    """What the card says of the training: the run's record, the step of the checkpoint, its held-out averages (None:
    not evaluated there), and what `bench` measured with these very weights (None: not measured)."""

    record: RunRecord
    step: int
    evaluation: Averages | None
    measured: Measured | None


def model_card(config: DraftConfig, layout: str, served: ServedTarget, directory: str, training: Training) -> str:
    """The card in Markdown. config: as written; served: the target; directory: where the draft is served from."""
    target = served.source
    method = algorithm(training.record.draft_section["algorithm"])
    rows = _facts(config, layout, target, training)
    lines = [
        *_front_matter(target, method.name),
        f"# {method.name} draft for {target}",
        "",
        f"{method.summary} ({method.paper}), for lossless speculative decoding. It has no vocabulary of its own and "
        f"works with {target} only.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "## Serving",
    ]
    for server, way in serve_commands(config, layout, served, directory).items():
        lines += ["", f"{server}:", ""]
        lines += [way.reason] if isinstance(way, NotServed) else ["```bash", way, "```"]
    if config.rope.type == "yarn":
        lines += [
            "",
            f"The draft's positions are scaled with YaRN (factor {config.rope.factor}); the commands scale the "
            f"target's alike, with rope_theta {config.rope.theta}, which has to be the target's own.",
        ]
    return "\n".join(lines) + "\n"


def _facts(config: DraftConfig, layout: str, target: str, training: Training) -> dict[str, Any]:
    record = training.record
    source = record.target
    revision = f", revision {source['revision']}" if source.get("revision") else ""
    started = record.draft_section.get("init_from")
    return {
        "method": record.draft_section["algorithm"],
        "target": f"{target}{revision} (config {source['config_hash'][:12]}, weights {source['weights_hash'][:12]})",
        "training data": f"feature store {record.store[:12]}",
        "training steps": f"{training.step:,}",
        "started from": started or "fresh weights",
        "accept length, measured": training.measured or NOT_MEASURED,
        "accept length, held-out documents (teacher-forced)": _length((training.evaluation or {}).get("accept_length")),
        **({} if config.block is None else {"block size": config.block.size}),
        "layers": config.num_hidden_layers,
        "tapped layers of the target": f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}",
        **({} if config.block is None else {"mask token": config.block.mask_token_id}),
        "positions": f"{config.max_position_embeddings:,}",
        "dtype": config.dtype,
        "layout": layout,
    }


def _length(value: Any) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f} tokens a verify"


def _front_matter(target: str, method: str) -> list[str]:
    """What model hubs read of a card; a target that is a path on some disk means nothing to them."""
    base = [f"base_model: {target}"] if is_hub_id(target) else []
    return ["---", *base, "tags:", "- speculative-decoding", f"- {method}", "---", ""]
