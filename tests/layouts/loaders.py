"""Where other software's loaders look for each field and tensor of a draft directory, read from the sources named here.

The versions, and which drafts these programs run at all, are in `draftsmith.layouts.consumers`.
"""

from dataclasses import dataclass

from draftsmith.layouts.consumers import MODEL_OPTIMIZER, SGLANG, VLLM, VLLM_SPECULATORS, Consumer
from draftsmith.layouts.vocabulary import EMBEDDING, HEAD


@dataclass(frozen=True)
class Loader:
    """How one architecture is loaded.

    class_names: what `architectures[0]` may be. reads: dotted path in `config.json` -> the canonical field found there
    (`head.x` for the head's; `field + 1` where a list counts from one; a JSON value where it is always the same).
    tensors: names besides the backbone's, `{layer}` for every layer. refuses: paths that may not be written.
    """

    class_names: tuple[str, ...]
    reads: dict[str, str]
    tensors: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """A program on one layout, and how it loads each architecture."""

    layout: str
    consumer: Consumer
    loaders: dict[str, Loader]


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
FLAT_MARKOV = ("markov_w1.weight", "markov_w2.weight")
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
    name: f"head.{name}" for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
}
_NESTED_CONVOLUTIONS = {f"dflash_config.{name}": means for name, means in _CONVOLUTIONS.items()}
_DOMINO_HEAD = {
    "dflash_config.projector_type": '"domino"',
    "emb_dim": "head.emb_dim",
    **{
        f"dflash_config.{name}": f"head.{name}"
        for name in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
    },
}

# sglang/srt/models/{dflash,dspark}.py, sglang/srt/speculative/dflash_utils.py,
# sglang/srt/speculative/dspark_components/dspark_config.py
_SGLANG = {**_DFLASH, "block_size": "block_size", "num_target_layers": "num_target_layers"}
_SGLANG_LOADERS = {
    "dflash": Loader(("DFlashDraftModel",), _SGLANG),
    "dflash2": Loader(("DFlash2DraftModel",), {**_SGLANG, **_NESTED_CONVOLUTIONS}, SELECTOR),
    "domino": Loader(("DFlashDraftModel",), {**_SGLANG, **_DOMINO_HEAD}, GRU),
    "dspark": Loader(
        ("Qwen3DSparkModel", "DSparkDraftModel"),
        {**_SGLANG, **_DSPARK_HEAD, "sample_from_anchor": "true"},
        MARKOV,
    ),
}

# vllm/config/speculative.py, vllm/model_executor/models/qwen3_{dflash,dflash2,dspark}.py,
# vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, vllm/v1/worker/gpu/spec_decode/{dflash,dspark}/speculator.py
_VLLM_LOADERS = {
    "dflash": Loader(("DFlashDraftModel",), _DFLASH),
    "dflash2": Loader(("DFlash2DraftModel",), {**_DFLASH, **_NESTED_CONVOLUTIONS}, SELECTOR),
    "dspark": Loader(
        ("Qwen3DSparkModel",),
        {**_DFLASH, **_DSPARK_HEAD, "block_size": "block_size", "sample_from_anchor": "true"},
        MARKOV,
        refuses=("dflash_config.sample_from_anchor",),
    ),
}

# speculators/models/{dflash,dspark}/config.py, vllm/transformers_utils/configs/speculators/{algos,base}.py
_SPECULATORS = {
    **{f"transformer_layer_config.{path}": name for path, name in {**_NETWORK, **_ROPE}.items()},
    "transformer_layer_config.model_type": '"qwen3"',
    "mask_token_id": "mask_token_id",
    "block_size": "block_size",
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "aux_hidden_state_layer_ids": "target_layer_ids + 1",
}
_ENDS = (EMBEDDING, HEAD)
_SPECULATORS_LOADERS = {
    "dflash": Loader(
        ("DFlashSpeculator",),
        {**_SPECULATORS, "speculators_model_type": '"dflash"', "sample_from_anchor": "false"},
        _ENDS,
    ),
    "dflash2": Loader(
        ("DFlash2DraftModel",),
        {**_SPECULATORS, "speculators_model_type": '"dflash2"', "sample_from_anchor": "false", **_CONVOLUTIONS},
        (*_ENDS, *SELECTOR),
    ),
    "dspark": Loader(
        ("DSparkSpeculator",),
        {**_SPECULATORS, "speculators_model_type": '"dspark"', "sample_from_anchor": "true", **_DSPARK_HEAD},
        (*_ENDS, *MARKOV),
    ),
}

# modelopt/torch/export/plugins/hf_spec_export.py, modelopt/torch/speculative/plugins/modeling_{dflash,domino,dspark}.py
_MODEL_OPTIMIZER = {
    **{path: name for path, name in _DFLASH.items() if path != "layer_types"},
    "block_size": "block_size",
    "num_target_layers": "num_target_layers",
    "torch_dtype": "dtype",
}
_MODEL_OPTIMIZER_LOADERS = {
    "dflash": Loader(("DFlashDraftModel",), _MODEL_OPTIMIZER),
    "domino": Loader(("DFlashDraftModel",), {**_MODEL_OPTIMIZER, **_DOMINO_HEAD}, GRU),
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
        FLAT_MARKOV,
    ),
}

READERS = (
    Reader("zlab", SGLANG, _SGLANG_LOADERS),
    Reader("sglang", SGLANG, _SGLANG_LOADERS),
    Reader("zlab", VLLM, _VLLM_LOADERS),
    Reader("speculators", VLLM_SPECULATORS, _SPECULATORS_LOADERS),
    Reader("modelopt", MODEL_OPTIMIZER, _MODEL_OPTIMIZER_LOADERS),
)
