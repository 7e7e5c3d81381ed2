import pytest

from draftsmith.data.mask_token import check_mask_token
from draftsmith.data.options import DataOptions
from draftsmith.errors import DraftsmithError
from tests.support.tiny_tokenizer import PLAIN_TEMPLATE, tiny_tokenizer


def refused(token: str, options: DataOptions | None = None, *, spare: int = 0, **changes: str) -> str:
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    number = tokenizer.convert_tokens_to_ids(token)
    with pytest.raises(DraftsmithError) as error:
        check_mask_token(number, tokenizer, options or DataOptions(), len(tokenizer) + spare)
    return str(error.value)


def test_tokens_of_every_text_are_refused() -> None:
    assert "the tokenizer's eos token" in refused("<|im_end|>")
    assert "the tokenizer's bos token" in refused("<|unknown|>", bos_token="<|unknown|>")
    assert "written by the chat template" in refused("<|im_start|>")
    # Only in the generation prompt, as a block of reasoning that is opened there.
    opened = PLAIN_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<|unknown|>{% endif %}")
    assert "written by the chat template" in refused("<|unknown|>", chat_template=opened)


def test_a_token_that_no_text_holds_is_proposed() -> None:
    tokenizer = tiny_tokenizer()
    assert refused("<|im_end|>", spare=3).endswith(
        f"such as {len(tokenizer)}, the first of 3 that the tokenizer does not have"
    )
    assert refused("<|im_end|>").endswith("take a token that no text holds")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_7|>"]})
    with pytest.raises(DraftsmithError, match=rf"such as {len(tokenizer) - 1} \('<\|reserved_7\|>'\)"):
        check_mask_token(tokenizer.eos_token_id, tokenizer, DataOptions(), len(tokenizer))


@pytest.mark.parametrize("chat_template", [True, False])
def test_other_tokens_may_be_masks(chat_template: bool) -> None:
    tokenizer = tiny_tokenizer(chat_template=chat_template)
    words = set(tokenizer.encode("hi hello user assistant\n"))
    for token in {tokenizer.pad_token_id, tokenizer.convert_tokens_to_ids("<|unknown|>"), len(tokenizer), *words}:
        check_mask_token(token, tokenizer, DataOptions(), len(tokenizer) + 1)
