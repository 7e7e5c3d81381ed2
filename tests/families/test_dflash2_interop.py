"""z-lab's package and draftsmith run each other's DFlash 2 drafts: the same numbers, the same proposals, the same
verifies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.decoding.generate import generate
from draftsmith.decoding.sampling import SamplingOptions, distribution
from draftsmith.drafts.attention import DenseBlockAttention
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_model
from tests.support.tiny_draft import tiny_draft

zlab = pytest.importorskip("dflash.model", reason="needs the extra [interop]")
pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their statistics come with times, for which they wait for a CUDA device."""
    monkeypatch.setattr(zlab, "_cuda_time", lambda: 0.0)


VOCABULARY = 23
HEAD: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
VARIANTS: list[dict[str, Any]] = [
    {"block_size": 3, "head": {**HEAD, "conv_kernel_size": 3, "conv_group_size": 16, "selector_top_k": VOCABULARY}},
    {"output_multiplier": 0.6, "final_logit_softcapping": 5.0, "input_embedding_scale": 1.7},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "causal": False},
]


def make_draft(target: Target, **options: Any) -> Draft:
    return tiny_draft(target, **({"architecture": "dflash2", "head": HEAD} | options))


def make_target() -> tuple[Any, Target]:
    model = tiny_model("qwen3", vocab_size=VOCABULARY, seed=5)
    return model, Target.from_model(model)


@torch.no_grad()
def hidden_states(draft: Draft, model: Any, context: int = 9) -> tuple[Tensor, Tensor]:
    """The states of one random block by draftsmith and by the package [1, B, H]."""
    config, size = draft.config, draft.config.block.size
    features = torch.randn(1, context, len(config.target_layer_ids) * config.hidden_size)
    embeddings = torch.randn(1, size, config.hidden_size)
    positions = torch.arange(context + size)
    masks = {}
    for kind in set(draft.attention_kinds):
        away = (positions[context:, None] - positions).abs()
        masks[kind] = (away < (kind.window or 10**6))[None, None]
    keys_values = draft.context_keys_values(features, positions[None, :context])
    ours = draft(embeddings[:, None], positions[None, None, context:], keys_values, DenseBlockAttention(masks))[:, 0]
    embeddings = embeddings * config.input_embedding_scale  # their generation loop does it
    return ours, model.eval()(position_ids=positions[None], noise_embedding=embeddings, target_hidden=features)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_their_package_loads_ours_and_generates_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    model, target = make_target()
    draft = make_draft(target, **options)
    draft.save(tmp_path / "draft")
    peer = zlab.DFlash2DraftModel.from_pretrained(tmp_path / "draft")
    names = {name.split(".", 1)[1] for name, _ in draft.named_parameters()}
    assert {name.replace("codebook.weight", "codebook") for name, _ in peer.named_parameters()} == names
    ours, theirs = hidden_states(draft, peer)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    for prompt in ([3, 1, 4, 1, 5, 9],):
        found = generate(target, draft, [prompt], max_new_tokens=40)[0]
        stats = zlab.dflash_generate(peer.eval(), model, torch.tensor([prompt]), 40, None, return_stats=True)
        assert stats.output_ids[0, len(prompt) :].tolist() == found.token_ids
        # They shorten the last blocks to what is left; until then every verify commits the same.
        shared = min(len(stats.acceptance_lengths), len(found.accept_lengths)) - 2
        assert shared >= 10
        assert stats.acceptance_lengths[:shared] == found.accept_lengths[:shared]
        assert max(found.accept_lengths) > 1


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_their_selector_makes_our_proposals(tmp_path: Path, options: dict[str, Any]) -> None:
    model, target = make_target()
    draft = make_draft(target, **options)
    draft.save(tmp_path / "draft")
    peer = zlab.DFlash2DraftModel.from_pretrained(tmp_path / "draft").eval()
    hidden, anchors = torch.randn(1, draft.config.block.size, 32), torch.tensor([7])
    filler = filler_of("dflash2", draft, target.ends)
    greedy = filler.fill(hidden, anchors, lambda logits, draw: (logits.argmax(-1), None)).token_ids
    theirs, _, _ = peer.propose(hidden[:, 1:], anchors, model.lm_head, 0.0)
    assert torch.equal(greedy, theirs)

    torch.manual_seed(1)
    path, candidates, q = peer.propose(hidden[:, 1:], anchors, model.lm_head, 0.8)
    taken = iter(path.unbind(1))  # follow their draws

    def follow(logits: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        return next(taken), distribution(logits, SamplingOptions(0.8))

    found = filler.fill(hidden, anchors, follow)
    wanted = torch.zeros_like(found.q).scatter(-1, candidates, q)
    torch.testing.assert_close(found.q, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_we_load_theirs_and_generate_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    model, target = make_target()
    start = make_draft(target, **options)
    start.save(tmp_path / "start")
    peer = zlab.DFlash2DraftModel.from_pretrained(tmp_path / "start")
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    peer.save_pretrained(tmp_path / "theirs")
    draft = Draft.load(tmp_path / "theirs", strict=True)
    assert draft.config == start.config
    ours, theirs = hidden_states(draft, peer)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(hidden_states(start, peer)[0], theirs, atol=1e-3)
    output = zlab.dflash_generate(peer.eval(), model, torch.tensor([[3, 1, 4]]), 40, None)
    assert output[0, 3:].tolist() == generate(target, draft, [[3, 1, 4]], max_new_tokens=40)[0].token_ids


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_codebooks_are_read_by_either_name(tmp_path: Path, suffix: str) -> None:
    _, target = make_target()
    draft = make_draft(target)
    draft.save(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    books = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]
    assert set(books) <= set(tensors)  # published files have no `.weight`
    for name in books:
        tensors[name + suffix] = tensors.pop(name)
    save_file(tensors, file)
    loaded = Draft.load(tmp_path / "draft", strict=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), draft.parameters(), strict=True))
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert {name: config["dflash_config"][name] for name in HEAD} == HEAD
