import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.chat import answer_text, render_ids, render_prompt, special_token_ids, stop_token_ids
from draftsmith.data.conversations import read_conversations
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.data.tokenize import tokenize_all
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.runner import Runner
from draftsmith.decoding.scheduler import PoolShape, StepPlan
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate import RegenerateOptions, regenerate
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import tiny_tokenizer

OPTIONS = RegenerateOptions(max_new_tokens=9, batch_size=3)
PROMPTS = [
    Prompt("b", ("one two the one two the one",), category="x"),
    Prompt("a", ("hi",)),
    Prompt("c", ("say the", "and two", "bye")),
    Prompt("d", ("user one",), system="be brief"),
    Prompt("e", ("two, three?", "more")),
    Prompt("f", ("(one)",)),
    Prompt("g", ("the user said one",)),
]


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), seed=5)
    # A random model hardly ever ends a turn by its eos token: a tenth of the vocabulary does here.
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 10))
    return Target.from_model(model, tokenizer)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plainly(target: Target, prompt: Prompt, limit: int) -> tuple[list[dict[str, str]], str]:
    """One prompt answered by the Hugging Face model itself, a whole forward pass a token."""
    stops = stop_token_ids(target.tokenizer, target.model.generation_config)
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    reason = "stop"
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        ids = render_prompt(messages, target.tokenizer, DataOptions())
        answer: list[int] = []
        while len(answer) < limit and not (answer and answer[-1] in stops):
            with torch.no_grad():
                logits = target.model(torch.tensor([ids + answer])).logits
            answer.append(int(logits[0, -1].argmax()))
        messages.append({"role": "assistant", "content": target.tokenizer.decode(answer, skip_special_tokens=True)})
        reason = "stop" if answer[-1] in stops else "length"
        if reason == "length":
            break
    return messages, reason


class Stopping:
    """Progress that fails after some batches, as an interruption would."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator["Stopping"]:
        yield self

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_answers_are_the_targets_own(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "answers.jsonl"
    report = regenerate(target, PROMPTS, out, OPTIONS)
    records = lines(out)
    assert [record["id"] for record in records] == [prompt.id for prompt in PROMPTS]
    for record, prompt in zip(records, PROMPTS, strict=True):
        messages, reason = plainly(target, prompt, OPTIONS.max_new_tokens)
        assert record["messages"] == messages
        assert record["finish_reason"] == reason
        assert record.get("category") == prompt.category
    reasons = [record["finish_reason"] for record in records]
    assert set(reasons) == {"stop", "length"}
    assert max(len(record["messages"]) for record in records) > 2
    assert (report.prompts, report.answered, report.resumed) == (7, 7, 0)
    assert report.cut == reasons.count("length")


def test_answers_can_be_trained_on(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    regenerate(target, PROMPTS, out, OPTIONS)
    conversations = read_conversations(out)
    assert [not c.finished for c in conversations] == [r["finish_reason"] == "length" for r in lines(out)]
    samples, report = tokenize_all(conversations, target.tokenizer, DataOptions())
    assert (report.conversations, report.mismatched) == (len(PROMPTS), 0)
    learnt = [token for sample in samples for token in sample.input_ids[sample.loss_mask].tolist()]
    assert learnt == [token for record in lines(out) for ids in record["answer_token_ids"] for token in ids]


def test_every_answer_is_kept_with_the_tokens_that_were_generated(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    prompts = [Prompt(f"{number}", ("hi",)) for number in range(80)]
    options = RegenerateOptions(max_new_tokens=200, temperature=1.0, batch_size=40)
    report = regenerate(target, prompts, out, options)
    assert report.tokens == sum(len(ids) for record in lines(out) for ids in record["answer_token_ids"])
    unrendered = 0
    for record in lines(out):
        answers = [n for n, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        for index, ids in zip(answers, record["answer_token_ids"], strict=True):
            question = render_prompt(record["messages"][:index], target.tokenizer, DataOptions())
            assert record["messages"][index]["content"] in answer_text(ids, target.tokenizer, special_tokens=True)
            whole = render_ids(
                record["messages"][: index + 1], target.tokenizer, DataOptions(), generation_prompt=False
            )
            words = ids[:-1] if ids[-1] in special_token_ids(target.tokenizer) else ids
            finished = index < answers[-1] or record["finish_reason"] == "stop"
            unrendered += finished and whole[: len(question) + len(words)] != question + words
    # Random weights say what nobody writes.
    assert report.unrendered == unrendered > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_batches(target: Target, tmp_path: Path, temperature: float) -> None:
    files = []
    for size in (1, 2, 7):
        files.append(tmp_path / f"{size}.jsonl")
        options = OPTIONS.model_copy(update={"batch_size": size, "temperature": temperature})
        regenerate(target, PROMPTS, files[-1], options)
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()


def test_the_engine_s_options_reach_it_and_change_nothing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    forward = Target.forward

    def spy(self: Target, input_ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> Any:
        seen.add(input_ids.shape[1])
        return forward(self, input_ids, positions, **options)

    monkeypatch.setattr(Target, "forward", spy)
    regenerate(target, PROMPTS, tmp_path / "a.jsonl", OPTIONS)
    assert max(seen) > 2
    seen.clear()
    engine = EngineOptions(prefill_chunk=2, num_proposals=3, proposer={"rollout": "plain"})  # the draft's do not matter
    regenerate(target, PROMPTS, tmp_path / "b.jsonl", OPTIONS, engine=engine)
    assert max(seen) == 2
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_one_engine_answers_all_prompts_and_no_slot_waits_for_the_slowest_row(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(str(number), ("one two the " * (number % 3 + 1),)) for number in range(12)]
    shapes: list[PoolShape] = []
    steps: list[int] = []
    make, step = Runner.make, Runner.step

    def made(self: Runner, shape: PoolShape) -> None:
        shapes.append(shape)
        make(self, shape)

    def stepped(self: Runner, plan: StepPlan) -> None:
        steps.append(sum(row is not None for row in plan.rows))
        step(self, plan)

    monkeypatch.setattr(Runner, "make", made)
    monkeypatch.setattr(Runner, "step", stepped)
    options = OPTIONS.model_copy(update={"temperature": 1.0})
    regenerate(target, prompts, tmp_path / "answers.jsonl", options)
    assert [shape.slots for shape in shapes] == [3]
    lengths = [len(ids) for record in lines(tmp_path / "answers.jsonl") for ids in record["answer_token_ids"]]
    shortest_first = sorted(range(12), key=lambda number: number % 3)
    by_batches = sum(max(lengths[i] for i in shortest_first[at : at + 3]) - 1 for at in range(0, 12, 3))
    assert sum(steps) / len(steps) > 2
    assert len(steps) < by_batches
    regenerate(target, prompts[:2], tmp_path / "few.jsonl", options)
    assert [shape.slots for shape in shapes] == [3, 2]


def test_sampling_settings_change_the_answers(target: Target, tmp_path: Path) -> None:
    contents = []
    for index, changes in enumerate(({}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1})):
        out = tmp_path / f"{index}.jsonl"
        regenerate(target, PROMPTS, out, OPTIONS.model_copy(update=changes))
        contents.append(out.read_bytes())
    assert len(set(contents)) == 3


def test_an_interrupted_run_goes_on(target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    options = OPTIONS.model_copy(update={"temperature": 1.0})
    regenerate(target, PROMPTS, whole, options)

    with pytest.raises(KeyboardInterrupt):
        regenerate(target, PROMPTS, out, options, Stopping(2))
    assert len(lines(out)) == 6
    torn = out.read_bytes()[:-20]
    out.write_bytes(torn)
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        report = regenerate(target, PROMPTS, out, options)
    assert "dropped a torn last line" in caplog.text
    assert (report.resumed, report.answered) == (5, 2)
    assert out.read_bytes() == whole.read_bytes()

    again = regenerate(target, PROMPTS, out, options, Stopping(1))
    assert (again.resumed, again.answered, again.tokens) == (7, 0, 0)
    assert out.read_bytes() == whole.read_bytes()


def test_a_run_torn_in_its_first_line_starts_over(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    regenerate(target, PROMPTS[:1], out, OPTIONS)
    whole = out.read_bytes()
    out.write_bytes(whole[:9])
    assert regenerate(target, PROMPTS[:1], out, OPTIONS).answered == 1
    assert out.read_bytes() == whole


def test_other_settings_or_prompts_are_refused(target: Target, tmp_path: Path) -> None:
    out, prompts = tmp_path / "answers.jsonl", [*PROMPTS[:2], PROMPTS[3]]
    regenerate(target, prompts, out, OPTIONS)
    before = out.read_bytes()

    with pytest.raises(DraftsmithError, match=r"settings: max_new_tokens was 9, now 8; write to .* \(run=DIR\)"):
        regenerate(target, prompts, out, OPTIONS.model_copy(update={"max_new_tokens": 8}))
    with pytest.raises(DraftsmithError, match=r"target\.template was "):
        regenerate(target, prompts, out, OPTIONS, data=DataOptions(system_prompt="x"))
    with pytest.raises(DraftsmithError, match="answers 'b', which is not among the prompts"):
        regenerate(target, prompts[1:], out, OPTIONS)
    with pytest.raises(DraftsmithError, match="'a' was asked something else"):
        regenerate(target, [PROMPTS[0], Prompt("a", ("ho",)), PROMPTS[3]], out, OPTIONS)
    for system in (None, "", "be long"):
        with pytest.raises(DraftsmithError, match=r"'d' was asked something else then \(its turns, or its system"):
            regenerate(target, [*PROMPTS[:2], replace(PROMPTS[3], system=system)], out, OPTIONS)
    (tmp_path / "answers.jsonl.settings.json").unlink()
    with pytest.raises(DraftsmithError, match=r"without answers\.jsonl\.settings\.json"):
        regenerate(target, prompts, out, OPTIONS)
    assert out.read_bytes() == before


def test_a_prompt_that_was_put_elsewhere_keeps_its_answer(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    regenerate(target, PROMPTS[:2], out, OPTIONS)
    before = lines(out)
    moved = [replace(PROMPTS[1], category="new"), replace(PROMPTS[0], category=None)]
    assert regenerate(target, moved, out, OPTIONS).answered == 0
    answers = {record["id"]: record["messages"] for record in before}
    assert [(record["id"], record.get("category"), record["messages"]) for record in lines(out)] == [
        ("a", "new", answers["a"]),
        ("b", None, answers["b"]),
    ]


def test_a_damaged_file_is_refused(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    regenerate(target, PROMPTS[:2], out, OPTIONS)
    good = out.read_bytes()
    for content, message in (
        (b"{]\n" + good, r"answers\.jsonl:1: not valid JSON"),
        (b'{"id": "a"}\n' + good, r"answers\.jsonl:1: not an answer that regenerate wrote"),
        *(
            (b'{"id": %s, "messages": %s, "finish_reason": "stop"}\n' % line, r"answers\.jsonl:1: not an answer")
            for line in ((b'"a"', b"null"), (b'"a"', b"[]"), (b'"a"', b'["x"]'), (b'"a"', b"[{}]"), (b'["a"]', b"[]"))
        ),
        (good + good, r"answers\.jsonl:3: answers 'b' a second time"),
    ):
        out.write_bytes(content)
        with pytest.raises(DraftsmithError, match=message):
            regenerate(target, PROMPTS[:2], out, OPTIONS)


def test_a_prompt_longer_than_the_window_is_named_before_any_work(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    long = Prompt("too-long", ("x" * target.max_position_embeddings,))
    with pytest.raises(DraftsmithError, match=r"'too-long': has \d+ tokens by its turn 1, .* window is 512"):
        regenerate(target, [PROMPTS[0], long], out, OPTIONS)
    assert not out.exists()


def test_prompts_that_outgrow_the_window_are_left_out_and_the_others_answered(target: Target, tmp_path: Path) -> None:
    long = "x" * target.max_position_embeddings
    prompts = [Prompt("first", (long,)), Prompt("second", ("the user said one", long)), *PROMPTS]
    options = OPTIONS.model_copy(update={"max_refused_share": 0.5, "max_new_tokens": 60, "batch_size": 4})
    report = regenerate(target, prompts, tmp_path / "some.jsonl", options)
    regenerate(target, PROMPTS, tmp_path / "all.jsonl", options)
    assert lines(tmp_path / "some.jsonl") == lines(tmp_path / "all.jsonl")
    refused = {line["id"]: line["reason"] for line in lines(tmp_path / "some.refused.jsonl")}
    assert refused.keys() == {"first", "second"}
    assert "by its turn 2" in refused["second"]
    assert (report.refused, report.answered) == (2, len(PROMPTS))


def test_faults_known_beforehand(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    bare = Target.from_model(target.model)
    untemplated = Target.from_model(target.model, tiny_tokenizer(chat_template=False))
    with pytest.raises(DraftsmithError, match="there are no prompts"):
        regenerate(target, [], out, OPTIONS)
    with pytest.raises(DraftsmithError, match="two prompts have the id 'a'"):
        regenerate(target, [PROMPTS[1], PROMPTS[1]], out, OPTIONS)
    with pytest.raises(DraftsmithError, match="there is no target"):
        regenerate(None, PROMPTS, out, OPTIONS)
    with pytest.raises(DraftsmithError, match="needs a target with a tokenizer"):
        regenerate(bare, PROMPTS, out, OPTIONS)
    with pytest.raises(DraftsmithError, match="has no chat template"):
        regenerate(untemplated, PROMPTS, out, OPTIONS)
    assert not out.exists()
