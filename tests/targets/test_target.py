"""Loading targets, refusing what cannot be computed exactly, and logits equal to the model's own."""

import json

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    BertLMHeadModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GraniteConfig,
    GraniteForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith.errors import DraftsmithError
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target
from tests.support.decoders import decoder_config, random_decoder
from tests.support.tiny import KINDS, tiny_model, tiny_target
from tests.support.tiny_tokenizer import tiny_tokenizer


def _inputs(width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 97, (2, width)), torch.arange(width).expand(2, -1)


def _saved(tmp_path, kind="llama", **options):
    tiny_model(kind, **options).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_loads_with_its_sizes_and_logits(kind, tmp_path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(tmp_path)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 97)
    assert (target.max_position_embeddings, target.dtype, target.device) == (512, torch.float32, torch.device("cpu"))
    assert (target.source, target.revision) == (str(tmp_path), None)
    assert target.tokenizer("one two").input_ids == tiny_tokenizer()("one two").input_ids
    ids, positions = _inputs()
    logits = target.ends.project(target.forward(ids, positions).final_state)
    torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=0, atol=0)


def test_a_directory_without_a_tokenizer_gives_none(tmp_path):
    assert Target.load(_saved(tmp_path)).tokenizer is None


def test_dtypes(tmp_path):
    directory = _saved(tmp_path, dtype=torch.bfloat16)
    assert Target.load(directory).dtype == torch.bfloat16
    assert Target.load(directory, dtype="float32").dtype == torch.float32
    assert Target.load(directory, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(DraftsmithError, match=r"dtype is 'int8'; allowed: 'auto', .*'bfloat16'"):
        Target.load(directory, dtype="int8")


def test_bfloat16_logits_are_the_models_own():
    target = tiny_target("gemma3", dtype=torch.bfloat16)
    ids, positions = _inputs()
    logits = target.ends.project(target.forward(ids, positions).final_state)
    torch.testing.assert_close(logits, target.model(input_ids=ids).logits, rtol=0, atol=0)


def test_the_language_model_of_a_multimodal_gemma():
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "max_position_embeddings": 256,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=90,
        boi_token_id=91,
        eoi_token_id=92,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    target = Target.from_model(model)
    assert (target.num_layers, target.hidden_size, target.max_position_embeddings) == (3, 32, 256)
    ids = torch.randint(0, 80, (2, 21))
    positions = torch.arange(21).expand(2, -1)
    plain = target.forward(ids, positions).final_state
    logits = target.ends.project(plain)
    torch.testing.assert_close(logits, model(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits)
    cache = target.new_cache(2, 32)
    parts = [target.forward(ids[:, a : a + 7], positions[:, a : a + 7], cache=cache).final_state for a in (0, 7, 14)]
    torch.testing.assert_close(torch.cat(parts, 1), plain, rtol=1e-4, atol=2e-5)


def test_from_model_puts_the_model_into_evaluation_mode():
    model = tiny_model("llama", attention_dropout=0.5).train()
    target = Target.from_model(model)
    assert not model.training
    ids, positions = _inputs()
    one, two = (target.forward(ids, positions).final_state for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not one.requires_grad


class _HalvedHead(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


class _ShiftedEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1.0


def test_scales_that_nobody_knows_are_found_by_running_the_model():
    model = tiny_model("llama")
    model.lm_head.__class__ = _HalvedHead
    with pytest.raises(DraftsmithError, match="'llama' computes its logits in a way"):
        Target.from_model(model)
    model = tiny_model("llama")
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(DraftsmithError, match="'llama' computes its embeddings in a way"):
        Target.from_model(model)
    model = tiny_model("llama")
    model.model.embed_tokens.__class__ = _ShiftedEmbedding
    with pytest.raises(DraftsmithError, match="embeds tokens with _ShiftedEmbedding"):
        Target.from_model(model)


def test_a_broken_model_is_found_by_running_it():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(DraftsmithError, match="NaN"):
        Target.from_model(model)


def test_scales_in_the_configuration_are_refused_by_name():
    config = GraniteConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    with pytest.raises(DraftsmithError, match=r"'granite' has logits_scaling = 8\.0"):
        Target.from_model(GraniteForCausalLM(config))


def test_models_that_are_not_decoder_only(tmp_path):
    bert = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    with pytest.raises(DraftsmithError, match="BertLMHeadModel; a decoder-only"):
        Target.from_model(BertLMHeadModel(bert))
    t5 = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path)
    with pytest.raises(DraftsmithError, match=r"\(t5\) as a causal language model"):
        Target.load(tmp_path)


def test_a_head_with_a_bias_is_refused():
    model = tiny_model("llama")
    model.lm_head.bias = nn.Parameter(torch.zeros(97))
    with pytest.raises(DraftsmithError, match="bias on its output head"):
        Target.from_model(model)


def _known(*names):
    """Those of these types that the installed transformers has."""
    return [name for name in names if name in CONFIG_MAPPING]


@pytest.mark.parametrize("kind", _known("deepseek_v4", "hy_v4", "qwen4_exp_text"))
def test_several_residual_streams_have_no_tap(kind):
    with pytest.raises(
        DraftsmithError, match=r"layers of .* read .*for 5 tokens of width 64: several residual streams"
    ):
        Target.from_model(random_decoder(decoder_config(kind)))


@pytest.mark.parametrize("kind", _known("dory"))
def test_layers_that_run_several_times_have_no_tap(kind):
    with pytest.raises(DraftsmithError, match=r"'dory' runs its \d layers \d+ times in one forward"):
        Target.from_model(random_decoder(decoder_config(kind)))


@pytest.mark.parametrize("kind", _known("llama4_text", "beam"))
def test_kinds_that_can_be_captured(kind):
    """Llama 4's class does not find its own decoder; some layers of Beam have no positions."""
    model = random_decoder(decoder_config(kind))
    target = Target.from_model(model)
    ids = torch.randint(3, 256, (2, 21))
    states = target.forward(ids, torch.arange(21).expand(2, -1), tap_ids=[0, 2])
    with torch.no_grad():
        right = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(states.taps, torch.cat([right.hidden_states[1], right.hidden_states[3]], -1))
    torch.testing.assert_close(target.ends.project(states.final_state), right.logits)


@pytest.mark.parametrize("kind", _known("llama4_text"))
def test_chunked_attention_is_captured_and_not_decoded(kind):
    target = Target.from_model(random_decoder(decoder_config(kind)))
    with pytest.raises(DraftsmithError, match="has layers of kind chunked_attention"):
        target.check_decoding()


def test_paths_without_a_target(tmp_path):
    with pytest.raises(DraftsmithError, match=r"no target at .*nowhere"):
        Target.load(tmp_path / "nowhere")
    with pytest.raises(DraftsmithError, match="no target at nowhere"):
        Target.load("nowhere")
    with pytest.raises(DraftsmithError, match=r"no config\.json"):
        Target.load(tmp_path)
    with pytest.raises(DraftsmithError, match="no GGUF file"):
        Target.load(tmp_path / "model.gguf")
    (tmp_path / "model.bin").touch()
    with pytest.raises(DraftsmithError, match=r"neither a model directory nor a \.gguf file"):
        Target.load(tmp_path / "model.bin")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(DraftsmithError, match=r"cannot read the configuration.*no-such-model"):
        Target.load(tmp_path)


def test_a_hub_id_that_is_not_at_hand(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DraftsmithError, match="'nobody/no-model', looked for on the hub"):
        Target.load("nobody/no-model")


def test_devices_that_are_not_there(tmp_path):
    directory = _saved(tmp_path)
    with pytest.raises(DraftsmithError, match="device is 'cuda:99', but torch sees"):
        Target.load(directory, device="cuda:99")
    for device in ("gpu", "meta"):  # torch knows one of them
        with pytest.raises(DraftsmithError, match=f"device is '{device}'; use 'auto', 'cpu'"):
            Target.load(directory, device=device)
    assert Target.load(directory, device="auto").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_weights_that_are_missing_wrong_or_cut_off(tmp_path):
    from safetensors.torch import load_file, save_file

    file = _saved(tmp_path) / "model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}, file, {"format": "pt"})
    with pytest.raises(DraftsmithError, match=r"lack 1 tensors, such as lm_head\.weight"):
        Target.load(tmp_path)
    save_file(whole | {"lm_head.weight": torch.zeros(50, 32)}, file, {"format": "pt"})
    with pytest.raises(DraftsmithError, match="cannot load target"):
        Target.load(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DraftsmithError, match="cannot load target"):
        Target.load(tmp_path)
    file.unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")  # pickled weights are not read
    with pytest.raises(DraftsmithError, match="cannot load target"):
        Target.load(tmp_path)


def test_options_know_their_keys():
    assert json.loads(TargetOptions(path="org/model").model_dump_json()) == {
        "path": "org/model",
        "dtype": "auto",
        "device": "auto",
        "revision": None,
        "fuse": "auto",
        "trust_remote_code": False,
    }
    for wrong in ({"dtype": "int8"}, {"divice": "cpu"}, {"path": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TargetOptions(**({"path": "org/model"} | wrong))
