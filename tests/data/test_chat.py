import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.data.chat import (
    default_system_prompt,
    render_prompt,
    special_token_ids,
    stop_token_ids,
    template_fingerprint,
    tokenizer_fingerprint,
)
from draftsmith.data.options import DataOptions
from draftsmith.data.sample import Conversation
from draftsmith.data.tokenize import tokenize, tokenize_all
from draftsmith.errors import DraftsmithError
from tests.support.tiny_tokenizer import PLAIN_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
DEFAULT = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are one of two.<|im_end|>\n{% endif %}"
THINKING = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<skip>{% endif %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
# A system block that is always there, with the given text in it, as in Llama 3.1.
DATED = (
    "<|im_start|>system\nToday is the day.\n\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% set messages = messages[1:] %}{% endif %}"
    "<|im_end|>\n"
)


def test_prompt_ends_where_the_answer_begins() -> None:
    tokenizer = tiny_tokenizer()
    prompt = render_prompt([USER], tokenizer, DataOptions())
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_configured_system_prompt_goes_where_there_is_none() -> None:
    tokenizer = tiny_tokenizer()
    options = DataOptions(system_prompt="be brief")
    with_own = render_prompt([{**SYSTEM, "content": "be long"}, USER], tokenizer, options)
    assert render_prompt([USER], tokenizer, options) == render_prompt([SYSTEM, USER], tokenizer, DataOptions())
    assert "be brief" not in str(tokenizer.decode(with_own))
    sample = tokenize(Conversation("c", (USER, {"role": "assistant", "content": "one"})), tokenizer, options)
    assert tokenizer.decode(sample.input_ids.tolist()).startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == "one<|im_end|>"


@pytest.mark.parametrize(
    ("template", "added"),
    [
        (PLAIN_TEMPLATE, None),
        (DEFAULT + PLAIN_TEMPLATE, "You are one of two."),
        (DATED + PLAIN_TEMPLATE, "<|im_start|>system\nToday is the day."),
        (NO_SYSTEM + PLAIN_TEMPLATE, None),
    ],
)
def test_a_default_system_prompt_is_found(template: str, added: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert default_system_prompt(tokenizer, DataOptions()) == added
    assert default_system_prompt(tokenizer, DataOptions(system_prompt="mine")) is None


def test_a_default_system_prompt_is_reported_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = DEFAULT + PLAIN_TEMPLATE
    answer = {"role": "assistant", "content": "one"}
    conversations = [Conversation(str(number), (USER, answer)) for number in range(3)]
    with caplog.at_level(logging.INFO, logger="draftsmith"):
        samples, report = tokenize_all(conversations, tokenizer, DataOptions())
    assert report.default_system_prompt == "You are one of two."
    assert sum("You are one of two." in record.getMessage() for record in caplog.records) == 1
    assert all("You are one of two." in str(tokenizer.decode(sample.input_ids.tolist())) for sample in samples)


def test_a_template_that_refuses_is_named() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = NO_SYSTEM + PLAIN_TEMPLATE
    with pytest.raises(DraftsmithError, match=r"the chat template of .*sha256.* refuses the messages: no system role"):
        render_prompt([SYSTEM, USER], tokenizer, DataOptions())


def test_thinking_reaches_the_template_in_training_and_generation_alike() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE + THINKING
    default = render_prompt([USER], tokenizer, DataOptions())
    assert render_prompt([USER], tokenizer, DataOptions(enable_thinking=True)) == default
    assert render_prompt([USER], tokenizer, DataOptions(enable_thinking=False)) == default + tokenizer.encode("<skip>")


def test_thinking_that_the_template_does_not_know_is_an_error() -> None:
    with pytest.raises(DraftsmithError, match=r"enable_thinking is False, but .* does not read"):
        render_prompt([USER], tiny_tokenizer(), DataOptions(enable_thinking=False))


def test_several_templates_need_a_default() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"rag": "x", "default": PLAIN_TEMPLATE}
    assert render_prompt([USER], tokenizer, DataOptions()) == render_prompt([USER], tiny_tokenizer(), DataOptions())
    tokenizer.chat_template = {"rag": "x", "tool_use": "y"}
    with pytest.raises(DraftsmithError, match="has the chat templates rag, tool_use and no default"):
        render_prompt([USER], tokenizer, DataOptions())


def test_stop_tokens_are_those_of_tokenizer_and_generation_config() -> None:
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    assert stop_token_ids(tokenizer, None) == (eos,)
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=9)) == tuple(sorted((eos, 9)))
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=[9, eos, 0])) == tuple(sorted((0, eos, 9)))
    tokenizer.eos_token = None
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=None)) == ()


def test_special_tokens_include_added_ones_without_a_name() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in special_token_ids(tokenizer)
    assert tokenizer.convert_tokens_to_ids("user") not in special_token_ids(tokenizer)


def test_tokenizer_fingerprint_is_stable_and_sees_what_matters(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    fingerprint = tokenizer_fingerprint(tokenizer)
    assert len(fingerprint) == 64
    tokenizer("one two", truncation=True, max_length=1)  # leaves truncation set in the backend
    tokenizer.chat_template = "another"
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(type(tokenizer).from_pretrained(tmp_path)) == fingerprint

    grown = tiny_tokenizer()
    grown.add_tokens(["<extra>"])
    renamed = tiny_tokenizer()
    renamed.eos_token = "<|endoftext|>"
    assert len({fingerprint, tokenizer_fingerprint(grown), tokenizer_fingerprint(renamed)}) == 3


def test_template_fingerprint_sees_text_and_settings() -> None:
    tokenizer = tiny_tokenizer()
    other = tiny_tokenizer()
    other.chat_template = PLAIN_TEMPLATE + " "
    thinking = tiny_tokenizer()
    thinking.chat_template = PLAIN_TEMPLATE + THINKING
    prints = [
        template_fingerprint(tokenizer, DataOptions()),
        template_fingerprint(tokenizer, DataOptions(system_prompt="x")),
        template_fingerprint(other, DataOptions()),
        template_fingerprint(thinking, DataOptions()),
        template_fingerprint(thinking, DataOptions(enable_thinking=False)),
    ]
    assert len(set(prints)) == len(prints)
    assert prints[0] == template_fingerprint(tiny_tokenizer(), DataOptions(max_length=17))


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] + 1 }}", "{{ 1 / 0 }}", "{{ 'a'.index('z') }}"])
def test_a_template_that_fails_while_it_runs_is_named(template: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(template, encoding="utf-8")
    with pytest.raises(DraftsmithError, match=r"own\.jinja .* refuses the messages"):
        render_prompt([USER], tiny_tokenizer(), DataOptions(chat_template=path))


def test_half_a_surrogate_pair_in_a_message_is_an_error() -> None:
    with pytest.raises(DraftsmithError, match=r"the content of a user message holds '\\udcff'"):
        render_prompt([{**USER, "content": "hi \udcff"}], tiny_tokenizer(), DataOptions())
