"""A benchmark of small random models: what it records, and that all figures follow from the records."""

import json
import logging
from collections import defaultdict
from dataclasses import replace

import pytest
from pydantic import ValidationError

from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry, RunningDecoder, request
from draftsmith.bench.figures import figures
from draftsmith.bench.measure import bench, write_benchmark
from draftsmith.bench.options import BenchOptions
from draftsmith.bench.records import PLAIN, read_report
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.errors import DraftsmithError
from tests.bench.made import wordy_target
from tests.support.tiny_draft import tiny_draft

PROMPTS = [
    Prompt("one", ("say one",), "odd"),
    Prompt("two", ("say two", "and the"), "even"),
    Prompt("three", ("on",), "odd"),
]


@pytest.fixture(scope="module")
def target():
    return wordy_target()


@pytest.fixture(scope="module")
def chat(target):
    return Chat(target.tokenizer, DataOptions())


@pytest.fixture(scope="module")
def drafts(target):
    return [DraftEntry("small", tiny_draft(target, block_size=4)), DraftEntry("wide", tiny_draft(target, seed=5))]


@pytest.fixture(scope="module")
def measured(target, drafts, chat):
    options = BenchOptions(batch_size=[1, 2], max_new_tokens=11, shown=2, warmup=0)
    return bench(target, drafts, PROMPTS, options, chat)


def test_every_decoder_answers_every_turn_of_every_prompt(measured):
    places = {(a.decoder, a.batch_size, a.prompt, a.turn) for a in measured.answers}
    turns = [(prompt.id, turn) for prompt in PROMPTS for turn in range(len(prompt.turns))]
    assert places == {(d, b, *t) for d in (PLAIN, "small", "wide") for b in (1, 2) for t in turns}
    assert len(places) == len(measured.answers)
    for answer in measured.answers:
        assert sum(answer.accept_lengths) == len(answer.token_ids) - 1
    assert max(n for a in measured.answers for n in a.accept_lengths) >= 2, "no draft is ever right: nothing is tested"


def test_the_plain_answer_is_the_history_of_the_next_turn(measured, chat):
    (first,) = [a for a in measured.answers_of(PLAIN, 1) if a.prompt == "two" and a.turn == 0]
    expected = chat.prompt_ids(PROMPTS[1], 1, [first.token_ids])
    assert {a.prompt_tokens for a in measured.answers if a.prompt == "two" and a.turn == 1} == {len(expected)}
    assert len(expected) > len(chat.prompt_ids(PROMPTS[1], 1, []))


def test_outputs_and_accept_lengths_do_not_depend_on_the_batch(measured):
    for decoder in ("small", "wide"):
        alone, together = (
            {(a.prompt, a.turn): (a.token_ids, a.accept_lengths) for a in measured.answers_of(decoder, size)}
            for size in (1, 2)
        )
        assert alone == together
    assert {a.equal_tokens == a.plain_tokens == len(a.token_ids) for a in measured.answers_of("wide", 1)} == {True}


def test_all_figures_follow_from_the_lines(measured, tmp_path):
    """An independent reader of `bench.jsonl` arrives at the summary of `bench.json`."""
    write_benchmark(measured, tmp_path / "bench.json", tmp_path / "bench.jsonl", tmp_path / "bench.html")
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "bench.json").read_text())["summary"]
    assert len(summary) == 6
    for said in summary:
        mine = [x for x in lines if x.get("decoder") == said["decoder"] and x.get("batch_size") == said["batch_size"]]
        answers, rounds = [x for x in mine if x["kind"] == "answer"], [x for x in mine if x["kind"] == "round"]
        tokens, seconds = sum(r["tokens"] for r in rounds), sum(r["seconds"] for r in rounds)
        first = sum(r["first_token_seconds"] for r in rounds)
        rows = sum(len(r["prompts"]) for r in rounds)
        assert said["tokens_per_second"]["value"] == pytest.approx(tokens / seconds)
        assert said["decode_tokens_per_second"]["value"] == pytest.approx((tokens - rows) / (seconds - first))
        assert said["first_token_seconds"] == pytest.approx(first / len(rounds))
        assert said["cycle_seconds"] == pytest.approx((seconds - first) / sum(r["cycles"] for r in rounds))
        assert said["new_tokens"] == sum(len(a["token_ids"]) for a in answers) == tokens
        if said["decoder"] == PLAIN:
            continue
        counted = [a["accept_lengths"][: len(a["accept_lengths"]) - (a["finish_reason"] == "length")] for a in answers]
        lengths = [n for row in counted for n in row]
        assert said["accept_length"]["value"] == pytest.approx(sum(lengths) / len(lengths))
        assert said["histogram"] == [lengths.count(n) for n in range(1, max(lengths) + 1)]
        by_kind = defaultdict(list)
        for answer, row in zip(answers, counted, strict=True):
            by_kind[answer["category"]] += row
        for kind, row in by_kind.items():
            assert said["accept_length_by_category"][kind]["value"] == pytest.approx(sum(row) / len(row))
        (decoder,) = [x for x in lines if x["kind"] == "decoder" and x["name"] == said["decoder"]]
        share = 1.0
        for slot in range(decoder["proposals"]):
            sure = [n for a in answers for n in a["accept_lengths"] if n >= slot + 2]
            refused = [n for a in answers for n in a["accept_lengths"][:-1] if n == slot + 1]
            if not sure and not refused:
                assert said["slots"]["conditional"][slot] is None
                break
            share *= len(sure) / (len(sure) + len(refused))
            assert said["slots"]["joint"][slot] == pytest.approx(share)
        equal = sum(a["equal_tokens"] for a in answers) / sum(
            max(len(a["token_ids"]), a["plain_tokens"]) for a in answers
        )
        assert said["equal_share"] == pytest.approx(equal)
    asked = [x for x in lines if x["kind"] == "prompt"]
    assert [(x["id"], *x["turns"]) for x in asked] == [(prompt.id, *prompt.turns) for prompt in PROMPTS]
    assert read_report(tmp_path / "bench.json") == measured


def test_a_shown_text_says_how_every_token_came(measured, chat):
    assert {(text.decoder, text.prompt) for text in measured.shown} == {
        (d, p) for d in ("small", "wide") for p in ("one", "two")
    }
    came = set()
    for text in measured.shown:
        (answer,) = [a for a in measured.answers_of(text.decoder, 1) if (a.prompt, a.turn) == (text.prompt, text.turn)]
        assert "".join(token.text for token in text.tokens) == chat.tokenizer.decode(answer.token_ids)
        whole = sum(answer.accept_lengths[:-1])
        accepted = sum(n - 1 for n in answer.accept_lengths[:-1])
        assert sum(token.came == "accepted" for token in text.tokens[1 : 1 + whole]) == accepted
        for token in text.tokens:
            came.add(token.came)
            assert 0 < token.target <= 1
            # An accepted proposal is the draft's own; a corrected one replaces another token.
            assert (token.draft is not None) == (token.came == "accepted")
            assert (token.instead is not None) == (token.came == "corrected")
            assert token.instead != token.text or token.instead is None
    assert came >= {"prefill", "accepted", "corrected"}


def test_sampled_answers_belong_to_the_seed_and_the_prompt(target, drafts, chat):
    def sampled(seed, batch_size):
        options = BenchOptions(temperature=0.9, seed=seed, batch_size=batch_size, max_new_tokens=9, warmup=0, shown=1)
        return bench(target, drafts[:1], [PROMPTS[0], PROMPTS[2]], options, chat)

    def said(report, decoder):
        return [a.token_ids for a in report.answers if a.decoder == decoder]

    first = sampled([7, 8], 1)
    assert said(first, PLAIN)[:2] == said(sampled(7, 2), PLAIN)
    # Deterministic proposals and noise that belongs to positions: sampling with a draft draws the same tokens.
    assert said(first, "small") == said(first, PLAIN)
    assert said(first, PLAIN)[:2] != said(first, PLAIN)[2:]
    assert figures(first, first.drafts[0], 1).equal_share is None
    (answer,) = [a for a in first.answers_of("small", 1) if (a.prompt, a.turn, a.seed) == ("one", 0, 7)]
    most, tokens = first.drafts[0].proposals, first.shown[0].tokens[1:]
    assert all(token.draft is None and token.instead is None for token in tokens)
    # What a verify's last token was follows from its length, but for the answer's last one.
    for verify, length in enumerate(answer.accept_lengths):
        end = sum(answer.accept_lengths[: verify + 1])
        wanted = "bonus" if length > most else "corrected" if end < len(tokens) else "ended"
        assert [token.came for token in tokens[end - length : end]] == ["accepted"] * (length - 1) + [wanted]
    assert tokens[-1].came == "ended"


def test_rows_that_wait_give_the_same_answers(target, drafts, chat, measured):
    options = BenchOptions(batch_size=1, rows_waiting=3, max_new_tokens=11, warmup=0, shown=0)
    waited = bench(target, drafts[:1], PROMPTS, options, chat)
    assert {(a.prompt, a.turn): a.token_ids for a in waited.answers_of("small", 1)} == {
        (a.prompt, a.turn): a.token_ids for a in measured.answers_of("small", 1)
    }
    assert [len(r.prompts) for r in waited.rounds_of("small", 1)] == [3, 1]
    assert [r.cycles is None for r in waited.rounds_of("small", 1)] == [True, False]


def test_fewer_proposals_by_the_engine_options(target, drafts, chat):
    options = BenchOptions(max_new_tokens=9, warmup=0, shown=0)
    found = bench(target, drafts[1:], PROMPTS[:1], options, chat, EngineOptions(num_proposals=1))
    assert found.setting["engine"]["num_proposals"] == 1
    assert found.drafts[0].proposals == 1
    assert max(found.answers_of("wide", 1)[0].accept_lengths) <= 2


def test_a_batch_wider_than_there_are_prompts_is_said(target, drafts, chat, caplog):
    caplog.set_level(logging.WARNING, logger="draftsmith")
    options = BenchOptions(batch_size=[1, 3], max_new_tokens=4, warmup=0, shown=0)
    found = bench(target, drafts[:1], PROMPTS[:2], options, chat)
    (told,) = caplog.messages
    assert "bench.batch_size has 3, and there are 2 prompts" in told
    assert [figures(found, found.drafts[0], size).batch for size in (1, 3)] == ["batch size 1", "batch size 3, 2 rows"]


def test_what_cannot_be_measured(target, drafts, chat):
    with pytest.raises(DraftsmithError, match=r"no prompts; .*bench\.prompts"):
        bench(target, drafts, [], BenchOptions(), chat)
    with pytest.raises(DraftsmithError, match="two decoders are called 'small'"):
        bench(target, [drafts[0], drafts[0]], PROMPTS, BenchOptions(), chat)


@pytest.mark.parametrize("content", ["{", "[1]", '{"summary": {}}', '{"version": 2, "rounds": []}'])
def test_a_damaged_report_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(DraftsmithError, match=r"(?s)bench\.json is not a report .*run `draftsmith bench` again"):
        read_report(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", float("inf")), ("seed", -1), ("seed", [1, 2**63]), ("batch_size", 0), ("batch_size", [])],
)
def test_options_that_the_engine_would_refuse_are_refused_by_the_recipe(name, value):
    with pytest.raises(ValidationError, match=name):
        BenchOptions(**{name: value})


def test_an_answer_that_differs_is_held_against_plain_decoding_at_the_verifys_width(target, drafts, chat, monkeypatch):
    """Plain decoding that says something else than the target: the drafts' answers are right at their own width."""
    decode = RunningDecoder.timed

    def changed(self, request):
        timed = decode(self, request)
        if self.name == PLAIN:
            first = timed.generations[0]
            ids = [first.token_ids[0], *first.token_ids[:-1]]
            timed.generations[0] = replace(first, token_ids=ids)
        return timed

    monkeypatch.setattr(RunningDecoder, "timed", changed)
    options = BenchOptions(max_new_tokens=9, batch_size=2, warmup=0, shown=0)
    found = bench(target, drafts[:1], [PROMPTS[0], PROMPTS[2]], options, chat).answers_of("small", 2)
    assert [answer.equal_at_width for answer in found] == [True, None]
    assert found[0].equal_tokens < len(found[0].token_ids)


def test_engines_say_when_they_prepared_something(target, drafts):
    engine = Engine(target, drafts[0].draft, EngineOptions(slots=1))
    ask = request([[40, 41]], [0], BenchOptions(max_new_tokens=4), ())
    engine.decode(ask)
    before = engine.preparations
    engine.decode(ask)
    assert engine.preparations == before
    engine.decode(request([[40] * 300], [0], BenchOptions(max_new_tokens=4), ()))
    assert engine.preparations != before
