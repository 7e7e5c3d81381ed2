"""Prompts as texts, chats and ids; where answers end; answers as texts."""

import pytest

from draftsmith import Target, generate
from draftsmith.data.chat import answer_text, render_prompt
from draftsmith.data.options import DataOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.errors import DraftsmithError
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import tiny_tokenizer

CHAT = [{"role": "user", "content": "say one"}]


@pytest.fixture(scope="module")
def speaker() -> Target:
    tokenizer = tiny_tokenizer()
    return Target.from_model(tiny_model("llama", vocab_size=len(tokenizer), seed=5), tokenizer)


def test_texts_and_chats_are_the_ids_that_the_tokenizer_gives(speaker: Target) -> None:
    tokenizer = speaker.tokenizer
    ids = [tokenizer.encode("one two"), render_prompt(CHAT, tokenizer, DataOptions()), [5, 6]]
    answers = generate(speaker, None, ["one two", CHAT, [5, 6]], max_new_tokens=9)
    assert answers == generate(speaker, None, ids, max_new_tokens=9)
    assert [one.token_ids for one in answers] != [answers[0].token_ids] * 3


def test_answers_have_their_text(speaker: Target) -> None:
    for answer in generate(speaker, None, ["one", CHAT], max_new_tokens=9):
        assert answer.text == answer_text(answer.token_ids, speaker.tokenizer)
    bare = Target.from_model(speaker.model)
    assert generate(bare, None, [[5]], max_new_tokens=3)[0].text is None


def test_answers_end_where_the_target_ends_its_turn(speaker: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    (endless,) = generate(speaker, None, [[5, 6]], max_new_tokens=12)
    assert endless.finish_reason == "length"
    fifth = endless.token_ids[4]
    cut = endless.token_ids.index(fifth) + 1
    for eos in (fifth, [fifth, 3], [10**6, fifth]):  # of a padded vocabulary, an id beyond the head's rows
        monkeypatch.setattr(speaker.model.generation_config, "eos_token_id", eos)
        (answer,) = generate(speaker, None, [[5, 6]], max_new_tokens=12)
        assert (answer.token_ids, answer.finish_reason) == (endless.token_ids[:cut], "stop")
    assert generate(speaker, None, [[5, 6]], max_new_tokens=12, stop_token_ids=()) == [endless]
    monkeypatch.undo()
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(fifth)
    told = Target.from_model(speaker.model, tokenizer)
    assert generate(told, None, [[5, 6]], max_new_tokens=12)[0].token_ids == endless.token_ids[:cut]


def test_a_request_of_texts_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="prompt 1 is the text 'Tell me'; a request holds lists of token ids"):
        Request.of([[1], "Tell me"], max_new_tokens=2, sampling=SamplingOptions())
