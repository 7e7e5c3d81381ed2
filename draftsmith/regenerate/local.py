"""Answers by the local engine."""

from collections import deque
from collections.abc import Iterator, Sequence

from draftsmith.data.chat import render_prompt, stop_token_ids
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.data.said import message_of
from draftsmith.decoding.answer import Answer
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate.dialogue import Dialogue
from draftsmith.regenerate.options import RegenerateOptions
from draftsmith.regenerate.outcome import Outcome
from draftsmith.regenerate.refusals import PromptRefused, RefusedPrompts
from draftsmith.targets.target import Target


def fitting(prompts: Sequence[Prompt], target: Target, data: DataOptions, refusals: RefusedPrompts) -> list[Prompt]:
    """The prompts whose first question the target's window has room for, shortest first; the others are refused."""
    lengths: dict[str, int] = {}
    for prompt in prompts:
        try:
            lengths[prompt.id] = len(_question_ids(Dialogue(prompt), target, data))
        except PromptRefused as refused:
            refusals.add(refused)
    return sorted((prompt for prompt in prompts if prompt.id in lengths), key=lambda prompt: lengths[prompt.id])


def answer_locally(
    target: Target, prompts: Sequence[Prompt], options: RegenerateOptions, data: DataOptions, engine: EngineOptions
) -> Iterator[Outcome]:
    """Answers by the local engine, which stays for the whole run: a conversation whose turn is answered makes room for
    the next. As soon as a batch of conversations is finished, they are given."""
    longest = len(_question_ids(Dialogue(prompts[-1]), target, data))  # the first questions' lengths rise
    slots = min(options.batch_size, len(prompts))
    local = Engine(target, None, engine.without_draft().model_copy(update={"slots": slots}))
    sampling = SamplingOptions.of(options)
    stops = stop_token_ids(target.tokenizer, target.model.generation_config)
    room = longest + options.max_new_tokens
    local.prepare(slots=slots, max_length=room, stops=len(stops), samplings=[sampling])
    upcoming = deque(Dialogue(prompt) for prompt in prompts)
    running: dict[Answer, Dialogue] = {}
    done: list[Outcome] = []  # one a conversation
    while upcoming or running:
        # As many again wait in the engine, so that no slot is free for want of a rendered prompt.
        while upcoming and len(running) < 2 * options.batch_size:
            dialogue = upcoming.popleft()
            try:
                ids = _question_ids(dialogue, target, data)
            except PromptRefused as refused:
                done.append(Outcome([], dialogue.tokens, (refused,), dialogue.unrendered))
                continue
            asked = Request.of(
                [ids],
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                stop_token_ids=stops,
                seed=[dialogue.seed(options.seed)],
            )
            (answer,) = local.submit(asked)
            running[answer] = dialogue
        for answer in [delta.answer for delta in local.step() if delta.last]:
            dialogue = running.pop(answer)
            _take(dialogue, answer, target, data)
            if dialogue.finished:
                done.append(Outcome([dialogue.record()], dialogue.tokens, (), dialogue.unrendered))
            else:
                upcoming.appendleft(dialogue)
        while len(done) >= options.batch_size:
            yield Outcome.of_all(done[: options.batch_size])
            del done[: options.batch_size]
    if done:
        yield Outcome.of_all(done)


def _take(dialogue: Dialogue, answer: Answer, target: Target, data: DataOptions) -> None:
    """Takes a finished answer into its dialogue. Raises `DraftsmithError` where the row met numbers that are not
    finite."""
    if answer.fault is not None:
        raise DraftsmithError(
            f"the {answer.fault} are NaN or infinite for prompt {dialogue.prompt.id!r}; check the weights, or use a "
            f"wider dtype than {target.dtype}"
        )
    ids, ended = answer.token_ids, answer.finish_reason == "stop"
    said = message_of(ids, ended, dialogue.ask(), answer.prompt, target.tokenizer, data)
    dialogue.answer(said.message, "stop" if ended else "length", ids)
    dialogue.tokens += len(ids)
    dialogue.unrendered += ended and not said.renders


def _question_ids(dialogue: Dialogue, target: Target, data: DataOptions) -> list[int]:
    """The tokens of the conversation up to the next answer. Raises `PromptRefused` where the target's window has no
    room for them and an answer."""
    ids = render_prompt(dialogue.ask(), target.tokenizer, data)
    window = target.max_position_embeddings
    if len(ids) >= window:
        raise PromptRefused(
            dialogue.prompt.id,
            f"has {len(ids)} tokens by its turn {dialogue.turn + 1}, and the target's window is {window} tokens, of "
            "which at least one must be left for the answer",
        )
    return ids
