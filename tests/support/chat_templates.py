"""Chat templates as models are published with them, from the package trl, each with a tokenizer that knows its tokens.

trl keeps them as text files (`trl/chat_templates/*.jinja`, Apache-2.0) to recognise models by. Nothing of it is
imported.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizer import tiny_tokenizer

# The token with which each family ends its turn, and which ends a generation.
END_OF_TURN = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "gptoss": "<|return|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "muse_glimmer": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
}
# GLM's turns end where the next begins; the others read content in parts, which texts are not.
NO_END_OF_TURN = ("glm4moe",)
CONTENT_IN_PARTS = ("idefics3", "llava_next", "smolvlm")

_WORD = r"[^<>\[\]\s'\"{}]{1,40}"
_TOKENS = re.compile(
    rf"<\|{_WORD}\|>|<\uff5c{_WORD}\uff5c>|<\|{_WORD}>|<{_WORD}\|>|<(?:start|end)_of_{_WORD}>|</?think>|\[gMASK\]|<sop>"
)


def published_templates() -> dict[str, str]:
    """Name -> template, of all whose messages are texts; none without the package."""
    spec = find_spec("trl")
    folders = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    files = sorted(file for folder in folders for file in (Path(folder) / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text("utf-8") for file in files if not file.stem.startswith(CONTENT_IN_PARTS)}


needs_templates = pytest.mark.skipif(
    find_spec("trl") is None, reason="needs the chat templates of the package trl (pip install --no-deps trl)"
)


def end_of_turn(name: str) -> str | None:
    """The token that ends an answer; None where there is none."""
    return next((token for family, token in END_OF_TURN.items() if name.startswith(family)), None)


@cache
def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a published template and its tokens; `<think>` and `</think>` are added tokens that are
    not special, and line breaks are a piece of their own, as in most models."""
    template = published_templates()[name]
    tokenizer = tiny_tokenizer(chat_template=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[^\s]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    end = end_of_turn(name)
    found = set(_TOKENS.findall(template)) | ({end} if end else set())
    thoughts = {token for token in found if "think>" in token}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found - thoughts)})
    tokenizer.add_tokens(sorted(thoughts))
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.eos_token = end or "<|endoftext|>"
    tokenizer.chat_template = template
    return tokenizer
