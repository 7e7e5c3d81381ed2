"""How servers are told to run a method's drafts (flags as of SGLang 0.5.23 and vLLM 0.33.0)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """A server runs the draft: `method`, its own name of the way of drafting; `tokens`, the number it asks for (SGLang:
    the tokens of one verify; vLLM: the proposals)."""

    method: str
    tokens: int


@dataclass(frozen=True)
class NotServed:
    """A server does not run the draft, and why."""

    reason: str


@dataclass(frozen=True)
class Serving:
    """What SGLang and vLLM make of a draft."""

    sglang: Served | NotServed
    vllm: Served | NotServed
