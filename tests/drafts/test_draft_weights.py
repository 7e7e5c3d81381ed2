"""Fresh weights, and weights in and out of directories: every tensor accounted for, none damaged."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.draft import Draft, DraftWeightsError, file_name
from draftsmith.errors import DraftsmithError
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)


def rewrite(directory: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Changes the tensors of a directory in place: `change` takes and returns the dictionary."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(change(tensors), directory / "model.safetensors")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_draft(TARGET).save(tmp_path / "draft")
    return tmp_path / "draft"


def test_fresh_weights_are_normal_and_norms_one() -> None:
    config = tiny_draft(TARGET, num_layers=3, attention_sinks=True, initializer_range=0.05).config
    draft = Draft.from_config(config, generator=torch.Generator().manual_seed(0))
    assert all(parameter.requires_grad for parameter in draft.parameters())
    for name, parameter in draft.state_dict().items():
        assert parameter.dtype == torch.float32
        if parameter.dim() == 2:
            assert float(parameter.std()) == pytest.approx(0.05, rel=0.2), name
            assert parameter.mean().abs() < 0.02, name
        else:
            wanted = 0.0 if name.endswith("attention_sink_bias") else 1.0
            assert torch.equal(parameter, torch.full_like(parameter, wanted)), name
    again = Draft.from_config(config.to_dict(), generator=torch.Generator().manual_seed(0))
    other = Draft.from_config(config, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draft.backbone.fc.weight, again.backbone.fc.weight)
    assert not torch.equal(draft.backbone.fc.weight, other.backbone.fc.weight)


def test_a_plain_draft_has_the_published_tensors() -> None:
    draft = tiny_draft(TARGET, num_layers=5)
    names = {file_name(name) for name in draft.state_dict()}
    assert len(names) == 3 + 11 * 5
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.q_norm.weight"} <= names


@pytest.mark.parametrize("options", [{}, {"attention_sinks": True}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_a_round_trip_is_bit_exact(tmp_path: Path, options: dict[str, object]) -> None:
    draft = tiny_draft(TARGET, seed=5, **options).to(getattr(torch, str(options.get("dtype", "float32"))))
    draft.save(tmp_path / "a")
    loaded = Draft.load(tmp_path / "a", strict=True)
    loaded.save(tmp_path / "b")
    assert loaded.config == draft.config
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()
    for name, parameter in draft.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name])
        assert loaded.state_dict()[name].dtype == parameter.dtype
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_wide_parameters_are_written_in_the_declared_dtype(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET, dtype="bfloat16")
    assert draft.dtype == torch.float32
    draft.save(tmp_path / "draft")
    held = load_file(tmp_path / "draft/model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "draft/config.json").read_text())["dtype"] == "bfloat16"
    wide = Draft.load(tmp_path / "draft", dtype="float32")
    assert wide.dtype == torch.float32
    assert wide.config.dtype == "bfloat16"
    assert torch.equal(wide.backbone.fc.weight, held["fc.weight"].float())


def test_loading_does_not_hold_on_to_the_file(saved: Path) -> None:
    draft = Draft.load(saved)
    before = draft.backbone.fc.weight.clone()
    with (saved / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    assert torch.equal(draft.backbone.fc.weight, before)


def test_every_fault_of_the_weights_is_said_at_once(saved: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["norm.weight"]
        tensors["layers.0.self_attn.k_proj.bias"] = torch.zeros(24)
        tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
        tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"].half()
        tensors["layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
        tensors["layers.1.mlp.gate_proj.weight"][0, 0] = float("-inf")
        return tensors

    rewrite(saved, damage)
    with pytest.raises(DraftWeightsError) as raised:
        Draft.load(saved)
    lines = str(raised.value).splitlines()
    assert str(saved) in lines[0]
    assert lines[1:] == [
        "missing: norm.weight [20]",
        "not used: layers.0.self_attn.k_proj.bias [24]",
        "wrong shape: fc.weight is [40, 20]; wanted [20, 40]",
        "wrong dtype: hidden_norm.weight is torch.float16; the configuration declares float32",
        "not finite: layers.1.mlp.gate_proj.weight holds NaN or Inf",
        "not finite: layers.1.mlp.up_proj.weight holds NaN or Inf",
    ]


def test_a_configuration_of_another_size_does_not_load_the_weights(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(DraftWeightsError, match=r"missing: layers\.2\."):
        Draft.load(saved)
    (saved / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 3}))
    with pytest.raises(DraftConfigError, match="num_attention_heads is 4"):
        Draft.load(saved)


def test_extras_that_drafts_do_not_have_are_reported(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(
        saved, lambda tensors: {**tensors, "lm_head.weight": torch.ones(61, 20), "rotary_emb.inv_freq": torch.ones(6)}
    )
    with caplog.at_level(logging.WARNING):
        Draft.load(saved)
    assert "lm_head.weight, rotary_emb.inv_freq" in caplog.text


def test_a_draft_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET)
    draft.save(tmp_path / "draft")
    before = (tmp_path / "draft/model.safetensors").read_bytes()
    with torch.no_grad():
        draft.backbone.fc.weight[0, 0] = float("nan")
    with pytest.raises(DraftWeightsError, match=r"not finite: fc\.weight"):
        draft.save(tmp_path / "draft")
    assert (tmp_path / "draft/model.safetensors").read_bytes() == before


def test_overflow_in_the_declared_dtype_is_not_written(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET, dtype="float16")
    with torch.no_grad():
        draft.backbone.fc.weight[0, 0] = 1e6
    with pytest.raises(DraftWeightsError, match=r"not finite: fc\.weight"):
        draft.save(tmp_path / "draft")


def test_an_unknown_dtype_is_refused(saved: Path) -> None:
    with pytest.raises(DraftsmithError, match="dtype is 'fp32'; allowed: 'auto'"):
        Draft.load(saved, dtype="fp32")


def test_devices_are_named_as_for_targets(saved: Path) -> None:
    found = Draft.load(saved, device="auto").device.type
    assert found == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(DraftsmithError, match="device is 'gpu'; use 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        Draft.load(saved, device="gpu")
    with pytest.raises(DraftsmithError, match="device is 'cuda:99', but torch sees"):
        Draft.load(saved.parent / "absent", device="cuda:99")  # said before any file is read
