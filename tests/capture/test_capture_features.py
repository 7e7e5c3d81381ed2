"""The features are the target's own hidden states, whatever batch they were computed in."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftsmith.features.encoding import decode, encode
from draftsmith.features.reader import Store
from draftsmith.features.schema import FP8, CaptureLayout
from tests.support.tiny import KINDS, tiny_target

from .samples import random_samples, run_capture

LENGTHS = (5, 23, 1, 9, 23, 14, 2)


def reference(model: nn.Module, input_ids: Tensor, tap_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Taps and final state of one document from the model's own `output_hidden_states`."""
    with torch.no_grad():
        states = model(input_ids=input_ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[tap_id + 1][0] for tap_id in tap_ids], dim=-1), states[-1][0]


@pytest.mark.parametrize("kind", KINDS)
def test_features_equal_the_models_own_hidden_states(kind: str, tmp_path: Path) -> None:
    target = tiny_target(kind)
    layout = CaptureLayout((2, 0), target.hidden_size, final_state=True)
    samples = random_samples(LENGTHS)
    run_capture(target, samples, layout, tmp_path, dtype="float32", tokens_per_batch=48)
    store = Store.open(tmp_path)
    assert len(store) == len(samples)
    for sample in samples:
        record = store[store.index_of(sample.id)]
        taps, final = reference(target.model, sample.input_ids, layout.tap_ids)
        torch.testing.assert_close(record.features["taps"], taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(record.features["final_state"], final, rtol=1e-4, atol=1e-4)
        assert torch.equal(record.input_ids, sample.input_ids)
        assert torch.equal(record.loss_mask, sample.loss_mask)


def test_the_final_state_is_post_norm_and_the_last_tap_is_not(tmp_path: Path) -> None:
    """Trap 20: the state that enters the head, not the one before the norm."""
    target = tiny_target("llama")
    last = target.num_layers - 1
    (sample,) = random_samples([17])
    run_capture(target, [sample], CaptureLayout((last,), 32, final_state=True), tmp_path, dtype="float32")
    record = Store.open(tmp_path)[0]
    with torch.no_grad():
        normed = target.model.model.norm(record.features["taps"])
        logits = target.model(input_ids=sample.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(record.features["final_state"], normed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.ends.project(record.features["final_state"]), logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(record.features["final_state"], record.features["taps"], atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_what_each_row_gives_alone(kind: str, tmp_path: Path) -> None:
    """Trap 17."""
    target = tiny_target(kind)
    layout = CaptureLayout((1, 3), target.hidden_size, final_state=True)
    samples = random_samples(LENGTHS, seed=1)
    run_capture(target, samples, layout, tmp_path / "together", dtype="float32", tokens_per_batch=1 << 20)
    run_capture(target, samples, layout, tmp_path / "alone", dtype="float32", tokens_per_batch=1)
    together, alone = Store.open(tmp_path / "together"), Store.open(tmp_path / "alone")
    for sample in samples:
        a, b = together[together.index_of(sample.id)], alone[alone.index_of(sample.id)]
        for name in layout.widths:
            torch.testing.assert_close(a.features[name], b.features[name], rtol=1e-5, atol=1e-5)


def test_a_changed_token_changes_the_features_from_there_on(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    layout = CaptureLayout((2,), target.hidden_size, final_state=False)
    (sample,) = random_samples([20])
    changed = random_samples([20])[0]
    changed.input_ids[11] = (changed.input_ids[11] + 1) % 97
    run_capture(target, [sample], layout, tmp_path / "a", dtype="float32")
    run_capture(target, [changed], layout, tmp_path / "b", dtype="float32")
    a, b = (Store.open(tmp_path / name)[0].features["taps"] for name in "ab")
    assert torch.equal(a[:11], b[:11])
    assert ((a[11:] - b[11:]).abs().amax(dim=-1) > 1e-6).all()


def test_no_layer_above_the_last_one_needed_runs_and_no_head(tmp_path: Path) -> None:
    target = tiny_target("llama", num_layers=5)
    ran: list[str] = []
    modules = {f"layer {i}": layer for i, layer in enumerate(target.model.model.layers)} | {
        "head": target.model.lm_head
    }
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    samples = random_samples([6, 4])
    run_capture(target, samples, CaptureLayout((0, 2), 32, final_state=False), tmp_path / "taps")
    assert set(ran) == {"layer 0", "layer 1", "layer 2"}
    ran.clear()
    run_capture(target, samples, CaptureLayout((0, 2), 32, final_state=True), tmp_path / "final")
    assert set(ran) == {f"layer {i}" for i in range(5)}


def test_bfloat16_is_the_rounding_of_what_was_computed(tmp_path: Path) -> None:
    target = tiny_target("llama")
    layout = CaptureLayout((1, 2), 32, final_state=True)
    samples = random_samples(LENGTHS)
    run_capture(target, samples, layout, tmp_path / "fp32", dtype="float32")
    run_capture(target, samples, layout, tmp_path / "bf16")
    for a, b in zip(Store.open(tmp_path / "fp32"), Store.open(tmp_path / "bf16"), strict=True):
        assert b.features["taps"].dtype == torch.bfloat16
        assert torch.equal(a.features["taps"].bfloat16(), b.features["taps"])
        assert torch.equal(a.features["final_state"].bfloat16(), b.features["final_state"])


def test_fp8_is_the_encoding_of_what_was_computed(tmp_path: Path) -> None:
    target = tiny_target("llama")
    layout = CaptureLayout((1, 2), 32, final_state=True)
    samples = random_samples(LENGTHS)
    run_capture(target, samples, layout, tmp_path / "fp32", dtype="float32")
    run_capture(target, samples, layout, tmp_path / "fp8", dtype="fp8")
    in_8_bits = replace(layout, dtype=FP8)
    for a, b in zip(Store.open(tmp_path / "fp32"), Store.open(tmp_path / "fp8"), strict=True):
        wanted = decode(encode(a.features, in_8_bits), in_8_bits, in_8_bits.widths)
        for name in layout.widths:
            assert torch.equal(b.features[name], wanted[name])
            assert float((b.features[name] - a.features[name]).norm() / a.features[name].norm()) < 0.035
