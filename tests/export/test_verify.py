"""The check after writing sees everything that may go wrong."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.export.verify import proposal_of, verify_export
from draftsmith.layouts import TargetParts
from draftsmith.targets.ends import TargetEnds
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=24, num_layers=6, vocab_size=41)
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "domino": {"gru_hidden_dim": 5, "emb_dim": 7, "pure_draft_prefix_len": 1, "shift_label": True},
    "dspark": {
        "markov_rank": 6,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4},
}


def draft_of(method: str, dtype: str = "bfloat16", **overrides: Any) -> Draft:
    draft = tiny_draft(TARGET, architecture=method, head=DRAFTS[method], block_size=5, dtype=dtype, **overrides)
    return draft.to(draft.config.torch_dtype)


def ends(dtype: torch.dtype = torch.bfloat16, seed: int = 5) -> TargetEnds:
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator).to(dtype) for _ in range(2))
    return TargetEnds(*weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("method", DRAFTS)
def test_what_was_written_reads_back(tmp_path: Path, method: str, dtype: str) -> None:
    draft = draft_of(method, dtype, layer_types=("full_attention", "sliding_attention"), sliding_window=6)
    draft.save(tmp_path / "draft")
    verify_export(tmp_path / "draft", draft)


@pytest.mark.parametrize("method", DRAFTS)
def test_one_bit_of_any_tensor_is_seen(tmp_path: Path, method: str) -> None:
    draft = draft_of(method)
    draft.save(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        changed = {**tensors, name: tensor.clone()}
        changed[name].view(-1).view(torch.int16)[-1] ^= 1
        save_file(changed, file)
        with pytest.raises(DraftsmithError) as error:
            verify_export(tmp_path / "draft", draft)
        assert f"{tmp_path / 'draft'} was written, but does not read back as the run's draft" in str(error.value)
        assert str(error.value).splitlines()[1:] == [
            f"  {where}.{name}" for where in ("backbone", "head") if f"{where}.{name}" in draft.state_dict()
        ]


def test_a_changed_configuration_is_seen(tmp_path: Path) -> None:
    draft = draft_of("dflash")
    draft.save(tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 1]
    file.write_text(json.dumps(config))
    with pytest.raises(DraftsmithError, match=r"target_layer_ids: \(1, 0\) was to be written, \(0, 1\) is read"):
        verify_export(tmp_path / "draft", draft)


@pytest.mark.parametrize("method", ["dflash", "dspark", "dflash2"])
def test_the_targets_ends_are_compared_where_the_layout_holds_them(tmp_path: Path, method: str) -> None:
    draft, own = draft_of(method), ends()
    if method == "dspark":
        draft = tiny_draft(
            TARGET, architecture=method, head=DRAFTS[method] | {"markov_head_type": "vanilla"}, dtype="bfloat16"
        ).to(torch.bfloat16)
    parts = TargetParts("org/model", ("LlamaForCausalLM",), own.embedding_weight, own.head_weight)
    draft.save(tmp_path / "draft", "speculators", target=parts)
    verify_export(tmp_path / "draft", draft, own)
    with pytest.raises(DraftsmithError) as error:
        verify_export(tmp_path / "draft", draft, TargetEnds(own.embedding_weight, ends(seed=6).head_weight))
    assert str(error.value).splitlines()[1:] == ["  the target's output head"]
    draft.save(tmp_path / "bare")
    with pytest.raises(DraftsmithError, match="the target's embedding\n  the target's output head"):
        verify_export(tmp_path / "bare", draft, own)


@pytest.mark.parametrize("method", DRAFTS)
def test_the_proposal_depends_on_every_parameter_that_proposals_depend_on(method: str) -> None:
    draft, own = draft_of(method, "float32"), ends(torch.float32)
    before = proposal_of(draft, own, 0)
    assert all(torch.equal(before[name], again) for name, again in proposal_of(draft, own, 0).items())
    assert before["states"].shape == (2, 5, 24)
    for name, parameter in draft.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)
        after = proposal_of(draft, own, 0)
        same = all(torch.equal(before[key], after[key]) for key in before)
        # How sure the draft is has no say in what it proposes; the tensors are compared all the same.
        assert same == ("confidence_head" in name), name
        with torch.no_grad():
            parameter.copy_(kept)
