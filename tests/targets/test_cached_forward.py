"""Forward over a cache: equal to the plain forward, row by row, whatever lies where nobody may look."""

import pytest
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.targets.cache import StaticCache
from draftsmith.targets.target import Target
from tests.support.tiny import KINDS, tiny_target

# Sliding windows of 8 (Mistral, Gemma 3; Qwen here, on some layers) are far shorter than the rows.
OVERRIDES = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}
LENGTHS = (29, 17, 23)
VOCAB = 97
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def _rows() -> Tensor:
    return torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)))


def _uncached(target: Target, row: Tensor, length: int) -> Tensor:
    """The final states [length, H] of one row alone, without a cache."""
    return target.forward(row[None, :length], torch.arange(length)[None]).final_state[0]


def _run_chunks(target: Target, cache: StaticCache, rows: Tensor, chunks: list[list[int]]) -> list[Tensor]:
    """Feed each row in its own chunk sizes; chunks narrower than the widest of a step are padded on the right with
    tokens at the following positions, which the row's next chunk overwrites. Returns each row's final states."""
    done = torch.zeros(len(rows), dtype=torch.int64)
    outputs: list[list[Tensor]] = [[] for _ in rows]
    for step in zip(*chunks, strict=True):
        positions = done[:, None] + torch.arange(max(step))
        ids = rows.gather(1, positions.clamp(max=rows.shape[1] - 1))
        for row, size in enumerate(step):
            ids[row, size:] = 3
        states = target.forward(ids, positions, cache=cache).final_state
        for row, size in enumerate(step):
            outputs[row].append(states[row, :size])
        done += torch.tensor(step)
    return [torch.cat(parts) for parts in outputs]


CHUNKS = [[11, 1, 7, 5, 4, 1], [3, 6, 1, 1, 5, 1], [9, 2, 2, 2, 4, 4]]


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_chunks_equal_the_plain_forward(kind):
    target = tiny_target(kind, **OVERRIDES.get(kind, {}))
    rows = _rows()
    cache = target.new_cache(3, 64)
    outputs = _run_chunks(target, cache, rows, CHUNKS)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(outputs[row], _uncached(target, rows[row], length), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_forward_is_the_models_own(kind):
    target = tiny_target(kind, **OVERRIDES.get(kind, {}))
    rows = _rows()
    logits = target.model(input_ids=rows).logits
    states = target.forward(rows, torch.arange(rows.shape[1]).expand(3, -1))
    torch.testing.assert_close(target.ends.project(states.final_state), logits, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_taps_come_out_of_a_cached_forward_too(kind):
    target = tiny_target(kind)
    row = _rows()[:1]
    positions = torch.arange(29)[None]
    expected = target.forward(row, positions, tap_ids=(1, 3))
    cache = target.new_cache(1, 40)
    # The upper layers' keys and values are written even where only a low tap is asked for.
    first = target.forward(row[:, :20], positions[:, :20], tap_ids=(1,), final_state=False, cache=cache)
    second = target.forward(row[:, 20:], positions[:, 20:], tap_ids=(1, 3), cache=cache)
    assert first.final_state is None
    torch.testing.assert_close(first.taps, expected.taps[:, :20, :32], **CLOSE)
    torch.testing.assert_close(second.taps, expected.taps[:, 20:], **CLOSE)


def _prefilled(target: Target, rows: Tensor) -> StaticCache:
    cache = target.new_cache(rows.shape[0], 48)
    target.forward(rows[:, :16], torch.arange(16).expand(rows.shape[0], -1), cache=cache)
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_entries_to_the_right_do_not_matter_and_entries_to_the_left_do(kind):
    target = tiny_target(kind, **OVERRIDES.get(kind, {}))
    rows = _rows()
    positions = torch.arange(16, 20).expand(3, -1)

    def verify(cache: StaticCache) -> Tensor:
        return target.forward(rows[:, 16:20], positions, cache=cache).final_state

    expected = verify(_prefilled(target, rows))
    stale = _prefilled(target, rows)
    for stored in stale.tensors:
        stored[:, :, 16:] = 1e6
    torch.testing.assert_close(verify(stale), expected, rtol=0, atol=0)

    changed = _prefilled(target, rows)
    changed.layers[0].values[1, :, 15] += 1.0  # inside every window
    result = verify(changed)
    assert not torch.allclose(result[1], expected[1], atol=1e-3)
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]], rtol=0, atol=0)


def test_entries_before_the_window_do_not_matter():
    target = tiny_target("mistral", num_layers=1)
    rows = _rows()
    positions = torch.arange(16, 20).expand(3, -1)
    expected = target.forward(rows[:, 16:20], positions, cache=_prefilled(target, rows)).final_state
    changed = _prefilled(target, rows)
    changed.layers[0].values[:, :, 9] += 1.0  # position 16 sees 9 .. 16, position 17 no longer sees 9
    result = target.forward(rows[:, 16:20], positions, cache=changed).final_state
    assert not torch.allclose(result[:, 0], expected[:, 0], atol=1e-3)
    torch.testing.assert_close(result[:, 1:], expected[:, 1:], rtol=0, atol=0)


def test_a_rejected_tail_is_forgotten_by_writing_over_it():
    target = tiny_target("gemma3")
    row = _rows()[:1]
    cache = target.new_cache(1, 40)
    target.forward(row[:, :12], torch.arange(12)[None], cache=cache)
    target.forward(torch.full((1, 8), 5), torch.arange(12, 20)[None], cache=cache)  # proposals that are not accepted
    states = target.forward(row[:, 12:29], torch.arange(12, 29)[None], cache=cache).final_state
    torch.testing.assert_close(states[0], _uncached(target, row[0], 29)[12:], **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_view_gives_the_same_and_shares_the_storage(kind):
    target = tiny_target(kind)
    rows = _rows()
    whole, viewed = target.new_cache(3, 200), target.new_cache(3, 200)
    for start in (0, 9, 18):
        positions = torch.arange(start, start + 9).expand(3, -1)
        ids = rows[:, start : start + 9]
        one = target.forward(ids, positions, cache=whole).final_state
        two = target.forward(ids, positions, cache=viewed.view(start + 9)).final_state
        torch.testing.assert_close(two, one, **CLOSE)
    torch.testing.assert_close(viewed.layers[2].keys, whole.layers[2].keys, **CLOSE)


def test_softcapped_attention():
    """The cap of Gemma 2's attention scores, against the model's own eager attention."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        sliding_window=6,
        initializer_range=0.3,
        pad_token_id=None,
        attn_implementation="eager",
    )
    target = Target.from_model(Gemma2ForCausalLM(config))
    rows = _rows()
    outputs = _run_chunks(target, target.new_cache(3, 64), rows, CHUNKS)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(outputs[row], _uncached(target, rows[row], length), **CLOSE)
    target.text_config.attn_logit_softcapping = None
    for layer in target.model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    uncapped = _run_chunks(target, target.new_cache(3, 64), rows, CHUNKS)
    assert not torch.allclose(uncapped[0], outputs[0], atol=1e-3)


def test_the_model_is_left_as_it_was():
    target = tiny_target("llama")
    before = target.model.config._attn_implementation
    cache = target.new_cache(1, 8)
    target.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache=cache)
    assert target.model.config._attn_implementation == before
    with pytest.raises(RuntimeError):  # past the end of the cache
        target.forward(torch.tensor([[1, 2]]), torch.tensor([[7, 8]]), cache=cache)
    assert target.model.config._attn_implementation == before
    assert target.model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape == (1, 5)


def test_cached_bfloat16_stays_bfloat16():
    target = tiny_target("gemma3", dtype=torch.bfloat16)
    cache = target.new_cache(1, 8)
    states = target.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), tap_ids=(1,), cache=cache)
    assert (states.taps.dtype, states.final_state.dtype, cache.layers[0].keys.dtype) == (torch.bfloat16,) * 3


def test_caches_that_cannot_be():
    target = tiny_target("llama")
    with pytest.raises(DraftsmithError, match="at least 1"):
        target.new_cache(0, 5)
    with pytest.raises(DraftsmithError, match="view of 9 positions of a cache of 8"):
        target.new_cache(1, 8).view(9)
    target.text_config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(DraftsmithError, match="linear_attention"):
        target.new_cache(1, 8)


def test_a_cache_of_other_heads_is_refused():
    cache = tiny_target("llama", num_key_value_heads=1).new_cache(1, 8)
    with pytest.raises(DraftsmithError, match="the cache holds"):
        tiny_target("llama").forward(torch.tensor([[1]]), torch.tensor([[0]]), cache=cache)
