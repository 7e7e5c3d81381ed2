"""The fused target on a device: the model's own states, graphs without host synchronisation, and the same bits for a
token from any slot, beside any neighbours and in any context bucket."""

import itertools

import pytest
import torch

from tests.support.tiny import KINDS, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OVERRIDES = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    "gemma3": {"attn_logit_softcapping": 3.0, "sliding_window": 19},
}


def _target(kind, dtype=torch.bfloat16, fused=True):
    from draftsmith.targets.target import Target

    options = {"hidden_size": 256, "initializer_range": 0.06, "dtype": dtype, **OVERRIDES.get(kind, {})}
    target = Target.from_model(tiny_model(kind, **options).cuda())
    if fused:
        target.fuse()
    return target


def _run(target, ids, edges=(0, 60, 61, 77), cache=None):
    cache = cache or target.new_cache(len(ids), 100)
    states = []
    for low, high in itertools.pairwise(edges):
        positions = torch.arange(low, high, device="cuda").repeat(len(ids), 1)
        states.append(target.forward(ids[:, low:high], positions, tap_ids=(0, 3), cache=cache.view(high)))
    return torch.cat([s.final_state for s in states], 1), torch.cat([s.taps for s in states], 1)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 6e-2)])
def test_fused_equals_the_models_own_code(kind, dtype, tolerance):
    target = _target(kind, dtype, fused=False)
    ids = torch.randint(0, 97, (3, 77), device="cuda")
    expected = _run(target, ids)
    target.fuse()
    for found, wanted in zip(_run(target, ids), expected, strict=True):
        assert (found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_a_graph_holds_a_step_and_serves_every_position(kind):
    target = _target(kind)
    ids = torch.randint(0, 97, (2, 70), device="cuda")
    cache, reference = target.new_cache(2, 90), target.new_cache(2, 90)
    prompt = torch.arange(40, device="cuda").repeat(2, 1)
    for each in (cache, reference):
        target.forward(ids[:, :40], prompt, cache=each)
    step_ids, step_positions = ids[:, 40:45].clone(), torch.arange(40, 45, device="cuda").repeat(2, 1)

    def step():
        states = target.forward(step_ids, step_positions, tap_ids=(1, 3), cache=cache)
        return states, target.ends.argmax(states.final_state)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, choice = step()
    for stored, kept in zip(cache.tensors, reference.tensors, strict=True):
        stored.copy_(kept)  # as it was before the steps that warmed up
    for start in (40, 45, 61):
        positions = torch.arange(start, start + 5, device="cuda") + torch.tensor([[0], [2]], device="cuda")
        step_ids.copy_(ids.gather(1, positions))
        step_positions.copy_(positions)
        graph.replay()
        expected = target.forward(step_ids, positions, tap_ids=(1, 3), cache=reference)
        assert torch.equal(captured.taps, expected.taps)
        assert torch.equal(captured.final_state, expected.final_state)
        assert torch.equal(choice.ids, target.ends.argmax(expected.final_state).ids)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_token_is_the_same_from_any_slot_beside_any_neighbour_in_any_bucket(kind, rows):
    target = _target(kind)
    ids = torch.randint(0, 97, (rows, 90), device="cuda")
    prompt = torch.arange(50, device="cuda").repeat(rows, 1)

    def verify(tokens, start, length):
        """States of six tokens of every row from `start` on, after its first 50."""
        cache = target.new_cache(rows, length)
        target.forward(tokens[:, :50], prompt, cache=cache)
        for low in range(50, start, 6):
            positions = (torch.arange(6, device="cuda") + low).repeat(rows, 1)
            target.forward(tokens[:, low : low + 6], positions, cache=cache)
        positions = (torch.arange(6, device="cuda") + start).repeat(rows, 1)
        return target.forward(tokens[:, start : start + 6], positions, cache=cache).final_state

    whole = verify(ids, 50, 100)
    assert torch.equal(verify(ids, 50, 300), whole)
    strangers = ids.clone()
    strangers[1:] = torch.randint(0, 97, (rows - 1, 90), device="cuda") if rows > 1 else strangers[1:]
    assert torch.equal(verify(strangers, 50, 100)[0], whole[0])
    # Tokens 53, 54, 55 from slots 3, 4, 5 and, one verify later, from slots 0, 1, 2.
    cache = target.new_cache(rows, 100)
    target.forward(ids[:, :50], prompt, cache=cache)
    for low in (50, 53):
        positions = (torch.arange(6, device="cuda") + low).repeat(rows, 1)
        later = target.forward(ids[:, low : low + 6], positions, cache=cache).final_state
    assert torch.equal(later[:, :3], whole[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 40, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_most_likely_token_is_the_logits_argmax(dtype, rows, softcap):
    from draftsmith.kernels.vocabulary.vocabulary_argmax import vocabulary_argmax, vocabulary_argmax_reference

    hidden = torch.randn(rows, 264, device="cuda").to(dtype)
    weight = (torch.randn(5003, 264, device="cuda") / 8).to(dtype)
    ids, finite = vocabulary_argmax(hidden, weight, softcap)
    logits = hidden.double() @ weight.double().T
    expected = vocabulary_argmax_reference(hidden, weight, softcap)[0]
    # Sums in another order may round to the other side of a near tie: what is chosen is as good as the best.
    chosen, best = (logits.gather(1, each[:, None])[:, 0] for each in (ids, expected))
    assert (
        (chosen - best).abs() <= (1e-5 if dtype == torch.float32 else 2e-2) * best.abs() * (4 if softcap else 1)
    ).all()
    assert finite.all()
    assert (ids == expected).float().mean() > 0.8
    weight[[4000, 4500]] = 3 * hidden[0]
    assert vocabulary_argmax(hidden, weight, None)[0][0] == 4000
    weight[77, 0] = float("nan")
    assert not vocabulary_argmax(hidden, weight, softcap)[1].any()
