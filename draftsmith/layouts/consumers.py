"""What other software's loaders look for in a draft directory, read from the sources of the versions named here.

Each table says where a loader looks for a value and which canonical field it must find there, which tensors it wants,
and which drafts it would run as something else than they were trained. Writers refuse those drafts; a test holds what
is written against the tables.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.layouts.attention_fields import SLIDING, uniform_kind

Check = Callable[[dict[str, Any]], Iterable[str]]


@dataclass(frozen=True)
class Loader:
    """How one architecture is loaded.

    class_names: what `architectures[0]` may be. reads: dotted path in `config.json` -> the canonical field found there
    (`head.x` for the head's; `field + 1` where a list counts from one; a plain value where it is always the same).
    tensors: names besides the backbone's, `{layer}` for every layer. only: canonical fields that the loader does not
    know, and the one value that it computes.
    """

    class_names: tuple[str, ...]
    reads: dict[str, Any]
    tensors: tuple[str, ...] = ()
    only: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Consumer:
    """One program: the version and the files that its table was read from, and how it loads each architecture."""

    name: str
    version: str
    sources: tuple[str, ...]
    loaders: dict[str, Loader]
    checks: tuple[Check, ...] = ()

    def faults(self, config: dict[str, Any]) -> list[str]:
        """Why this program would not run the draft of a canonical configuration as it was trained: one line each."""
        who = f"{self.name} {self.version}"
        architecture = config["architecture"]
        if architecture not in self.loaders:
            return [f"{who} does not load {architecture!r} drafts; it loads {', '.join(map(repr, self.loaders))}"]
        faults = [
            f"{name} is {value!r}; {who} computes {allowed!r} only"
            for name, allowed in self.loaders[architecture].only.items()
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


BACKBONE = (
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(
        f"layers.{{layer}}.{name}.weight"
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        )
    ),
)
"""The tensors that every loader wants."""

SINKS = "layers.{layer}.self_attn.attention_sink_bias"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
SELECTOR = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
    *(
        f"layers.{{layer}}.{conv}.{part}"
        for conv in ("attention_conv", "mlp_conv")
        for part in ("base_kernel", "kernel_projection.weight")
    ),
)
GRU = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")

_NETWORK = {
    name: name
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "layer_types",
    )
}
_ROPE = {"rope_parameters.rope_theta": "rope.rope_theta", "rope_parameters.rope_type": "rope.rope_type"}
_DFLASH = {
    **_NETWORK,
    **_ROPE,
    "dflash_config.mask_token_id": "mask_token_id",
    "dflash_config.target_layer_ids": "target_layer_ids",
}
_DSPARK_HEAD = {
    name: f"head.{name}"
    for name in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
}
_CONVOLUTIONS = {
    f"dflash_config.{name}": f"head.{name}"
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
}
_DOMINO_HEAD = {
    f"dflash_config.{name}": f"head.{name}"
    for name in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
}
_PLAIN_LOGITS = {"output_multiplier": 1.0, "final_logit_softcapping": None}
_VANILLA = {"head.markov_head_type": "vanilla"}
_SGLANG = {**_DFLASH, "block_size": "block_size", "num_target_layers": "num_target_layers"}

SGLANG = Consumer(
    "sglang",
    "0.5.23",
    (
        "sglang/srt/models/dflash.py",
        "sglang/srt/models/dspark.py",
        "sglang/srt/speculative/dflash_utils.py",
        "sglang/srt/speculative/dspark_components/dspark_config.py",
    ),
    {
        # Multiplier and soft-cap keep the order of logits, so that a plain argmax is the same without them.
        "dflash": Loader(("DFlashDraftModel",), _SGLANG),
        "dflash2": Loader(("DFlash2DraftModel",), {**_SGLANG, **_CONVOLUTIONS}, SELECTOR),
        "domino": Loader(
            ("DFlashDraftModel",),
            {**_SGLANG, **_DOMINO_HEAD, "emb_dim": "head.emb_dim", "dflash_config.projector_type": '"domino"'},
            GRU,
            {**_PLAIN_LOGITS, "head.pure_draft_prefix_len": 1},
        ),
        "dspark": Loader(
            ("Qwen3DSparkModel", "DSparkDraftModel"), {**_SGLANG, **_DSPARK_HEAD}, MARKOV, {**_PLAIN_LOGITS}
        ),
    },
)

VLLM = Consumer(
    "vllm",
    "0.33.0",
    (
        "vllm/config/speculative.py",
        "vllm/model_executor/models/qwen3_dflash.py",
        "vllm/model_executor/models/qwen3_dflash2.py",
        "vllm/model_executor/models/qwen3_dspark.py",
        "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    ),
    {
        "dflash": Loader(("DFlashDraftModel",), _DFLASH, only={"input_embedding_scale": 1.0}),
        "dflash2": Loader(("DFlash2DraftModel",), {**_DFLASH, **_CONVOLUTIONS}, SELECTOR),
        "dspark": Loader(
            ("Qwen3DSparkModel",),
            {**_DFLASH, **_DSPARK_HEAD, "block_size": "block_size"},
            MARKOV,
            {**_PLAIN_LOGITS, **_VANILLA, "input_embedding_scale": 1.0},
        ),
    },
)
"""vLLM on z-lab's layout."""


def _one_causality(config: dict[str, Any]) -> Iterable[str]:
    kind = uniform_kind(config)
    if kind is None:
        yield (
            f"layer_types is {list(config['layer_types'])}, whose layers differ in causality, and one field says "
            "it for all of them; write layout 'zlab'"
        )
    elif kind == (False, True):
        yield "causal is True on full layers, which always see the whole block; write layout 'zlab'"


_BARE = {
    **_PLAIN_LOGITS,
    "input_embedding_scale": 1.0,
    "attention_sinks": False,
    "rope.partial_rotary_factor": 1.0,
}
_SPECULATORS = {
    **{f"transformer_layer_config.{path}": name for path, name in {**_NETWORK, **_ROPE}.items()},
    "transformer_layer_config.model_type": '"qwen3"',
    "mask_token_id": "mask_token_id",
    "block_size": "block_size",
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "aux_hidden_state_layer_ids": "target_layer_ids + 1",
}
_ENDS = ("embed_tokens.weight", "lm_head.weight")

SPECULATORS = Consumer(
    "speculators",
    "0.9.0",
    ("speculators/models/dflash/config.py", "speculators/models/dspark/config.py"),
    {
        "dflash": Loader(
            ("DFlashSpeculator",),
            {**_SPECULATORS, "speculators_model_type": '"dflash"', "sample_from_anchor": "false"},
            _ENDS,
            _BARE,
        ),
        "dflash2": Loader(
            ("DFlash2DraftModel",),
            {
                **_SPECULATORS,
                "speculators_model_type": '"dflash2"',
                "sample_from_anchor": "false",
                **{path.removeprefix("dflash_config."): name for path, name in _CONVOLUTIONS.items()},
            },
            (*_ENDS, *SELECTOR),
            _BARE,
        ),
        "dspark": Loader(
            ("DSparkSpeculator",),
            {**_SPECULATORS, "speculators_model_type": '"dspark"', "sample_from_anchor": "true", **_DSPARK_HEAD},
            (*_ENDS, *MARKOV),
            _BARE,
        ),
    },
    (_one_causality,),
)
"""The package speculators on its own layout."""

VLLM_SPECULATORS = Consumer(
    "vllm",
    "0.33.0",
    (
        "vllm/transformers_utils/configs/speculators/algos.py",
        "vllm/transformers_utils/configs/speculators/base.py",
        "vllm/model_executor/models/qwen3_dflash.py",
        "vllm/model_executor/models/qwen3_dspark.py",
    ),
    {
        **SPECULATORS.loaders,
        "dspark": replace(SPECULATORS.loaders["dspark"], only={**_BARE, **_VANILLA}),
    },
    (_one_causality,),
)
"""vLLM on the speculators layout, of which it reads the same fields."""


def _one_window(config: dict[str, Any]) -> Iterable[str]:
    kind = uniform_kind(config)
    if config["attention_sinks"] and kind is None and SLIDING in config["layer_types"]:
        yield f"layer_types is {list(config['layer_types'])}; attention sinks go with layers of one kind"


def _confidence_with_markov(config: dict[str, Any]) -> Iterable[str]:
    head = config["head"]
    if head.get("enable_confidence_head") and not head["confidence_head_with_markov"]:
        yield "confidence_head_with_markov is False; the confidence head always reads the Markov embedding"


_MODEL_OPTIMIZER_LOGITS = {name: _BARE[name] for name in _BARE if name != "attention_sinks"}
_MODEL_OPTIMIZER = {
    **{path: name for path, name in _DFLASH.items() if path != "layer_types"},
    "block_size": "block_size",
    "num_target_layers": "num_target_layers",
    "torch_dtype": "dtype",
}
_FLAT_MARKOV = ("markov_w1.weight", "markov_w2.weight")

MODEL_OPTIMIZER = Consumer(
    "nvidia-modelopt",
    "0.47.0",
    (
        "modelopt/torch/export/plugins/hf_spec_export.py",
        "modelopt/torch/speculative/plugins/modeling_dflash.py",
        "modelopt/torch/speculative/plugins/modeling_domino.py",
        "modelopt/torch/speculative/plugins/modeling_dspark.py",
    ),
    {
        "dflash": Loader(("DFlashDraftModel",), _MODEL_OPTIMIZER, only=_MODEL_OPTIMIZER_LOGITS),
        "domino": Loader(
            ("DFlashDraftModel",),
            {**_MODEL_OPTIMIZER, **_DOMINO_HEAD, "emb_dim": "head.emb_dim", "dflash_config.projector_type": '"domino"'},
            GRU,
            _MODEL_OPTIMIZER_LOGITS,
        ),
        "dspark": Loader(
            ("DFlashDraftModel",),
            {
                **_MODEL_OPTIMIZER,
                "dflash_config.projector_type": '"dspark"',
                "dflash_config.markov_rank": "head.markov_rank",
                "dflash_config.markov_head_type": "head.markov_head_type",
                "dflash_config.use_confidence_head": "head.enable_confidence_head",
                "dflash_config.shift_label": "true",
            },
            _FLAT_MARKOV,
            _MODEL_OPTIMIZER_LOGITS,
        ),
    },
    (_one_window, _confidence_with_markov),
)
