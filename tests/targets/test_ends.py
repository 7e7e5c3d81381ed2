"""The ends alone: the same embeddings and logits as the full model, from two tensors of its files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GraniteConfig

from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import Target
from tests.support.checkpoints import edit_tensors
from tests.support.tiny import KINDS, tiny_model, tiny_target


@pytest.mark.parametrize("shards", ["single", "sharded"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_alone_they_equal_the_full_models(kind, tied, shards, tmp_path):
    model = tiny_model(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "sharded")
    full, alone = Target.load(tmp_path).ends, TargetEnds.load(tmp_path)
    ids, hidden = torch.randint(0, 97, (3, 5)), torch.randn(3, 5, 32)
    torch.testing.assert_close(alone.embed(ids), full.embed(ids), rtol=0, atol=0)
    torch.testing.assert_close(alone.project(hidden), full.project(hidden), rtol=0, atol=0)
    assert (alone.vocab_size, alone.hidden_size, alone.softcap) == (97, 32, full.softcap)
    same = alone.head_weight.data_ptr() == alone.embedding_weight.data_ptr()
    assert same == tied == torch.equal(full.head_weight, full.embedding_weight)


def test_only_the_files_with_the_ends_are_read(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index["model.embed_tokens.weight"], index["lm_head.weight"]}
    for name in set(index.values()) - needed:
        (tmp_path / name).write_bytes(b"not read")
    assert TargetEnds.load(tmp_path).vocab_size == 97
    (tmp_path / index["lm_head.weight"]).unlink()
    with pytest.raises(DraftsmithError, match=r"lacks .*where its index places lm_head\.weight"):
        TargetEnds.load(tmp_path)


def test_plain_arithmetic():
    embedding, head = torch.randn(11, 6), torch.randn(11, 6)
    ends = TargetEnds(embedding, head, embedding_scale=2.5, softcap=3.0)
    ids, hidden = torch.tensor([[4, 0], [10, 4]]), 4 * torch.randn(2, 2, 6)
    torch.testing.assert_close(ends.embed(ids), embedding[ids] * 2.5)
    torch.testing.assert_close(ends.embedding_rows(ids), embedding[ids], rtol=0, atol=0)
    raw = torch.einsum("...h,vh->...v", hidden, head)
    torch.testing.assert_close(ends.project(hidden), 3.0 * torch.tanh(raw / 3.0))
    assert raw.abs().max() > 3.0
    plain = TargetEnds(embedding, head)
    torch.testing.assert_close(plain.embed(ids), embedding[ids])
    torch.testing.assert_close(plain.project(hidden), raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemmas_scale_is_counted_once_and_rounded_like_the_models(dtype):
    target = tiny_target("gemma3", dtype=dtype)  # sqrt(32) is not a bfloat16 number
    ids = torch.randint(0, 97, (2, 7))
    embedded = target.model.get_input_embeddings()(ids)
    torch.testing.assert_close(target.ends.embed(ids), embedded, rtol=0, atol=0)
    ratio = embedded.float() / functional.embedding(ids, target.ends.embedding_weight).float()
    torch.testing.assert_close(ratio.mean(), torch.tensor(32**0.5), rtol=1e-2, atol=0)


def test_they_are_frozen_share_the_models_tensors_and_stay_out_of_checkpoints():
    target = tiny_target("llama")
    ends = target.ends
    assert ends.head_weight.data_ptr() == target.model.lm_head.weight.data_ptr()
    assert ends.state_dict() == {}
    assert list(ends.parameters()) == []
    hidden = torch.randn(2, 32, requires_grad=True)
    ends.project(hidden).sum().backward()
    assert hidden.grad is not None
    assert target.model.lm_head.weight.grad is None


def test_dtype_on_loading(tmp_path):
    tiny_model("gemma3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert TargetEnds.load(tmp_path).head_weight.dtype == torch.bfloat16
    ends = TargetEnds.load(tmp_path, dtype="float32")
    full = Target.load(tmp_path, dtype="float32").ends
    ids = torch.arange(9)
    torch.testing.assert_close(ends.embed(ids), full.embed(ids), rtol=0, atol=0)
    assert ends.embed(ids).dtype == torch.float32


def test_a_head_that_differs_from_a_tied_configuration_is_kept(tmp_path):
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    ends, full = TargetEnds.load(tmp_path), Target.load(tmp_path).ends
    assert not torch.equal(ends.head_weight, ends.embedding_weight)
    torch.testing.assert_close(ends.head_weight, full.head_weight, rtol=0, atol=0)


def test_weights_that_are_missing_ambiguous_or_elsewhere(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}, file)
    with pytest.raises(DraftsmithError, match=r"lack lm_head\.weight \(tie_word_embeddings is False\)"):
        TargetEnds.load(tmp_path)
    save_file(whole | {"embed_tokens.weight": torch.zeros(97, 32)}, file)
    with pytest.raises(DraftsmithError, match=r"several tensors that are model\.embed_tokens\.weight: embed_tokens\.w"):
        TargetEnds.load(tmp_path)
    file.write_bytes(b"12345678 no header")
    with pytest.raises(DraftsmithError, match="not a complete safetensors file"):
        TargetEnds.load(tmp_path)
    file.unlink()
    with pytest.raises(DraftsmithError, match="safetensors only"):
        TargetEnds.load(tmp_path)


def _same_ends(directory, **options):
    alone, full = TargetEnds.load(directory, **options), Target.load(directory, **options).ends
    torch.testing.assert_close(alone.embedding_weight, full.embedding_weight, rtol=0, atol=0)
    torch.testing.assert_close(alone.head_weight, full.head_weight, rtol=0, atol=0)


def test_layers_that_the_model_does_not_run_may_have_ends_of_their_own(tmp_path):
    """Layers for the prediction of several tokens lie behind the others, with an embedding and a head each."""
    tiny_model("llama").save_pretrained(tmp_path)
    further = {
        f"{prefix}.{name}": torch.randn(97, 32)
        for prefix in ("model.layers.4", "mtp", "model.mtp.0")
        for name in ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
    }
    edit_tensors(tmp_path, lambda tensors: tensors | further)
    _same_ends(tmp_path)


def test_names_without_the_base_models_prefix(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    _same_ends(tmp_path)


def test_names_are_the_models_own(tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = GPTNeoXConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    _same_ends(tmp_path)
    # As the files of this model have been named from the beginning.
    edit_tensors(tmp_path, lambda tensors: {n.replace("lm_head", "embed_out"): t for n, t in tensors.items()})
    assert {"gpt_neox.embed_in.weight", "embed_out.weight"} <= set(load_file(tmp_path / "model.safetensors"))
    _same_ends(tmp_path)


def test_shapes_and_scales_that_do_not_fit(tmp_path):
    with pytest.raises(DraftsmithError, match=r"\(11, 6\).*\(12, 6\)"):
        TargetEnds(torch.zeros(11, 6), torch.zeros(12, 6))
    GraniteConfig(embedding_multiplier=12.0).save_pretrained(tmp_path)
    with pytest.raises(DraftsmithError, match=r"embedding_multiplier = 12\.0"):
        TargetEnds.load(tmp_path)
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    model.config.vocab_size = 96
    model.config.save_pretrained(tmp_path)
    with pytest.raises(DraftsmithError, match=r"output head of .* is \(97, 32\) and its configuration says \(96, 32\)"):
        TargetEnds.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}'])
def test_an_index_that_is_damaged_is_an_error_that_names_it(content, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(DraftsmithError, match=r"model\.safetensors\.index\.json has no readable weight_map"):
        TargetEnds.load(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_most_likely_tokens(kind):
    ends = tiny_target(kind).ends
    hidden = torch.randn(2, 5, 32)
    choice = ends.argmax(hidden)
    assert torch.equal(choice.ids, ends.project(hidden).argmax(-1))
    assert choice.finite.all()
    hidden[1, 3] = float("nan")
    assert (~ends.argmax(hidden).finite).nonzero().tolist() == [[1, 3]]
