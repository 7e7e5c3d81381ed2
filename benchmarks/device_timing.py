"""What the benchmarks on a GPU share: timing, profiles, bandwidth, and lines of JSON."""

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """While open, the process group that the variable PAUSE_GROUP names, if it does, stands still: the device is this
    process's only. The group may have ended."""
    group = int(os.environ.get("PAUSE_GROUP", "0"))
    if group == 0:
        yield
        return
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
        time.sleep(0.1)  # what it had launched comes to its end
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)


def median_ms(run: Callable[[], object], repeats: int = 7, inner: int = 5) -> float:
    times = []
    with alone():
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
    with alone(), torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
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
    kernels = [event for event in trace.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    table = "\n".join(
        f"{event.self_device_time_total / steps:9.1f} us/step {event.count / steps:7.1f} x  {event.key[:100]}"
        for event in kernels[:rows]
    )
    table += f"\n{sum(event.count for event in kernels) / steps:.1f} kernels a step"
    return 1.0 - busy / (spans[-1][1] - spans[0][0]), table
