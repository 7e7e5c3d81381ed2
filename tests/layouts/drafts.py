"""Random drafts of every architecture, and which of them a layout can hold."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from draftsmith.drafts.draft import Draft
from draftsmith.layouts import TargetParts
from tests.support.tiny_draft import dspark_head, tiny_draft

FULL, SLIDING = "full_attention", "sliding_attention"
TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)

HEADS: dict[str, list[dict[str, Any]]] = {
    "dflash": [{}],
    "dflash2": [{"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5}],
    "domino": [
        {"gru_hidden_dim": 7, "emb_dim": 5, "pure_draft_prefix_len": 1, "shift_label": True},
        {"gru_hidden_dim": 3, "emb_dim": 9, "pure_draft_prefix_len": 0, "shift_label": False},
    ],
    "dspark": [
        dspark_head(kind, confidence, markov, rank=5)
        for kind in ("vanilla", "gated", "rnn")
        for confidence, markov in ((True, True), (True, False), (False, False))
    ]
    + [dspark_head("vanilla", confidence, False, rank=0) for confidence in (True, False)],
}
"""Architecture -> heads to try."""


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Drafts of every architecture: with and without sinks, windows, YaRN, scales; any dtype."""
    architecture = draw(st.sampled_from(sorted(HEADS)))
    layers = draw(st.integers(1, 3))
    layer_types = tuple(draw(st.sampled_from((FULL, SLIDING))) for _ in range(layers))
    rope: dict[str, Any] = {"rope_theta": draw(st.sampled_from((5000.0, 1e6)))}
    if draw(st.booleans()):
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    elif draw(st.booleans()):
        rope |= {"partial_rotary_factor": 0.5}
    return tiny_draft(
        TARGET,
        num_layers=layers,
        num_taps=draw(st.integers(1, 4)),
        block_size=draw(st.integers(2, 9)),
        layer_types=layer_types,
        sliding_window=draw(st.integers(1, 6)) if SLIDING in layer_types else None,
        seed=draw(st.integers(0, 1000)),
        architecture=architecture,
        head=draw(st.sampled_from(HEADS[architecture])),
        rope=rope,
        causal=draw(st.sampled_from((None, True, False))),
        attention_sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        output_multiplier=draw(st.sampled_from((1.0, 0.5))),
        final_logit_softcapping=draw(st.sampled_from((None, 20.0))),
        input_embedding_scale=draw(st.sampled_from((1.0, 3.5))),
    )


def simple_draft(architecture: str, head: int = 0, **options: Any) -> Draft:
    """A draft that every layout with this architecture can hold."""
    return tiny_draft(TARGET, architecture=architecture, head=HEADS[architecture][head], **options)


def target_ends(seed: int = 0, name: str | None = "organisation/target") -> TargetParts:
    """Random ends of `TARGET`, not tied."""
    generator = torch.Generator().manual_seed(seed)
    shape = (TARGET.vocab_size, TARGET.hidden_size)
    embedding, head = (torch.randn(shape, generator=generator) for _ in range(2))
    return TargetParts(name, ("LlamaForCausalLM",), embedding, head)
