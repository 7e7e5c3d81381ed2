"""The part `rollout` of `two_gpus.py`: blocks filled by processes that share the vocabulary, beside one's own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from device_timing import say
from torch import Tensor
from transformers import AutoModelForCausalLM
from two_gpus_shapes import COUNT, RANK, Call, Shape, draft_section

from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.block_drafter import Filler
from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.drafter import Proposals
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.decoding.generate import generate
from draftsmith.decoding.graphs import StepGraphs
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import RowSampling, SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target

LAYERS = 4  # of the target that the engine runs: what the parts compare does not depend on its depth
FIELDS: dict[str, dict[str, Any]] = {"domino": {"shift_label": False}, "dspark": {"block_size": 7}}
"""Blocks as `rollout_gpu.py` has them: 15 and 7 proposals."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rollout_part(call: Call, method: str, dtype_name: str = "bf16", name: str = "qwen3-8b") -> dict[str, Any]:
    """Proposals and the engine's tokens with a shared vocabulary against one process's, and the time of a block."""
    shape, dtype = call.shape(name), DTYPES[dtype_name]
    torch.manual_seed(0)
    target, draft = models(call, shape, method, dtype)
    told: dict[str, Any] = {"equal_weights": same_everywhere(fingerprint(draft, target))}
    for graphs in ("eager", "graph"):
        if graphs == "graph" and call.device == "cpu":
            break
        for kind in ("peaked", "flat", "sampled"):
            found = blocks_beside(call, target, draft, kind=kind, graphs=graphs == "graph")
            told[f"{graphs}_{kind}"] = found
            if RANK == 0:
                say(rollout=f"{method}:{dtype_name}", run=graphs, kind=kind, **found)
    told["engine"] = engine_beside(call, shape, target, draft)
    if RANK == 0:
        say(rollout=f"{method}:{dtype_name}", engine=told["engine"])
    if call.device == "cuda" and dtype == torch.bfloat16:
        for batch in (1, 8):
            told[f"ms_batch_{batch}"] = times(target, draft, batch)
    return told


def models(call: Call, shape: Shape, method: str, dtype: torch.dtype) -> tuple[Target, Draft]:
    """Random weights: base logits of states as `states` makes them have a standard deviation of 3, and the head's
    corrections one of about 1."""
    with torch.device(call.device):
        model = AutoModelForCausalLM.from_config(shape.text_config(LAYERS), dtype=dtype)
    target = Target.from_model(model.eval())
    fields = {"num_hidden_layers": 1, "target_layer_ids": (0, 2)} | ({} if call.tiny else FIELDS[method])
    section = draft_section(call, shape, method, **fields)
    with torch.device("meta"):
        draft = Draft(draft_config(section, target.info))
    draft = draft.to_empty(device=call.device).to(dtype).eval().requires_grad_(False)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1)
    head: Any = draft.head
    weight = head.output_weight if method == "domino" else head.markov_head.markov_w2.weight
    # A latent of DSpark has norm 1, one of Domino about 20 (SiLU of 256 numbers of standard deviation 2).
    torch.nn.init.normal_(weight, std=0.05 if method == "domino" and not call.tiny else 1.0)
    return target, draft


def fingerprint(draft: Draft, target: Target) -> list[float]:
    return [float(p.double().sum()) for p in (*draft.parameters(), target.ends.head_weight)]


def same_everywhere(value: Any) -> bool:
    """Whether all processes hold the same value."""
    values: list[Any] = [None] * COUNT
    if COUNT > 1:
        dist.all_gather_object(values, value)
    return all(other == value for other in values) if COUNT > 1 else True


# --- blocks -----------------------------------------------------------------------------------------------------------


@dataclass
class Blocks:
    """A block's inputs at fixed addresses, and what a filler made of them."""

    filler: Filler
    hidden: Tensor
    anchors: Tensor
    sampler: RowSampler
    made: Proposals | None = None

    def run(self) -> None:
        self.made = self.filler.fill(self.hidden, self.anchors, self.sampler)


def fillers(target: Target, draft: Draft) -> tuple[Filler, Filler]:
    """(one that shares the vocabulary with all processes, one by itself), both `dense`."""
    method = algorithm_for(draft.config)
    assert isinstance(method, BlockAlgorithm)
    shared, own = (method.parse_decoding({"rollout": "dense", "tensor_parallel": parts}) for parts in (True, False))
    return method.filler(draft, target.ends, shared), method.filler(draft, target.ends, own)


def states(target: Target, batch: int, slots: int, kind: str, generator: torch.Generator) -> Tensor:
    """States [batch, slots, H]: logits of standard deviation 3; `peaked`: and one token a slot at about 24."""
    head = target.ends.head_weight
    size = (batch, slots, head.shape[1])
    spread = 3.0 / float(head.float().std())  # |h|
    noise = torch.randn(size, device=head.device, generator=generator) * (spread / head.shape[1] ** 0.5)
    if kind != "peaked":
        return noise.to(head.dtype)
    chosen = torch.randint(len(head), (batch, slots), device=head.device, generator=generator)
    rows = head[chosen].float()
    return (noise + rows * (24.0 / rows.square().sum(-1, keepdim=True))).to(head.dtype)


def sampler_of(batch: int, kind: str, device: torch.device) -> RowSampler:
    rows = RowSampling.of([SamplingOptions(0.8 if kind == "sampled" else 0.0)] * batch, device)
    index = torch.arange(batch, device=device)
    return RowSampler(rows, index, index + 100)


def blocks_of(target: Target, draft: Draft, batch: int, kind: str) -> tuple[Blocks, Blocks]:
    generator = torch.Generator(target.device).manual_seed(5)
    hidden = states(target, batch, draft.config.block.size, kind, generator)
    anchors = torch.randint(target.vocab_size, (batch,), device=target.device, generator=generator)
    sampler = sampler_of(batch, kind, target.device)
    shared, own = (Blocks(filler, hidden, anchors, sampler) for filler in fillers(target, draft))
    return shared, own


def blocks_beside(call: Call, target: Target, draft: Draft, *, kind: str, graphs: bool) -> dict[str, Any]:
    """Blocks of fresh random states, shared and by itself: how many are equal, and how far q is off."""
    batch, rounds = 3, 4 if call.tiny or kind == "sampled" else 20
    shared, own = blocks_of(target, draft, batch, kind)
    held = StepGraphs(target.device, 4) if graphs else None
    generator = torch.Generator(target.device).manual_seed(6)
    equal = changed = 0
    furthest, seen = 0.0, []
    with torch.no_grad():
        for _ in range(rounds):
            shared.hidden.copy_(states(target, batch, draft.config.block.size, kind, generator))
            shared.anchors.random_(0, target.vocab_size, generator=generator)
            for blocks in (shared, own):
                blocks.run() if held is None else held.run(id(blocks), blocks.run)
            one, other = made(shared), made(own)
            equal += int((one.token_ids == other.token_ids).all(-1).sum())
            base = draft.logits(shared.hidden, target.ends).argmax(-1)[:, -one.token_ids.shape[1] :]
            changed += int((one.token_ids != base).sum())
            if one.q is not None and other.q is not None:
                furthest = max(furthest, float((one.q - other.q).abs().max()))
            seen.append(one.token_ids.tolist())
    told: dict[str, Any] = {"blocks": rounds * batch, "equal_blocks": equal, "same_on_all": same_everywhere(seen)}
    told["changed_by_head"] = round(changed / (rounds * batch * len(seen[0][0])), 3)
    if kind == "sampled":
        told["largest_difference_of_q"] = furthest
    return told


def made(blocks: Blocks) -> Proposals:
    assert blocks.made is not None
    return blocks.made


def times(target: Target, draft: Draft, batch: int) -> dict[str, float]:
    """Milliseconds of a block (median of graph replays, caches flushed before each), with its base logits."""
    shared, own = blocks_of(target, draft, batch, "peaked")
    held = StepGraphs(target.device, 4)
    found = {}
    with torch.no_grad():
        for name, blocks in (("shared", shared), ("alone", own)):
            run = run_of(held, blocks)
            for _ in range(3):
                run()
            found[name] = round(flushed_median(run), 4)
    return {**found, "shared_over_alone": round(found["shared"] / found["alone"], 3)}


def run_of(held: StepGraphs, blocks: Blocks) -> Callable[[], None]:
    return lambda: held.run(id(blocks), blocks.run)


def flushed_median(run: Callable[[], None], repeats: int = 40) -> float:
    buffer = torch.zeros(64 * 2**20, device="cuda")
    spans = []
    for _ in range(repeats):
        buffer.add_(1.0)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in spans)[repeats // 2]


# --- the engine -------------------------------------------------------------------------------------------------------


def engine_beside(call: Call, shape: Shape, target: Target, draft: Draft) -> dict[str, Any]:
    """Answers of the engine, its proposals shared or its own: greedy rows and drawn ones."""
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(shape.vocabulary, (length,), generator=generator).tolist() for length in (3, 11, 7)]
    told: dict[str, Any] = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        answers = []
        for shared in (True, False):
            options = EngineOptions(proposer={"rollout": "dense", "tensor_parallel": shared})
            found = generate(
                target, draft, prompts, max_new_tokens=8 if call.tiny else 40, temperature=temperature,
                seed=17, options=options,
            )  # fmt: skip
            answers.append([(answer.token_ids, answer.accept_lengths) for answer in found])
        told[name] = {
            "equal_answers": sum(one == other for one, other in zip(*answers, strict=True)),
            "answers": len(prompts),
            "same_on_all": same_everywhere(answers[0]),
            "accept_length": round(
                sum(sum(lengths) for _, lengths in answers[0]) / sum(len(lengths) for _, lengths in answers[0]), 3
            ),
        }
    sys.stdout.flush()
    return told
