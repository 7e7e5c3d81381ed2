"""D-PACE as position weighting: who may use it, and agreement with another implementation."""

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from draftsmith.algorithms.registry import DraftSectionUnion
from draftsmith.algorithms.weighting import DPaceWeighting
from tests.algorithms.test_dflash import VOCAB, anchors_for, features_of, make_draft, terms_of
from tests.blocks.packed import Batch, pack, random_document
from tests.support.tiny import tiny_target

SECTIONS: TypeAdapter[Any] = TypeAdapter(DraftSectionUnion)
DPACE = {"kind": "dpace", "alpha": 0.4, "variant": "continuation_value"}
PEERS = {
    "full": "dpace",
    "cumulative_confidence": "dpace-cumulative-confidence-only",
    "continuation_value": "dpace-continuation-value-only",
}

PEER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dta"])
def test_methods_of_plain_cross_entropy_take_it(name: str) -> None:
    section = SECTIONS.validate_python({"algorithm": name, "objective": {"weighting": DPACE}})
    assert section.objective.weighting == DPaceWeighting(alpha=0.4, variant="continuation_value")


@pytest.mark.parametrize("name", ["domino", "dspark"])
def test_methods_with_other_terms_refuse_it_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=r"weighting is of kind 'dpace'.*allowed are 'uniform' and 'decay'"):
        SECTIONS.validate_python({"algorithm": name, "objective": {"weighting": DPACE}})


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_alpha_lies_in_0_to_1(alpha: float) -> None:
    with pytest.raises(ValidationError, match="alpha"):
        DPaceWeighting(alpha=alpha)


def blocks_with_labels(batch: Batch) -> int:
    """With every candidate an anchor: the supervised tokens whose next token is supervised too."""
    return int((batch.loss_mask[:, :-1] & batch.loss_mask[:, 1:]).sum())


@pytest.mark.interop
@pytest.mark.parametrize("variant", PEERS)
def test_specforge_computes_the_same_sum(variant: str) -> None:
    """The numerator and its gradient, on the same weights, anchors (every candidate) and inputs; SpecForge divides by
    the number of rows, three here, where draftsmith divides by the number of blocks."""
    pytest.importorskip("specforge", reason="needs the extra [interop]")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # a slow import
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    target = tiny_target("llama", vocab_size=VOCAB)
    draft = make_draft(target)
    config = draft.config
    peer = DFlashDraftModel(
        Qwen3Config(
            **{name: getattr(config, name) for name in PEER_FIELDS},
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.rope_theta},
            max_position_embeddings=512,
            attn_implementation="sdpa",
            block_size=config.block.size,
            num_target_layers=config.num_target_layers,
            dflash_config={
                "mask_token_id": config.block.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
            },
        )
    )
    peer.load_state_dict({name.split(".", 1)[1]: p.detach() for name, p in draft.named_parameters()})
    head = torch.nn.Linear(config.hidden_size, VOCAB, bias=False)
    head.weight = torch.nn.Parameter(target.ends.head_weight.clone(), requires_grad=False)
    model = OnlineDFlashModel(
        peer.eval(),
        head,
        torch.nn.Embedding.from_pretrained(target.ends.embedding_weight),
        mask_token_id=config.block.mask_token_id,
        block_size=config.block.size,
        attention_backend="sdpa",
        num_anchors=99,
        loss_type=PEERS[variant],
        dpace_alpha=0.4,
    )
    generator = torch.Generator().manual_seed(2)
    batch = pack([[random_document(generator, f"d{row}", 31, supervised=0.6)] for row in range(3)], 31)
    features = features_of(batch, draft)
    weighting = {"kind": "dpace", "alpha": 0.4, "variant": variant}
    section = SECTIONS.validate_python({"algorithm": "dflash", "objective": {"weighting": weighting}})
    terms = terms_of(target, draft, section, batch, features, anchors_for(batch, draft, section, 99))
    loss = model(batch.input_ids, features, batch.loss_mask.long())[0]
    peer_params = dict(peer.named_parameters())
    found = torch.autograd.grad(terms.numerator, list(draft.parameters()))
    wanted = torch.autograd.grad(loss, [peer_params[name.split(".", 1)[1]] for name, _ in draft.named_parameters()])
    ratio = (terms.numerator / loss).item()
    assert ratio == pytest.approx(3.0, rel=1e-4)
    assert terms.denominator.item() == blocks_with_labels(batch)
    for ours, theirs in zip(found, wanted, strict=True):
        near = 1e-4 * max(1.0, theirs.abs().max().item()) * ratio
        torch.testing.assert_close(ours, theirs * ratio, rtol=1e-3, atol=near)
