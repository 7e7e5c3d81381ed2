"""Targets whose layers a server does not hand out, read from the sources of the versions named here.

Drafts of every method read tapped layers, and so does a capture: a server without them can do neither.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerTaps:
    """A server's interface by which a model's layers are tapped.

    without: architectures (`architectures[0]` of a target's configuration) that the server runs and that lack it. Of an
    architecture that is not listed nothing is known.
    """

    server: str
    version: str
    interface: str
    without: frozenset[str]

    def fault(self, architecture: str | None) -> str | None:
        """Why a target of this architecture cannot be tapped; None where it can, or is not known."""
        if architecture not in self.without:
            return None
        return f"{self.server} {self.version} runs {architecture} without `{self.interface}`, so no layer can be tapped"


def architecture_of(config: Any) -> str | None:
    """The class that a configuration names for its model; None where it names none."""
    named = getattr(config, "architectures", None)
    return named[0] if named else None


def _decoders(names: str) -> frozenset[str]:
    return frozenset(f"{name}ForCausalLM" for name in names.split())


# vllm/model_executor/models: classes of the registry that do not derive from SupportsEagle3.
VLLM_TAPS = LayerTaps(
    "vLLM",
    "0.32.0",
    "SupportsEagle3",
    _decoders(
        """
        AXK1 Bloom Cohere Cohere2 Dbrx Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba Gemma Gemma2 Gemma3
        Gemma3n Glm4 Glm4Moe Glm4MoeLite GPTJ GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA HrmText
        HyperCLOVAX HYV3 Jamba Lfm2 Lfm2Moe LongcatFlash Mamba Mamba2 Mixtral Nemotron Olmoe OlmoHybrid OPT Qwen2Moe
        StableLm Zamba2
        """
    )
    | {"GPT2LMHeadModel"},
)

# sglang/srt/models: entry classes that have no such method, inherited ones included.
_NEITHER = _decoders(
    """
    Afmoe Arcee Cohere Cohere2 Cohere2Moe Dbrx DeepseekV4 Ernie4_5_Moe Exaone4 FalconH1 FalconMamba Gemma Gemma2 Gemma3n
    Glm4 GPTBigCode GPTJ Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA GraniteSWA HrmText
    HunYuanDenseV1 HunYuanMoEV1 HYV3 HYV4 KimiLinear Mamba Mamba2 MiniCPM3 Mixtral Olmo Olmo2 Olmoe OPT Persimmon Phi
    StableLm Starcoder2 Zaya
    """
) | {"GPT2LMHeadModel", "Gemma3nForConditionalGeneration"}
SGLANG_DFLASH_TAPS = LayerTaps(
    "SGLang",
    "0.5.23",
    "set_dflash_layers_to_capture",
    _NEITHER
    | _decoders("Apertus ExaoneMoe Gemma3 Glm4Moe LongcatFlash MiniMaxM2 Qwen2 Qwen2Moe")
    | {"Gemma3ForConditionalGeneration"},
)
SGLANG_EAGLE3_TAPS = LayerTaps(
    "SGLang",
    "0.5.23",
    "set_eagle3_layers_to_capture",
    _NEITHER | _decoders("Laguna Lfm2 Lfm2Moe MiMoV2Flash NemotronH"),
)
