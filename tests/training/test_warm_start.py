import json
import logging
import shutil

import pytest
import torch

from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.training.record import load_run
from draftsmith.training.run import train
from tests.training.counting import QUIET, identity_of, options, section


def run(target, store, run_dir, draft_section, **arguments):
    return train(
        draft_section=draft_section,
        target=target,
        ends=target.ends,
        store=store,
        run_dir=run_dir,
        options=arguments.pop("options", options(max_steps=3)),
        track=QUIET,
        target_identity=identity_of(target),
        **arguments,
    )


def evaluations(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in entry.items() if k not in ("kind", "step")} for entry in lines if entry["kind"] == "eval"]


@pytest.fixture
def exported(target, store, tmp_path):
    """A draft trained for a few steps and exported."""
    run(target, store, tmp_path / "first", section(), options=options(max_steps=20))
    load_run(tmp_path / "first", "last").save(tmp_path / "draft")
    return tmp_path / "draft"


def test_the_first_evaluation_is_the_exported_drafts_last(target, store, tmp_path, exported):
    run(target, store, tmp_path / "second", section(init_from=str(exported)))
    assert evaluations(tmp_path / "second")[0] == evaluations(tmp_path / "first")[-1]
    assert evaluations(tmp_path / "second")[0] != evaluations(tmp_path / "first")[0]


def test_sizes_left_out_are_the_checkpoints(target, store, tmp_path, exported):
    minimal = section(init_from=str(exported), num_hidden_layers=None, mask_token_id=None, block_size=None)
    run(target, store, tmp_path / "second", minimal)
    assert load_run(tmp_path / "second", "last").config == Draft.load(exported).config


def test_a_resumed_run_does_not_need_the_directory(target, store, tmp_path, exported):
    warm = section(init_from=str(exported))
    run(target, store, tmp_path / "straight", warm, options=options(max_steps=4))
    run(target, store, tmp_path / "second", warm, options=options(max_steps=4, save_every=2, keep_last=2))
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-00000004")
    shutil.rmtree(exported)
    run(target, store, tmp_path / "second", warm, options=options(max_steps=4, save_every=2), resume=True)
    resumed, straight = (load_run(tmp_path / name, "last").state_dict() for name in ("second", "straight"))
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_every_mismatch_is_listed(target, store, tmp_path, exported):
    other = section(
        init_from=str(exported), num_hidden_layers=2, layer_types=("full_attention",) * 2, intermediate_size=48
    )
    with pytest.raises(DraftsmithError) as error:
        run(target, store, tmp_path / "second", other)
    message = str(error.value)
    assert "layers.0.mlp.up_proj.weight: found [64, 32], wanted [48, 32]" in message
    assert "layers.0.mlp.down_proj.weight: found [32, 64], wanted [32, 48]" in message
    assert "layers.1.self_attn.q_proj.weight: not in the checkpoint, wanted [32, 32]" in message
    assert not (tmp_path / "second").exists()


def test_tensors_that_the_draft_does_not_have_are_listed(target, store, tmp_path):
    run(target, store, tmp_path / "deep", section(num_hidden_layers=2))
    load_run(tmp_path / "deep", "last").save(tmp_path / "draft")
    shallow = section(init_from=str(tmp_path / "draft"), num_hidden_layers=1, layer_types=("full_attention",))
    with pytest.raises(
        DraftsmithError, match=r"layers\.1\.mlp\.gate_proj\.weight: found .* not part of the configured"
    ):
        run(target, store, tmp_path / "second", shallow)


def test_another_mask_token_warns_and_another_block_size_does_not(target, store, tmp_path, exported, caplog):
    with caplog.at_level(logging.WARNING):
        run(target, store, tmp_path / "second", section(init_from=str(exported), block_size=6))
    assert "mask_token_id" not in caplog.text
    assert "block_size" not in caplog.text
    with caplog.at_level(logging.WARNING):
        run(target, store, tmp_path / "third", section(init_from=str(exported), mask_token_id=17))
    assert "mask_token_id is 18, this run has 17" in caplog.text


def test_a_missing_directory_is_named(target, store, tmp_path):
    with pytest.raises(DraftsmithError, match=f"there is no directory {tmp_path / 'nowhere'}"):
        run(target, store, tmp_path / "second", section(init_from=str(tmp_path / "nowhere")))
