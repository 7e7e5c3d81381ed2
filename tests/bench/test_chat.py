"""Conversations and text of a benchmark are those of training."""

import random

import pytest

from draftsmith.bench.chat import Chat
from draftsmith.data.chat import answer_text, render_prompt
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.regenerate.dialogue import Dialogue
from tests.support.tiny_tokenizer import tiny_tokenizer

SPACED = "do n't say : one , two . The end !"


@pytest.fixture(scope="module")
def tidying():
    """A tokenizer that takes spaces away before punctuation unless it is told not to."""
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    # Newer versions of transformers tidy after byte-level vocabularies only where this is set as well.
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer.encode(SPACED)
    assert tokenizer.decode(ids) != SPACED, "nothing is tidied: nothing is tested"
    return tokenizer


def test_text_is_what_the_tokens_say(tidying):
    ids = [*tidying.encode(SPACED), tidying.eos_token_id]
    chat = Chat(tidying, DataOptions())
    assert answer_text(ids, tidying) == chat.text(ids) == SPACED
    assert answer_text(ids, tidying, special_tokens=True) == SPACED + "<|im_end|>"
    pieces = chat.pieces(ids)
    assert "".join(pieces) == SPACED + "<|im_end|>"
    assert pieces == [tidying.decode([token], clean_up_tokenization_spaces=False) for token in ids]


def test_the_next_turn_has_the_reasoning_of_the_last_where_the_template_puts_it():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content %}<|unknown|>{{ message.reasoning_content }}<|endoftext|>{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    said = "<|unknown|>the one<|endoftext|>two<|im_end|>"
    asked = Chat(tokenizer, DataOptions()).prompt_ids(Prompt("x", ("hi", "more")), 1, [tokenizer.encode(said)])
    assert f"assistant\n{said}\n" in tokenizer.decode(asked)


@pytest.mark.parametrize("system", [None, "", "be brief"])
def test_a_benchmark_asks_as_regenerate_does(tidying, system):
    chance = random.Random(3)
    prompt = Prompt("x", tuple(f"say {chance.random()}" for _ in range(3)), system=system)
    chat, dialogue = Chat(tidying, DataOptions()), Dialogue(prompt)
    answers: list[list[int]] = []
    for turn in range(3):
        asked = render_prompt(dialogue.ask(), tidying, DataOptions())
        assert chat.prompt_ids(prompt, turn, answers) == asked
        assert len(dialogue.ask()) == (system is not None) + 2 * turn + 1
        answers.append(tidying.encode(f"{chance.random()} , {SPACED}"))
        dialogue.answer({"role": "assistant", "content": answer_text(answers[-1], tidying)}, "stop")
    messages = dialogue.record()["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == list(prompt.turns)
    assert [m["content"] for m in messages if m["role"] == "system"] == ([] if system is None else [system])
