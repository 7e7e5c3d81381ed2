"""Which drafts other software would run as something else than they were trained, read from the sources of the versions
named here. Writers refuse those drafts.

Where the same loaders look for each field and tensor, what is written is held against in `tests/layouts/loaders.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from draftsmith.layouts.attention_fields import SLIDING, uniform_kind

Check = Callable[[dict[str, Any]], Iterable[str]]


@dataclass(frozen=True)
class Consumer:
    """One program in the version that its table was read from.

    only: each architecture that it loads -> canonical fields that it does not know (`head.x` for the head's), and the
    one value that it computes. checks: what no field shows alone.
    """

    name: str
    version: str
    only: dict[str, dict[str, Any]]
    checks: tuple[Check, ...] = ()

    def faults(self, config: dict[str, Any]) -> list[str]:
        """Why this program would not run the draft of a canonical configuration as it was trained: one line each."""
        who = f"{self.name} {self.version}"
        architecture = config["architecture"]
        if architecture not in self.only:
            return [f"{who} does not load {architecture!r} drafts; it loads {', '.join(map(repr, self.only))}"]
        faults = [
            f"{name} is {value!r}; {who} computes {allowed!r} only"
            for name, allowed in self.only[architecture].items()
            if (value := lookup(config, name)) != allowed
        ]
        return faults + [f"{fault} ({who})" for check in self.checks for fault in check(config)]


_DEFAULTS = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "input_embedding_scale": 1.0,
    "attention_sinks": False,
    "causal": None,
    "sliding_window": None,
    "rope.partial_rotary_factor": 1.0,
}


def lookup(config: dict[str, Any], name: str) -> Any:
    """A field of a canonical configuration by its dotted name; what is left out has its default."""
    value: Any = config
    for part in name.split("."):
        if part not in value:
            return _DEFAULTS[name]
        value = value[part]
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


def _confidence_with_markov(config: dict[str, Any]) -> Iterable[str]:
    head = config["head"]
    if head.get("enable_confidence_head") and not head["confidence_head_with_markov"]:
        yield "confidence_head_with_markov is False; the confidence head always reads the Markov embedding"


_PLAIN_LOGITS = {"output_multiplier": 1.0, "final_logit_softcapping": None}
_UNSCALED = {"input_embedding_scale": 1.0}
_VANILLA = {"head.markov_head_type": "vanilla"}
_SINKS_ONLY = {**_PLAIN_LOGITS, **_UNSCALED, "rope.partial_rotary_factor": 1.0}
_BARE = {**_SINKS_ONLY, "attention_sinks": False}

SGLANG = Consumer(
    "sglang",
    "0.5.23",
    {
        # Multiplier and soft-cap keep the order of logits, so that a plain argmax is the same without them.
        "dflash": {},
        "dflash2": {},
        "domino": {**_PLAIN_LOGITS, "head.pure_draft_prefix_len": 1},
        "dspark": _PLAIN_LOGITS,
    },
)

VLLM = Consumer(
    "vllm",
    "0.33.0",
    {"dflash": _UNSCALED, "dflash2": {}, "dspark": {**_PLAIN_LOGITS, **_VANILLA, **_UNSCALED}},
)
"""vLLM on z-lab's layout."""

SPECULATORS = Consumer("speculators", "0.9.0", {"dflash": _BARE, "dflash2": _BARE, "dspark": _BARE}, (_one_causality,))
"""The package speculators on its own layout."""

VLLM_SPECULATORS = Consumer(
    VLLM.name, VLLM.version, {**SPECULATORS.only, "dspark": {**_BARE, **_VANILLA}}, SPECULATORS.checks
)
"""vLLM on the speculators layout, of which it reads the same fields."""

MODEL_OPTIMIZER = Consumer(
    "nvidia-modelopt",
    "0.47.0",
    {"dflash": _SINKS_ONLY, "domino": _SINKS_ONLY, "dspark": _SINKS_ONLY},
    (_one_window, _confidence_with_markov),
)
