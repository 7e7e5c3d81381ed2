"""The one function that most users need."""

from collections.abc import Sequence
from dataclasses import replace

from draftsmith.data.chat import answer_text
from draftsmith.data.chat import stop_token_ids as own_stop_tokens
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.prompts import Prompt, prompt_ids
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target

__all__ = ["Generation", "generate"]


def generate(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    seed: int | Sequence[int] | None = None,
    options: EngineOptions | None = None,
) -> list[Generation]:
    """Continues a batch of prompts, with the draft's help; the output is the target's own.

    prompts: one a row, of any lengths: a text to go on with; a chat (a list of {"role", "content"}), rendered by the
    tokenizer's own chat template so that the assistant answers; or token ids. draft None: plain decoding, one token a
    target pass, through the same engine. Temperature 0 is greedy, and the tokens are those of plain greedy decoding at
    the verify's width (`EngineOptions.verify_width`; in 16 bits a pass of another width rounds differently, and a tie
    may fall the other way); above 0, tokens follow the target's distribution after temperature, then top-k (0: off),
    then top-p (1: off). A row ends after the first of `stop_token_ids` that it generates (kept), after max_new_tokens,
    or at the end of the target's window; None stops where the target ends its turn (its tokenizer's and generation
    configuration's end tokens), and () nowhere. seed: one number for the request, or one a row; None draws a fresh one
    from torch's default generator.

    Returns one `Generation` a prompt, in order, with its text where the target has a tokenizer. Raises
    `DraftsmithError` for draft and target that do not fit, values out of range, empty or over-long prompts, ids outside
    the vocabulary, and texts or chats for a target without a tokenizer, before any work.
    """
    if stop_token_ids is None:
        # A tokenizer may have more tokens than the head has rows: those are never generated.
        own = own_stop_tokens(target.tokenizer, target.model.generation_config)
        stop_token_ids = [token for token in own if token < target.vocab_size]
    request = Request.of(
        prompt_ids(prompts, target),
        max_new_tokens=max_new_tokens,
        sampling=SamplingOptions(temperature=temperature, top_p=top_p, top_k=top_k),
        stop_token_ids=stop_token_ids,
        seed=seed,
    )
    generations = Engine(target, draft, options).decode(request)
    if target.tokenizer is None:
        return generations
    return [replace(one, text=answer_text(one.token_ids, target.tokenizer)) for one in generations]
