"""The counting language: after t comes t + 1 modulo `SYMBOLS`. A target that speaks it, and drafts that learn it.

A head that is trained with one slot convention and decoded with another learns it to 100 % and still commits less than
the block has room for; `assert_commits_maximum` is the test that sees that.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm, algorithm_for
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.reader import Store
from draftsmith.run.recipe import parse_recipe
from draftsmith.targets.target import Target
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.record import load_run
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from draftsmith.training.warm_start import read_warm_start

SYMBOLS = 11
MASK = SYMBOLS + 1  # never seen in text
VOCABULARY = SYMBOLS + 3
TAP_IDS = (1, 3)
HIDDEN = 32

PROMPTS = tuple(
    tuple((start + i) % SYMBOLS for i in range(length)) for start, length in ((3, 6), (0, 5), (10, 9), (7, 7))
)

SECTION: dict[str, Any] = {
    "mask_token_id": MASK,
    "block_size": 5,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "target_layer_ids": TAP_IDS,
    "dtype": "float32",
}
"""What every draft of these tests shares; a method adds its own fields."""


@cache
def counting_target(sharpness: float = 12.0) -> Target:
    """A small Llama built to count: tokens have orthogonal embeddings, and the output head's row of t + 1 is the
    embedding of t. Its layers add a little, so that its taps are not just the embedding. `sharpness`: the logit of the
    right token (the others are near 0)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
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
        directions = torch.linalg.qr(torch.randn(HIDDEN, VOCABULARY)).Q.T  # [V, H], orthonormal
    following = torch.arange(VOCABULARY)
    following[:SYMBOLS] = (following[:SYMBOLS] + 1) % SYMBOLS
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(directions * HIDDEN**0.5)
        model.lm_head.weight[following] = directions * sharpness / HIDDEN**0.5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.02)
    return Target.from_model(model)


def counting_samples(count: int = 64, seed: int = 0) -> list[Sample]:
    """Texts of 12 to 31 tokens from random starts; the first few tokens are a prompt, without supervision."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = int(torch.randint(12, 32, (), generator=generator))
        prompt = int(torch.randint(2, 5, (), generator=generator))
        start = int(torch.randint(SYMBOLS, (), generator=generator))
        ids = (torch.arange(length) + start) % SYMBOLS
        samples.append(Sample(f"count-{number}", ids, torch.arange(length) >= prompt))
    return samples


def train_counting(
    section: dict[str, Any], *, steps: int = 200, lr: float = 2e-2, seed: int = 0, through_files: bool = True
) -> tuple[Target, Draft]:
    """Captures the language from the target, trains the draft that the recipe section describes (`algorithm` and the
    method's own fields, over `SECTION`; None: not that field) until it is always right, and returns (target, draft).

    through_files: the draft is written and read again in the z-lab layout. Fails where training ends with an error rate
    above zero or a block that is not accepted as a whole.
    """
    target = counting_target()
    fields = {name: value for name, value in {**SECTION, **section}.items() if value is not None}
    draft_section = parse_recipe({"run": "run", "target": {"path": "counting"}, "draft": fields}).draft
    method = algorithm(draft_section.algorithm)
    source = draft_section.init_from
    config = draft_config(draft_section, target.info, None if source is None else read_warm_start(source).config)
    identity = target_identity(target.source, None, target.text_config, target.ends.head_weight)
    options = TrainOptions(
        device="cpu",
        max_steps=steps,
        lr=lr,
        tokens_per_row=32,
        num_anchors=24,
        rows_per_step=4,
        rows_per_forward=4,
        eval_share=0.1,
        seed=seed,
        keep_best=0,
    )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        layout = method.capture(config)
        capture(
            target,
            counting_samples(),
            layout,
            root / "features",
            CaptureOptions(dtype="float32"),
            Provenance(identity, None),
        )
        result = train(
            section=draft_section,
            target=target,
            source=StoreSource(Store.open(root / "features")),
            run_dir=root / "run",
            options=options,
            track=TrackOptions(console=False, jsonl=False, tensorboard=False),
            provenance=Provenance(identity, None),
        )
        evaluation = result.evaluation
        assert evaluation is not None
        accuracy = evaluation["accuracy"]
        assert isinstance(accuracy, list)
        assert len(accuracy) == method.num_proposals(config)
        assert {value for value in accuracy if value is not None} == {1.0}, (
            evaluation
        )  # None: label not to be predicted
        draft = load_run(root / "run", "last")
        if through_files:
            draft.save(root / "draft")
            draft = Draft.load(root / "draft", strict=True)
    return target, draft.eval()


def assert_commits_maximum(target: Target, draft: Draft, *, verifies: int = 3, **options: Any) -> list[Generation]:
    """Greedy decoding of ragged prompts counts on without a mistake, and every verify commits all that it can: the
    method's proposals, or `num_proposals`, and one more. `options` are further `EngineOptions`."""
    width = 1 + (options.get("num_proposals") or algorithm_for(draft.config).num_proposals(draft.config))
    engine = Engine(target, draft, EngineOptions(**options))
    assert engine.width == width
    request = Request.of(PROMPTS, max_new_tokens=1 + verifies * width, sampling=SamplingOptions(), seed=0)
    results = engine.decode(request)
    for prompt, result in zip(PROMPTS, results, strict=True):
        counted = [(prompt[-1] + 1 + i) % SYMBOLS for i in range(request.max_new_tokens)]
        assert result.token_ids == counted
        assert result.accept_lengths == [width] * verifies
    return results
