"""Time of one block's rollout on a GPU, at the sizes of Qwen3-8B: Domino with 15 proposals, DSpark with 7.

    python benchmarks/rollout_gpu.py [--parts floor rollouts steps million] [--out results.jsonl]

Weights are random. Base logits have a standard deviation of 3 and one token at 24 or so, as language models have, or at
12 to 26 for heads of the kind `trained`; `--heads` names kinds of W2 (`make_output_weight`), each with the correction's
standard deviation over the vocabulary. Every rollout is captured in a CUDA graph and
replayed, with the caches flushed in between; times are medians and include the product that gives the base logits. The
floor is the bytes that have to be read, at the bandwidth that a plain read reaches: the output head once, W2 once a
step (not at all when pruned), the other weights, which fit in the cache, once. One JSON line a measurement.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import RowSampling, SamplingOptions
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.kernels.rollout.low_rank_argmax import low_rank_argmax, low_rank_scores
from draftsmith.kernels.rollout.low_rank_pruning import leaders, pruned_low_rank_argmax
from draftsmith.kernels.rollout.row_bounds import row_bounds, upper_bounds
from draftsmith.kernels.vocabulary.keys import key_ids, new_keys
from draftsmith.targets.ends import TargetEnds

VOCAB, HIDDEN = 151936, 4096
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
HEADS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "domino": ("domino", 16, dict(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1, shift_label=False)),
    "dspark": (
        "dspark",
        7,
        dict(
            markov_rank=256,
            markov_head_type="vanilla",
            enable_confidence_head=False,
            confidence_head_with_markov=False,
        ),
    ),
}


def make_sampler(batch: int, temperature: float) -> RowSampler:
    rows = RowSampling.of([SamplingOptions(temperature)] * batch, DEVICE)
    index = torch.arange(batch, device=DEVICE)
    return RowSampler(rows, index, index + 100)


def make_ends() -> TargetEnds:
    head = torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=DTYPE) * 0.02
    return TargetEnds(torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=DTYPE), head)


def make_draft(name: str) -> Draft:
    architecture, block_size, head = HEADS[name]
    config = dict(
        architecture=architecture, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, intermediate_size=64, vocab_size=VOCAB, block_size=block_size,
        mask_token_id=1, target_layer_ids=[0], num_target_layers=1, max_position_embeddings=4096, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e6}, layer_types=["full_attention"], dtype="bfloat16", head=head,
    )  # fmt: skip
    with torch.device("meta"):
        draft = Draft(DraftConfig.parse(config))
    draft = draft.to_empty(device=DEVICE).to(DTYPE)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return draft


def output_weight(draft: Draft) -> Tensor:
    """W2."""
    head: Any = draft.head
    return head.output_weight if hasattr(head, "output_weight") else head.markov_head.markov_w2.weight


def sample_latents(draft: Draft) -> Tensor:
    """Latents [64, E] as they come."""
    head: Any = draft.head
    if hasattr(head, "markov_head"):
        return head.markov_head.markov_w1.weight[:64].float()
    hidden = make_hidden(make_head_rows(), 64, 1)[:, 0]  # SiLU of W1 [h; s], with states below 1
    return torch.nn.functional.silu(hidden @ head.embed_proj[0].weight[:, :HIDDEN].T).float()


def make_output_weight(kind: str, latents: Tensor, spread: float) -> Tensor:
    """W2 [V, E] whose corrections have this standard deviation over the vocabulary.

    `random`: all directions alike. `trained`: as counted on a trained Domino head (`pruning_shares.py`), nine tenths of
    it lie along one direction that all rows share, and the rest falls off so that what is beside the 16 strongest
    directions allows a row four times the correction's standard deviation.
    """
    rank = latents.shape[1]
    weight = torch.randn(VOCAB, rank, device=DEVICE)
    if kind == "trained":
        shared = latents.mean(0, keepdim=True)
        directions = torch.linalg.qr(torch.cat((shared, torch.randn(rank - 1, rank, device=DEVICE))).T).Q.T
        sizes = torch.arange(1, rank, device=DEVICE) ** -0.9
        weight[:, 1:] *= sizes
        weight[:, 0] = 3 * sizes.norm()
        weight = weight @ directions
    return (weight * (spread / (latents @ weight.T).std(-1).mean())).to(DTYPE)


def set_output_weight(draft: Draft, kind: str, spread: float) -> None:
    with torch.no_grad():
        output_weight(draft).copy_(make_output_weight(kind, sample_latents(draft), spread))


def make_tops(kind: str, batch: int, slots: int) -> Tensor:
    """The largest base logit over the mean, for every slot."""
    return (
        12 + 14 * torch.rand(batch, slots, 1, device=DEVICE) if kind == "trained" else torch.tensor(24.0, device=DEVICE)
    )


_HEAD_ROWS: list[Tensor] = []
_READ_TB_PER_S = [4.3]


def make_head_rows() -> Tensor:
    return _HEAD_ROWS[0]


def make_hidden(head: Tensor, batch: int, slots: int, top: float | Tensor = 24.0) -> Tensor:
    """States [batch, slots, H] whose logits have standard deviation 3 and, for one token a slot, `top` on average: one
    number, or one a slot [batch, slots, 1]."""
    chosen = torch.randint(len(head), (batch, slots), device=DEVICE)
    rows = head[chosen].float()  # [batch, slots, H]
    squared = rows.square().sum(-1, keepdim=True)
    noise = torch.randn_like(rows)
    share = top / squared
    # |h| * 0.02 = 3, of which the token's own row has its share.
    rest = (150.0**2 - (share * share * squared)).clamp(min=1.0).sqrt() / HIDDEN**0.5
    return (share * rows + rest * noise).to(DTYPE)


def flush(buffer: Tensor) -> None:
    buffer.add_(1.0)


def median_ms(run: Callable[[], object], repeats: int = 30) -> float:
    """Of one graph replay, caches flushed before each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    buffer = torch.zeros(64 * 2**20, device=DEVICE)
    times = []
    for _ in range(repeats):
        flush(buffer)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in times)[repeats // 2]


def floor() -> Iterator[dict[str, Any]]:
    """Bandwidth of a copy and of a read."""
    large = torch.randn(2**30, device=DEVICE, dtype=DTYPE)
    other = torch.empty_like(large)
    copy = median_ms(lambda: other.copy_(large), 10)
    read = median_ms(lambda: large.view(torch.int64).amax(), 10)
    _READ_TB_PER_S[:] = [large.nbytes / read / 1e9]
    yield {
        "part": "bandwidth",
        "copy_tb_per_s": 2 * large.nbytes / copy / 1e9,
        "read_tb_per_s": large.nbytes / read / 1e9,
    }


def floor_ms(draft: Draft, proposals: int, variant: dict[str, Any]) -> float:
    """Bytes that a rollout has to read, over the bandwidth."""
    head: Any = draft.head
    corrected = proposals - getattr(head, "pure_draft_prefix_len", 0)
    read = VOCAB * HIDDEN * 2
    if variant["rollout"] != "pruned":
        read += corrected * output_weight(draft).nbytes
    if hasattr(head, "prefix_gru"):
        gru = head.prefix_gru
        read += gru.weight_hh_l0.nbytes + head.embed_proj[0].weight.nbytes
        read += 0 if variant.get("token_table") else gru.weight_ih_l0.nbytes
    return read / _READ_TB_PER_S[0] / 1e9


def rollouts(
    heads: list[tuple[str, float]], batches: list[int], names: list[str], repeats: int, temperatures: list[float]
) -> Iterator[dict[str, Any]]:
    """Whole rollouts, and what they agree on; heads: kinds and spreads."""
    ends = make_ends()
    _HEAD_ROWS[:] = [ends.head_weight]
    for name in names:
        draft = make_draft(name)
        method = algorithm_for(draft.config)
        assert isinstance(method, BlockAlgorithm)
        proposals = method.block_layout(draft.config).max_proposals
        variants: list[dict[str, Any]] = [{"rollout": "plain"}, {"rollout": "dense"}, {"rollout": "pruned"}]
        if name == "domino":
            variants += [{**variant, "token_table": True} for variant in variants[1:]]
        for (kind, spread), batch in itertools.product(heads, batches):
            set_output_weight(draft, kind, spread)
            hidden = make_hidden(
                ends.head_weight, batch, draft.config.block.size, make_tops(kind, batch, draft.config.block.size)
            )
            anchors = torch.randint(VOCAB, (batch,), device=DEVICE)
            slots = hidden[:, -proposals:].contiguous()
            base = median_ms(lambda: draft.logits(slots, ends), repeats)  # noqa: B023
            yield {"part": "base product", "method": name, "batch": batch, "ms": base}
            greedy = draft.logits(slots, ends).argmax(-1)
            for temperature, variant in itertools.product(temperatures, variants):
                # How far the correction spreads changes the time of pruned rollouts only, which are greedy, and of
                # guesses, which it makes wrong.
                pruned = variant["rollout"] == "pruned"
                if (pruned and temperature) or (variant["rollout"] == "plain" and (kind, spread) != heads[0]):
                    continue
                filler = method.filler(draft, ends, method.parse_decoding(variant))
                plain = method.filler(draft, ends, method.parse_decoding({"rollout": "plain"}))
                sampler = make_sampler(batch, temperature)
                with torch.no_grad():
                    tokens = filler.fill(hidden, anchors, sampler).token_ids
                    reference = plain.fill(hidden, anchors, sampler).token_ids
                    ms = median_ms(lambda: filler.fill(hidden, anchors, sampler), repeats)  # noqa: B023
                yield {
                    "part": "rollout", "method": name, "batch": batch, **variant, "temperature": temperature,
                    "head": kind, "spread": spread, "ms": ms, "floor_ms": floor_ms(draft, proposals, variant),
                    "equal_to_plain": None if temperature else float((tokens == reference).float().mean()),
                    "changed_by_head": float((tokens != greedy).float().mean()),
                }  # fmt: skip


def steps(heads: list[tuple[str, float]], slots: int) -> Iterator[dict[str, Any]]:
    """The share of rows that bounds leave, of one row and of eight rows together, by kind and spread; and what
    Cauchy-Schwarz on the rows themselves would leave."""
    ends = make_ends()
    _HEAD_ROWS[:] = [ends.head_weight]
    draft = make_draft("domino")
    for kind, spread in heads:
        latents = sample_latents(draft)
        weight = make_output_weight(kind, latents, spread)
        hidden = make_hidden(ends.head_weight, 8, slots, make_tops(kind, 8, slots)).transpose(0, 1)
        base = hidden @ ends.head_weight.T  # [slots, 8, V]
        bounds, norms = row_bounds(weight), weight.float().norm(dim=-1)
        left: dict[str, list[float]] = {"norms": [], "bounds": [], "bounds, of 8": [], "changed": []}
        for eight, latent in zip(base, latents.to(DTYPE).split(8), strict=False):
            scores = low_rank_scores(eight, weight, latent)
            lower = scores.gather(-1, leaders(eight).firsts.long()).amax(-1, keepdim=True)
            by_norms = eight + latent.float().norm(dim=-1, keepdim=True) * norms >= lower
            able = upper_bounds(eight, bounds, latent) >= lower
            left["norms"].append(float(by_norms.float().mean()))
            left["bounds"].append(float(able.float().mean()))
            left["bounds, of 8"].append(float(able.any(0).float().mean()))
            left["changed"].append(float((scores.argmax(-1) != eight.argmax(-1)).float().mean()))
        yield {
            "part": "share left", "head": kind, "spread": spread,
            **{name: sum(shares) / len(shares) for name, shares in left.items()},
        }  # fmt: skip


def million(steps_wanted: int, seed: int) -> Iterator[dict[str, Any]]:
    """Pruned against dense on random operands of many kinds: the number of keys that differ."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    done = rows = 0
    mismatches, rows_read = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    started = time.perf_counter()
    batch, kind = 64, 0
    while done < steps_wanted:
        vocab, rank = ((151936, 256), (49152, 64), (20011, 130))[kind % 3]
        spread = (0.02, 0.1, 0.3, 1.0)[kind // 3 % 4]
        weight = torch.randn(vocab, rank, device=DEVICE, dtype=DTYPE) * spread
        if kind % 4 == 2:  # a few strong directions, as trained heads have
            along = torch.randn(vocab, 8, device=DEVICE, dtype=DTYPE) * (spread / 3)
            weight = 0.05 * weight + along @ torch.randn(8, rank, device=DEVICE, dtype=DTYPE)
        if kind % 2:  # equal rows, and rows of very different norms
            weight[vocab // 2 : vocab // 2 + 500] = weight[:500]
            weight *= torch.rand(vocab, 1, device=DEVICE, generator=generator).to(DTYPE) ** 4
        bounds = row_bounds(weight)
        for _ in range(20):
            base = (3 * torch.randn(batch, vocab, device=DEVICE, generator=generator)).to(DTYPE)
            if kind % 2:
                base = (base * 2).round() / 2  # many ties
            few = leaders(base)
            for _ in range(60):
                latent = torch.randn(batch, rank, device=DEVICE, dtype=DTYPE, generator=generator)
                one = new_keys(batch, device=DEVICE)
                low_rank_argmax(base, weight, latent, one)
                other = new_keys(batch, device=DEVICE)
                read = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
                pruned_low_rank_argmax(base, weight, latent, other, bounds=bounds, leaders=few, read=read)
                mismatches += (one != other).sum()
                rows_read += read.sum()
                few_rows = slice(0, 1 + done // batch % 4)  # fewer rows in a program
                again = new_keys(few_rows.stop, device=DEVICE)
                pruned_low_rank_argmax(
                    base[few_rows], weight, latent[few_rows], again, bounds=bounds, leaders=few.of(few_rows)
                )
                mismatches += (one[few_rows] != again).sum()
                rows += batch * vocab
                done += batch
        kind += 1
    ids = key_ids(one)
    yield {
        "part": "pruned against dense", "steps": done, "mismatches": int(mismatches), "kinds": kind,
        "mean_share_left": float(rows_read) / rows,
        "seconds": time.perf_counter() - started, "last": int(ids[0]),
    }  # fmt: skip


def head_of(text: str) -> tuple[str, float]:
    """KIND:SPREAD of the command line."""
    kind, _, spread = text.partition(":")
    if kind not in ("random", "trained"):
        raise argparse.ArgumentTypeError(f"{text!r}: kinds are random and trained")
    return kind, float(spread)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["floor", "rollouts", "steps", "million"])
    parser.add_argument("--methods", nargs="*", default=list(HEADS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument(
        "--heads", nargs="*", type=head_of, default=[("random", 1.0), ("random", 0.5), ("trained", 1.3)],
        metavar="KIND:SPREAD",
    )  # fmt: skip
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "floor": floor,
        "rollouts": lambda: rollouts(
            arguments.heads, arguments.batches, arguments.methods, arguments.repeats, arguments.temperatures
        ),
        "steps": lambda: steps(arguments.heads, slots=8),
        "million": lambda: million(arguments.steps, arguments.seed),
    }
    for part in arguments.parts:
        for line in parts[part]():
            print(json.dumps(line), flush=True)
            if arguments.out is not None:
                with open(arguments.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
