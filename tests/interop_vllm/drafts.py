"""Drafts of every method that vLLM serves, trained for a moment on what a random target says."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.decoding.generate import generate
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.reader import Store
from draftsmith.targets.target import Target
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import tiny_tokenizer

MASK = 3  # <|unknown|>, which no text holds
ENDS = tuple(f"<|end {number}|>" for number in range(6))
SECTIONS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dta": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6},
    "dspark": {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True},
}
"""Method -> its own fields of a recipe's draft section. vLLM drafts with all of these."""


@cache
def saved_target(kind: str = "llama", *, talkative: bool = False) -> Path:
    """A target whose heads are 32 wide, which vLLM's attention on a CPU needs, with a tokenizer beside it. talkative:
    what it says depends on more than the last token."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(ENDS)})
    model = tiny_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"sliding_window": 32} if kind == "mistral" else {}),
    )
    _make_predictable(model, *((0.5, 0.2) if talkative else (0.1, 0.02)))
    # The model never says its eos token: these others end some answers. The rest are defaults of sampling, such as
    # published targets have, that must not change what a server is asked for.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ENDS))]
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=1, repetition_penalty=1.3)
    directory = Path(mkdtemp(prefix="draftsmith-vllm-"))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@torch.no_grad()
def _make_predictable(model: Any, attention: float, mlp: float) -> None:
    """After a token comes, mostly, the next one of a fixed cycle, and the layers add a little, by these scales: what a
    draft learns in a moment, and not quite."""
    vocab_size, hidden_size = model.get_input_embeddings().weight.shape
    generator = torch.Generator().manual_seed(3)
    directions = torch.nn.functional.normalize(torch.randn(vocab_size, hidden_size, generator=generator), dim=-1)
    words = MASK + 1 + torch.randperm(vocab_size - MASK - 1, generator=generator)  # in the order in which they follow
    following = torch.arange(vocab_size)
    following[words] = words.roll(-1)
    model.get_input_embeddings().weight.copy_(directions * hidden_size**0.5)
    model.get_output_embeddings().weight[following] = directions * 12.0 / hidden_size**0.5
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.weight.mul_(attention)
        for name, weight in layer.mlp.named_parameters():
            if "down_proj" in name:
                weight.mul_(mlp)


def random_prompts(count: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Prompts of 4 to 20 random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 21, (count,), generator=generator).tolist()
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@cache
def learnt_texts() -> tuple[Target, list[Sample]]:
    """The target, and what it says after random prompts."""
    target = Target.load(saved_target())
    prompts = random_prompts(64, 1, target.vocab_size)
    answers = generate(target, None, prompts, max_new_tokens=40, stop_token_ids=())
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([*prompt, *answer.token_ids])
        samples.append(Sample(f"text-{number}", ids, torch.arange(ids.shape[0]) >= len(prompt)))
    return target, samples


@cache
def trained(method_name: str) -> Path:
    """The run of a draft that is right now and then: trained for 120 steps on `learnt_texts`."""
    target, samples = learnt_texts()
    section = algorithm(method_name).section(
        mask_token_id=MASK,
        block_size=6,
        num_hidden_layers=1,
        intermediate_size=256,
        target_layer_ids=(2, 0),  # an export puts them in order
        dtype="float32",
        **SECTIONS[method_name],
    )
    layout = algorithm(method_name).capture(draft_config(section, target.info, None))
    root = Path(mkdtemp(prefix="draftsmith-vllm-"))
    identity = target_identity(target.source, None, target.text_config, target.ends.head_weight)
    capture(target, samples, layout, root / "features", CaptureOptions(dtype="float32"), Provenance(identity, None))
    train(
        section,
        target,
        StoreSource(Store.open(root / "features")),
        root / "run",
        TrainOptions(
            device="cpu", max_steps=120, lr=1e-2, tokens_per_row=64, num_anchors=24, rows_per_step=8, rows_per_forward=8
        ),
        TrackOptions(console=False, jsonl=False, tensorboard=False),
    )
    return root / "run"
