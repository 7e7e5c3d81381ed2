"""Evaluation predicts serving: on a synthetic language, a half-trained draft's accept length is the engine's."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.capture.online import OnlineFeatures
from draftsmith.capture.options import CaptureOptions
from draftsmith.data.sample import Sample
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.schema import CaptureLayout
from draftsmith.run.recipe import parse_recipe
from draftsmith.stages.evaluate import by_generating
from draftsmith.targets.target import Target
from draftsmith.training.hooks import Hooks
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.run import train

SYMBOLS, HIDDEN = 61, 64
MASK = SYMBOLS
TAP_IDS = (1, 3)


def cyclic_target() -> Target:
    """After token t comes the t-th entry of a random cycle: a table that a draft has to learn slot by slot."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = LlamaConfig(
            vocab_size=SYMBOLS + 1,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config).eval()
        directions = torch.linalg.qr(torch.randn(HIDDEN, SYMBOLS + 1)).Q.T  # [V, H], orthonormal
        cycle = torch.randperm(SYMBOLS)
    following = torch.arange(SYMBOLS + 1)
    following[cycle] = cycle.roll(-1)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(directions * HIDDEN**0.5)
        model.lm_head.weight[following] = directions * 12.0 / HIDDEN**0.5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.02)
    return Target.from_model(model)


def texts(target: Target, count: int, length: int, seed: int) -> torch.Tensor:
    """What the target itself says [count, length], greedily, after random first tokens."""
    ids = torch.randint(SYMBOLS, (count, 1), generator=torch.Generator().manual_seed(seed))
    following = target.ends.project(target.ends.embed(torch.arange(SYMBOLS))).argmax(-1)
    for _ in range(length - 1):
        ids = torch.cat([ids, following[ids[:, -1:]]], dim=1)
    positions = torch.arange(length).expand(count, -1)
    said = target.ends.project(target.forward(ids, positions).final_state).argmax(-1)
    assert torch.equal(said[:, :-1], ids[:, 1:])
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "lr"), [(60, 3e-3), (120, 1.5e-2)])
def test_held_out_accept_length_is_the_engines(tmp_path, steps, lr):
    """Of a draft that has begun to learn, and of one that has learnt nearly all."""
    draft = {"algorithm": "dflash"}
    target = cyclic_target()
    identity = target_identity("cycle", None, target.text_config, target.ends.head_weight)
    samples = [Sample(f"text-{i}", ids, torch.arange(64) > 0) for i, ids in enumerate(texts(target, 60, 64, seed=1))]
    layout = CaptureLayout(TAP_IDS, HIDDEN, final_state=draft["algorithm"] == "dspark")
    source = OnlineFeatures(target, samples, layout, CaptureOptions(dtype="float32"), Provenance(identity, None))
    fields = {"block_size": 5, "num_hidden_layers": 1, "target_layer_ids": TAP_IDS, "mask_token_id": MASK}
    prompts = texts(target, 24, 3, seed=2).tolist()
    train(
        section=parse_recipe(
            {"run": "run", "target": {"path": "cycle"}, "draft": {**fields, **draft, "dtype": "float32"}}
        ).draft,
        target=target,
        source=source,
        run_dir=tmp_path,
        options=TrainOptions(
            device="cpu",
            max_steps=steps,
            lr=lr,
            tokens_per_row=256,
            num_anchors=16,
            rows_per_step=2,
            rows_per_forward=2,
            eval_share=0.3,
            keep_best=0,
        ),
        track=TrackOptions(console=False, tensorboard=False),
        hooks=Hooks(evaluate_generate=by_generating(target, prompts, max_new_tokens=61, busy=source.busy)),
    )
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    pairs = [(e["accept_length"], e["generate_accept_length"]) for e in entries if e["kind"] == "eval"]
    print(pairs)
    assert len(pairs) == 2
    for held_out, engine in pairs:
        assert engine == pytest.approx(held_out, rel=0.05)
    last = pairs[-1][0]
    assert last > 4.5 if steps > 100 else 1.05 < last < 2.0
