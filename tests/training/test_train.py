import json
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch.utils.tensorboard import SummaryWriter  # noqa: F401  (slow import, kept out of the tests' time)

from draftsmith.algorithms.dflash import DFlashObjective
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.manifest import StoreError, StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.training.hooks import Hooks
from draftsmith.training.options import TrackOptions
from draftsmith.training.record import find_checkpoint, load_run
from draftsmith.training.run import train
from draftsmith.training.schedule import learning_rate
from draftsmith.training.source import StoreSource
from tests.support.tiny import tiny_target
from tests.training.counting import QUIET, TAP_IDS, counting_store, identity_of, options, section

LAYOUT = CaptureLayout(TAP_IDS, 32, final_state=False, dtype=torch.float32)


def run(target, store, run_dir, train_options=None, draft_section=None, *, track=QUIET, hooks=None, **arguments):
    return train(
        draft_section or section(),
        target,
        StoreSource(store),
        run_dir,
        train_options or options(),
        track,
        hooks=hooks,
        **{"provenance": Provenance(identity_of(target), None), **arguments},
    )


def entries(run_dir, kind):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def numbers(entry):
    """An entry without what depends on the machine."""
    return {k: v for k, v in entry.items() if k not in ("tokens_per_second", "data_wait", "memory_gib")}


def weights(run_dir):
    return find_checkpoint(run_dir, "last").weights()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_counting_language_is_learnt(target, store, run_dir):
    learning = options(max_steps=120, rows_per_step=4, rows_per_forward=4, num_anchors=16, lr=1e-2, eval_every=60)
    result = run(target, store, run_dir, learning)
    first, last = entries(run_dir, "eval")[0], entries(run_dir, "eval")[-1]
    assert last["loss"] < 0.2 * first["loss"]
    assert last["accuracy"] == [1.0, 1.0, 1.0]
    assert result.evaluation == {name: last[name] for name in ("loss", "accuracy", "accept_length")}
    assert (result.step, result.total_steps, result.interrupted_by, result.best_step) == (120, 120, None, 120)


def test_max_steps_is_exact_and_the_schedule_counts_optimiser_steps(target, store, run_dir):
    chosen = options(max_steps=7, rows_per_step=4, rows_per_forward=1, warmup_ratio=0.3)
    result = run(target, store, run_dir, chosen)
    logged = entries(run_dir, "train")
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["lr"] for entry in logged] == [learning_rate(step, 7, chosen) for step in range(7)]
    assert result.step == 7
    optimizer = find_checkpoint(run_dir, "last").state()["optimizer"]
    assert {int(value) for name, value in optimizer.items() if name.startswith("step.")} == {7}


def test_without_max_steps_the_epochs_decide(target, store, run_dir):
    result = run(target, store, run_dir, options(max_steps=None, epochs=2, rows_per_step=3))
    epochs = [entry["epoch"] for entry in entries(run_dir, "train")]
    assert len(epochs) == result.total_steps
    assert sorted(set(epochs)) == [0.0, 1.0]


def test_accumulated_rows_equal_rows_at_once(target, store, tmp_path):
    for rows in (1, 4):
        run(target, store, tmp_path / str(rows), options(max_steps=3, rows_per_step=4, rows_per_forward=rows))
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    assert max(float((one[name] - four[name]).abs().max()) for name in one) < 1e-6
    losses = [[entry["loss"] for entry in entries(tmp_path / str(rows), "train")] for rows in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    # Rows hold different numbers of labels: a mean of means would be another number.
    run(target, store, tmp_path / "other", options(max_steps=3, rows_per_step=2))
    other = weights(tmp_path / "other")
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-4


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_the_gradient_does_not_grow_with_the_number_of_labels(target, store, tmp_path, weighting):
    """Every document thrice in one step, and all their anchors: the mean and its gradient stay what they are."""
    norms = []
    for copies in (1, 3):
        directory = tmp_path / f"store-{copies}"
        with StoreWriter(directory, StoreHeader.for_layout(LAYOUT, identity_of(target), None)) as writer:
            for number in range(5):
                for copy in range(copies):
                    writer.add(replace(store[number], sample_id=f"{number}/{copy}"))
        finish_store(directory)
        chosen = options(max_steps=1, num_anchors=64, rows_per_step=8, eval_share=0, clip=1e-3)
        drafted = section(objective={"weighting": {"kind": weighting}})
        run(target, Store.open(directory), tmp_path / f"run-{copies}", chosen, draft_section=drafted)
        norms.append(entries(tmp_path / f"run-{copies}", "train")[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] > 1e-2


def test_the_applied_gradient_is_clipped_to_its_norm(target, store, tmp_path):
    applied = {}
    for clip in (None, 0.01, 1e6):
        directory = tmp_path / str(clip)
        run(target, store, directory, options(max_steps=1, clip=clip, betas=(0.9, 0.95)))
        state = find_checkpoint(directory, "last").state()["optimizer"]
        first_moments = [value.flatten() for name, value in state.items() if name.startswith("exp_avg.")]
        applied[clip] = float(torch.cat(first_moments).norm()) / (1 - 0.9)
        norm = entries(directory, "train")[0]["grad_norm"]  # before clipping
        assert norm > 0.1
    assert applied[None] == pytest.approx(norm, rel=1e-4)
    assert applied[1e6] == pytest.approx(norm, rel=1e-4)
    assert applied[0.01] == pytest.approx(0.01, rel=1e-3)


def test_objectives_are_told_the_share_of_the_run_that_is_done(target, store, run_dir, monkeypatch):
    told, terms = [], DFlashObjective.terms

    def listening(self, draft, ends, outputs):
        told.append(outputs.progress)
        return terms(self, draft, ends, outputs)

    monkeypatch.setattr(DFlashObjective, "terms", listening)
    run(target, store, run_dir, options(max_steps=4, rows_per_step=2, rows_per_forward=2, eval_share=0))
    assert told == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("stop_at", [4, 5])
def test_a_resumed_run_is_bit_identical(target, store, tmp_path, stop_at, monkeypatch):
    """Stopped by SIGTERM in the middle of an epoch, between two log entries."""
    chosen = options(max_steps=9, rows_per_step=3, save_every=2, eval_every=4)
    track = QUIET.model_copy(update={"every": 3})

    def noise(draft):
        """Stands for all that draws from torch's own generator, which goes on too."""
        return {"noise": float(torch.rand(()))}

    run(target, store, tmp_path / "straight", chosen, track=track, hooks=Hooks(evaluate_generate=noise))
    assert len({entry["generate_noise"] for entry in entries(tmp_path / "straight", "eval")}) > 2

    class Killer:
        def __init__(self):
            self.steps = 0

        def advance(self, amount=1.0, **fields):
            self.steps += amount
            if amount and self.steps == stop_at - 1:
                os.kill(os.getpid(), signal.SIGTERM)  # while the next step is under way

    class Killing:
        def stage(self, name, total, unit):
            from contextlib import nullcontext

            return nullcontext(Killer())

    killed = Hooks(Killing(), evaluate_generate=noise)
    stopped = run(target, store, tmp_path / "resumed", chosen, track=track, hooks=killed)
    assert (stopped.step, stopped.interrupted_by) == (stop_at, "SIGTERM")
    whole = Hooks(evaluate_generate=noise)
    finished = run(target, store, tmp_path / "resumed", chosen, track=track, hooks=whole, resume=True)
    assert finished.step == 9

    straight, resumed = (find_checkpoint(tmp_path / name, "last") for name in ("straight", "resumed"))
    assert equal(straight.weights(), resumed.weights())
    assert straight.position == resumed.position
    a, b = straight.state(), resumed.state()
    assert equal(a["optimizer"], b["optimizer"])
    assert torch.equal(a["generators"][0]["cpu"], b["generators"][0]["cpu"])
    for kind in ("train", "eval"):
        assert list(map(numbers, entries(tmp_path / "straight", kind))) == list(
            map(numbers, entries(tmp_path / "resumed", kind))
        )


def test_a_killed_run_goes_on_from_its_last_checkpoint(target, store, tmp_path):
    """What was logged after the last checkpoint is replaced, not repeated."""
    chosen = options(max_steps=6, save_every=4, eval_every=3)
    run(target, store, tmp_path / "straight", chosen)
    run(target, store, tmp_path / "killed", chosen)
    checkpoints = tmp_path / "killed" / "checkpoints"
    run(target, store, tmp_path / "half", options(max_steps=6, save_every=4, eval_every=3, keep_last=5))
    for path in checkpoints.iterdir():
        path.rename(path.with_suffix(".gone"))
    (tmp_path / "half" / "checkpoints" / "step-00000004").rename(checkpoints / "step-00000004")
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run(target, store, tmp_path / "killed", chosen, resume=True)
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "killed"))
    assert [entry["step"] for entry in entries(tmp_path / "killed", "train")] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in entries(tmp_path / "killed", "eval")] == [0, 3, 6]


def test_a_finished_run_resumes_into_nothing(target, store, run_dir):
    first = run(target, store, run_dir)
    before = weights(run_dir)
    again = run(target, store, run_dir, resume=True)
    assert again == first
    assert equal(weights(run_dir), before)


def test_a_resumed_run_can_be_made_longer_but_not_shorter(target, store, run_dir):
    run(target, store, run_dir, options(max_steps=3))
    assert run(target, store, run_dir, options(max_steps=5), resume=True).step == 5
    with pytest.raises(DraftsmithError, match="has reached step 5, and this recipe ends at step 4"):
        run(target, store, run_dir, options(max_steps=4), resume=True)


def test_a_run_is_not_overwritten_and_not_resumed_with_other_settings(target, store, tmp_path, run_dir):
    run(target, store, run_dir)
    with pytest.raises(DraftsmithError, match="holds a run that has reached step 6; resume it"):
        run(target, store, run_dir)
    with pytest.raises(DraftsmithError, match=r"train.seed: the run has 0, the recipe 3.*draft|train.seed") as error:
        run(target, store, run_dir, options(seed=3), section(block_size=5), resume=True)
    assert "draft.block_size: the run has 4, the recipe 5" in str(error.value)
    other = counting_store(tmp_path / "other", target, documents=21)
    with pytest.raises(DraftsmithError, match="the feature store: the run learns from index"):
        run(target, other, run_dir, resume=True)


def test_small_norms_move_under_bf16(target, store, run_dir):
    """Norm weights stand at 1.0, where bf16 has steps of 2^-7: changes far below that must add up."""
    run(target, store, run_dir, options(max_steps=5, precision="bf16", lr=2e-4, warmup_ratio=0.0))
    saved = weights(run_dir)
    norms = {name: weight for name, weight in saved.items() if "norm" in name}
    assert norms
    for name, weight in norms.items():
        assert weight.dtype == torch.float32, name
        change = (weight - 1.0).abs()
        assert 0 < change.max() < 2**-8, name
        assert torch.equal(weight.bfloat16(), torch.ones_like(weight).bfloat16()), name


def test_bf16_arithmetic_differs_from_fp32(target, store, tmp_path):
    for precision in ("bf16", "fp32"):
        run(target, store, tmp_path / precision, options(max_steps=1, precision=precision))
    losses = [entries(tmp_path / precision, "train")[0]["loss"] for precision in ("bf16", "fp32")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_the_targets_own_ends_are_left_as_they_are(store, run_dir):
    target = tiny_target("llama", vocab_size=19, num_layers=4, dtype=torch.bfloat16)
    head = target.ends.head_weight
    run(target, store, run_dir, provenance=None)
    assert target.ends.head_weight is head
    assert head.dtype == torch.bfloat16


def test_micro_batches_and_steps_without_a_label_add_nothing(target, tmp_path):
    """Half the documents have no candidate; with one document a row, whole steps have none either."""
    sparse = counting_store(tmp_path / "sparse", target, documents=8, unsupervised=(0, 1, 2, 5, 6))
    chosen = options(tokens_per_row=24, rows_per_step=1, max_steps=8, eval_share=0.0)
    run(target, sparse, tmp_path / "run", chosen)
    logged = entries(tmp_path / "run", "train")
    assert sum(entry["loss"] is None for entry in logged) >= 4
    assert all(entry["grad_norm"] == 0 for entry in logged if entry["loss"] is None)
    assert any(entry["loss"] is not None for entry in logged)
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())


def test_a_store_without_any_label_trains_to_nothing_and_stays_finite(target, tmp_path):
    empty = counting_store(tmp_path / "empty", target, documents=3, unsupervised=(0, 1, 2))
    with pytest.raises(DraftsmithError, match="no supervised token"):
        run(target, empty, tmp_path / "run", options(eval_share=0.0))


def test_best_and_last_load_as_drafts_in_the_export_dtype(target, store, run_dir):
    chosen = options(max_steps=6, eval_every=2, lr=0.3, keep_best=1)  # such a rate makes later steps worse
    result = run(target, store, run_dir, chosen, section(dtype="bfloat16"))
    evals = {entry["step"]: entry["accept_length"] for entry in entries(run_dir, "eval") if entry["step"] > 0}
    assert result.best_step is not None
    assert evals[result.best_step] == max(evals.values())
    last, best = load_run(run_dir, "last"), load_run(run_dir, "best")
    for draft, which in ((last, "last"), (best, "best")):
        saved = find_checkpoint(run_dir, which).weights()
        state = draft.state_dict()
        assert all(torch.equal(state[name], saved[name].bfloat16()) for name in saved)


def test_export_of_what_is_not_there_is_an_error(target, store, run_dir, tmp_path):
    with pytest.raises(DraftsmithError, match="is not a training run"):
        load_run(tmp_path / "nowhere")
    run(target, store, run_dir, options(eval_share=0.0, max_steps=1))
    assert load_run(run_dir, "last").config.block.size == 4
    with pytest.raises(DraftsmithError, match="none is best"):
        load_run(run_dir, "best")


def test_generation_is_evaluated_with_the_draft_as_it_is_served(target, store, run_dir):
    seen = []

    def evaluate_generate(draft):
        seen.append((draft.dtype, draft.training))
        return {"accept_length": 2.5}

    run(
        target,
        store,
        run_dir,
        draft_section=section(dtype="bfloat16"),
        hooks=Hooks(evaluate_generate=evaluate_generate),
    )
    assert seen == [(torch.bfloat16, False)] * 2
    assert [entry["generate_accept_length"] for entry in entries(run_dir, "eval")] == [2.5, 2.5]


def test_a_store_of_other_taps_or_another_target_is_refused(target, store, run_dir):
    with pytest.raises(StoreError, match="tap_ids"):
        run(target, store, run_dir, draft_section=section(target_layer_ids=(0, 2)))
    other = tiny_target("llama", vocab_size=19, num_layers=4, seed=7)
    with pytest.raises(StoreError, match="weights_hash"):
        run(other, store, run_dir)
    assert not run_dir.exists()


def test_a_document_longer_than_a_row_is_named(target, store, run_dir):
    longest = {store.sample_ids[i] for i in range(len(store)) if store.lengths[i] == max(store.lengths)}
    with pytest.raises(DraftsmithError, match=f"'({'|'.join(longest)})' has {max(store.lengths)} tokens"):
        run(target, store, run_dir, options(tokens_per_row=max(store.lengths) - 1, eval_share=0.0))


def test_tensorboard_and_console(target, store, run_dir, capsys):
    run(target, store, run_dir, options(max_steps=2), track=TrackOptions(every=1))
    shown = capsys.readouterr().out
    assert "train  step 2  loss " in shown
    assert "eval   step 2  loss " in shown
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((run_dir / "tensorboard").iterdir())))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/grad_norm", "train/accuracy/label_3", "eval/accept_length"} <= set(tags)
    logged = [entry["loss"] for entry in entries(run_dir, "train")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(logged)


def test_a_tracker_that_is_not_installed_is_an_error(target, store, run_dir, monkeypatch):
    monkeypatch.setitem(__import__("draftsmith.training.tracking", fromlist=["x"])._AVAILABLE, "wandb", lambda: False)
    with pytest.raises(DraftsmithError, match=r"track\.wandb is on but wandb is not installed"):
        run(target, store, run_dir, track=QUIET.model_copy(update={"wandb": True}))


def test_a_device_that_is_not_there_is_an_error(target, store, run_dir):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(DraftsmithError, match=r"train\.device is 'cuda'"):
        run(target, store, run_dir, options(device="cuda"))


def test_training_on_cuda_without_triton_is_refused_at_the_start(target, store, run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DraftsmithError, match=r"training on cuda needs the package triton.*or set train\.device"):
        run(target, store, run_dir, options(device="cuda"))


def test_one_gpu_is_not_for_several_processes(target, store, run_dir, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DraftsmithError, match=r"train\.device is 'cuda:1' with 2 processes.*use 'cuda' or 'auto'"):
        run(target, store, run_dir, options(device="cuda:1"))


@pytest.mark.parametrize("device", ["banana", "mps", "", "cuda:99"])
def test_a_device_that_training_does_not_run_on_is_an_error(target, store, run_dir, device):
    with pytest.raises(DraftsmithError, match=f"train\\.device is '{device}'.*use "):
        run(target, store, run_dir, options(device=device))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "clip"])
def test_infinite_numbers_are_refused(name):
    with pytest.raises(ValidationError, match="finite number"):
        options(**{name: float("inf")})


def test_unknown_options_are_errors():
    with pytest.raises(ValidationError, match="learning_rate"):
        options(learning_rate=1.0)


def test_attention_that_blocks_do_not_fit_is_refused_before_training(target, store, run_dir):
    asked = section(head_dim=16, block_size=70, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(DraftsmithError, match=r"70 slots x 2 heads.* make 256; use 'flex'"):
        run(target, store, run_dir, options(attention="anchored"), asked)
    assert not run_dir.exists()
