"""How servers are told to run a method's drafts (flags as of SGLang 0.5.23 and vLLM 0.32.0).

Which drafts a server can run at all is `layouts.consumers`' to say.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """`method`: the server's own name of the way of drafting; `tokens`: the number it asks for (SGLang: the tokens of
    one verify; vLLM: the proposals)."""

    method: str
    tokens: int


@dataclass(frozen=True)
class Serving:
    """What to tell SGLang and vLLM; None: the server has no way of drafting for the method."""

    sglang: Served | None
    vllm: Served | None
