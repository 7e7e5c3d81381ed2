"""A run's draft in every layout that can express it, with its card; and what stays when it cannot be written."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open

from draftsmith.algorithms.registry import algorithm
from draftsmith.drafts.config import FIELDS
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads import HEADS
from draftsmith.errors import DraftsmithError
from draftsmith.export.card import Measured
from draftsmith.export.fingerprint import directory_fingerprint
from draftsmith.export.options import ExportOptions, RopeScaling
from draftsmith.export.run import export_run
from draftsmith.features.identity import Provenance
from draftsmith.layouts import LayoutError
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target
from draftsmith.training.record import load_run
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft
from tests.training.counting import BASE, QUIET, counting_store, counting_target, identity_of, options

METHODS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dta": {},
    "domino": {"gru_hidden_dim": 5, "emb_dim": 7, "pure_draft_prefix_len": 1, "shift_label": True},
    "dspark": {"markov_rank": 6},
    "dflash2": {"conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4},
}
SERVED = {  # SGLang's method and width, vLLM's method and proposals, for blocks of 4
    "dflash": ("DFLASH", 4, "dflash", 3),
    "dta": ("DFLASH", 4, "dflash", 3),
    "domino": ("DFLASH", 4, None, None),
    "dspark": ("DSPARK", 5, "dspark", 4),
    "dflash2": ("DFLASH", 4, "dflash", 3),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return counting_target()


@pytest.fixture(scope="module")
def target_path(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    target.model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runs(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A short training of every method, exporting bf16."""
    root = tmp_path_factory.mktemp("runs")
    store = counting_store(root / "features", target, final_state=True)
    for method, head in METHODS.items():
        train(
            section=algorithm(method).section(**{**BASE, "dtype": "bfloat16", **head}),
            target=target,
            source=StoreSource(store),
            run_dir=root / method,
            options=options(max_steps=2),
            track=QUIET,
            provenance=Provenance(identity_of(target), None),
        )
    return {method: root / method for method in METHODS}


@pytest.mark.parametrize("layout", ["zlab", "sglang", "modelopt", "speculators"])
@pytest.mark.parametrize("method", METHODS)
def test_every_layout_holds_the_runs_draft_or_says_why_not(
    runs: dict[str, Path], target: Target, target_path: Path, tmp_path: Path, method: str, layout: str
) -> None:
    out = tmp_path / "draft"
    options = ExportOptions(which="last", layout=layout)
    refused = (method, layout) in {("domino", "speculators"), ("dflash2", "modelopt")}
    if refused:
        with pytest.raises(LayoutError, match=f"does not load '{method}' drafts"):
            export_run(runs[method], options, out, target=TargetOptions(path=str(target_path)))
        assert list(tmp_path.iterdir()) == []
        return
    exported = export_run(runs[method], options, out, target=TargetOptions(path=str(target_path)))
    assert (exported.directory, exported.step) == (out, 2)
    wanted, found = load_run(runs[method], "last"), Draft.load(out)
    assert found.config.attention_kinds == wanted.config.attention_kinds
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(torch.equal(wanted.state_dict()[name], tensor) for name, tensor in found.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]
    with safe_open(out / "model.safetensors", "pt") as file:
        carried = {"embed_tokens.weight", "lm_head.weight"} & set(file.keys())
        assert len(carried) == (2 if layout == "speculators" else 0)
        if carried:
            assert torch.equal(file.get_tensor("lm_head.weight"), target.ends.head_weight.bfloat16())
            assert torch.equal(file.get_tensor("embed_tokens.weight"), target.ends.embedding_weight.bfloat16())


def without_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as a record may have it that says the least: without what has its default."""
    head = HEADS[config["architecture"]].model_fields
    said = {
        name: value
        for name, value in config.items()
        if FIELDS[name].info.is_required() or value != FIELDS[name].info.default
    }
    least = {n: v for n, v in config["head"].items() if head[n].is_required() or v != head[n].default}
    return {**said, "head": least}


@pytest.mark.parametrize("layout", ["zlab", "sglang", "modelopt", "speculators"])
@pytest.mark.parametrize("method", METHODS)
def test_a_record_that_leaves_defaults_out_exports_the_same(
    runs: dict[str, Path], target_path: Path, tmp_path: Path, method: str, layout: str
) -> None:
    """Domino's `pure_draft_prefix_len` was a KeyError; its default, which SGLang does not compute, is named there."""
    run = shutil.copytree(runs[method], tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    if method == "domino":
        for name in ("pure_draft_prefix_len", "shift_label"):
            record["draft_config"]["head"].pop(name)
            record["draft_section"].pop(name)
    record["draft_config"] = without_defaults(record["draft_config"])
    (run / "run.json").write_text(json.dumps(record))
    options, given = ExportOptions(which="last", layout=layout), TargetOptions(path=str(target_path))
    refusals = {
        ("domino", "speculators"): "does not load 'domino'",
        ("domino", "sglang"): "head.pure_draft_prefix_len is 0; sglang 0.5.23 computes 1 only",
        ("dflash2", "modelopt"): "does not load 'dflash2'",
    }
    if (method, layout) in refusals:
        with pytest.raises(LayoutError, match=refusals[method, layout]):
            export_run(run, options, tmp_path / "draft", target=given)
        return
    export_run(run, options, tmp_path / "draft", target=given)
    found, wanted = Draft.load(tmp_path / "draft").config, load_run(runs[method], "last").config
    if method == "domino":
        wanted = wanted.replace(head={"gru_hidden_dim": 5, "emb_dim": 7})
    if layout == "zlab":
        assert found.meaning() == wanted.meaning()
    assert found.head == wanted.head


@pytest.mark.parametrize("method", METHODS)
def test_the_card_says_what_the_draft_is_and_how_it_is_served(
    runs: dict[str, Path], target: Target, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "my draft"
    export_run(runs[method], ExportOptions(which="last"), out, target=TargetOptions(path="org/model"))
    card = (out / "README.md").read_text()
    record = json.loads((runs[method] / "run.json").read_text())
    assert card.startswith("---\nbase_model: org/model\ntags:\n- speculative-decoding\n")
    for line in (
        f"# {method} draft for org/model",
        f"| method | {method} |",
        f"| training data | feature store {record['store'][:12]} |",
        "| training steps | 2 |",
        "| started from | fresh weights |",
        "| accept length, measured | not measured |",
        "| tapped layers of the target | 1, 2 of 4 |",
        "| dtype | bfloat16 |",
    ):
        assert line in card.splitlines(), line
    sglang, width, vllm, proposals = SERVED[method]
    commands = [shlex.split(block.split("```")[0].replace("\\\n", " ")) for block in card.split("```bash\n")[1:]]
    assert commands[0] == [
        *("python", "-m", "sglang.launch_server", "--model-path", "org/model"),
        *("--speculative-algorithm", sglang, "--speculative-draft-model-path", str(out)),
        *("--speculative-num-draft-tokens", str(width)),
    ]
    if vllm is None:
        assert len(commands) == 1
        assert "Not this draft: vllm 0.32.0 does not load 'domino' drafts" in card
    else:
        assert commands[1][:4] == ["vllm", "serve", "org/model", "--speculative-config"]
        assert json.loads(commands[1][4]) == {"method": vllm, "model": str(out), "num_speculative_tokens": proposals}


@pytest.mark.parametrize(
    ("kind", "sglang", "vllm"),
    [("llama", True, True), ("qwen2", False, True), ("gemma3", False, False)],
)
def test_the_card_knows_targets_that_a_server_cannot_tap(
    runs: dict[str, Path], tmp_path: Path, kind: str, sglang: bool, vllm: bool
) -> None:
    tiny_target(kind).model.save_pretrained(tmp_path / "target")
    target = TargetOptions(path=str(tmp_path / "target"))
    export_run(runs["dflash"], ExportOptions(which="last"), tmp_path / "draft", target=target)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert ("-m sglang.launch_server" in card) is sglang
    assert ("vllm serve" in card) is vllm
    refusals = [line for line in card.splitlines() if line.startswith("Not with this target: ")]
    assert len(refusals) == (not sglang) + (not vllm)
    assert all("so no layer can be tapped" in line for line in refusals)


def test_taps_are_written_in_ascending_order_and_the_draft_stays_the_same(tmp_path: Path) -> None:
    """Servers hand layers over by number, whatever order a file names them in."""
    target = counting_target()
    layers = (2, 0, 3)
    draft = tiny_draft(target, target_layer_ids=layers)
    ordered = draft.with_ascending_taps()
    assert ordered.config.target_layer_ids == (0, 2, 3)
    assert not torch.equal(draft.backbone.fc.weight, ordered.backbone.fc.weight)
    features = {layer: torch.randn(1, 5, target.hidden_size) for layer in layers}
    read = [torch.cat([features[layer] for layer in each.config.target_layer_ids], dim=-1) for each in (draft, ordered)]
    ours, theirs = (each.backbone.fc(row) for each, row in zip((draft, ordered), read, strict=True))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ordered.with_ascending_taps() is ordered


def test_the_card_sends_a_server_to_a_layout_that_it_reads(
    runs: dict[str, Path], target_path: Path, tmp_path: Path
) -> None:
    target = TargetOptions(path=str(target_path))
    export_run(runs["dflash"], ExportOptions(which="last", layout="speculators"), tmp_path / "a", target=target)
    card = (tmp_path / "a" / "README.md").read_text()
    assert "Not from layout 'speculators'; export it again in layout 'zlab' or 'sglang'." in card
    assert "vllm serve" in card
    assert "base_model" not in card  # a path on this disk means nothing to a hub


def test_held_out_numbers_are_the_checkpoints(runs: dict[str, Path], tmp_path: Path) -> None:
    lines = map(json.loads, (runs["dflash"] / "metrics.jsonl").read_text().splitlines())
    last = [entry for entry in lines if entry["kind"] == "eval"][-1]
    export_run(runs["dflash"], ExportOptions(which="last"), tmp_path / "draft", target=TargetOptions(path="org/model"))
    line = f"| accept length, held-out documents (teacher-forced) | {last['accept_length']:.2f} tokens a verify |"
    assert line in (tmp_path / "draft" / "README.md").read_text()


def test_a_measurement_is_quoted_for_the_very_weights_only(
    runs: dict[str, Path], target_path: Path, tmp_path: Path
) -> None:
    target = TargetOptions(path=str(target_path))

    def quoted(method: str, measured: dict[str, Measured], **fields: Any) -> bool:
        export_run(
            runs[method], ExportOptions(which="last", **fields), tmp_path / "again", target=target, measured=measured
        )
        line = "| accept length, measured | 2.75 tokens a verify on 1,319 prompts of asked.jsonl, temperature 0.7 |"
        return line in (tmp_path / "again" / "README.md").read_text()

    export_run(runs["dflash"], ExportOptions(which="last"), tmp_path / "first", target=target)
    found = Measured(2.75, 1319, "some/where/asked.jsonl", 0.7)
    measured = {directory_fingerprint(tmp_path / "first"): found}
    assert quoted("dflash", measured)
    assert quoted("dflash", measured, layout="speculators")
    assert not quoted("dta", measured)
    assert not quoted("dflash", measured, rope_scaling=RopeScaling(factor=2.0))
    assert not quoted("dflash", {"0" * 64: found})


def test_yarn_is_written_and_the_commands_scale_the_target_alike(runs: dict[str, Path], tmp_path: Path) -> None:
    options = ExportOptions(which="last", rope_scaling=RopeScaling(factor=4.0))
    export_run(runs["dspark"], options, tmp_path / "draft", target=TargetOptions(path="org/model"))
    config = Draft.load(tmp_path / "draft").config
    plain = load_run(runs["dspark"], "last").config
    assert config.max_position_embeddings == 4 * plain.max_position_embeddings
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("yarn", 4.0, plain.rope.theta)
    card = (tmp_path / "draft" / "README.md").read_text()
    blocks = [shlex.split(block.split("```")[0].replace("\\\n", " ")) for block in card.split("```bash\n")[1:]]
    for words, flag in zip(blocks, ("--json-model-override-args", "--hf-overrides"), strict=True):
        assert json.loads(words[words.index(flag) + 1]) == {"rope_parameters": config.rope.as_parameters()}


def test_what_was_there_stays_when_writing_fails(runs: dict[str, Path], tmp_path: Path) -> None:
    target = TargetOptions(path="org/model")
    out = tmp_path / "draft"
    export_run(runs["dflash"], ExportOptions(which="last"), out, target=target)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(DraftsmithError, match="there is no target at"):
        export_run(
            runs["dflash"],
            ExportOptions(which="last", layout="speculators"),
            out,
            target=TargetOptions(path=str(tmp_path / "nowhere")),
        )
    with pytest.raises(LayoutError, match="does not load 'dflash2' drafts"):
        export_run(runs["dflash2"], ExportOptions(which="last", layout="modelopt"), out, target=target)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(LayoutError, match=r"is not only a draft directory \(it holds notes.txt\)"):
        export_run(runs["dflash"], ExportOptions(which="last"), out, target=target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


def test_layouts_that_are_only_read_and_unknown_ones_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    for layout in ("specforge", "zlap"):
        with pytest.raises(DraftsmithError, match=f"export.layout is '{layout}'; allowed: .*'zlab'"):
            export_run(runs["dflash"], ExportOptions(which="last", layout=layout), tmp_path / "draft")


def test_a_warm_started_run_says_where_it_started(runs: dict[str, Path], target: Target, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    export_run(runs["dflash"], ExportOptions(which="last"), draft, target=TargetOptions(path="org/model"))
    train(
        section=algorithm("dflash").section(init_from=str(draft)),
        target=target,
        source=StoreSource(counting_store(tmp_path / "features", target)),
        run_dir=tmp_path / "warm",
        options=options(max_steps=1),
        track=QUIET,
    )
    export_run(tmp_path / "warm", ExportOptions(which="last"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| started from | {draft} |" in card
    assert "# dflash draft for tiny" in card  # the target as its features name it
