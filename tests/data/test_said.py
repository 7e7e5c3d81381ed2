"""Answers as tokens and as messages, on small templates of their own (published ones: test_published_templates)."""

from dataclasses import replace

import pytest

from draftsmith.data.chat import render_prompt
from draftsmith.data.options import DataOptions
from draftsmith.data.said import Said, message_of
from draftsmith.data.sample import Conversation, Sample
from draftsmith.data.tokenize import samples_of, tokenize, tokenize_all
from draftsmith.errors import DraftsmithError
from tests.support.tiny_tokenizer import PLAIN_TEMPLATE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
QUESTIONS = ({"role": "user", "content": "hi"}, {"role": "user", "content": "more"})
# Reasoning in a block of its own, which earlier turns lose.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and loop.last %}<|unknown|>{{ message.reasoning_content }}<|endoftext|>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def said(text: str, finished: bool = True, template: str = PLAIN_TEMPLATE) -> tuple[list[int], Said]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    ids = encode(text) + [END] * finished
    prompt = render_prompt(QUESTIONS[:1], tokenizer, DataOptions())
    return ids, message_of(ids, finished, QUESTIONS[:1], prompt, tokenizer, DataOptions())


def conversation(*answers: tuple[str, list[int]]) -> Conversation:
    messages = []
    for question, (text, _) in zip(QUESTIONS, answers, strict=False):
        messages += [question, {"role": "assistant", "content": text}]
    return Conversation("c", tuple(messages), answer_ids=tuple(tuple(ids) for _, ids in answers))


def learnt(sample: Sample) -> list[int]:
    return sample.input_ids[sample.loss_mask].tolist()


def test_plain_text_stays_as_it_is() -> None:
    assert said("one <two>\n")[1] == Said({"role": "assistant", "content": "one <two>\n"}, renders=True)


@pytest.mark.parametrize("finished", [True, False])
def test_reasoning_between_special_tokens_is_kept_apart(finished: bool) -> None:
    _, kept = said("<|unknown|>the one<|endoftext|>two", finished, THINKING)
    assert kept.message == {"role": "assistant", "content": "two", "reasoning_content": "the one"}
    assert kept.renders == finished


def test_reasoning_that_was_cut_off_is_reasoning() -> None:
    _, kept = said("<|unknown|>the on", False, THINKING)
    assert kept.message == {"role": "assistant", "content": "", "reasoning_content": "the on"}


def test_special_tokens_without_a_place_in_the_template_stay_in_the_text() -> None:
    ids, kept = said("one<|unknown|>two")
    assert kept == Said({"role": "assistant", "content": "one<|unknown|>two"}, renders=True)
    (sample,) = samples_of(Conversation("c", (QUESTIONS[0], kept.message)), TOKENIZER, DataOptions())
    assert learnt(sample) == ids


def test_tokens_that_the_text_does_not_give_back_are_learnt() -> None:
    ids = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "two"] + [END]
    assert ids[:-1] != encode("two")
    prompt = render_prompt(QUESTIONS[:1], TOKENIZER, DataOptions())
    kept = message_of(ids, True, QUESTIONS[:1], prompt, TOKENIZER, DataOptions())
    assert kept == Said({"role": "assistant", "content": "two"}, renders=False)
    known = conversation(("two", ids))
    (sample,) = samples_of(known, TOKENIZER, DataOptions())
    assert sample.input_ids.tolist() == prompt + ids
    assert learnt(sample) == ids
    assert learnt(tokenize(replace(known, answer_ids=()), TOKENIZER, DataOptions())) == [*encode("two"), END]


def test_an_earlier_answer_that_later_turns_render_otherwise_has_a_sample_of_its_own() -> None:
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "two"] + [END]
    usual, last = [*encode("two"), END], [*encode("one"), END]
    together, apart = DataOptions(), DataOptions(turns="apart")
    first_prompt = render_prompt(QUESTIONS[:1], TOKENIZER, together)

    (sample,) = samples_of(conversation(("two", usual), ("one", last)), TOKENIZER, together)
    assert learnt(sample) == usual + last
    for options in (together, apart):
        samples = samples_of(conversation(("two", letters), ("one", last)), TOKENIZER, options)
        assert [each.id for each in samples] == ["c/0", "c" if options is together else "c/1"]
        assert samples[0].input_ids.tolist() == first_prompt + letters
        assert [learnt(each) for each in samples] == [letters, last]
    every, report = tokenize_all([conversation(("two", letters), ("one", last))], TOKENIZER, together)
    assert (report.conversations, report.samples, report.mismatched) == (1, len(every), 0) == (1, 2, 0)


@pytest.mark.parametrize(
    "ids",
    [[*encode("twist"), END], [*encode("two")[:-1], END], [10**6], [END]],
    ids=["other", "fewer", "unknown", "none"],
)
def test_ids_of_another_text_are_refused(ids: list[int]) -> None:
    with pytest.raises(DraftsmithError, match=r"'c': the content 'two' .* remove answer_token_ids"):
        samples_of(conversation(("two", ids)), TOKENIZER, DataOptions())
