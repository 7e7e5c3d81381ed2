"""A real target with a trained draft, prompt after prompt at batch 1: speculative and plain decoding, both on graphs.

    python benchmarks/engine_trained_gpu.py --target DIR_OR_GGUF --draft DIR --prompts gsm8k.jsonl

Greedy, in bf16. Also says whether the tokens are those of plain decoding at the verify width (they must be), at width 1
(bf16 rounding may part them) and of eager steps, and how far the draft's fused pass is from its own modules. Prints
JSON lines.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from device_timing import profile, say

from draftsmith.data.prompts import read_prompts
from draftsmith.decoding.cache import DenseBlocks, FusedBlocks
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target


@dataclass
class Speed:
    """Sums over requests, one after the other: seconds to the first token, seconds after it, tokens, steps."""

    prefill: float = 0.0
    after: float = 0.0
    tokens: int = 0
    steps: int = 0
    requests: int = 0

    @property
    def whole(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / (self.prefill + self.after)

    @property
    def decoding(self) -> float:
        """Tokens a second after the first."""
        return (self.tokens - self.requests) / self.after

    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_second": round(self.whole, 1),
            "tokens_per_second_without_prefill": round(self.decoding, 1),
            "prefill_ms": round(self.prefill / self.requests * 1e3, 2),
            "step_ms": round(self.after / self.steps * 1e3, 4),
        }


def _timed(engine: Engine, prompts: list[list[int]], new: int) -> tuple[list[Generation], Speed]:
    """Decodes one prompt after the other."""
    speed, found = Speed(requests=len(prompts)), []
    for prompt in prompts:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        (answer,) = engine.submit(_request(prompt, new))
        while not answer.token_ids:
            engine.step()
        first = time.perf_counter()
        while not answer.finished:
            engine.step()
        torch.cuda.synchronize()
        found.append(answer.generation())
        speed.prefill += first - begin
        speed.after += time.perf_counter() - first
        speed.tokens += len(answer.token_ids)
        speed.steps += len(found[-1].accept_lengths)
    return found, speed


def trained(arguments: argparse.Namespace) -> None:
    """Tokens a second of a trained draft against plain decoding, over the first prompts of a file."""
    fuse = "auto" if arguments.fuse else "off"
    target = Target.load(arguments.target, dtype="bfloat16", device="cuda", fuse=fuse)
    draft = Draft.load(arguments.draft, dtype="bfloat16", device="cuda").eval()
    prompts = []
    for asked in read_prompts(arguments.prompts)[: arguments.limit]:
        turn = [{"role": "user", "content": asked.turns[0]}]
        ids = target.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        prompts.append([int(token) for token in ids])
    longest = max(len(prompt) for prompt in prompts) + arguments.new
    size = dict(slots=1, max_length=longest, context_bucket=longest + 64)  # one graph holds every step
    speculative = Engine(target, draft, EngineOptions(**size))
    width = speculative.stepper.width
    engines = {
        "plain": Engine(target, None, EngineOptions(**size)),
        "speculative": speculative,
        "plain at the verify width": Engine(target, None, EngineOptions(**size, verify_width=width)),
        "speculative, eager": Engine(target, draft, EngineOptions(**size, graphs="off")),
    }
    found: dict[str, list[Generation]] = {}
    speeds: dict[str, Speed] = {}
    for name, engine in engines.items():
        eager = "eager" in name
        some = prompts[: max(1, arguments.limit // 8)] if eager else prompts
        for prompt in some:  # kernels of every width of prompt
            engine.decode(_request(prompt, 4))
        if not eager:
            for prompt in (min(prompts, key=len), max(prompts, key=len)):  # captures
                engine.decode(_request(prompt, arguments.new))
        before = engine.preparations
        found[name], speeds[name] = _timed(engine, some, arguments.new)
        say(part="timed", engine=name, captured_meanwhile=engine.preparations != before, **speeds[name].figures())
    lengths = [length for row in found["speculative"] for length in row.accept_lengths]

    def same(first: str, second: str) -> float:
        pairs = zip(found[first], found[second], strict=False)
        return statistics.mean(a.token_ids == b.token_ids for a, b in pairs)

    say(
        part="trained", prompts=len(prompts), new_tokens=arguments.new,
        accept_length=round(statistics.mean(lengths), 3),
        speculative_over_plain=round(speeds["speculative"].whole / speeds["plain"].whole, 3),
        speculative_over_plain_without_prefill=round(speeds["speculative"].decoding / speeds["plain"].decoding, 3),
        same_as_plain_at_the_verify_width=same("speculative", "plain at the verify width"),
        same_as_plain=same("speculative", "plain"), same_as_eager=same("speculative", "speculative, eager"),
        draft_layers=draft.config.num_hidden_layers, block_size=draft.config.block_size, fused=target.fused,
        fused_draft_relative_difference=round(_draft_difference(target, draft), 5),
    )  # fmt: skip
    for name in ("plain", "speculative"):
        engine = engines[name]
        engine.submit(_request(prompts[0], arguments.new))
        for _ in range(4):
            engine.step()
        idle, table = profile(engine.step, 20, arguments.kernels)
        say(part=f"trained profile, {name}", idle=round(idle, 4))
        print(table, flush=True)


def _draft_difference(target: Target, draft: Draft) -> float:
    """Between the fused pass and the draft's own modules, on random features of 300 tokens."""
    width = len(draft.config.target_layer_ids) * target.hidden_size
    taps = torch.randn(1, 300, width, device="cuda", dtype=draft.dtype)
    start = torch.tensor([300], device="cuda")
    embeddings = target.ends.embedding_rows(torch.arange(100, 100 + draft.config.block_size, device="cuda")[None])
    states = []
    with torch.no_grad():
        for blocks in (DenseBlocks(draft), FusedBlocks(draft)):
            cache = blocks.new_cache(1, 400)
            blocks.append(taps, start - 300, cache)
            blocks.append(taps[:, : draft.config.block_size], start - 20, cache)  # few rows take another way
            states.append(blocks.block(embeddings, start, cache, 384).float())
    return float((states[0] - states[1]).norm() / states[0].norm())


def _request(prompt: list[int], new: int) -> Request:
    return Request.of([prompt], max_new_tokens=new, sampling=SamplingOptions(), seed=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file")
    parser.add_argument("--draft", required=True, help="directory of the draft")
    parser.add_argument("--prompts", required=True, help="JSONL of prompts")
    parser.add_argument("--limit", type=int, default=24, help="prompts")
    parser.add_argument("--new", type=int, default=200, help="new tokens a prompt")
    parser.add_argument("--kernels", type=int, default=12, help="kernels of a profile to print")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="the target's own modules")
    trained(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
