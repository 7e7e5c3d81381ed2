"""SpecForge's Domino objective and draftsmith's compute the same numbers."""

import pytest
import torch
from transformers import Qwen3Config

from draftsmith.algorithms.domino import DominoObjectiveOptions, DominoSection
from draftsmith.algorithms.weighting import DecayWeighting
from draftsmith.targets.target import Target
from tests.algorithms.test_dflash import anchors_for, features_of
from tests.algorithms.test_domino import VOCAB, make_draft, outputs_of, terms_of
from tests.blocks.packed import pack, random_document
from tests.support.tiny import tiny_target

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab_size=VOCAB)


@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (False, 0)])
def test_specforge_computes_the_same_objective(target: Target, shift: bool, prefix: int) -> None:
    """Loss, metrics and gradients on the same weights and inputs, with every candidate an anchor."""
    family = pytest.importorskip("specforge.algorithms.common.dflash_family_model", reason="needs the extra [interop]")
    peers = pytest.importorskip("specforge.modeling.draft.domino")

    draft = make_draft(target, shift, prefix)
    config = draft.config
    peer = peers.DominoDraftModel(
        Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=VOCAB,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.rope_theta},
            max_position_embeddings=512,
            attn_implementation="sdpa",
            block_size=config.block.size,
            num_target_layers=config.num_target_layers,
            dflash_config={
                "projector_type": "domino",
                "mask_token_id": config.block.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
                **config.head.model_dump(),
            },
        )
    )
    peer.load_state_dict({name.split(".", 1)[1]: p.detach() for name, p in draft.named_parameters()})
    model = family.OnlineDominoModel(
        peer.eval(),
        torch.nn.Linear(config.hidden_size, VOCAB, bias=False),
        torch.nn.Embedding.from_pretrained(target.ends.embedding_weight),
        mask_token_id=config.block.mask_token_id,
        block_size=config.block.size,
        attention_backend="sdpa",
        num_anchors=99,
        loss_decay_gamma=3.0,
        shift_label=shift,
    )
    model.lm_head.weight = torch.nn.Parameter(target.ends.head_weight.clone(), requires_grad=False)

    generator = torch.Generator().manual_seed(2)
    rows = [[random_document(generator, f"d{row}", 31, supervised=0.6)] for row in range(3)]
    batch = pack(rows, 31)
    features = features_of(batch, draft)
    loss, accuracy, peer_metrics = model(batch.input_ids, features, batch.loss_mask.float(), lambda_base=0.35)
    section = DominoSection(
        objective=DominoObjectiveOptions(weighting=DecayWeighting(gamma=3.0), lambda_start=0.7, head_chunk=9)
    )
    anchors = anchors_for(batch, draft, section, num_anchors=99)
    terms = terms_of(target, draft, section, outputs_of(target, draft, batch, features, anchors, 0.5))
    own = {name: float(top.sum() / bottom.sum()) for name, (top, bottom) in terms.metrics.items()}

    torch.testing.assert_close(terms.numerator / terms.denominator, loss, rtol=1e-4, atol=0)
    for name, value in (
        ("accuracy", accuracy),
        ("final_loss", peer_metrics["final_loss"]),
        ("base_loss", peer_metrics["base_loss"]),
        ("base_accuracy", peer_metrics["base_accuracy"]),
        ("lambda", peer_metrics["lambda_base"]),
    ):
        assert own[name] == pytest.approx(float(value), rel=1e-4)
    (terms.numerator / terms.denominator).backward()
    loss.backward()
    theirs = dict(peer.named_parameters())
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name.split(".", 1)[1]].grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
