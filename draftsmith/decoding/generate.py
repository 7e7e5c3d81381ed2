"""The one function that most users need."""

from collections.abc import Sequence

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target

__all__ = ["Generation", "generate"]


def generate(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_token_ids: Sequence[int] = (),
    seed: int | Sequence[int] | None = None,
    options: EngineOptions | None = None,
) -> list[Generation]:
    """Continues a batch of prompts, with the draft's help; the output is the target's own.

    prompts: token ids, one list a row, of any lengths. draft None: plain decoding, one token a target pass, through
    the same engine. Temperature 0 is greedy, and the tokens are those of plain greedy decoding at the verify's width
    (`EngineOptions.verify_width`; in 16 bits a pass of another width rounds differently, and a tie may fall the other
    way); above 0, tokens follow the target's distribution after temperature, then top-k (0: off), then top-p (1: off).
    A row ends after the first of `stop_token_ids` that it generates (kept), after max_new_tokens, or at the end of the
    target's window. seed: one number for the request, or one a row; None draws a fresh one from torch's default
    generator.

    Returns one `Generation` a prompt, in order. Raises `DraftsmithError` for draft and target that do not fit, values
    out of range, empty or over-long prompts and ids outside the vocabulary, before any work.
    """
    request = Request.of(
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=SamplingOptions(temperature=temperature, top_p=top_p, top_k=top_k),
        stop_token_ids=stop_token_ids,
        seed=seed,
    )
    return Engine(target, draft, options).decode(request)
