"""Between any two layouts and back: the same tensors bit by bit, the same meaning, or a refusal by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.cli.app import app
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.convert import convert
from draftsmith.drafts.directory import family, read_directory
from draftsmith.drafts.draft import Draft, DraftWeightsError
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import LAYOUTS, WRITABLE, Family, LayoutError, TargetParts
from draftsmith.layouts.consumers import MODEL_OPTIMIZER, SGLANG, SPECULATORS
from draftsmith.layouts.zlab import ZlabLayout
from tests.layouts.drafts import FULL, HEADS, SLIDING, drafts, simple_draft, target_ends

REFUSING = {"sglang": SGLANG, "modelopt": MODEL_OPTIMIZER, "speculators": SPECULATORS}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(draft=drafts(), first=st.sampled_from(WRITABLE), second=st.sampled_from(WRITABLE))
def test_there_and_back(tmp_path_factory: pytest.TempPathFactory, draft: Draft, first: str, second: str) -> None:
    root = tmp_path_factory.mktemp("convert")
    draft.save(root / "zlab")
    start = read_directory(root / "zlab", strict=True)
    assert DraftConfig.parse(start.config).meaning() == draft.config.meaning()
    source = root / "zlab"
    for step, layout in enumerate((first, second, "zlab")):
        refused = REFUSING[layout].faults(draft.config.to_dict(), family()) if layout in REFUSING else []
        destination = root / f"{step}-{layout}"
        if refused:
            with pytest.raises(LayoutError, match="cannot be written in layout") as raised:
                convert(source, destination, layout, target=target_ends())
            assert all(fault in str(raised.value) for fault in refused)
            assert not destination.exists()
            continue
        convert(source, destination, layout, target=target_ends())
        source = destination
    back = read_directory(source)
    assert same(start.tensors, back.tensors)
    assert DraftConfig.parse(back.config).meaning() == draft.config.meaning()


@pytest.mark.parametrize("layout", WRITABLE)
@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_a_layout_holds_what_its_readers_know(tmp_path: Path, architecture: str, layout: str) -> None:
    """So that the property above is not a string of refusals."""
    without = {("modelopt", "dflash2"), ("speculators", "domino")}
    draft = simple_draft(architecture)
    if (layout, architecture) in without:
        with pytest.raises(LayoutError, match=f"does not load '{architecture}' drafts"):
            draft.save(tmp_path / "out", layout, target=target_ends())
        return
    draft.save(tmp_path / "out", layout, target=target_ends())
    loaded = Draft.load(tmp_path / "out")
    assert same(loaded.state_dict(), draft.state_dict())
    assert loaded.config.meaning() == draft.config.meaning()
    # SGLang's files, and most of Model-Optimizer's, are z-lab's.
    own = layout == "speculators" or (layout, architecture) == ("modelopt", "dspark")
    assert read_directory(tmp_path / "out").layout == (layout if own else "zlab")


def test_a_conversion_says_what_it_did(tmp_path: Path) -> None:
    draft = simple_draft("dspark", 4)
    draft.save(tmp_path / "in", "speculators", target=target_ends())
    converted = convert(tmp_path / "in", tmp_path / "out", "zlab")
    assert converted.lines() == [
        f"dspark draft of {len(draft.state_dict())} tensors: speculators -> zlab",
        "not the draft's own: embed_tokens.weight, lm_head.weight",
    ]
    assert set(load_file(tmp_path / "out/model.safetensors")) == {n.split(".", 1)[1] for n in draft.state_dict()}


def test_a_source_that_carries_the_target_hands_it_on(tmp_path: Path) -> None:
    parts = target_ends(3)
    simple_draft("dflash").save(tmp_path / "in", "speculators", target=parts)
    convert(tmp_path / "in", tmp_path / "out", "speculators")
    again = read_directory(tmp_path / "out").target
    assert again is not None
    assert (again.name, again.architectures) == (parts.name, parts.architectures)
    assert torch.equal(again.embedding, parts.embedding)
    assert torch.equal(again.output_head, parts.output_head)
    convert(tmp_path / "in", tmp_path / "plain", "zlab")
    with pytest.raises(LayoutError, match="output head are part of this layout; name the target"):
        convert(tmp_path / "plain", tmp_path / "none", "speculators")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("draft", "layout", "said"),
    [
        (("dflash", 0, {"layer_types": (FULL, SLIDING), "sliding_window": 4}), "speculators", "differ in causality"),
        (("dflash2", 0, {"causal": True}), "speculators", "causal is True on full layers"),
        (("dspark", 0, {"attention_sinks": True}), "speculators", "attention_sinks is True"),
        (("dflash", 0, {"input_embedding_scale": 2.0}), "speculators", "input_embedding_scale is 2.0"),
        (("dflash", 0, {"final_logit_softcapping": 9.0}), "modelopt", "final_logit_softcapping is 9.0"),
        (("dspark", 1, {}), "modelopt", "confidence_head_with_markov is False"),
        (("domino", 1, {}), "sglang", "pure_draft_prefix_len is 0"),
        (
            ("dflash", 0, {"layer_types": (FULL, SLIDING), "sliding_window": 4, "attention_sinks": True}),
            "modelopt",
            "sinks go with",
        ),
    ],
)
def test_what_a_layouts_readers_would_run_as_another_draft_is_refused(
    tmp_path: Path, draft: tuple[str, int, dict[str, Any]], layout: str, said: str
) -> None:
    architecture, head, options = draft
    made = simple_draft(architecture, head, **options)
    with pytest.raises(LayoutError, match=said):
        made.save(tmp_path / "out", layout, target=target_ends())
    made.save(tmp_path / "out", "zlab")


def test_a_target_is_only_read_for_a_sound_draft(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="does not exist"):
        convert(tmp_path / "in", tmp_path / "out", "speculators", target=str(tmp_path / "absent"))
    simple_draft("dflash").save(tmp_path / "in")
    with pytest.raises(DraftsmithError, match="absent"):
        convert(tmp_path / "in", tmp_path / "out", "speculators", target=str(tmp_path / "absent"))
    with pytest.raises(DraftsmithError, match="'sglang' holds nothing of it; those that do: speculators"):
        convert(tmp_path / "in", tmp_path / "out", "sglang", target=str(tmp_path / "absent"))
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_from_an_unsound_source(tmp_path: Path) -> None:
    simple_draft("dflash").save(tmp_path / "in")
    tensors = load_file(tmp_path / "in/model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(tensors, tmp_path / "in/model.safetensors")
    with pytest.raises(DraftWeightsError, match=r"not finite: layers\.1\.mlp\.up_proj\.weight"):
        convert(tmp_path / "in", tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


class Lossy(ZlabLayout):
    """A writer with a fault: of the tensors it loses one and changes one, and it adds one slot to blocks."""

    name = "lossy"

    def write(
        self, config: dict[str, Any], tensors: dict[str, torch.Tensor], family: Family, target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        written, named = super().write(config, tensors, family, target)
        named = {name: tensor for name, tensor in named.items() if name != "hidden_norm.weight"}
        return {**written, "block_size": config["block_size"] + 1}, named | {"norm.weight": named["norm.weight"] + 1}


def test_what_does_not_read_back_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "lossy", Lossy())
    simple_draft("dflash", seed=1).save(tmp_path / "in")
    former = simple_draft("dflash", seed=2)
    former.save(tmp_path / "out")
    for destination in ("out", "new"):
        with pytest.raises(DraftsmithError, match=r"differs: block_size, hidden_norm\.weight, norm\.weight; use"):
            convert(tmp_path / "in", tmp_path / destination, "lossy")
    assert same(Draft.load(tmp_path / "out").state_dict(), former.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_draft_is_not_converted_onto_itself(tmp_path: Path) -> None:
    simple_draft("dflash").save(tmp_path / "in")
    with pytest.raises(DraftsmithError, match="both what is read and what is written"):
        convert(tmp_path / "in", tmp_path / "../" / tmp_path.name / "in", "sglang")


@pytest.mark.parametrize("layout", ["specforge", "deepspec"])
def test_layouts_that_are_only_read(tmp_path: Path, layout: str) -> None:
    simple_draft("dflash").save(tmp_path / "in")
    with pytest.raises(LayoutError, match=f"layout '{layout}' is only read; allowed to write: .*'zlab'"):
        convert(tmp_path / "in", tmp_path / "out", layout)


def test_a_forced_layout_reads_what_is_not_recognised(tmp_path: Path) -> None:
    simple_draft("dspark").save(tmp_path / "in", "modelopt")
    assert read_directory(tmp_path / "in").layout == "modelopt"
    assert read_directory(tmp_path / "in", "zlab").layout == "zlab"
    config = json.loads((tmp_path / "in/config.json").read_text())
    with pytest.raises(LayoutError, match="speculators_model_type is None"):
        read_directory(tmp_path / "in", "speculators")
    assert config["architectures"] == ["DFlashDraftModel"]


def test_the_command_says_what_it_did_or_why_not(tmp_path: Path) -> None:
    draft = simple_draft("dflash2")
    draft.save(tmp_path / "in", "speculators", target=target_ends())
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--layout"]
    done = CliRunner().invoke(app, [*arguments, "zlab"])
    assert done.exit_code == 0, done.output
    assert "speculators -> zlab" in done.stderr
    assert "not the draft's own: embed_tokens.weight, lm_head.weight" in done.stderr
    assert same(Draft.load(tmp_path / "out").state_dict(), draft.state_dict())
    failed = CliRunner().invoke(app, [*arguments, "modelopt"])
    assert failed.exit_code == 1
    assert "nvidia-modelopt 0.47.0 does not load 'dflash2' drafts" in failed.stderr
