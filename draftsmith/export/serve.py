"""The commands that serve an exported draft with its target."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import family
from draftsmith.layouts.consumers import SGLANG, VLLM, VLLM_SPECULATORS, Consumer
from draftsmith.targets.location import locate
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.servers import SGLANG_DFLASH_TAPS, SGLANG_EAGLE3_TAPS, VLLM_TAPS, LayerTaps, architecture_of

# Layouts that a server reads; which drafts it runs as they were trained is in the consumers' tables.
_SGLANG_READS = {"zlab": SGLANG, "sglang": SGLANG}
_VLLM_READS = {"zlab": VLLM, "sglang": VLLM, "speculators": VLLM_SPECULATORS}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class NotServed:
    """Why a server does not run a draft, as a sentence."""

    reason: str


@dataclass(frozen=True)
class ServedTarget:
    """A target as servers see it. source: hub id or path as the user names it; path: where a server loads it from, of a
    GGUF file its conversion; architecture: the class that its configuration names, None where that is not at hand."""

    source: str
    path: str
    architecture: str | None = None

    @classmethod
    def at_hand(cls, target: TargetOptions) -> "ServedTarget":
        """What this machine's disk says of a target; nothing is downloaded, and a target need not be there."""
        local = Path(target.path).expanduser()
        path = locate(local).name if local.suffix == ".gguf" and local.is_file() else target.path
        try:
            config = AutoConfig.from_pretrained(path, revision=target.revision, local_files_only=True)
        except (OSError, ValueError):  # not here, or of a kind that only its own code knows
            return cls(target.path, path)
        return cls(target.path, path, architecture_of(config))


_NO_WAY = NotServed("Not served: it has no way of drafting for this method.")


def serve_commands(
    config: DraftConfig, layout: str, target: ServedTarget, directory: str
) -> dict[str, str | NotServed]:
    """Server and version -> the shell command that serves the draft at `directory`, or why that server does not run it.

    config: as written.
    """
    return {
        f"SGLang {SGLANG.version}": _sglang(config, layout, target, directory),
        f"vLLM {VLLM.version}": _vllm(config, layout, target, directory),
    }


def is_hub_id(target: str) -> bool:
    """Whether a target's source looks like `organisation/model` rather than a path."""
    return _HUB_ID.fullmatch(target) is not None and not target.endswith(".gguf")


def _sglang(config: DraftConfig, layout: str, target: ServedTarget, directory: str) -> str | NotServed:
    served = algorithm_for(config).serving(config).sglang
    taps = SGLANG_EAGLE3_TAPS if served is not None and served.method == "EAGLE3" else SGLANG_DFLASH_TAPS
    refusal = _refusal(config, layout, _SGLANG_READS, taps, target)
    if refusal is not None or served is None:
        return refusal or _NO_WAY
    words = ["python", "-m", "sglang.launch_server", "--model-path", target.path]
    words += ["--speculative-algorithm", served.method, "--speculative-draft-model-path", directory]
    words += ["--speculative-num-draft-tokens", str(served.tokens)]
    if scaling := _target_scaling(config):
        words += ["--json-model-override-args", json.dumps(scaling)]
    return _command(words)


def _vllm(config: DraftConfig, layout: str, target: ServedTarget, directory: str) -> str | NotServed:
    served = algorithm_for(config).serving(config).vllm
    refusal = _refusal(config, layout, _VLLM_READS, VLLM_TAPS, target)
    if refusal is not None or served is None:
        return refusal or _NO_WAY
    speculative = {"method": served.method, "model": directory, "num_speculative_tokens": served.tokens}
    words = ["vllm", "serve", target.path, "--speculative-config", json.dumps(speculative)]
    if scaling := _target_scaling(config):
        words += ["--hf-overrides", json.dumps(scaling)]
    return _command(words)


def _refusal(
    config: DraftConfig, layout: str, readers: dict[str, Consumer], taps: LayerTaps, target: ServedTarget
) -> NotServed | None:
    if layout not in readers:
        known = " or ".join(map(repr, readers))
        return NotServed(f"Not from layout {layout!r}; export it again in layout {known}.")
    faults = readers[layout].faults(config.to_dict(), family())
    if faults:
        return NotServed(f"Not this draft: {'; '.join(faults)}.")
    fault = taps.fault(target.architecture)
    return NotServed(f"Not with this target: {fault}.") if fault else None


def _target_scaling(config: DraftConfig) -> dict[str, Any]:
    """What the target has to be told where the draft's positions are scaled with YaRN: the same."""
    return {"rope_parameters": config.rope.as_parameters()} if config.rope.type == "yarn" else {}


def _command(words: list[str]) -> str:
    """A shell command with an option and its value on each line."""
    quoted = [shlex.quote(word) for word in words]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options = [" ".join(quoted[i : i + 2]) for i in range(first, len(words), 2)]
    return " \\\n  ".join([" ".join(quoted[:first]), *options])
