"""What the benchmarks on a GPU share: timing, profiles, bandwidth, random weights, and lines of JSON."""

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


@torch.no_grad()
def draw_weights(module: torch.nn.Module) -> None:
    """Small normal matrices, and ones in the place of norms."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)


def median_ms(run: Callable[[], object], repeats: int = 7, inner: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times)


def measured_bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    sink = torch.empty_like(source)
    sink.copy_(source)
    return 2 * source.numel() / (median_ms(lambda: sink.copy_(source), 5, 2) * 1e-3)


def profile(run: Callable[[], object], steps: int, rows: int) -> tuple[float, str]:
    """Share of the time in which no kernel runs, and the kernels that take longest."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return 1.0 - busy / (spans[-1][1] - spans[0][0]), kernel_table(trace, steps, rows)


def kernel_table(trace: torch.profiler.profile, steps: int, rows: int) -> str:
    """The kernels that take longest, one a line, and how many run in a step."""
    kernels = [event for event in trace.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    table = "\n".join(
        f"{event.self_device_time_total / steps:9.1f} us/step {event.count / steps:7.1f} x  {event.key[:100]}"
        for event in kernels[:rows]
    )
    return table + f"\n{sum(event.count for event in kernels) / steps:.1f} kernels a step"
