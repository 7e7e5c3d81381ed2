"""Supervised tokens are the generated ones: published chat templates x texts with reasoning and without x cuts."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from draftsmith.data.chat import render_prompt, render_text, special_token_ids
from draftsmith.data.conversations import read_conversations
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.data.said import message_of
from draftsmith.data.sample import Conversation, Sample
from draftsmith.data.tokenize import TemplateMismatch, samples_of, tokenize
from draftsmith.regenerate.answers import answer_record
from tests.support.chat_templates import (
    NO_END_OF_TURN,
    end_of_turn,
    needs_templates,
    published_templates,
    published_tokenizer,
)

pytestmark = [pytest.mark.interop, needs_templates]

NAMES = sorted(published_templates()) or ["none"]
QUESTION = {"role": "user", "content": "hi"}
PROSE = st.text(st.sampled_from("ab e\n.1<&\"'"), min_size=1, max_size=12)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """What a model may say: an answer, reasoning before it in several forms, special tokens of no meaning there."""
    thought, answer = draw(PROSE), draw(PROSE)
    form = draw(
        st.sampled_from(
            (
                "{a}",
                "<think>\n{t}\n</think>\n\n{a}",
                "{t}\n</think>\n\n{a}",
                "\n<think>{t}</think>\n{a}",
                "<think>{t}</think>{a}",
                "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{a}",
                "<|channel|>final<|message|>{a}",
                "<|channel>thought\n{t}\n<channel|>{a}",
                "{a}<|channel|>{t}",
                " {a}\n",
            )
        )
    )
    return form.format(t=thought, a=answer)


def generated(text: str, tokenizer: PreTrainedTokenizerFast, name: str, cut: int | None) -> list[int]:
    """The tokens of a text as a model would give them: the first `cut`, or all with the end of turn."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if cut is not None:
        return ids[: 1 + cut % len(ids)]
    end = end_of_turn(name)
    return ids if end is None else [*ids, tokenizer.convert_tokens_to_ids(end)]


def supervised(sample: Sample) -> list[int]:
    return sample.input_ids[sample.loss_mask].tolist()


def test_there_are_templates_of_many_kinds() -> None:
    assert len(NAMES) >= 50
    assert {"qwen3", "qwen3_5_think", "gptoss", "phi3", "cohere2", "glm4moe", "gemma4_v5"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(said=st.lists(texts(), min_size=1, max_size=3), cut=st.none() | st.integers(0, 60), apart=st.booleans())
def test_answers_that_were_generated_are_learnt_token_by_token(
    name: str, said: list[str], cut: int | None, apart: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = published_tokenizer(name)
    options = DataOptions(turns="apart" if apart else "together")
    prompt = Prompt("c", tuple(f"question {turn}" for turn in range(len(said))))
    answers: list[dict[str, str]] = []
    given_prompts, ids = [], []
    for turn, text in enumerate(said):
        question = prompt.question(answers)
        given_prompts.append(render_prompt(question, tokenizer, options))
        finished = cut is None or turn < len(said) - 1
        ids.append(generated(text, tokenizer, name, None if finished else cut))
        answers.append(message_of(ids[-1], finished, question, given_prompts[-1], tokenizer, options).message)
    finish_reason = "stop" if cut is None else "length"
    path = tmp_path_factory.mktemp("said") / "answers.jsonl"
    path.write_text(json.dumps(answer_record(prompt, prompt.conversation(answers), finish_reason, ids)) + "\n")

    (conversation,) = read_conversations(path)
    learnt = []
    for sample in samples_of(conversation, tokenizer, options):
        start = 0
        mask, whole = sample.loss_mask.tolist(), sample.input_ids.tolist()
        while start < len(whole):
            end = start + 1
            while end < len(whole) and mask[end] == mask[start]:
                end += 1
            if mask[start]:
                learnt.append((whole[:start], whole[start:end]))
            start = end
    assert learnt == list(zip(given_prompts, ids, strict=True))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(text=texts(), cut=st.none() | st.integers(0, 60))
def test_answers_known_as_text_are_learnt_as_they_are_or_refused(name: str, text: str, cut: int | None) -> None:
    tokenizer, options = published_tokenizer(name), DataOptions()
    ids = generated(text, tokenizer, name, cut)
    special = special_token_ids(tokenizer)
    words = [token for token in ids if token not in special]
    # A text that lost special tokens is another one.
    assume(cut is not None or ids[: len(words)] == words)
    content = tokenizer.decode(words)
    message = {"role": "assistant", "content": content}
    try:
        sample = tokenize(Conversation("c", (QUESTION, message), finished=cut is None), tokenizer, options)
    except TemplateMismatch:
        return
    learnt = supervised(sample)
    if cut is None:
        # Templates may strip what is around an answer; GLM's have no end of turn.
        end = end_of_turn(name)
        body = tokenizer.decode([token for token in learnt if token not in special]).strip()
        # What a text has of the generation prompt (`<think>`) was not generated.
        given_before = content.strip().removesuffix(body)
        assert content.strip() == given_before + body
        assert (
            render_text([QUESTION], tokenizer, options, generation_prompt=True).rstrip().endswith(given_before.rstrip())
        )
        assert end is None or learnt.count(tokenizer.convert_tokens_to_ids(end)) == 1
        assert [token for token in learnt if token not in special] == learnt or learnt[-1] in special
    elif words == ids:
        assert tokenizer.decode(learnt) == content
        prompt = render_prompt([QUESTION], tokenizer, options)
        assert sample.input_ids.tolist() == [*prompt, *learnt]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(NO_END_OF_TURN)])
def test_plain_answers_are_read_with_their_end_of_turn(name: str) -> None:
    """What is refused above is not everything."""
    tokenizer, options = published_tokenizer(name), DataOptions()
    prompt = render_text([QUESTION], tokenizer, options, generation_prompt=True)
    if prompt.endswith("<think>\n"):
        pytest.skip("the generation prompt opens a block of reasoning, which a plain answer does not close")
    conversation = Conversation("c", (QUESTION, {"role": "assistant", "content": "one two"}))
    learnt = tokenizer.decode(supervised(tokenize(conversation, tokenizer, options)))
    closing = "<|END_RESPONSE|>" if name.startswith("cohere2") else ""
    assert learnt == f"one two{closing}{end_of_turn(name)}"


@pytest.mark.parametrize(
    ("name", "message", "finished", "learnt"),
    [
        ("qwen3", {"content": "<think>\none two"}, False, "<think>\none two"),
        ("qwen3", {"content": "", "reasoning_content": "one tw"}, False, "<think>\none tw"),
        ("qwen3", {"content": "one two"}, True, "one two<|im_end|>"),
        ("qwen3_training", {"content": "<think>\none two"}, False, "<think>\none two"),
        ("qwen3_training", {"content": "one two"}, True, "one two<|im_end|>"),
        ("qwen3_5_think", {"content": "one two"}, False, "one two"),
        ("qwen3_5_think", {"content": "one\n</think>\n\ntw"}, False, "one\n</think>\n\ntw"),
        (
            "qwen3_5_think_training",
            {"content": "<think>\none\n</think>\n\ntwo"},
            True,
            "one\n</think>\n\ntwo<|im_end|>",
        ),
        ("qwen3_instruct_2507_training", {"content": "one tw"}, False, "one tw"),
        ("gptoss", {"content": "", "reasoning_content": "one"}, False, "<|channel|>analysis<|message|>one"),
        (
            "gptoss",
            {"content": "two", "reasoning_content": "one"},
            True,
            "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>",
        ),
        ("phi3", {"content": "one"}, True, "one<|end|>"),
        ("cohere2", {"content": "one"}, True, "one<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("glm4moe", {"content": "one"}, True, "one"),
        ("glm4moe", {"content": "one", "reasoning_content": "two"}, True, "\n<think>two</think>\none"),
        (
            "gemma4_v5",
            {"content": "one", "reasoning_content": "two"},
            True,
            "<|channel>thought\ntwo\n<channel|>one<turn|>",
        ),
        ("lfm2_2_5", {"content": "one", "reasoning_content": "two"}, True, "<think>two</think>one<|im_end|>"),
    ],
)
def test_what_is_learnt_of_an_answer_known_as_text(name: str, message: dict, finished: bool, learnt: str) -> None:
    tokenizer = published_tokenizer(name)
    conversation = Conversation("c", (QUESTION, {"role": "assistant", **message}), finished)
    assert tokenizer.decode(supervised(tokenize(conversation, tokenizer, DataOptions()))) == learnt


@pytest.mark.parametrize(
    ("name", "message", "finished", "cause"),
    [
        # Channels that were taken out of the text leave no trace of where they were.
        ("gptoss", {"content": "analysisThey gr"}, False, r"puts '<\|channel\|>final<\|message\|>' before an answer"),
        ("llama3", {"content": "two", "reasoning_content": "one"}, True, "its reasoning_content is not rendered"),
        ("glm4moe", {"content": "<think>\none\n</think>\n\ntwo"}, True, "rewrites the answer's text"),
        ("deepseek_r1_distill", {"content": "one</think>two"}, True, "not rendered after the template's generation pr"),
        ("qwen3_5_think", {"content": "one two"}, True, r"puts '\\n</think>\\n\\n' between .* data\.enable_thinking"),
        ("qwen3_5_think", {"content": "<think>\none"}, False, "begins with '<think>'"),
    ],
)
def test_what_cannot_be_known_is_refused(name: str, message: dict, finished: bool, cause: str) -> None:
    conversation = Conversation("c", (QUESTION, {"role": "assistant", **message}), finished)
    with pytest.raises(TemplateMismatch, match=cause):
        tokenize(conversation, published_tokenizer(name), DataOptions())


def test_answers_without_reasoning_follow_a_prompt_without_it() -> None:
    tokenizer, options = published_tokenizer("qwen3_5_think"), DataOptions(enable_thinking=False)
    conversation = Conversation("c", (QUESTION, {"role": "assistant", "content": "one two"}))
    sample = tokenize(conversation, tokenizer, options)
    prompt = render_prompt([QUESTION], tokenizer, options)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(supervised(sample)) == "one two<|im_end|>"


def test_channels_are_kept_and_come_back() -> None:
    tokenizer, options = published_tokenizer("gptoss"), DataOptions()
    said = (
        "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
    )
    ids = tokenizer.encode(said, add_special_tokens=False)
    prompt = render_prompt([QUESTION], tokenizer, options)
    kept = message_of(ids, True, [QUESTION], prompt, tokenizer, options)
    assert kept.message == {"role": "assistant", "content": "Hello!", "reasoning_content": "They greet."}
    assert kept.renders
    conversation = Conversation("c", (QUESTION, kept.message))
    for known in (conversation, replace(conversation, answer_ids=(tuple(ids),))):
        (sample,) = samples_of(known, tokenizer, options)
        assert sample.input_ids.tolist() == [*prompt, *ids]
        assert supervised(sample) == ids
    # Two answers in one, and a call of a tool: no message that renders them, yet the ids are all there.
    for odd in (
        said.replace("<|return|>", "<|end|><|start|>assistant") + said,
        "<|channel|>commentary to=f<|message|>{}<|call|>",
    ):
        ids = tokenizer.encode(odd, add_special_tokens=False)
        kept = message_of(ids, True, [QUESTION], prompt, tokenizer, options)
        assert not kept.renders
        (sample,) = samples_of(
            Conversation("c", (QUESTION, kept.message), answer_ids=(tuple(ids),)), tokenizer, options
        )
        assert supervised(sample) == ids
