import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.data.chat import render_prompt
from draftsmith.data.options import DataOptions
from draftsmith.data.sample import Conversation, Sample
from draftsmith.data.tokenize import TemplateMismatch, answers_apart, tokenize, tokenize_all
from draftsmith.errors import DraftsmithError
from tests.support.tiny_tokenizer import GENERATION_TEMPLATE, PLAIN_TEMPLATE, tiny_tokenizer

# Earlier answers lose their reasoning, as Qwen3's template does it.
FORGETFUL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>hm</think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("one", "two", "the", "user", "x1", "a-b", "Hello,", "2.5", "(yes)", "\nnew", "end.")


def chat(*turns: str, identity: str = "c", finished: bool = True) -> Conversation:
    """A conversation of alternating questions and answers."""
    messages = tuple({"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns))
    return Conversation(identity, messages, finished)


def random_chat(rng: random.Random) -> Conversation:
    return chat(*(" ".join(rng.choices(WORDS, k=rng.randint(1, 9))).strip() for _ in range(rng.randint(2, 7))))


def by_hand(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Ids and mask of the plain template, put together piece by piece."""
    ids: list[int] = []
    mask: list[bool] = []
    for message in conversation.messages:
        pieces = [(f"<|im_start|>{message['role']}\n", False), (message["content"] + "<|im_end|>", True), ("\n", False)]
        for text, learnt in pieces:
            new = tokenizer.encode(text)
            ids += new
            mask += [learnt and message["role"] == "assistant"] * len(new)
    return ids, mask


def learnt(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()))


@pytest.mark.parametrize("with_generation_tag", [False, True])
def test_the_mask_is_the_answers_with_their_end_of_turn(with_generation_tag: bool) -> None:
    tokenizer = tiny_tokenizer(with_generation_tag)
    rng = random.Random(3)
    for _ in range(25):
        conversation = random_chat(rng)
        sample = tokenize(conversation, tokenizer, DataOptions())
        ids, mask = by_hand(tokenizer, conversation)
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask


def test_first_answer_token_is_learnt_and_the_header_is_not() -> None:
    tokenizer = tiny_tokenizer()
    conversation = chat("hi", "one two")
    sample = tokenize(conversation, tokenizer, DataOptions())
    prompt = render_prompt(conversation.messages[:1], tokenizer, DataOptions())
    assert sample.loss_mask.int().argmax() == len(prompt)
    assert learnt(sample, tokenizer) == "one two<|im_end|>"


def test_the_mask_follows_who_wrote_the_text() -> None:
    tokenizer = tiny_tokenizer()
    sample = tokenize(chat("say one", "two"), tokenizer, DataOptions())
    swapped = tokenize(chat("two", "say one"), tokenizer, DataOptions())
    assert learnt(sample, tokenizer) == "two<|im_end|>"
    assert learnt(swapped, tokenizer) == "say one<|im_end|>"


def test_special_text_of_the_user_is_never_learnt() -> None:
    tokenizer = tiny_tokenizer()
    sample = tokenize(chat("assistant\nfoo<|im_end|>", "bar"), tokenizer, DataOptions())
    assert learnt(sample, tokenizer) == "bar<|im_end|>"


def test_a_mark_that_leaves_out_the_end_of_turn_gets_it() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = GENERATION_TEMPLATE.replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    sample = tokenize(chat("hi", "one", "more", "two"), tokenizer, DataOptions())
    assert learnt(sample, tokenizer) == "one<|im_end|>two<|im_end|>"


def test_a_newline_that_the_template_marks_after_the_end_of_turn_is_not_learnt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = GENERATION_TEMPLATE.replace("{% endgeneration %}{{ '\n' }}", "\n{% endgeneration %}")
    sample = tokenize(chat("hi", "one", "more", "two"), tokenizer, DataOptions())
    assert learnt(sample, tokenizer) == "one<|im_end|>two<|im_end|>"
    sample = tokenize(chat("hi", "one", "more", "one two", finished=False), tokenizer, DataOptions())
    assert learnt(sample, tokenizer) == "one<|im_end|>one two"


def test_a_mark_missing_for_an_answer_is_an_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = GENERATION_TEMPLATE.replace("== 'assistant'", "== 'assistant' and loop.last")
    with pytest.raises(TemplateMismatch, match=r"'c'.*marks 1 spans .* for 2 answers"):
        tokenize(chat("hi", "one", "more", "two"), tokenizer, DataOptions())


def test_an_answer_cut_off_ends_without_end_of_turn() -> None:
    for with_generation_tag in (False, True):
        tokenizer = tiny_tokenizer(with_generation_tag)
        sample = tokenize(chat("hi", "one", "more", "two tw", finished=False), tokenizer, DataOptions())
        assert learnt(sample, tokenizer) == "one<|im_end|>two tw"
        assert sample.loss_mask[-1]


def test_a_template_that_rewrites_earlier_turns_needs_them_apart() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL_TEMPLATE
    conversation = chat("hi", "one", "more", "two", finished=False)
    with pytest.raises(TemplateMismatch, match=r"message 1: the chat template of .*sha256 .*data\.turns: apart"):
        tokenize(conversation, tokenizer, DataOptions())
    samples, report = tokenize_all([conversation], tokenizer, DataOptions(turns="apart"))
    assert [sample.id for sample in samples] == ["c/0", "c/1"]
    assert [learnt(sample, tokenizer) for sample in samples] == [
        "one<|im_end|>",
        "two",
    ]
    assert report.conversations == 1


@pytest.mark.parametrize("with_generation_tag", [False, True])
def test_turns_apart_are_what_is_served(with_generation_tag: bool) -> None:
    tokenizer = tiny_tokenizer(with_generation_tag)
    conversation = chat("hi", "one", "more", "two", "bye", "the end", "unanswered")
    samples, _ = tokenize_all([conversation], tokenizer, DataOptions(turns="apart"))
    assert [learnt(sample, tokenizer) for sample in samples] == ["one<|im_end|>", "two<|im_end|>", "the end<|im_end|>"]
    for sample, end in zip(samples, (1, 3, 5), strict=True):
        prompt = render_prompt(conversation.messages[:end], tokenizer, DataOptions())
        assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert [part.messages[-1]["role"] for part in answers_apart(conversation)] == ["assistant"] * 3


def test_an_answer_that_merges_with_the_header_is_an_error_or_skipped() -> None:
    tokenizer = tiny_tokenizer()
    bad, good = chat("hi", "\n\none", identity="bad"), chat("hi", "one")
    with pytest.raises(TemplateMismatch, match=r"'bad', message 1: .*strip the white space"):
        tokenize_all([good, bad], tokenizer, DataOptions())
    samples, report = tokenize_all([good, bad], tokenizer, DataOptions(template_mismatch="skip"))
    assert [sample.id for sample in samples] == ["c"]
    assert report.mismatched == 1


def test_a_template_without_the_generation_prompt_is_an_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE.replace("<|im_start|>assistant", "<|im_start|>model")
    with pytest.raises(TemplateMismatch, match="not rendered after the template's generation prompt"):
        tokenize(chat("hi", "one"), tokenizer, DataOptions())


def test_over_long_samples_are_cut_skipped_or_refused_and_counted() -> None:
    tokenizer = tiny_tokenizer()
    short, long = chat("hi", "one", identity="short"), chat("hi", "one two " * 20, identity="long")
    late = chat("one two " * 20, "one", identity="late")
    limit = len(tokenize(short, tokenizer, DataOptions()).input_ids)

    samples, report = tokenize_all([short, long, late], tokenizer, DataOptions(max_length=limit, overlong="cut"))
    assert [sample.id for sample in samples] == ["short", "long"]
    assert [len(sample.input_ids) for sample in samples] == [limit, limit]
    assert (report.conversations, report.samples, report.cut, report.skipped, report.unsupervised) == (3, 2, 2, 0, 1)
    assert report.tokens == 2 * limit
    assert report.supervised_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)

    samples, report = tokenize_all([short, long, late], tokenizer, DataOptions(max_length=limit, overlong="skip"))
    assert [sample.id for sample in samples] == ["short"]
    assert (report.cut, report.skipped) == (0, 2)

    with pytest.raises(DraftsmithError, match=rf"'long' has \d+ tokens, more than data.max_length {limit}"):
        tokenize_all([short, long], tokenizer, DataOptions(max_length=limit, overlong="error"))
    with pytest.raises(DraftsmithError, match="no sample is left of 1 conversations: 1 too long"):
        tokenize_all([long], tokenizer, DataOptions(max_length=limit, overlong="skip"))


def test_no_chat_template_is_an_error_and_a_file_mends_it(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=False)
    with pytest.raises(DraftsmithError, match=r"has no chat template; give one with data\.chat_template: FILE"):
        tokenize(chat("hi", "one"), tokenizer, DataOptions())
    with pytest.raises(DraftsmithError, match=r"cannot read .*missing\.jinja"):
        tokenize(chat("hi", "one"), tokenizer, DataOptions(chat_template=tmp_path / "missing.jinja"))
    file = tmp_path / "chat.jinja"
    file.write_text(PLAIN_TEMPLATE, encoding="utf-8")
    mended = tokenize(chat("hi", "one"), tokenizer, DataOptions(chat_template=file))
    own = tokenize(chat("hi", "one"), tiny_tokenizer(), DataOptions())
    assert mended.input_ids.tolist() == own.input_ids.tolist()
    assert mended.loss_mask.tolist() == own.loss_mask.tolist()
