"""The token that a draft's empty slots read: it must be one that no text holds."""

from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import render_ids
from draftsmith.data.options import DataOptions
from draftsmith.errors import DraftsmithError


def check_mask_token(token: int, tokenizer: PreTrainedTokenizerBase, options: DataOptions, vocab_size: int) -> None:
    """Raise `DraftsmithError` for a token that is in every text: one that begins or ends texts, or that the chat
    template writes. vocab_size: the rows of the target's embedding."""
    ends = {"the tokenizer's eos token": tokenizer.eos_token_id, "the tokenizer's bos token": tokenizer.bos_token_id}
    reason = next((name for name, found in ends.items() if found == token), None)
    if reason is None and token in _written_by_the_template(tokenizer, options):
        reason = "written by the chat template into every conversation"
    if reason is not None:
        raise DraftsmithError(
            f"draft.mask_token_id is {token} ({tokenizer.convert_ids_to_tokens(token)!r}), which is {reason}: the "
            "draft could not tell it from an empty slot; take a token that no text holds"
            f"{_proposal(tokenizer, vocab_size)}"
        )


def _written_by_the_template(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> set[int]:
    """The special and added tokens of a small conversation; nothing where there is no template, or it takes none."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    written: set[int] = set()
    for generation_prompt, part in ((False, messages), (True, messages[:1])):
        try:
            written |= set(render_ids(part, tokenizer, options, generation_prompt=generation_prompt))
        except DraftsmithError:
            continue  # said where conversations are rendered
    return written & set(tokenizer.added_tokens_decoder)


def _proposal(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Ids that no text holds, for an error: beyond the tokenizer's tokens, or reserved by their names."""
    if len(tokenizer) < vocab_size:
        return (
            f", such as {len(tokenizer)}, the first of {vocab_size - len(tokenizer)} that the tokenizer does not have"
        )
    names = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
    spare = [token for token, name in names.items() if "reserved" in name or "unused" in name]
    return f", such as {spare[0]} ({names[spare[0]]!r})" if spare else ""
