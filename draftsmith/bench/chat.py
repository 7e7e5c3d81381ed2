"""Conversations as the benchmark asks them: rendered by the target's chat template, and tokens as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import answer_text, render_prompt, special_token_ids
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.data.said import message_of

_INCOMPLETE = "\ufffd"
"""What stands for bytes that are no whole character yet."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the settings of its chat template."""

    tokenizer: PreTrainedTokenizerBase
    data: DataOptions

    def prompt_ids(self, prompt: Prompt, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """The token ids after which the answer to `turn` (0-based) begins; answers: token ids of the turns before,
        which become messages as those of `regenerate` do."""
        special = special_token_ids(self.tokenizer)
        before: list[dict[str, str]] = []
        for answer in answers[:turn]:
            question = prompt.question(before)
            asked = render_prompt(question, self.tokenizer, self.data)
            finished = answer[-1] in special
            before.append(message_of(answer, finished, question, asked, self.tokenizer, self.data).message)
        return render_prompt(prompt.question(before), self.tokenizer, self.data)

    def text(self, token_ids: Sequence[int]) -> str:
        """What a reader of an answer sees."""
        return answer_text(token_ids, self.tokenizer)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's share of the text, special tokens by their names. A character of several tokens belongs to the
        last of them."""
        shown, pieces = "", []
        for end in range(1, len(token_ids) + 1):
            text = answer_text(token_ids[:end], self.tokenizer, special_tokens=True)
            whole = end == len(token_ids) or not text.endswith(_INCOMPLETE)
            pieces.append(text[len(shown) :] if whole else "")
            shown = text if whole else shown
        return pieces
