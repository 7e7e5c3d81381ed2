"""DSpark's head as a module, and in files: its own spelling and those of others."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_directory
from draftsmith.drafts.draft import Draft, DraftWeightsError
from draftsmith.drafts.heads.dspark import MARKOV_HEADS, corrected_logits
from draftsmith.layouts import LayoutError
from tests.support.tiny_draft import dspark_head, tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)
RANK = 3
fields = partial(dspark_head, rank=RANK)


def make(**head: Any) -> Draft:
    return tiny_draft(TARGET, architecture="dspark", head=fields(**head))


COMBINATIONS = [
    {"kind": kind, "confidence": confidence, "with_markov": with_markov}
    for kind in MARKOV_HEADS
    for confidence, with_markov in ((True, True), (True, False), (False, False))
]


def edit(directory: Path, nested: dict[str, Any] | None = None, **top: Any) -> None:
    """Sets fields of a config.json; ... removes one."""
    config = json.loads((directory / "config.json").read_text())
    for part, changes in ((config, top), (config["dflash_config"], nested or {})):
        part.update(changes)
        for name in [name for name, value in part.items() if value is ...]:
            del part[name]
    (directory / "config.json").write_text(json.dumps(config))


# --- the module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MARKOV_HEADS)
@torch.no_grad()
def test_steps_give_the_latents_of_whole_blocks(kind: str) -> None:
    markov = make(kind=kind).head.markov_head
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, 7, 20, generator=generator)
    previous = markov.embed(torch.randint(61, (2, 3, 7), generator=generator))
    together = markov.latents(previous, hidden)
    state = markov.start(previous[..., 0, :])
    for slot in range(7):
        latent, state = markov.step(state, previous[..., slot, :], hidden[..., slot, :])
        torch.testing.assert_close(latent, together[..., slot, :])
    # The first slot's token reaches later slots through the recurrent state, and only there.
    changed = previous.clone()
    changed[..., 0, :] += 1.0
    later = markov.latents(changed, hidden)[..., 1:, :]
    assert (later != together[..., 1:, :]).any().item() == (kind == "rnn")
    assert (markov.latents(changed, hidden)[..., 0, :] != together[..., 0, :]).any()


def test_a_small_bias_survives_bf16_logits() -> None:
    base = torch.full((1, 4), 300.0, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [0.25], [0.5], [-0.25]], dtype=torch.bfloat16)
    found = corrected_logits(base, torch.ones(1, 1, dtype=torch.bfloat16), weight)
    assert found.tolist() == [[300.0, 300.25, 300.5, 299.75]]


def test_fresh_weights_are_all_set() -> None:
    draft = Draft.from_config(make(kind="rnn").config)
    assert all(p.isfinite().all() for p in draft.parameters())
    assert (draft.head.markov_head.joint_proj.bias == 0).all()
    assert draft.head.markov_head.markov_w1.weight.std().item() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("name", fields())
def test_every_field_is_needed(name: str) -> None:
    config = make().config.to_dict()
    del config["head"][name]
    with pytest.raises(DraftConfigError, match=f"{name} is missing"):
        DraftConfig.parse(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("markov_rank", v) for v in (0, -1, True, 2.5, "3", None)]
    + [("markov_head_type", v) for v in ("Gated", "lstm", 3)]
    + [(flag, v) for flag in ("enable_confidence_head", "confidence_head_with_markov") for v in (1, "true", None)],
)
def test_wrong_values_name_field_value_and_what_is_allowed(name: str, value: Any) -> None:
    config = make().config.to_dict()
    config["head"][name] = value
    with pytest.raises(DraftConfigError) as error:
        DraftConfig.parse(config)
    assert all(part in str(error.value) for part in (name, repr(value), "allowed"))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", COMBINATIONS, ids=str)
def test_what_is_written_is_read_again(tmp_path: Path, head: dict[str, Any]) -> None:
    draft = make(**head)
    draft.save(tmp_path / "draft")
    again = Draft.load(tmp_path / "draft", strict=True)
    assert again.config == draft.config
    for (name, before), after in zip(draft.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(before, after), name
    config = json.loads((tmp_path / "draft/config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    nested = config["dflash_config"]
    assert nested["projector_type"] == "dspark"
    assert (config["sample_from_anchor"], nested["attention_mode"]) == (True, "gqa")
    assert "sample_from_anchor" not in nested  # vLLM refuses it there
    assert nested["use_confidence_head"] is head["confidence"]
    for name, value in draft.config.head.model_dump().items():
        assert config[name] == nested[name] == value
    tensors = load_file(tmp_path / "draft/model.safetensors")
    assert tensors["markov_head.markov_w1.weight"].shape == tensors["markov_head.markov_w2.weight"].shape == (61, RANK)
    shapes = {name: list(t.shape) for name, t in tensors.items() if "proj" in name and "layers" not in name}
    wanted: dict[str, list[int]] = {}
    if head["kind"] == "gated":
        wanted |= {"markov_head.gate_proj.weight": [RANK, 20 + RANK], "markov_head.gate_proj.bias": [RANK]}
    if head["kind"] == "rnn":
        wanted |= {"markov_head.joint_proj.weight": [9, 2 * RANK + 20], "markov_head.joint_proj.bias": [9]}
    if head["confidence"]:
        width = 20 + RANK * head["with_markov"]
        wanted |= {"confidence_head.proj.weight": [1, width], "confidence_head.proj.bias": [1]}
    assert shapes == wanted


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("confidence", [False, True])
def test_a_rank_of_zero_is_no_markov_head(tmp_path: Path, confidence: bool, held: bool) -> None:
    """As the package speculators writes it; or with matrices that have no columns."""
    head = dspark_head("vanilla", confidence, False, rank=0)
    draft = tiny_draft(TARGET, architecture="dspark", head=head)
    draft.save(tmp_path / "draft")
    if held:
        tensors = load_file(tmp_path / "draft/model.safetensors")
        tensors |= {f"markov_head.markov_{name}.weight": torch.zeros(61, 0) for name in ("w1", "w2")}
        save_file(tensors, tmp_path / "draft/model.safetensors")
    again = Draft.load(tmp_path / "draft", strict=True)
    assert again.config == draft.config
    assert again.config.head.model_dump() == head
    assert {name for name in again.state_dict() if name.startswith("head.")} == (
        {"head.confidence_head.proj.weight", "head.confidence_head.proj.bias"} if confidence else set()
    )
    edit(tmp_path / "draft", {"confidence_head_with_markov": True}, confidence_head_with_markov=True)
    if confidence:
        with pytest.raises(DraftConfigError, match=r"no Markov embedding to read \(markov_rank is 0\)"):
            Draft.load(tmp_path / "draft")


def test_equal_heads_are_called_mha(tmp_path: Path) -> None:
    tiny_draft(TARGET, architecture="dspark", head=fields(), num_key_value_heads=4).save(tmp_path / "draft")
    assert json.loads((tmp_path / "draft/config.json").read_text())["dflash_config"]["attention_mode"] == "mha"


MODEL_OPTIMIZER: dict[str, Any] = {
    "enable_confidence_head": ...,
    "confidence_head_with_markov": ...,
    "attention_mode": ...,
}


@pytest.mark.parametrize("prefix", ["", "model.", "dflash_module.", "model.logit_head.", "logit_head."])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("head", COMBINATIONS, ids=str)
def test_other_writers_names_mean_the_same(tmp_path: Path, head: dict[str, Any], flat: bool, prefix: str) -> None:
    """Model-Optimizer: flat tensors, `use_confidence_head`, no word on the embedding; older files: logit_head."""
    draft = make(**head)
    draft.save(tmp_path / "draft")
    tensors = load_file(tmp_path / "draft/model.safetensors")
    if flat:
        renames = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
        for old, new in renames.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    own = ("markov", "gate_proj", "joint_proj", "confidence")
    tensors = {(prefix if name.startswith(own) else "") + name: tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "draft/model.safetensors")
    edit(
        tmp_path / "draft",
        MODEL_OPTIMIZER,
        architectures=["DFlashDraftModel"],
        **dict.fromkeys((*fields(), "sample_from_anchor"), ...),
    )
    again = Draft.load(tmp_path / "draft", strict=True)
    assert again.config == draft.config
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("nested", "top", "wanted"),
    [
        ({"projector_type": ...}, {}, {}),  # known by its class alone
        ({"projector_type": ...}, {"architectures": ["DSparkDraftModel"]}, {}),
        ({"markov_rank": ..., "markov_head_type": ...}, {}, {}),  # at top level only
        ({"markov_head_type": ...}, {"markov_head_type": ...}, {}),  # vanilla unless said
        ({"use_confidence_head": ..., "enable_confidence_head": ...}, {"enable_confidence_head": ...}, {}),
        ({"confidence_head_alpha": 1.0}, {}, {}),
    ],
)
def test_fields_left_out_are_found_elsewhere(
    tmp_path: Path, nested: dict[str, Any], top: dict[str, Any], wanted: dict[str, Any]
) -> None:
    make().save(tmp_path / "draft")
    edit(tmp_path / "draft", nested, **top)
    read = read_directory(tmp_path / "draft", strict=True)
    assert read.config["architecture"] == "dspark"
    assert read.config["head"] == fields() | wanted


@pytest.mark.parametrize(
    ("nested", "top", "said"),
    [
        ({}, {"sample_from_anchor": False}, "sample_from_anchor is False; allowed: true"),
        ({"sample_from_anchor": False}, {"sample_from_anchor": ...}, "sample_from_anchor is False; allowed: true"),
        ({"shift_label": False}, {}, "shift_label is False; allowed: true"),
        ({"attention_mode": "mqa"}, {}, "attention_mode is 'mqa'; allowed: 'gqa', 'mha'"),
        ({"attention_mode": "mha"}, {}, "attention_mode is 'mha', but num_attention_heads is 4"),
        ({"use_confidence_head": False}, {}, "enable_confidence_head is True"),
        ({}, {"markov_rank": 5}, "dflash_config.markov_rank is 3 but markov_rank is 5"),
        ({"projector_type": "dspak"}, {}, "projector_type is 'dspak'; allowed: .*'dspark'"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, nested: dict[str, Any], top: dict[str, Any], said: str) -> None:
    make().save(tmp_path / "draft")
    edit(tmp_path / "draft", nested, **top)
    with pytest.raises(LayoutError, match=said):
        read_directory(tmp_path / "draft")


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    make().save(tmp_path / "draft")
    tensors = load_file(tmp_path / "draft/model.safetensors")
    tensors["markov_w2.weight"] = tensors["markov_head.markov_w2.weight"].clone()
    save_file(tensors, tmp_path / "draft/model.safetensors")
    with pytest.raises(LayoutError, match=r"markov_head\.markov_w2\.weight under two names"):
        read_directory(tmp_path / "draft")


def test_a_head_that_the_weights_do_not_hold_is_named(tmp_path: Path) -> None:
    make().save(tmp_path / "draft")
    edit(tmp_path / "draft", {"markov_head_type": "gated"}, markov_head_type="gated")
    with pytest.raises(DraftWeightsError, match=r"missing: markov_head\.gate_proj\.bias \[3\]"):
        Draft.load(tmp_path / "draft")
