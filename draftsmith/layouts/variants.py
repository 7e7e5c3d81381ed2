"""The z-lab layout as particular projects write and want it."""

from typing import Any

from torch import Tensor

from draftsmith.layouts.attention_fields import FULL, uniform_kind
from draftsmith.layouts.canonical import CanonicalDraft, LayoutError, TargetParts
from draftsmith.layouts.consumers import MODEL_OPTIMIZER, SGLANG
from draftsmith.layouts.files import SPECFORGE_STATE
from draftsmith.layouts.spelling import Family
from draftsmith.layouts.zlab import SECTION, ZlabLayout, renamed


class SglangLayout(ZlabLayout):
    """What SGLang serves: z-lab's spelling, of drafts that SGLang decodes as they were trained."""

    name = "sglang"

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        return False  # no file differs from z-lab's

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`."""
        refuse(self.name, SGLANG.faults(config, family))
        return super().write(config, tensors, family, target)


class ModelOptimizerLayout(ZlabLayout):
    """What Model-Optimizer exports, and its modules load: some heads' modules flat, and one window for all layers."""

    name = "modelopt"

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        section = config.get(SECTION)
        if not isinstance(section, dict):
            return False
        spellings = [member.spelling.modelopt for member in family.members]
        return "use_swa" in section or any(
            spelling.own is not None and spelling.own in section and spelling.instead_of not in section
            for spelling in spellings
        )

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`."""
        refuse(self.name, MODEL_OPTIMIZER.faults(config, family))
        written, _ = super().write(config, tensors, family, target)
        section = written[SECTION]
        spelling = family.member(config["architecture"]).spelling
        for name in spelling.modelopt.left_out:
            section.pop(name, None)
        for name in {*spelling.repeated, *(name for name, _ in spelling.at_top)} - {*spelling.modelopt.at_top}:
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
        own_names = tuple((canonical, own) for own, canonical in spelling.modelopt.tensor_names)
        return written, renamed(tensors, own_names)


class SpecForgeLayout(ZlabLayout):
    """What SpecForge exports, and its run checkpoints (a `training_state.pt` beside the draft's `config.json`)."""

    name = "specforge"
    writable = False

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        architectures = config.get("architectures")
        named = architectures if isinstance(architectures, list) else []
        own = any(member.spelling.specforge in named for member in family.members if member.spelling.specforge)
        return SECTION in config and (own or SPECFORGE_STATE in files)

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, strict: bool) -> CanonicalDraft:
        """See `Layout.read`. A run checkpoint holds the dtype of training, whatever its `config.json` declares."""
        held = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        declared = config.get("dtype", config.get("torch_dtype"))
        if len(held) != 1 or declared is None or str(declared).removeprefix("torch.") in held:
            return super().read(config, tensors, family, strict)
        dtype = held.pop()
        own = {name: value for name, value in config.items() if name != "torch_dtype"}
        draft = super().read({**own, "dtype": dtype}, tensors, family, strict)
        draft.notes.append(f"config.json declares {declared}, but the weights hold {dtype}, which is kept")
        return draft


class DeepSpecLayout(ZlabLayout):
    """Drafts as DeepSpec publishes them: every field at the top level."""

    name = "deepspec"
    writable = False

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        marks = {member.spelling.deepspec for member in family.members if member.spelling.deepspec}
        return SECTION not in config and "target_layer_ids" in config and not marks.isdisjoint(config)


def refuse(layout: str, faults: list[str]) -> None:
    """Raises `LayoutError` with every fault, if there is one."""
    if faults:
        raise LayoutError(f"this draft cannot be written in layout {layout!r}:\n" + "\n".join(faults))
