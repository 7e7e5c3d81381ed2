"""What counts as a setting of a stage: when it is not run again, goes on, or is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.features.reader import Store
from tests.cli.test_cli import fails, run, save_target, walked, write_lines, write_recipe
from tests.support.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def done(tmp_path_factory, target):
    return walked(tmp_path_factory.mktemp("done"), target)


def test_a_finished_stage_is_not_run_again(done):
    directory = done.parent / "run"
    watched = [path for path in directory.rglob("*") if path.is_file() and path.parent.name != "draft"]
    before = {path: path.stat().st_mtime_ns for path in watched}
    for command in ("regenerate", "capture", "train", "bench"):
        status, _, errors = run(command, done)
        assert status == 0
        assert "done already" in errors
    assert {path: path.stat().st_mtime_ns for path in watched} == before


def test_how_a_step_is_computed_is_no_setting_of_a_training(done):
    """Neither now nor where the stamp was written when it still was one."""
    stamp = done.parent / "run" / "stages" / "train.json"
    content = json.loads(stamp.read_text())
    assert "graphs" not in content["settings"]["train"]
    content["settings"]["train"] |= {"attention": "auto", "graphs": False}
    stamp.write_text(json.dumps(content))
    status, _, errors = run("train", done, "train.attention=dense", "train.compile=false")
    assert status == 0, errors
    assert "train: done already" in errors
    assert "train.lr: 0.0006 then, 0.1 now" in fails("train", done, "train.lr=0.1")


def test_speeds_of_another_machine_are_measured_again(done):
    """`target.device` is no setting of any stage, and what it stands for is one of a benchmark."""
    stamp = done.parent / "run" / "stages" / "bench.json"
    assert "bench: done already" in run("bench", done, "target.device=auto")[2]
    content = json.loads(stamp.read_text())
    found = content["settings"]["machine"]
    assert found["torch"] == torch.__version__
    for name in ("device", "torch"):
        stamp.write_text(json.dumps(content | {"settings": content["settings"] | {"machine": found | {name: "other"}}}))
        status, _, errors = run("bench", done)
        assert status == 0, errors
        assert "done already" not in errors
        assert json.loads(stamp.read_text())["settings"]["machine"] == found


def test_all_of_a_prompt_is_a_setting_of_a_benchmark(done, tmp_path):
    question, system = {"role": "user", "content": "say a"}, {"role": "system", "content": "be brief"}
    prompts = tmp_path / "prompts.jsonl"
    asked = ("bench.batch_size=1", "bench.max_new_tokens=2", "bench.warmup=0", "bench.shown=0")
    for category, messages in (("words", [question]), ("words", [system, question]), ("letters", [system, question])):
        write_lines(prompts, [{"id": "p0", "category": category, "messages": messages}])
        status, _, errors = run("bench", done, f"bench.prompts={prompts}", *asked)
        assert status == 0, errors
        assert "done already" not in errors
    assert "bench: done already" in run("bench", done, f"bench.prompts={prompts}", *asked)[2]


def test_how_the_target_decodes_is_no_setting_of_features(done):
    """Also where the stamp was written when it still was one."""
    stamp = done.parent / "run" / "stages" / "capture.json"
    content = json.loads(stamp.read_text())
    assert content["settings"]["target"].keys().isdisjoint({"fuse", "device"})
    content["settings"]["target"]["fuse"] = "on"
    stamp.write_text(json.dumps(content))
    assert "capture: done already" in run("capture", done, "target.fuse=off")[2]
    # Answers and speeds come from cached forwards, for which it counts.
    for stage in ("regenerate", "bench"):
        assert json.loads((stamp.parent / f"{stage}.json").read_text())["settings"]["target"]["fuse"] == "auto"


def test_changed_settings_are_refused_by_name_and_fresh_makes_anew(tmp_path, target):
    recipe = write_recipe(tmp_path, target)
    run("regenerate", recipe)
    message = fails("regenerate", recipe, "regenerate.max_new_tokens=5")
    assert "answers made with other settings: max_new_tokens was 12, now 5" in message
    assert "--fresh" in message
    # A refused change leaves what was there, and how many are answered at a time changes nothing.
    status, _, errors = run("regenerate", recipe, "regenerate.batch_size=2")
    assert "done already" in errors
    status, _, errors = run("regenerate", recipe, "regenerate.max_new_tokens=5", "--fresh")
    assert status == 0, errors


def test_answers_stay_where_prompts_are_added_and_not_where_they_change(tmp_path, target):
    recipe = write_recipe(tmp_path, target)
    run("regenerate", recipe)
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    answers = (tmp_path / "run" / "answers.jsonl").read_text()
    more = {"id": "more", "prompt": "say g"}
    write_lines(tmp_path / "prompts.jsonl", [*prompts, more])
    status, _, errors = run("regenerate", recipe)
    assert status == 0, errors
    assert "1 prompts answered" in errors
    assert "6 there before" in errors
    assert (tmp_path / "run" / "answers.jsonl").read_text().startswith(answers)
    write_lines(tmp_path / "prompts.jsonl", [{**prompts[0], "prompt": "say something else"}, *prompts[1:]])
    assert "'p0' was asked something else then" in fails("regenerate", recipe)
    # A conversation's system message is part of what was asked, and its category is not.
    write_lines(tmp_path / "prompts.jsonl", [{**prompts[0], "category": "letters"}, *prompts[1:], more])
    status, _, errors = run("regenerate", recipe)
    assert status == 0, errors
    assert "7 there before" in errors
    kept = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [answer["category"] for answer in kept[:2]] == ["letters", "words"]
    system = {"role": "system", "content": "be brief"}
    talk = {"id": "p0", "messages": [system, {"role": "user", "content": prompts[0]["prompt"]}]}
    write_lines(tmp_path / "prompts.jsonl", [talk, *prompts[1:], more])
    assert "'p0' was asked something else then" in fails("regenerate", recipe)


def test_a_capture_follows_the_depth_of_a_draft_that_names_no_taps(tmp_path, target):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    talks = write_lines(tmp_path / "talks.jsonl", [{"messages": talk}])
    recipe = write_recipe(tmp_path, target, draft={"num_taps": None}, data={"conversations": str(talks)})
    assert run("capture", recipe)[0] == 0
    message = fails("capture", recipe, "draft.num_hidden_layers=2", "draft.layer_types=null")
    assert "draft.num_hidden_layers: 1 then, 2 now" in message
    status, _, errors = run("capture", recipe, "draft.num_hidden_layers=2", "draft.num_taps=1", "--fresh")
    assert status == 0, errors
    status, _, errors = run("capture", recipe, "draft.num_hidden_layers=3", "draft.num_taps=1")
    assert "done already" in errors


# --- what is found before any work ----------------------------------------------------------------------------------


@pytest.fixture
def answered(tmp_path, target):
    """A recipe whose run has answers of a finished `regenerate`."""
    recipe = write_recipe(tmp_path, target)
    assert run("regenerate", recipe)[0] == 0
    return recipe


def test_answers_of_an_unfinished_regenerate_are_refused(answered):
    answers, stamp = answered.parent / "run" / "answers.jsonl", answered.parent / "run" / "stages" / "regenerate.json"
    content = json.loads(stamp.read_text())
    stamp.write_text(json.dumps(content | {"finished": False}))
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:2]))
    for command in (["capture", answered], ["train", answered, "train.features=online"]):
        errors = fails(*command)
        assert "holds 2 answers to 6 prompts: `draftsmith regenerate` has not finished; run it again" in errors
        assert f"data.conversations={answers}" in errors
    assert not (answered.parent / "run" / "features").exists()
    assert run("capture", answered, f"data.conversations={answers}")[0] == 0
    assert run("regenerate", answered)[0] == 0
    assert len(answers.read_text().splitlines()) == 6


def test_answers_that_were_lost_are_asked_for_again(answered):
    answers = answered.parent / "run" / "answers.jsonl"
    whole = answers.read_bytes()
    assert "regenerate: done already" in run("regenerate", answered)[2]
    answers.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    status, _, errors = run("regenerate", answered)
    assert status == 0, errors
    assert "4 prompts answered" in errors
    assert answers.read_bytes() == whole
    # A prompt that was refused is not asked again for ever.
    answers.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    (answers.parent / "answers.refused.jsonl").write_text('{"id": "p5", "reason": "too long"}\n')
    assert "regenerate: done already" in run("regenerate", answered)[2]


def test_answers_are_learnt_after_the_prompts_that_they_were_given_to(answered):
    errors = fails("capture", answered, "data.system_prompt=be brief")
    assert "were given with data.system_prompt 'template', and it is 'be brief' now" in errors
    answers = answered.parent / "run" / "answers.jsonl"
    assert run("capture", answered, "data.system_prompt=be brief", f"data.conversations={answers}")[0] == 0


@pytest.mark.parametrize(
    ("token", "reason"),
    [("<|im_end|>", "the tokenizer's eos token"), ("<|im_start|>", "written by the chat template into every")],
)
def test_a_mask_token_that_is_in_every_text_is_refused(answered, token, reason):
    number = tiny_tokenizer().convert_tokens_to_ids(token)
    recipe = [answered, f"draft.mask_token_id={number}"]
    errors = fails("capture", *recipe)
    assert f"draft.mask_token_id is {number} ('{token}'), which is {reason}" in errors
    assert f"such as {len(tiny_tokenizer())}, the first of 1 that the tokenizer does not have" in errors
    assert run("capture", answered)[0] == 0
    assert f"which is {reason}" in fails("train", *recipe)
    assert not (answered.parent / "run" / "train" / "checkpoints").exists()


def test_a_mask_token_that_documents_hold_is_told(answered, caplog):
    word = tiny_tokenizer().convert_tokens_to_ids("a")
    assert run("capture", answered)[0] == 0
    for features in ("store", "online"):
        caplog.clear()
        where = f"run={answered.parent / features}"
        conversations = f"data.conversations={answered.parent / 'run' / 'answers.jsonl'}"
        assert run("capture", answered, where, conversations)[0] == 0
        settings = [where, conversations, f"train.features={features}", f"draft.mask_token_id={word}"]
        status, _, errors = run("train", answered, *settings)
        assert status == 0, errors
        store = Store.open(answered.parent / features / "features")
        held = sum(bool((record.input_ids == word).any()) for record in store)
        assert f"the mask token {word} occurs in {held} of the 6 documents" in caplog.text
        assert 0 < held <= 6


def test_documents_that_do_not_fit_into_a_row_are_found_before_any_work(answered):
    errors = fails("regenerate", answered, "data.max_length=97")
    assert "tokens_per_row is 96, less than data.max_length 97" in errors
    errors = fails("capture", answered, "train.tokens_per_row=20")
    assert "tokens, and a row of the training takes 20 (train.tokens_per_row)" in errors
    assert not (answered.parent / "run" / "features").exists()
    assert run("capture", answered)[0] == 0
    errors = fails("train", answered, "train.tokens_per_row=20")
    assert "train.tokens_per_row is 20, and 6 of the 6 documents" in errors
    assert not (answered.parent / "run" / "train" / "checkpoints").exists()


def test_a_fine_tuned_target_is_another_target(answered, tmp_path_factory, target):
    assert run("capture", answered)[0] == 0
    tuned = tmp_path_factory.mktemp("tuned") / "target"
    shutil.copytree(target, tuned)
    moved = ["train", answered, f"target.path={tuned}"]
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.2.self_attn.q_proj.weight"] += 0.05
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    assert "target.layers_hash: the store has" in fails(*moved)
    shutil.copy(target / "model.safetensors", tuned)
    status, _, errors = run(*moved)
    assert status == 0, errors
