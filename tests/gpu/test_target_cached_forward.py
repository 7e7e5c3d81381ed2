"""The cached target forward on a device: equal to the plain one, and the same when replayed from a CUDA graph."""

import itertools

import pytest
import torch

from tests.support.tiny import KINDS, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _target(kind: str, dtype: torch.dtype = torch.float32):
    from draftsmith.targets.target import Target

    # Head size 64: what real models have, and what fused attention kernels want.
    return Target.from_model(tiny_model(kind, hidden_size=256, dtype=dtype, initializer_range=0.06).cuda())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_cached_equals_plain(kind, dtype, tolerance):
    target = _target(kind, dtype)
    ids = torch.randint(0, 97, (3, 61), device="cuda")
    positions = torch.arange(61, device="cuda").expand(3, -1)
    expected = target.forward(ids, positions).final_state
    cache = target.new_cache(3, 100)
    edges = (0, 33, 34, 50, 61)
    parts = [
        target.forward(ids[:, a:b], positions[:, a:b], cache=cache).final_state for a, b in itertools.pairwise(edges)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_serves_every_position(kind):
    target = _target(kind)
    ids = torch.randint(0, 97, (2, 40), device="cuda")
    cache, reference = target.new_cache(2, 64), target.new_cache(2, 64)
    prefill = torch.arange(20, device="cuda").expand(2, -1)
    for each in (cache, reference):
        target.forward(ids[:, :20], prefill, cache=each)

    step_ids, step_positions = ids[:, 20:24].clone(), torch.arange(20, 24, device="cuda").repeat(2, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up outside the capture
        target.forward(step_ids, step_positions, tap_ids=(1, 3), cache=cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = target.forward(step_ids, step_positions, tap_ids=(1, 3), cache=cache)

    for start in (20, 24, 28):
        window = torch.arange(start, start + 4, device="cuda").repeat(2, 1)
        step_ids.copy_(ids[:, start : start + 4])
        step_positions.copy_(window)
        graph.replay()
        expected = target.forward(ids[:, start : start + 4], window, tap_ids=(1, 3), cache=reference)
        torch.testing.assert_close(captured.taps, expected.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(captured.final_state, expected.final_state, rtol=1e-4, atol=1e-4)


def test_no_host_synchronisation():
    target = _target("gemma3")
    cache = target.new_cache(2, 64)
    ids = torch.randint(0, 97, (2, 6), device="cuda")
    positions = torch.arange(6, device="cuda").repeat(2, 1)
    target.forward(ids, positions, cache=cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        states = target.forward(ids, positions, tap_ids=(0, 2), cache=cache.view(32))
        target.ends.project(states.final_state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
