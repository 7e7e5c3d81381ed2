"""Which drafts other software would run as something else than they were trained, read from the sources of the versions
named here. Writers refuse those drafts.

Where the same loaders look for each field and tensor, what is written is held against in `tests/layouts/loaders.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.layouts.attention_fields import SLIDING, uniform_kind
from draftsmith.layouts.spelling import Family

Check = Callable[[dict[str, Any]], Iterable[str]]


@dataclass(frozen=True)
class AtLeast:
    """In a table of what a program computes: this number and larger ones."""

    least: int

    def __repr__(self) -> str:
        return f"{self.least} or more"


def _is_computed(value: Any, allowed: Any) -> bool:
    return value >= allowed.least if isinstance(allowed, AtLeast) else value == allowed


@dataclass(frozen=True)
class Consumer:
    """One program in the version that its tables were read from.

    key: what the architectures call it that it loads (`HeadSpelling.served`, where the tables are). checks: what no
    field shows alone.
    """

    name: str
    version: str
    key: str
    checks: tuple[Check, ...] = ()

    def only(self, family: Family) -> dict[str, Mapping[str, Any]]:
        """Each architecture that it loads -> canonical fields that it does not know (`head.x` for the head's), and the
        one value that it computes, or the least."""
        members = {member.architecture: member.spelling.served for member in family.members}
        return {architecture: served[self.key] for architecture, served in members.items() if self.key in served}

    def faults(self, config: dict[str, Any], family: Family) -> list[str]:
        """Why this program would not run the draft of a canonical configuration as it was trained: one line each."""
        who, only = f"{self.name} {self.version}", self.only(family)
        architecture = config["architecture"]
        if architecture not in only:
            return [f"{who} does not load {architecture!r} drafts; it loads {', '.join(map(repr, only))}"]
        faults = [
            f"{name} is {lookup(config, name)!r}; {who} computes {allowed!r} only"
            for name, allowed in only[architecture].items()
            if not _is_computed(lookup(config, name), allowed)
        ]
        return faults + [f"{fault} ({who})" for check in self.checks for fault in check(config)]


def lookup(config: dict[str, Any], name: str) -> Any:
    """A field of a canonical configuration by its dotted name; what is left out is None there."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if value is not None else None
    return value


def _one_causality(config: dict[str, Any]) -> Iterable[str]:
    kind = uniform_kind(config)
    if kind is None:
        yield (
            f"layer_types is {list(config['layer_types'])}, whose layers differ in causality, and one field says "
            "it for all of them; write layout 'zlab'"
        )
    elif kind == (False, True):
        yield "causal is True on full layers, which always see the whole block; write layout 'zlab'"


def _one_window(config: dict[str, Any]) -> Iterable[str]:
    kind = uniform_kind(config)
    if config["attention_sinks"] and kind is None and SLIDING in config["layer_types"]:
        yield f"layer_types is {list(config['layer_types'])}; attention sinks go with layers of one kind"


def _confidence_reads_markov(config: dict[str, Any]) -> Iterable[str]:
    head = config["head"]
    if head.get("enable_confidence_head") and not head["confidence_head_with_markov"]:
        yield "confidence_head_with_markov is False; the confidence head always reads the Markov embedding"


PLAIN_LOGITS: Mapping[str, Any] = {"output_multiplier": 1.0, "final_logit_softcapping": None}
UNSCALED: Mapping[str, Any] = {"input_embedding_scale": 1.0}
SINKS_ONLY: Mapping[str, Any] = {**PLAIN_LOGITS, **UNSCALED, "rope.partial_rotary_factor": 1.0}
BARE: Mapping[str, Any] = {**SINKS_ONLY, "attention_sinks": False}

SGLANG = Consumer("sglang", "0.5.23", "sglang")

VLLM = Consumer("vllm", "0.32.0", "vllm")
"""vLLM on z-lab's layout."""

SPECULATORS = Consumer("speculators", "0.9.0", "speculators", (_one_causality,))
"""The package speculators on its own layout."""

VLLM_SPECULATORS = Consumer(VLLM.name, VLLM.version, "vllm-speculators", SPECULATORS.checks)
"""vLLM on the speculators layout, of which it reads the same fields."""

MODEL_OPTIMIZER = Consumer("nvidia-modelopt", "0.47.0", "modelopt", (_one_window, _confidence_reads_markov))
