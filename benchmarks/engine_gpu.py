"""The engine on a GPU, against the memory floor: cycles, plain steps, idle time, memory.

    python benchmarks/engine_gpu.py cycles plain steady memory zlab --layers 36

Qwen3-8B's shapes with random weights, and a DFlash draft of 5 layers with blocks of 16. A cycle is one replay of the
step graph (propose, verify, commit, append); random weights accept next to nothing, and a step's work does not depend
on what is accepted. The floor is what a cycle must read, once, over the bandwidth measured by a large copy. Prints one
JSON line a measurement; times are medians in milliseconds.

`cycles`, `plain`: the step graph by batch and context; `plain16`: the target's pass at the verify width. `steady`: the
engine as it is used, host included, with the device's idle share from a profile. `memory`: peak over weights and caches
at batch 8. `zlab`: the package `dflash`, which must be there, on the same weights.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from device_timing import draw_weights, measured_bandwidth, median_ms, profile, say
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftsmith.algorithms.block_drafter import BlockDrafter
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.graphs import StepGraphs
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.pool import SlotPool
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import ContextCache, FusedBlocks
from draftsmith.kernels.layers import skinny_linear
from draftsmith.targets.target import Target

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12288, 32, 8, 128, 151936
BLOCK, DRAFT_LAYERS, ROOM = 16, 5, 512
DTYPE = torch.bfloat16


# --- models and floors ------------------------------------------------------------------------------------------------


def build_target(layers: int, fuse: bool) -> Target:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=40960,
        rope_theta=1e6, tie_word_embeddings=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    target = Target.from_model(model)
    if fuse:
        target.fuse()
    return target


def draft_fields(layers: int) -> dict[str, Any]:
    taps = [round(1 + i * (layers - 4) / (DRAFT_LAYERS - 1)) for i in range(DRAFT_LAYERS)]
    return {
        "architecture": "dflash", "hidden_size": HIDDEN, "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "max_position_embeddings": 40960,
        "rope": {"rope_theta": 1e6}, "layer_types": ("full_attention",) * DRAFT_LAYERS, "dtype": "bfloat16",
        "block_size": BLOCK, "mask_token_id": VOCABULARY - 1, "target_layer_ids": tuple(taps),
        "num_target_layers": layers,
    }  # fmt: skip


def build_draft(layers: int) -> Draft:
    with torch.device("meta"):
        draft = Draft(DraftConfig.parse(draft_fields(layers)))
    draft = draft.to_empty(device="cuda").to(DTYPE).eval()
    draw_weights(draft)
    return draft.requires_grad_(False)


def layer_bytes() -> int:
    return 2 * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INTERMEDIATE)


def cache_bytes(layers: int, batch: int, context: int) -> int:
    return 2 * layers * batch * context * KV_HEADS * HEAD_DIM * 2


def plain_bytes(layers: int, batch: int, context: int) -> int:
    """What a target pass must read: its layers, its head, its caches."""
    return layers * layer_bytes() + 2 * VOCABULARY * HIDDEN + cache_bytes(layers, batch, context)


def cycle_bytes(layers: int, batch: int, context: int) -> int:
    """And what a draft's block adds: its layers, the fusion of the taps, the head again, its caches."""
    fusion = 2 * DRAFT_LAYERS * HIDDEN * HIDDEN
    draft = DRAFT_LAYERS * layer_bytes() + fusion + 2 * VOCABULARY * HIDDEN
    return plain_bytes(layers, batch, context) + draft + cache_bytes(DRAFT_LAYERS, batch, context)


# --- measurements -----------------------------------------------------------------------------------------------------


def loaded(engine: Engine, batch: int, context: int) -> SlotPool:
    """Slots with rows of `context` tokens, whose caches hold noise: what a step costs does not depend on it."""
    prompts = [[1] * context] * batch
    engine.submit(Request.of(prompts, max_new_tokens=ROOM, sampling=SamplingOptions(), seed=0))
    scheduler, runner = engine.scheduler, engine.runner
    shape = scheduler.shape_wanted()
    assert shape is not None
    runner.make(shape)
    scheduler.move_in(shape)
    for placement in scheduler.admit():
        runner.place(placement)
    scheduler.prefilling.clear()
    scheduler.groups.clear()
    pool = runner.pool
    assert pool is not None
    for tensor in pool.target_cache.tensors:
        tensor.normal_()
    if isinstance(pool.draft, ContextCache):
        pool.draft.joint.normal_()
    pool.state.tokens.random_(engine.target.vocab_size - 1)
    pool.state.finished.fill_(False)
    return pool


def pool_bytes(pool: SlotPool) -> int:
    """Of the caches of a pool."""
    caches = [*pool.target_cache.tensors]
    if isinstance(pool.draft, ContextCache):
        caches.append(pool.draft.joint)
    return sum(tensor.numel() * tensor.element_size() for tensor in caches)


def step_graph(engine: Engine, batch: int, context: int) -> tuple[Callable[[], None], float, float]:
    """A replay of the step graph; seconds of the first, eager, step and of the capture."""
    pool = loaded(engine, batch, context)
    plan = engine.scheduler.next_step()
    assert plan is not None
    slots = pool.rows(0, batch)
    graphs = StepGraphs(engine.target.device, 4)

    def run() -> None:
        graphs.run("step", lambda: engine.runner.stepper.step(slots, plan.extent, plan.bounds))

    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return run, seconds[0], seconds[1]


def _request(prompt: list[int], new: int) -> Request:
    return Request.of([prompt], max_new_tokens=new, sampling=SamplingOptions(), seed=0)


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.layers = arguments.layers
        self.grid = [(batch, context) for batch in arguments.batches for context in arguments.contexts]
        self.rows = arguments.kernels
        begin = time.perf_counter()
        self.bandwidth = measured_bandwidth()
        self.target, self.draft = build_target(self.layers, arguments.fuse), build_draft(self.layers)
        self.weights = torch.cuda.memory_allocated()
        say(
            part="setup", device=torch.cuda.get_device_name(), torch=torch.__version__,
            terabytes_per_second=round(self.bandwidth / 1e12, 3), fused=arguments.fuse,
            weights_gb=round(self.weights / 1e9, 2), seconds=round(time.perf_counter() - begin, 1),
        )  # fmt: skip

    def engine(self, drafted: bool, batch: int, **options: Any) -> Engine:
        return Engine(self.target, self.draft if drafted else None, EngineOptions(slots=batch, **options))

    def floor_ms(self, size: int) -> float:
        return size / self.bandwidth * 1e3

    def cycles(self) -> None:
        self._steps("cycle", True, cycle_bytes)

    def plain(self) -> None:
        self._steps("plain", False, plain_bytes)

    def _steps(self, part: str, drafted: bool, size: Callable[[int, int, int], int], **options: Any) -> None:
        for batch, context in self.grid:
            run, eager, capture = step_graph(self.engine(drafted, batch, **options), batch, context)
            found, floor = median_ms(run), self.floor_ms(size(self.layers, batch, context))
            say(
                part=part, batch=batch, context=context, ms=round(found, 4), floor_ms=round(floor, 4),
                over_floor=round(found / floor, 3), first_step_s=round(eager, 2), capture_s=round(capture, 2),
                **options,
            )  # fmt: skip
            if context == self.grid[0][1]:
                idle, table = profile(run, 5, self.rows)
                say(part=f"{part} profile", idle_between_kernels=round(idle, 4))
                print(table, flush=True)
            del run
            torch.cuda.empty_cache()

    def plain16(self) -> None:
        """The target pass of a verify alone: plain decoding at the verify width."""
        self._steps("plain", False, plain_bytes, verify_width=BLOCK)

    def steady(self) -> None:
        """The whole engine, host included: wall time a step, and the device's idle share."""
        for drafted in (True, False):
            batch, context = self.grid[0]
            engine = self.engine(drafted, batch)
            loaded(engine, batch, context)
            for _ in range(6):
                engine.step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(40):
                engine.step()
            torch.cuda.synchronize()
            wall = (time.perf_counter() - begin) / 40 * 1e3
            replay, _, _ = step_graph(self.engine(drafted, batch), batch, context)
            replays = median_ms(replay, inner=20)
            idle, _ = profile(engine.step, 10, 1)
            say(
                part="steady", drafted=drafted, batch=batch, context=context, ms=round(wall, 4),
                replays_alone_ms=round(replays, 4), idle=round(idle, 4),
            )  # fmt: skip

    def draft_alone(self) -> None:
        """The draft's block and its append, with and without the kernel for products of few rows."""
        for batch in (1, 8):
            engine = self.engine(True, batch)
            pool = loaded(engine, batch, 512)
            assert isinstance(engine.drafter, BlockDrafter)
            blocks, context = engine.drafter.runner, pool.draft
            assert isinstance(blocks, FusedBlocks)
            assert isinstance(context, ContextCache)
            ids = torch.full((batch, BLOCK), VOCABULARY - 1, device="cuda")
            taps = torch.randn(batch, BLOCK, DRAFT_LAYERS * HIDDEN, device="cuda", dtype=DTYPE)
            for limit in (skinny_linear.MAX_ROWS, 0):
                usual, skinny_linear.MAX_ROWS = skinny_linear.MAX_ROWS, limit
                run = self._draft_graph(blocks, context, ids, taps, pool.state.length)
                skinny_linear.MAX_ROWS = usual
                run()
                found = median_ms(run, inner=20)
                size = cycle_bytes(0, batch, 512) - 4 * VOCABULARY * HIDDEN
                floor = round(self.floor_ms(size), 4)
                say(part="draft", batch=batch, skinny=limit > 0, ms=round(found, 4), floor_ms=floor)
                if batch == 1:
                    print(profile(run, 5, 12)[1], flush=True)

    def _draft_graph(
        self, blocks: FusedBlocks, context: ContextCache, ids: torch.Tensor, taps: torch.Tensor, start: torch.Tensor
    ) -> Callable[[], None]:
        graphs = StepGraphs(self.target.device, 2)

        def both() -> None:
            blocks.append(taps, start, context)
            blocks.block(self.target.ends.embedding_rows(ids), start, context, 1024)

        def run() -> None:
            with torch.no_grad():
                graphs.run("draft", both)

        return run

    def prefill(self) -> None:
        """A long prompt, chunk by chunk: seconds to its first token, and peak memory over weights and caches."""
        for length, chunk in ((32000, 512), (32000, 2048)):
            engine = self.engine(True, 1, prefill_chunk=chunk)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            prompt = torch.randint(VOCABULARY - 1, (length,)).tolist()
            (answer,) = engine.submit(_request(prompt, 16))
            begin = time.perf_counter()
            while not answer.token_ids:
                engine.step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            assert engine.runner.pool is not None
            over = torch.cuda.max_memory_allocated() - before - pool_bytes(engine.runner.pool)
            say(
                part="prefill", tokens=length, chunk=chunk, seconds=round(seconds, 2),
                tokens_per_second=round(length / seconds), over_gb=round(over / 1e9, 3),
            )  # fmt: skip

    def memory(self) -> None:
        """Peak over weights and caches: prefill of 2,048 tokens and steps, at batch 8."""
        torch.cuda.empty_cache()
        engine = self.engine(True, 8)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        prompts = torch.randint(VOCABULARY - 1, (8, 2048)).tolist()
        engine.submit(Request.of(prompts, max_new_tokens=64, sampling=SamplingOptions(), seed=0))
        begin = time.perf_counter()
        engine.step()
        prefill = time.perf_counter() - begin
        for _ in range(8):
            engine.step()
        assert engine.runner.pool is not None
        caches = pool_bytes(engine.runner.pool)
        say(
            part="memory", batch=8, context=2048, caches_gb=round(caches / 1e9, 3),
            over_gb=round((torch.cuda.max_memory_allocated() - before - caches) / 1e9, 3),
            reserved_over_gb=round((torch.cuda.memory_reserved() - before - caches) / 1e9, 3),
            first_step_s=round(prefill, 2),
        )  # fmt: skip

    def zlab(self) -> None:
        """The package `dflash` on the same weights: one prompt of 512 tokens."""
        from dflash.model import DFlashDraftModel, dflash_generate

        fields = draft_fields(self.layers)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
            num_hidden_layers=DRAFT_LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM, max_position_embeddings=40960, rope_theta=1e6, num_target_layers=self.layers,
            block_size=BLOCK, dflash_config={
                "mask_token_id": fields["mask_token_id"], "target_layer_ids": list(fields["target_layer_ids"])
            },
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        with torch.device("cuda"):
            theirs = DFlashDraftModel(config).eval()
        torch.set_default_dtype(before)
        # Where the names agree, the same numbers; all of them do in this layout.
        ours = {name.split(".", 1)[1]: tensor for name, tensor in self.draft.state_dict().items()}
        theirs.load_state_dict(ours, strict=True)
        prompt = torch.randint(VOCABULARY - 1, (1, 512), device="cuda")
        with torch.no_grad():
            dflash_generate(theirs, self.target.model, prompt, 4, None, return_stats=True)
            stats = dflash_generate(theirs, self.target.model, prompt, 32, None, return_stats=True)
        cycles = len(stats.acceptance_lengths)
        total = stats.time_per_output_token * stats.num_output_tokens
        say(part="zlab", context=512, cycles=cycles, ms_per_cycle=round(total / cycles * 1e3, 2))


PARTS = ("cycles", "plain", "plain16", "steady", "draft_alone", "prefill", "memory", "zlab")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 2048, 4096])
    parser.add_argument("--kernels", type=int, default=15, help="kernels of a profile to print")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="the target's own modules")
    arguments = parser.parse_args()
    bench, failed = Bench(arguments), False
    for part in arguments.parts:
        begin = time.perf_counter()
        try:
            getattr(bench, part)()
        except Exception as error:  # noqa: BLE001 (a part that fails is reported, and the others go on)
            failed = True
            traceback.print_exc()
            say(part=part, error=f"{type(error).__name__}: {error}"[:400])
        say(part=f"{part} done", seconds=round(time.perf_counter() - begin, 1))
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
