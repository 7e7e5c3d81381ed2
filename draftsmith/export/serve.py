"""The commands that serve an exported draft with its target."""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import family
from draftsmith.layouts.consumers import SGLANG, VLLM, VLLM_SPECULATORS, Consumer

# Layouts that a server reads; which drafts it runs as they were trained is in the consumers' tables.
_SGLANG_READS = {"zlab": SGLANG, "sglang": SGLANG}
_VLLM_READS = {"zlab": VLLM, "sglang": VLLM, "speculators": VLLM_SPECULATORS}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class NotServed:
    """Why a server does not run a draft, as a sentence."""

    reason: str


_NO_WAY = NotServed("Not served: it has no way of drafting for this method.")


def serve_commands(config: DraftConfig, layout: str, target: str, directory: str) -> dict[str, str | NotServed]:
    """Server and version -> the shell command that serves the draft at `directory`, or why that server does not run it.

    config: as written; target: hub id or path of the target.
    """
    return {
        f"SGLang {SGLANG.version}": _sglang(config, layout, target, directory),
        f"vLLM {VLLM.version}": _vllm(config, layout, target, directory),
    }


def is_hub_id(target: str) -> bool:
    """Whether a target's source looks like `organisation/model` rather than a path."""
    return _HUB_ID.fullmatch(target) is not None and not target.endswith(".gguf")


def _sglang(config: DraftConfig, layout: str, target: str, directory: str) -> str | NotServed:
    served = algorithm_for(config).serving(config).sglang
    refusal = _refusal(config, layout, _SGLANG_READS)
    if refusal is not None or served is None:
        return refusal or _NO_WAY
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    words += ["--speculative-algorithm", served.method, "--speculative-draft-model-path", directory]
    words += ["--speculative-num-draft-tokens", str(served.tokens)]
    if scaling := _target_scaling(config):
        words += ["--json-model-override-args", json.dumps(scaling)]
    return _command(words)


def _vllm(config: DraftConfig, layout: str, target: str, directory: str) -> str | NotServed:
    served = algorithm_for(config).serving(config).vllm
    refusal = _refusal(config, layout, _VLLM_READS)
    if refusal is not None or served is None:
        return refusal or _NO_WAY
    speculative = {"method": served.method, "model": directory, "num_speculative_tokens": served.tokens}
    words = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    if scaling := _target_scaling(config):
        words += ["--hf-overrides", json.dumps(scaling)]
    return _command(words)


def _refusal(config: DraftConfig, layout: str, readers: dict[str, Consumer]) -> NotServed | None:
    if layout not in readers:
        known = " or ".join(map(repr, readers))
        return NotServed(f"Not from layout {layout!r}; export it again in layout {known}.")
    faults = readers[layout].faults(config.to_dict(), family())
    return NotServed(f"Not this draft: {'; '.join(faults)}.") if faults else None


def _target_scaling(config: DraftConfig) -> dict[str, Any]:
    """What the target has to be told where the draft's positions are scaled with YaRN: the same."""
    return {"rope_parameters": config.rope.as_parameters()} if config.rope.type == "yarn" else {}


def _command(words: list[str]) -> str:
    """A shell command with an option and its value on each line."""
    quoted = [shlex.quote(word) for word in words]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options = [" ".join(quoted[i : i + 2]) for i in range(first, len(words), 2)]
    return " \\\n  ".join([" ".join(quoted[:first]), *options])
