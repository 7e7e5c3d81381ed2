"""Times, memory, waits and profiles of steps on a GPU, for `train_gpu.py`."""

import cProfile
import fcntl
import pstats
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch

LOCK: list[str] = []
"""A file of which measuring processes hold the lock in turn (`--lock FILE`), while others may compile."""


def alone() -> AbstractContextManager[None]:
    """Around what is measured: no other process that takes turns uses the GPU."""
    return _holding(fcntl.LOCK_EX)


def beside_others() -> AbstractContextManager[None]:
    """Around work on the GPU that nobody measures: not while something is measured."""
    return _holding(fcntl.LOCK_SH)


@contextmanager
def _holding(kind: int) -> Iterator[None]:
    if not LOCK:
        yield
        return
    with open(f"{LOCK[0]}.door", "w") as door, open(LOCK[0], "w") as file:
        # Who comes first goes first: those beside others would keep others out for long.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(file, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


def timed(step: Callable[[], Any], repeats: int, warmup: int = 3) -> tuple[float, float]:
    """(median seconds of a step by device events, mean seconds by the host's clock over all of them)."""
    with alone():
        return _timed(step, repeats, warmup)


def _timed(step: Callable[[], Any], repeats: int, warmup: int) -> tuple[float, float]:
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    started = time.perf_counter()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / repeats
    times = sorted(one.elapsed_time(two) / 1000 for one, two in pairwise(marks))
    return times[len(times) // 2], wall


def measured(step: Callable[[], Any], repeats: int, options: Sequence[str]) -> dict[str, Any]:
    before = time.perf_counter()
    with beside_others():  # so that whoever is ready first does not measure beside those that still compile
        step()
        torch.cuda.synchronize()
    first = time.perf_counter() - before
    torch.cuda.empty_cache()  # a graph's memory, which the next step may take, is not what this one used
    seconds, wall = timed(step, repeats)
    found = {
        "ms": round(1e3 * seconds, 2),
        "wall_ms": round(1e3 * wall, 2),
        "steps_per_s": round(1 / wall, 2),
        "first_step_s": round(first, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
    }
    if "profile" in options:
        with alone():
            profile(step)
    if "host" in options:
        with alone():
            host(step)
    return found


def waits(step: Callable[[], Any]) -> int:
    """How often the host waits for the device in one step, as far as torch notices."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "synchroniz" in str(warning.message)]
    for warning in found[:5]:
        print(f"waits at {warning.filename}:{warning.lineno}", file=sys.stderr)
    return len(found)


def profile(step: Callable[[], Any], rows: int = 25) -> None:
    """Kernels of one step by their time on the device, to stderr."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as taken:
        step()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in taken.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
        # Not the spans that torch marks around several kernels.
        and not event.key.startswith(("## ", "Optimizer.", "Activity Buffer"))
    ]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    launches = sum(event.count for event in kernels)
    print(f"profile: {total / 1e3:.1f} ms on the device in {launches} launches", file=sys.stderr)
    for event in kernels[:rows]:
        name = " ".join(event.key.split())[:90]
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d}x  {name}", file=sys.stderr)
    others = [
        event
        for event in taken.key_averages(group_by_input_shape=True)
        if event.device_type == torch.autograd.DeviceType.CPU and event.self_device_time_total > 1000
    ]
    others.sort(key=lambda event: -event.self_device_time_total)
    for event in others[:rows]:
        shapes = str(event.input_shapes)[:90]
        print(
            f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d}x  {event.key[:40]} {shapes}",
            file=sys.stderr,
        )


def host(step: Callable[[], Any], steps: int = 10, rows: int = 40) -> None:
    """Where the host's time goes: Python functions, then operators, of `steps` steps that nothing waits for, to
    stderr."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(2):
        step()
    issued = (time.perf_counter() - started) / 2
    torch.cuda.synchronize()
    print(f"host: {1e3 * issued:.2f} ms to issue a step", file=sys.stderr)
    with torch.autograd.set_multithreading_enabled(False):  # the backward in this thread, where it is seen
        taken = cProfile.Profile()
        taken.enable()
        for _ in range(steps):
            step()
        taken.disable()
        for order in ("tottime", "cumulative"):
            pstats.Stats(taken, stream=sys.stderr).sort_stats(order).print_stats(rows)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
            for _ in range(steps):
                step()
    table = operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=60)
    print(table, file=sys.stderr)
