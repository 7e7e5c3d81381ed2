"""The `regenerate` stage: prompts in, conversations with the target's own answers out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.data.chat import answer_text, render_prompt, stop_token_ids, template_fingerprint, with_system_prompt
from draftsmith.data.options import DataOptions
from draftsmith.data.prompt import answer_message
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.generate import generate
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate.answers import AnswerFile
from draftsmith.regenerate.dialogue import Dialogue
from draftsmith.regenerate.endpoint import ChatEndpoint, EndpointOptions, in_parallel
from draftsmith.targets.target import Target

# The records of some prompts that are done, and how many new tokens they took.
Answers = tuple[list[dict[str, Any]], int]


class RegenerateOptions(BaseModel):
    """The recipe's `regenerate` section: how the target answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"batch_size", "endpoint"})
    """Fields that answers do not depend on: how many are made at a time, or where."""

    max_new_tokens: int = Field(default=512, ge=1, description="The most tokens of one answer.")
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="0: greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="1: off.")
    top_k: int = Field(default=0, ge=0, description="0: off.")
    seed: int = Field(default=0, ge=0, description="For sampling: an answer depends on it and on its prompt alone.")
    batch_size: int = Field(default=16, ge=1, description="Prompts that the local engine answers at a time.")
    endpoint: EndpointOptions | None = Field(
        default=None, description="An OpenAI-compatible server to ask in place of the local engine."
    )


@dataclass
class RegenerateReport:
    """path: the file of answers; prompts asked for; resumed: answers that were there already; answered: those of this
    run, with their new `tokens`; cut: conversations of the whole file whose last answer met the length limit."""

    path: Path
    prompts: int
    resumed: int
    answered: int = 0
    tokens: int = 0
    cut: int = 0


def regenerate(
    target: Target | None,
    prompts: Sequence[Prompt],
    out: str | Path,
    options: RegenerateOptions,
    progress: Progress | None = None,
    *,
    data: DataOptions | None = None,
) -> RegenerateReport:
    """Writes the target's answers to `out`: a line {id, category?, messages, finish_reason} a prompt, in their order.

    Each turn is asked after the earlier ones and their answers; a conversation ends early with an answer that meets the
    length limit. With `options.endpoint` a server answers, and `target` may be None. Answers are appended and made
    durable batch by batch; a run that stopped goes on with what is missing, and a finished one changes nothing. `data`
    holds the template settings, which training must share.

    DraftsmithError: no prompts, ids used twice, a target without tokenizer or chat template, `out` made from other
    prompts or with other settings, a prompt longer than the target's window, an endpoint that fails.
    """
    data = data or DataOptions()
    progress = progress or SilentProgress()
    _check_ids(prompts)
    file = AnswerFile(Path(out))
    if options.endpoint is None:
        local = _checked_target(target)
        source = {
            "source": local.source,
            "revision": local.revision,
            "dtype": str(local.dtype),
            "template": template_fingerprint(local.tokenizer, data),
        }
    else:
        if data.chat_template is not None:
            raise DraftsmithError(
                f"data.chat_template is {data.chat_template}, but a server renders with its own template; start the "
                "server with that template and leave data.chat_template unset here"
            )
        source = {"model": options.endpoint.model, **data.model_dump(include={"system_prompt", "enable_thinking"})}
    done = file.resume({**_asked(options), "target": source}, prompts)
    missing = [prompt for prompt in prompts if prompt.id not in done]
    report = RegenerateReport(file.path, prompts=len(prompts), resumed=len(done))
    if missing:
        with progress.stage("regenerate", total=len(missing), unit="prompts") as stage:
            if options.endpoint is None:
                answers = _by_target(local, missing, options, data)
            else:
                answers = _by_endpoint(options.endpoint, missing, options, data)
            for records, tokens in answers:
                file.append(records)
                report.answered += len(records)
                report.tokens += tokens
                stage.advance(len(records), tokens=f"{report.tokens:,}")
    report.cut = sum(record["finish_reason"] == "length" for record in file.finish(prompts))
    return report


def check_answers(out: str | Path, options: RegenerateOptions) -> None:
    """Raise `DraftsmithError` where `regenerate` could not go on with the answers in `out`, as far as that can be known
    without the target."""
    AnswerFile(Path(out)).check(_asked(options))


def _asked(options: RegenerateOptions) -> dict[str, Any]:
    """What answers depend on beside the target."""
    return options.model_dump(exclude=set(options.WITHOUT_EFFECT))


def _by_target(
    target: Target, prompts: Sequence[Prompt], options: RegenerateOptions, data: DataOptions
) -> Iterator[Answers]:
    """Answers by the local engine, in batches of prompts of like length."""
    tokenizer = target.tokenizer
    stops = stop_token_ids(tokenizer, target.model.generation_config)
    dialogues = [Dialogue(prompt) for prompt in prompts]
    dialogues.sort(key=lambda dialogue: len(_question_ids(dialogue, target, data)))
    for first in range(0, len(dialogues), options.batch_size):
        batch = dialogues[first : first + options.batch_size]
        tokens = 0
        while waiting := [dialogue for dialogue in batch if not dialogue.finished]:
            generations = generate(
                target,
                None,
                [_question_ids(dialogue, target, data) for dialogue in waiting],
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                stop_token_ids=stops,
                seed=[dialogue.seed(options.seed) for dialogue in waiting],
            )
            for dialogue, generation in zip(waiting, generations, strict=True):
                tokens += len(generation.token_ids)
                text = answer_text(generation.token_ids, tokenizer)
                if generation.finish_reason == "length":
                    # The limit may fall inside a character of several tokens, which then decodes to U+FFFD.
                    text = text.rstrip("\ufffd")
                dialogue.answer(answer_message(text), generation.finish_reason)
        yield [dialogue.record() for dialogue in batch], tokens


def _question_ids(dialogue: Dialogue, target: Target, data: DataOptions) -> list[int]:
    """The tokens of the conversation up to the next answer, which the target's window must have room for."""
    ids = render_prompt(dialogue.ask(), target.tokenizer, data)
    window = target.max_position_embeddings
    if len(ids) >= window:
        raise DraftsmithError(
            f"prompt {dialogue.prompt.id!r} has {len(ids)} tokens by its turn {dialogue.turn + 1}, and the target's "
            f"window is {window} tokens, of which at least one must be left for the answer; shorten or drop the prompt"
        )
    return ids


def _by_endpoint(
    endpoint: EndpointOptions, prompts: Sequence[Prompt], options: RegenerateOptions, data: DataOptions
) -> Iterator[Answers]:
    """Answers by a server, each conversation as it is finished."""
    settings: dict[str, Any] = {
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
    }
    if options.top_k:
        settings["top_k"] = options.top_k
    if data.enable_thinking is not None:
        settings["chat_template_kwargs"] = {"enable_thinking": data.enable_thinking}
    server = ChatEndpoint(endpoint)

    def converse(prompt: Prompt) -> Answers:
        dialogue = Dialogue(prompt)
        tokens = 0
        while not dialogue.finished:
            # Servers take 32-bit seeds at the least.
            request = {**settings, "seed": dialogue.seed(options.seed) % 2**31}
            answer = server.chat(with_system_prompt(dialogue.ask(), data), request, about=f"prompt {prompt.id!r}")
            tokens += answer.tokens
            dialogue.answer(answer.message, answer.finish_reason)
        return [dialogue.record()], tokens

    return in_parallel(converse, prompts, endpoint.concurrency)


def _checked_target(target: Target | None) -> Target:
    if target is None or target.tokenizer is None:
        found = "there is no target" if target is None else f"{target.source} has none"
        raise DraftsmithError(
            f"regenerate needs a target with a tokenizer, and {found}; "
            "give one (target.path), or name a server that answers (regenerate.endpoint)"
        )
    return target


def _check_ids(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise DraftsmithError("there are no prompts to answer; give at least one (data.prompts)")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DraftsmithError(f"two prompts have the id {prompt.id!r}; ids must be unique")
        seen.add(prompt.id)
