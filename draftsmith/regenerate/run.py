"""The `regenerate` stage: prompts in, conversations with the target's own answers out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.data.chat import template_fingerprint, with_system_prompt
from draftsmith.data.jsonl import read_records
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.options import EngineOptions
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate.answers import AnswerFile
from draftsmith.regenerate.dialogue import Dialogue
from draftsmith.regenerate.endpoint import ChatEndpoint, in_parallel, request_fields
from draftsmith.regenerate.local import answer_locally, fitting
from draftsmith.regenerate.options import EndpointOptions, RegenerateOptions
from draftsmith.regenerate.outcome import Outcome
from draftsmith.regenerate.refusals import PromptRefused, RefusedPrompts, refused_file
from draftsmith.targets.target import Target


@dataclass
class RegenerateReport:
    """path: the file of answers; prompts asked for; resumed: answers that were there already; answered: those of this
    run, with their new `tokens`; unrendered: answers of this run whose text the chat template renders to other tokens
    than were generated, so that only the kept tokens tell what was said; cut: conversations of the whole file whose
    last answer met the length limit; refused: prompts that have no answer, with the reasons in `refusals_path`."""

    path: Path
    prompts: int
    resumed: int
    answered: int = 0
    tokens: int = 0
    unrendered: int = 0
    cut: int = 0
    refused: int = 0
    refusals_path: Path | None = None

    def line(self) -> str:
        """The counts for people; what is rare only where it happened."""
        others = f", {self.unrendered:,} kept as tokens that their text does not give back" if self.unrendered else ""
        return (
            f"{self.answered:,} prompts answered with {self.tokens:,} tokens, {self.resumed:,} there before, "
            f"{self.cut:,} met the length limit{others}"
        )


def regenerate(
    target: Target | None,
    prompts: Sequence[Prompt],
    out: str | Path,
    options: RegenerateOptions,
    progress: Progress | None = None,
    *,
    data: DataOptions | None = None,
    engine: EngineOptions | None = None,
) -> RegenerateReport:
    """Writes the target's answers to `out`, a line a prompt in their order: {id, category?, messages,
    answer_token_ids?, finish_reason}.

    `answer_token_ids` are the generated tokens of each answer, of which training learns; the local engine gives them,
    and so do servers that return them (vLLM, SGLang).
    Each turn is asked after the earlier ones and their answers; a conversation ends early with an answer that meets the
    length limit. With `options.endpoint` a server answers, and `target` may be None. Answers are appended and made
    durable batch by batch; a run that stopped goes on with what is missing, and a finished one changes nothing. `data`
    holds the template settings, which training must share. engine: options of the local engine.

    A prompt that gets no answer (it outgrows the target's window, a server refuses it or ends its answer otherwise than
    with a stop or at the limit) is left out, and noted in a file beside `out`; a later run asks it again.

    DraftsmithError: no prompts, ids used twice, a target without tokenizer or chat template, `out` made from other
    prompts or with other settings, an endpoint that fails, and, with all other answers kept, more prompts without an
    answer than `options.max_refused_share`.
    """
    data = data or DataOptions()
    progress = progress or SilentProgress()
    _check_ids(prompts)
    file = AnswerFile(Path(out))
    local = _checked_target(target) if options.endpoint is None else None
    source = _source(local, options.endpoint, data)
    done = file.resume({**_asked(options), "target": source}, prompts)
    missing = [prompt for prompt in prompts if prompt.id not in done]
    report = RegenerateReport(file.path, prompts=len(prompts), resumed=len(done))
    refusals = RefusedPrompts(file.path, len(prompts), options.max_refused_share)
    if local is not None:
        missing = fitting(missing, local, data, refusals)
        refusals.check_share()
    if missing:
        with progress.stage("regenerate", total=len(missing), unit="prompts") as stage:
            for outcome in _outcomes(local, missing, options, data, engine or EngineOptions()):
                file.append(outcome.records)
                report.answered += len(outcome.records)
                report.tokens += outcome.tokens
                report.unrendered += outcome.unrendered
                for refused in outcome.refused:
                    refusals.add(refused)
                if report.answered == 0:
                    refusals.check_hope()
                stage.advance(len(outcome.records) + len(outcome.refused), tokens=f"{report.tokens:,}")
    answered = refusals.finish(prompts)
    report.refused = len(refusals.reasons)
    report.refusals_path = refusals.path if report.refused else None
    report.cut = sum(record["finish_reason"] == "length" for record in file.finish(answered))
    return report


def check_answers(out: str | Path, options: RegenerateOptions) -> None:
    """Raise `DraftsmithError` where `regenerate` could not go on with the answers in `out`, as far as that can be known
    without the target."""
    AnswerFile(Path(out)).check(_asked(options))


def unanswered(out: str | Path, prompts: Sequence[Prompt]) -> list[str]:
    """The ids of prompts that have neither an answer in `out` nor a note beside it that they were refused.

    Raises `DraftsmithError` where a line of either file is not JSON.
    """
    noted: set[str] = set()
    for path in (Path(out), refused_file(Path(out))):
        if path.is_file():
            noted |= {record["id"] for _, record in read_records(path) if isinstance(record, dict) and "id" in record}
    return [prompt.id for prompt in prompts if prompt.id not in noted]


def _asked(options: RegenerateOptions) -> dict[str, Any]:
    """What answers depend on beside the target."""
    return options.model_dump(exclude=set(options.WITHOUT_EFFECT))


def _source(local: Target | None, endpoint: EndpointOptions | None, data: DataOptions) -> dict[str, Any]:
    """Who answers, and how prompts are rendered: one of the two is given."""
    if local is not None:
        return {
            "source": local.source,
            "revision": local.revision,
            "dtype": str(local.dtype),
            "template": template_fingerprint(local.tokenizer, data),
        }
    assert endpoint is not None
    if data.chat_template is not None:
        raise DraftsmithError(
            f"data.chat_template is {data.chat_template}, but a server renders with its own template; start the "
            "server with that template and leave data.chat_template unset here"
        )
    return {"model": endpoint.model, **data.model_dump(include={"system_prompt", "enable_thinking"})}


def _outcomes(
    local: Target | None,
    prompts: Sequence[Prompt],
    options: RegenerateOptions,
    data: DataOptions,
    engine: EngineOptions,
) -> Iterator[Outcome]:
    """Answers by the target here, or by the server that `options` names."""
    if local is not None:
        return answer_locally(local, prompts, options, data, engine)
    assert options.endpoint is not None
    return _by_endpoint(options.endpoint, prompts, options, data)


def _by_endpoint(
    endpoint: EndpointOptions, prompts: Sequence[Prompt], options: RegenerateOptions, data: DataOptions
) -> Iterator[Outcome]:
    """Answers by a server, each conversation as it is finished."""
    settings = request_fields(options)
    if data.enable_thinking is not None:
        settings["chat_template_kwargs"] = {"enable_thinking": data.enable_thinking}

    def converse(prompt: Prompt) -> Outcome:
        dialogue = Dialogue(prompt)
        while not dialogue.finished:
            # Servers take 32-bit seeds at the least.
            request = {**settings, "seed": dialogue.seed(options.seed) % 2**31}
            try:
                answer = server.chat(with_system_prompt(dialogue.ask(), data), request, prompt_id=prompt.id)
            except PromptRefused as refused:
                return Outcome([], dialogue.tokens, (refused,))
            dialogue.tokens += answer.tokens
            dialogue.answer(answer.message, answer.finish_reason, answer.token_ids)
        return Outcome([dialogue.record()], dialogue.tokens)

    with ChatEndpoint(endpoint) as server:
        yield from in_parallel(converse, prompts, endpoint.concurrency)


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
