"""The commands around a feature store: new masks, features of others, a look at it and its check."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.capture.hf import HfBackend
from draftsmith.data.sample import Sample
from draftsmith.features.manifest import MANIFEST_FILE
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.target import Target
from tests.cli.test_cli import fails, run, save_target, write_lines, write_recipe
from tests.support.tiny_tokenizer import PLAIN_TEMPLATE, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def conversations(directory: Path, first_answer: str = "assistant") -> Path:
    """Chats whose first answer is from `first_answer`; TEMPLATE prints those of tools as the assistant's."""
    return write_lines(
        directory / f"chats-{first_answer}.jsonl",
        [
            {
                "id": f"c{number}",
                "messages": [
                    {"role": "user", "content": "say it"},
                    {"role": first_answer, "content": "the one"},
                    {"role": "user", "content": "and"},
                    {"role": "assistant", "content": "one two " * number},
                ],
            }
            for number in range(1, 5)
        ],
    )


TEMPLATE = PLAIN_TEMPLATE.replace(
    "{{ message['role'] }}", "{{ 'assistant' if message['role'] == 'tool' else message['role'] }}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def recipe(tmp_path: Path, target: Path) -> Path:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    chats = conversations(tmp_path)
    return write_recipe(tmp_path, target, data={"conversations": str(chats), "chat_template": str(template)})


def succeed(*arguments: Any) -> tuple[str, str]:
    status, output, errors = run(*arguments)
    assert status == 0, errors
    return output, errors


def test_a_captured_store_is_remasked_verified_and_shown(recipe: Path, tmp_path: Path) -> None:
    succeed("capture", recipe, "capture.dtype=fp8")
    features = tmp_path / "run" / "features"
    before = Store.open(features)
    old = {record.sample_id: record for record in before}
    changed = f"data.conversations={conversations(tmp_path, 'tool')}"
    assert "other settings" in fails("capture", recipe, "capture.dtype=fp8", changed)
    _, said = succeed("capture", recipe, "capture.dtype=fp8", changed, "--remask")
    assert "4 of 4 documents have a new loss mask" in said
    store = Store.open(features)
    for record in store:
        assert torch.equal(record.features["taps"], old[record.sample_id].features["taps"])
        assert 0 < int(record.loss_mask.sum()) < int(old[record.sample_id].loss_mask.sum())
    _, said = succeed("capture", recipe, "capture.dtype=fp8", changed)
    assert "done already" in said

    assert "is as it should be" in succeed("inspect", features, "--verify")[1]
    shown, _ = succeed("inspect", tmp_path / "run", "--sample", "c2")
    assert "sample c2" in shown
    assert "⟦" in shown
    assert "one two one two" in shown[shown.rindex("⟦") : shown.rindex("⟧")]
    assert "the one" in shown
    assert "the one" not in shown[shown.rindex("⟦") : shown.rindex("⟧")]
    assert "has no sample 'c9'" in fails("inspect", features, "--sample", "c9")

    damaged = next(features.glob("*.features.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 1
    damaged.write_bytes(data)
    errors = fails("inspect", features, "--verify")
    assert f"damaged: {damaged}" in errors
    assert "has 1 faults" in errors


def test_a_sample_is_shown_with_the_stores_own_tokenizer_only(recipe: Path, tmp_path: Path, target: Path) -> None:
    succeed("capture", recipe)
    other = shutil.copytree(target, tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|another|>"])
    tokenizer.save_pretrained(other)
    assert "has the vocabulary" in fails("inspect", tmp_path / "run", "--sample", "c1", "--tokenizer", other)


def write_files(directory: Path, target: Path, chats: Path) -> Path:
    """SpecForge's files of what the target computes for three documents, layers 2 and 1."""
    loaded = Target.load(target)
    layout = CaptureLayout((2, 1), loaded.hidden_size, final_state=False)
    directory.mkdir()
    for number, line in enumerate(chats.read_text().splitlines()[:3]):
        ids = loaded.tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False)
        input_ids = torch.tensor(ids)
        mask = torch.zeros(len(ids), dtype=torch.int64)
        mask[-3:] = 1
        (features,) = HfBackend(loaded, layout).features([Sample("x", input_ids, mask.bool())])
        data = {"input_ids": input_ids, "loss_mask": mask, "hidden_states": features["taps"].clone()[None]}
        torch.save(data, directory / f"data_{number}.ckpt")
    return directory


def test_features_of_another_project_are_imported_and_trained_on(recipe: Path, tmp_path: Path, target: Path) -> None:
    files = write_files(tmp_path / "files", target, conversations(tmp_path))
    said = ("--import", files, "--from", "specforge", "--tap-ids", "2,1", "--final-state", "none")
    draft = "draft.target_layer_ids=[2]"
    _, errors = succeed("capture", recipe, draft, "draft.num_taps=null", *said)
    assert "3 captured" in errors
    store = Store.open(tmp_path / "run" / "features")
    assert (len(store), store.manifest.tap_ids) == (3, (2,))
    assert all(int(record.loss_mask.sum()) == 3 for record in store)
    wrong = list(said)
    wrong[5] = "3,2"
    message = fails("capture", recipe, draft, "draft.num_taps=null", f"run={tmp_path / 'wrong'}", *wrong)
    assert "layer 2 differs from what the target computes" in message


def test_import_needs_everything_that_files_do_not_say(recipe: Path, tmp_path: Path) -> None:
    message = fails("capture", recipe, "--import", tmp_path, "--from", "specforge")
    assert "--tap-ids, --final-state missing" in message
    said = ("--import", tmp_path, "--from", "specforge", "--tap-ids", "1,x", "--final-state", "none")
    assert "--tap-ids is '1,x'" in fails("capture", recipe, *said)


def test_capture_goes_on_after_the_masks_of_an_unfinished_store_were_rewritten(recipe: Path, tmp_path: Path) -> None:
    small = "capture.shard_bytes=1"
    succeed("capture", recipe, small)
    features = tmp_path / "run" / "features"
    (features / MANIFEST_FILE).unlink()  # as where a capture was killed before its last shard
    last = max(features.glob("*.features.safetensors")).name.removesuffix(".features.safetensors")
    for path in features.glob(f"{last}.*"):
        path.unlink()
    changed = f"data.conversations={conversations(tmp_path, 'tool')}"
    _, said = succeed("capture", recipe, small, changed, "--remask")
    assert "3 of 3 documents have a new loss mask" in said
    assert "`draftsmith capture` goes on" in said
    succeed("capture", recipe, small, changed)
    assert sorted(record.sample_id for record in Store.open(features)) == ["c1", "c2", "c3", "c4"]


def test_a_damaged_shard_is_mended_by_deleting_it_and_capturing_again(recipe: Path, tmp_path: Path) -> None:
    small = "capture.shard_bytes=1"
    succeed("capture", recipe, small)
    features = tmp_path / "run" / "features"
    before = {record.sample_id: record.features["taps"].clone() for record in Store.open(features)}
    damaged = sorted(features.glob("*.features.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert damaged.name in fails("inspect", features, "--verify")
    for path in features.glob(f"{damaged.name.split('.')[0]}.*"):
        path.unlink()
    _, said = succeed("capture", recipe, small)
    assert "1 captured in" in said
    succeed("inspect", features, "--verify")
    after = {record.sample_id: record.features["taps"] for record in Store.open(features)}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    _, said = succeed("capture", recipe, small)
    assert "done already" in said
    manifest = features / MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes().replace(b'"samples": 4', b'"samples": 5'))
    assert "delete it and capture again" in fails("capture", recipe, small)
    manifest.unlink()
    succeed("capture", recipe, small)
    assert len(Store.open(features)) == len(before)


def test_what_works_in_one_process_says_so(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--fresh works in one process; 2 were started" in fails("capture", recipe, "--fresh")
    assert "--remask works in one process; 2 were started" in fails("capture", recipe, "--remask")
    said = ("--import", recipe.parent, "--from", "specforge", "--tap-ids", "1", "--final-state", "none")
    assert "--import works in one process; 2 were started" in fails("capture", recipe, *said)
    for command in ("regenerate", "export", "bench", "tune", "generate"):
        asked = ("-p", "x") if command == "generate" else ()
        assert f"{command} works in one process; 2 were started" in fails(command, recipe, *asked)


def test_a_target_without_a_tokenizer_is_named(recipe: Path, target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(target, bare, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    served = ("capture.backend=vllm", f"target.path={bare}")
    assert "has no tokenizer beside its weights" in fails("capture", recipe, *served)
