"""A real target with a trained draft, prompt after prompt at batch 1: speculative and plain decoding, both on graphs.

    python benchmarks/engine_trained_gpu.py --target DIR_OR_GGUF --draft DIR --prompts gsm8k.jsonl

Greedy, in bf16. The ratio of whole answers comes first, then the same with eager passes over prompts. Also says whether
the tokens are those of plain decoding at the verify width (they must be), at width 1 (bf16 rounding may part them) and
of eager steps, how far the draft's fused pass is from its own modules, and what reading a prompt takes by its length.
Prints JSON lines. `--random` in place of target, draft and prompts: SmolLM2-135M's shapes, whose tokens mean nothing.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from device_timing import draw_weights, profile, say
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.prompts import read_prompts
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import DenseBlocks, FusedBlocks
from draftsmith.targets.target import Target

DEVICE = "cuda"
EAGER_TOKENS = 40
LENGTHS = (16, 60, 100, 130, 180, 250, 380, 500, 2000)


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


def _timed(engine: Engine, requests: list[Request]) -> tuple[list[Generation], Speed]:
    """Decodes one request after the other."""
    speed, found = Speed(requests=len(requests)), []
    for request in requests:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        (answer,) = engine.submit(request)
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


def models(arguments: argparse.Namespace) -> tuple[Target, Draft, list[Request]]:
    """Target, draft, and what is asked of them, prompt by prompt."""
    if arguments.random:
        prompts = [[1 + i] * (60 + 13 * i % 150) for i in range(arguments.limit)]
        return random_target(), random_draft(), [_request([prompt], arguments.new) for prompt in prompts]
    fuse = "auto" if arguments.fuse else "off"
    target = Target.load(arguments.target, dtype="bfloat16", device=DEVICE, fuse=fuse)
    draft = Draft.load(arguments.draft, dtype="bfloat16", device=DEVICE).eval()
    stop, requests = target.tokenizer.eos_token_id, []
    for asked in read_prompts(arguments.prompts)[: arguments.limit]:
        turn = [{"role": "user", "content": asked.turns[0]}]
        ids = target.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        requests.append(_request([[int(token) for token in ids]], arguments.new, (stop,)))
    return target, draft, requests


def random_target() -> Target:
    """SmolLM2-135M's shapes, fused."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    target = Target.from_model(model)
    target.fuse()
    return target


def random_draft(**changed: object) -> Draft:
    """A draft for it with five layers and blocks of 16; `changed` are fields of its configuration."""
    fields = {
        "architecture": "dflash", "hidden_size": 576, "num_hidden_layers": 5, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope": {"rope_theta": 1e5}, "layer_types": ("full_attention",) * 5,
        "dtype": "bfloat16", "block_size": 16, "mask_token_id": 16, "target_layer_ids": (1, 8, 14, 20, 27),
        "num_target_layers": 30,
    }  # fmt: skip
    config = DraftConfig.parse({**fields, **changed})
    with torch.device(DEVICE):
        draft = Draft(config).to(torch.bfloat16)
    draw_weights(draft)
    return draft.to(DEVICE).eval()  # the rope's frequencies are made on the CPU


def measured(
    name: str, engine: Engine, requests: list[Request], *, eager_prompts: bool = False
) -> tuple[list[Generation], Speed]:
    """Decodes all prompts once everything is prepared, and says how fast that was."""
    longest = max(requests, key=lambda request: len(request.prompts[0]))
    engine.decode(longest)
    if eager_prompts:
        engine.runner.prompt_graphs = None  # as if there were none; the widths stay
    for _ in range(2):
        for request in requests:
            engine.decode(replace(request, max_new_tokens=4))
    before = engine.preparations
    found, speed = _timed(engine, requests)
    say(part="timed", engine=name, captured_meanwhile=engine.preparations != before, **speed.figures())
    return found, speed


def trained(arguments: argparse.Namespace) -> None:
    """Tokens a second of a trained draft against plain decoding, over the first prompts of a file."""
    target, draft, requests = models(arguments)
    few = requests[: max(1, len(requests) // 4)]
    longest = max(len(request.prompts[0]) for request in requests) + arguments.new
    # One graph holds every step, and prompts have room for their padding.
    size = dict(slots=1, max_length=longest + 64, context_bucket=longest + 128)

    def engine(drafted: bool, **options: object) -> Engine:
        return Engine(target, draft if drafted else None, EngineOptions.model_validate({**size, **options}))

    speculative, plain = engine(True), engine(False)
    with_draft, speed = measured("speculative", speculative, requests)
    alone, plain_speed = measured("plain", plain, requests)
    lengths = [length for row in with_draft for length in row.accept_lengths]
    say(
        part="trained", prompts=len(requests), new_tokens=arguments.new,
        accept_length=round(statistics.mean(lengths), 3),
        speculative_over_plain=round(speed.whole / plain_speed.whole, 3),
        speculative_over_plain_without_prefill=round(speed.decoding / plain_speed.decoding, 3),
        draft_layers=draft.config.num_hidden_layers, block_size=draft.config.block.size, fused=target.fused,
    )  # fmt: skip
    bare, bare_speed = measured("speculative, eager prompts", engine(True), few, eager_prompts=True)
    _, bare_plain = measured("plain, eager prompts", engine(False), few, eager_prompts=True)
    say(part="eager prompts", speculative_over_plain=round(bare_speed.whole / bare_plain.whole, 3))
    width = speculative.stepper.width
    at_width, _ = measured("plain at the verify width", engine(False, verify_width=width), requests)
    begun = [replace(request, max_new_tokens=EAGER_TOKENS) for request in few[:2]]
    eager, _ = measured("speculative, eager", engine(True, graphs="off"), begun)
    begins = [replace(row, token_ids=row.token_ids[:EAGER_TOKENS]) for row in with_draft]
    say(
        part="equal", as_plain_at_the_verify_width=_same(with_draft, at_width), as_plain=_same(with_draft, alone),
        as_eager=_same(begins, eager), as_eager_prompts=_same(with_draft, bare),
        fused_draft_relative_difference=round(_draft_difference(target, draft), 5),
    )  # fmt: skip
    prompts_alone(target, draft)
    for name, measured_engine in (("plain", plain), ("speculative", speculative)):
        measured_engine.submit(requests[0])
        for _ in range(4):
            measured_engine.step()
        idle, table = profile(measured_engine.step, 20, arguments.kernels)
        say(part=f"trained profile, {name}", idle=round(idle, 4))
        print(table, flush=True)


def prompts_alone(target: Target, draft: Draft) -> None:
    """Milliseconds from a request to its first token, by the prompts' length, with and without graphs."""
    for rows in (1, 4):
        engine = Engine(target, draft, EngineOptions(slots=rows, max_length=2048))
        engine.decode(_request([[1]] * rows, 1))
        held = engine.runner.prompt_graphs
        for length in LENGTHS:
            asked, found = _request([[1 + row] * length for row in range(rows)], 1), {}
            for name, graphs in (("graphs", held), ("eager", None)):
                engine.runner.prompt_graphs = graphs
                for _ in range(2):
                    engine.decode(asked)
                times = []
                for _ in range(5):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    engine.decode(asked)
                    times.append(time.perf_counter() - begin)
                found[f"{name}_ms"] = round(statistics.median(times) * 1e3, 3)
            say(part="prompts", rows=rows, length=length, **found)


def _same(first: list[Generation], second: list[Generation]) -> float:
    """Share of answers with the same tokens."""
    return statistics.mean(a.token_ids == b.token_ids for a, b in zip(first, second, strict=False))


def _draft_difference(target: Target, draft: Draft) -> float:
    """Between the fused pass and the draft's own modules, on random features of 300 tokens."""
    width = len(draft.config.target_layer_ids) * target.hidden_size
    taps = torch.randn(1, 300, width, device=DEVICE, dtype=draft.dtype)
    start = torch.tensor([300], device=DEVICE)
    embeddings = target.ends.embedding_rows(torch.arange(100, 100 + draft.config.block.size, device=DEVICE)[None])
    states = []
    with torch.no_grad():
        for blocks in (DenseBlocks(draft), FusedBlocks(draft)):
            cache = blocks.new_cache(1, 400)
            blocks.append(taps, start - 300, cache)
            blocks.append(taps[:, : draft.config.block.size], start - 20, cache)  # few rows take another way
            states.append(blocks.block(embeddings, start, cache, 384).float())
    return float((states[0] - states[1]).norm() / states[0].norm())


def _request(prompts: list[list[int]], new: int, stop: tuple[int, ...] = ()) -> Request:
    return Request.of(prompts, max_new_tokens=new, sampling=SamplingOptions(), seed=0, stop_token_ids=stop)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="directory, hub id or GGUF file")
    parser.add_argument("--draft", help="directory of the draft")
    parser.add_argument("--prompts", help="JSONL of prompts")
    parser.add_argument("--random", action="store_true", help="SmolLM2's shapes with random weights, and no files")
    parser.add_argument("--limit", type=int, default=24, help="prompts")
    parser.add_argument("--new", type=int, default=200, help="new tokens a prompt, at most")
    parser.add_argument("--kernels", type=int, default=12, help="kernels of a profile to print")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="the target's own modules")
    arguments = parser.parse_args()
    if not arguments.random and None in (arguments.target, arguments.draft, arguments.prompts):
        parser.error("--target, --draft and --prompts belong together; without them, --random")
    trained(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
