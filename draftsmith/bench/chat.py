"""Conversations as the benchmark asks them: rendered by the target's chat template, and tokens as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import render_prompt
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt

_INCOMPLETE = "\ufffd"
"""What stands for bytes that are no whole character yet."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the settings of its chat template."""

    tokenizer: PreTrainedTokenizerBase
    data: DataOptions

    def prompt_ids(self, prompt: Prompt, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """The token ids after which the answer to `turn` (0-based) begins; answers: token ids of the turns before."""
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for question, answer in zip(prompt.turns, answers, strict=False):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": self.text(answer)})
        messages.append({"role": "user", "content": prompt.turns[turn]})
        return render_prompt(messages, self.tokenizer, self.data)

    def text(self, token_ids: Sequence[int]) -> str:
        """What a reader of an answer sees."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's share of the text, special tokens by their names. A character of several tokens belongs to the
        last of them."""
        shown, pieces = "", []
        for end in range(1, len(token_ids) + 1):
            text = str(self.tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False))
            whole = end == len(token_ids) or not text.endswith(_INCOMPLETE)
            pieces.append(text[len(shown) :] if whole else "")
            shown = text if whole else shown
        return pieces
