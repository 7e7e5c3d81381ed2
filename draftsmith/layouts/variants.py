"""The z-lab layout as particular projects write and want it."""

from typing import Any

from torch import Tensor

from draftsmith.layouts.attention_fields import FULL, uniform_kind
from draftsmith.layouts.canonical import CanonicalDraft, LayoutError, TargetParts
from draftsmith.layouts.consumers import MODEL_OPTIMIZER, SGLANG
from draftsmith.layouts.dspark_fields import OTHER_NAMES
from draftsmith.layouts.files import SPECFORGE_STATE
from draftsmith.layouts.zlab import SECTION, ZlabLayout


class SglangLayout(ZlabLayout):
    """What SGLang serves: z-lab's spelling, of drafts that SGLang decodes as they were trained."""

    name = "sglang"

    def recognises(self, config: dict[str, Any], files: frozenset[str]) -> bool:
        return False  # no file differs from z-lab's

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`."""
        refuse(self.name, SGLANG.faults(config))
        return super().write(config, tensors, target)


class ModelOptimizerLayout(ZlabLayout):
    """What Model-Optimizer exports, and its modules load: DSpark's modules flat, and one window for all layers."""

    name = "modelopt"

    def recognises(self, config: dict[str, Any], files: frozenset[str]) -> bool:
        section = config.get(SECTION)
        if not isinstance(section, dict):
            return False
        return "use_swa" in section or ("use_confidence_head" in section and "enable_confidence_head" not in section)

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`."""
        refuse(self.name, MODEL_OPTIMIZER.faults(config))
        written, _ = super().write(config, tensors, target)
        section = written[SECTION]
        for name in ("enable_confidence_head", "confidence_head_with_markov", "attention_mode"):
            section.pop(name, None)
        for name in {*config["head"], "sample_from_anchor"} - {"emb_dim"}:
            written.pop(name, None)
        written |= {"architectures": ["DFlashDraftModel"], "torch_dtype": config["dtype"]}
        kind = uniform_kind(config)
        if kind is not None:
            slides, causal = kind
            section["causal"] = written["is_causal"] = causal
            if slides:
                section |= {"use_swa": True, "swa_window_size": config["sliding_window"]}
                written |= {"layer_types": [FULL] * len(config["layer_types"]), "use_sliding_window": False}
        if config["attention_sinks"]:
            written["attention_sink_bias"] = True
        return written, {_flat(name): tensor for name, tensor in tensors.items()}


class SpecForgeLayout(ZlabLayout):
    """What SpecForge exports, and its run checkpoints (a `training_state.pt` beside the draft's `config.json`)."""

    name = "specforge"
    writable = False

    def recognises(self, config: dict[str, Any], files: frozenset[str]) -> bool:
        architectures = config.get("architectures")
        named = architectures if isinstance(architectures, list) else []
        own = any(name in named for name in ("DominoDraftModel", "DSparkDraftModel"))
        return SECTION in config and (own or SPECFORGE_STATE in files)

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], strict: bool) -> CanonicalDraft:
        """See `Layout.read`. A run checkpoint holds the dtype of training, whatever its `config.json` declares."""
        held = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        declared = config.get("dtype", config.get("torch_dtype"))
        if len(held) != 1 or declared is None or str(declared).removeprefix("torch.") in held:
            return super().read(config, tensors, strict)
        dtype = held.pop()
        own = {name: value for name, value in config.items() if name != "torch_dtype"}
        draft = super().read({**own, "dtype": dtype}, tensors, strict)
        draft.notes.append(f"config.json declares {declared}, but the weights hold {dtype}, which is kept")
        return draft


class DeepSpecLayout(ZlabLayout):
    """DSpark as DeepSpec publishes it: every field at the top level."""

    name = "deepspec"
    writable = False

    def recognises(self, config: dict[str, Any], files: frozenset[str]) -> bool:
        return SECTION not in config and {"markov_rank", "target_layer_ids"} <= set(config)


def refuse(layout: str, faults: list[str]) -> None:
    """Raises `LayoutError` with every fault, if there is one."""
    if faults:
        raise LayoutError(f"this draft cannot be written in layout {layout!r}:\n" + "\n".join(faults))


def _flat(name: str) -> str:
    return next((new + name.removeprefix(old) for new, old in OTHER_NAMES if name.startswith(old)), name)
