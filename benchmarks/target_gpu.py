"""The target's decode and verify steps on one GPU, in a CUDA graph, against the time that reading their bytes takes.

Random weights at a published model's shapes: nothing is downloaded. One JSON line a case: measured milliseconds
(median over replays), the floor (bytes that must be read, each once, over the measured copy bandwidth), their ratio.

    python benchmarks/target_gpu.py --cases 1:512:1 1:4096:16 32:4096:8 --profile 1:512:1 --prefill 32768
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from draftsmith.targets.target import Target

SHAPES = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip


def bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written ones counted."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), 10)
    return 2 * source.nbytes / seconds


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of `run` on the device, after two runs to warm up."""
    times = []
    for index in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def random_target(shape: str, fuse: bool) -> Target:
    """A bf16 model of the shape on the device, with an embedding and a head of its own."""
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=40960, tie_word_embeddings=False, dtype=torch.bfloat16
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = Target.from_model(model)
    if fuse:
        target.fuse()
    return target


def step_bytes(target: Target, batch: int, context: int) -> int:
    """What a step must read: every layer's weights, the head, and the rows' keys and values."""
    decoder = target.model.get_decoder()
    weights = sum(p.nbytes for p in decoder.layers.parameters()) + target.ends.head_weight.nbytes
    config = target.text_config
    entry = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 2
    return weights + batch * context * entry


def captured_step(target: Target, batch: int, context: int, width: int) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of one step: w tokens of every row at the end of its context, and the most likely next ones. The second
    result owns the tensors that the graph reads, and must live as long as it."""
    cache = target.new_cache(batch, -(-(context + width) // 512) * 512)
    for stored in cache.tensors:
        stored.normal_()
    ids = torch.randint(0, target.vocab_size, (batch, width), device="cuda")
    positions = (torch.arange(width, device="cuda") + context - width).repeat(batch, 1)
    # As many taps as a draft of five layers reads, of a verify.
    tap_ids = (1, 9, 17, 25, 33) if width > 1 and target.num_layers > 33 else ()

    def step() -> None:
        states = target.forward(ids, positions, tap_ids=tap_ids, cache=cache)
        target.ends.argmax(states.final_state)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, (cache, ids, positions)


def profile(graph: torch.cuda.CUDAGraph) -> list[dict]:
    """The kernels of three replays, by their share."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    return [
        {"kernel": row.key[:70], "count": row.count // 3, "us": round(row.self_device_time_total / row.count, 2),
         "ms": round(row.self_device_time_total / 3000, 3)}
        for row in rows[:16]
    ]  # fmt: skip


def prefill(target: Target, length: int, chunk: int) -> dict:
    """A long prompt in chunks through one cache; seconds, and memory over weights and cache."""
    cache = target.new_cache(1, length)
    ids = torch.randint(0, target.vocab_size, (1, length), device="cuda")

    def run() -> None:
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            positions = torch.arange(begin, end, device="cuda")[None]
            target.forward(ids[:, begin:end], positions, tap_ids=(1,), cache=cache.view(end))

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin_time = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin_time
    return {
        "prefill": length, "chunk": chunk, "seconds": round(seconds, 3), "tokens_per_s": round(length / seconds),
        "extra_gb": round((torch.cuda.max_memory_allocated() - before) / 1e9, 3),
    }  # fmt: skip


def numbers(text: str) -> tuple[int, int, int]:
    """'batch:context:width' as three numbers."""
    batch, context, width = map(int, text.split(":"))
    return batch, context, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--own-code", action="store_true", help="the model's own code instead of fused operations")
    parser.add_argument("--cases", nargs="*", type=numbers, default=[(1, 512, 1)], metavar="BATCH:CONTEXT:WIDTH")
    parser.add_argument("--profile", nargs="*", type=numbers, default=[], metavar="BATCH:CONTEXT:WIDTH")
    parser.add_argument("--prefill", nargs="*", type=int, default=[], metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill chunk")
    options = parser.parse_args()

    rate = bandwidth()
    print(json.dumps({"copy_bandwidth_tb_s": round(rate / 1e12, 3), "torch": torch.__version__}), flush=True)
    target = random_target(options.shape, not options.own_code)
    for case in options.cases:
        begin = time.perf_counter()
        graph, inputs = captured_step(target, *case)
        captured = time.perf_counter() - begin
        seconds = median_seconds(graph.replay, 20)
        floor = step_bytes(target, case[0], case[1]) / rate
        result = dict(zip(("batch", "context", "width"), case, strict=True)) | {
            "fused": target.fused, "ms": round(1000 * seconds, 3), "floor_ms": round(1000 * floor, 3),
            "ratio": round(seconds / floor, 3), "capture_s": round(captured, 1),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
        if case in options.profile:
            for row in profile(graph):
                print(json.dumps(row), flush=True)
        del graph, inputs
        torch.cuda.empty_cache()
    for length in options.prefill:
        print(json.dumps(prefill(target, length, options.chunk)), flush=True)


if __name__ == "__main__":
    main()
