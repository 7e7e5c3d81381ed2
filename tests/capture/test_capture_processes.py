"""Several processes fill one store: the same records as one process, bit for bit, whoever computes what, and whenever
they are killed (traps 18 and 19)."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.capture.plan import padded_tokens, plan_batches, share_batches
from draftsmith.features.reader import Store
from draftsmith.features.verify import verify_store
from tests.features.stores import equal
from tests.support.forks import fork

from . import forked_captures
from .forked_captures import LENGTHS, OPTIONS, POISON
from .samples import random_samples

KILLS = 30


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    count=st.integers(1, 9),
)
def test_shares_hold_every_batch_once_and_differ_by_one_batch_at_most(
    lengths: list[int], budget: int, count: int
) -> None:
    batches = plan_batches(random_samples(lengths), budget)
    shares = share_batches(batches, count)
    assert len(shares) == count
    assert sorted(batch[0].id for share in shares for batch in share) == sorted(batch[0].id for batch in batches)
    loads = [sum(map(padded_tokens, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(padded_tokens, batches))


def records(directory: Path) -> dict[str, Any]:
    return {record.sample_id: record for record in Store.open(directory)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All captures, whole and killed, by a process of its own, which can fork freely."""
    directory = tmp_path_factory.mktemp("captures")
    process = fork(forked_captures.main, directory, 7, KILLS, said=directory / "said")
    process.join(600)
    assert process.exitcode == 0, (directory / "said").read_text()[-3000:]
    return directory, json.loads((directory / "outcome.json").read_text())


@pytest.mark.slow
def test_two_processes_make_the_records_of_one(outcome: tuple[Path, dict[str, Any]]) -> None:
    directory, found = outcome
    assert found["said"]["one"] == [f"{len(LENGTHS)} 0"]
    assert found["said"]["two"] == [f"{len(LENGTHS)} 0"] * 2
    one, two = records(directory / "one"), records(directory / "two")
    assert one.keys() == two.keys()
    assert all(equal(one[sample_id], two[sample_id]) for sample_id in one)
    assert verify_store(directory / "two") == []
    shards = Store.open(directory / "two").manifest.shards
    tokens = [
        sum(shard.tokens for shard in shards if shard.tokens_file.name.startswith(f"shard-000{number}"))
        for number in (0, 1)
    ]
    assert abs(tokens[0] - tokens[1]) <= OPTIONS["tokens_per_batch"]


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_a_capture(outcome: tuple[Path, dict[str, Any]]) -> None:
    directory, found = outcome
    first, second = found["said"]["begun"]
    assert first == second
    captured, resumed = map(int, first.split())
    assert captured + resumed == len(LENGTHS)
    assert min(captured, resumed) > 0
    one, begun = records(directory / "one"), records(directory / "begun")
    assert one.keys() == begun.keys()
    assert all(equal(one[sample_id], begun[sample_id]) for sample_id in one)
    assert not list((directory / "begun").glob("shard-0002*"))


@pytest.mark.slow
def test_a_process_without_work_is_fine(outcome: tuple[Path, dict[str, Any]]) -> None:
    directory, found = outcome
    assert found["said"]["single"] == ["1 0"] * 2
    assert len(Store.open(directory / "single")) == 1


@pytest.mark.slow
def test_processes_with_other_samples_are_told(outcome: tuple[Path, dict[str, Any]]) -> None:
    directory, found = outcome
    assert all("processes [1] were given other samples than process 0" in said for said in found["said"]["uneven"])
    assert not (directory / "uneven").exists()


@pytest.mark.slow
def test_what_each_process_refuses_is_reported_together(outcome: tuple[Path, dict[str, Any]]) -> None:
    directory, found = outcome
    samples = random_samples(LENGTHS)
    spoilt = {sample.id for sample in samples if bool((sample.input_ids == POISON).any())}
    assert 2 <= len(spoilt) < len(samples)
    assert found["said"]["poisoned"] == [f"{len(samples) - len(spoilt)} 0"] * 2
    report = json.loads((directory / "poisoned" / "report.json").read_text())
    assert set(report["refused"]["not_finite"]) == spoilt
    assert set(records(directory / "poisoned")) == {sample.id for sample in samples} - spoilt


@pytest.mark.slow
def test_what_the_first_process_finds_wrong_all_say(outcome: tuple[Path, dict[str, Any]]) -> None:
    _, found = outcome
    assert all("dtype: the store has 'float32', this run needs 'fp8'" in said for said in found["said"]["other"])


@pytest.mark.slow
def test_a_finished_capture_is_not_done_again(outcome: tuple[Path, dict[str, Any]]) -> None:
    _, found = outcome
    assert found["said"]["again"] == [f"0 {len(LENGTHS)}"] * 2


@pytest.mark.slow
def test_killed_at_random_moments_nothing_is_lost_or_repeated(outcome: tuple[Path, dict[str, Any]]) -> None:
    """Every store that came out was compared with the whole one, record by record."""
    _, found = outcome
    assert found["killed"] >= KILLS
    assert found["stores"] >= 3
    assert found["resumed"] >= 1
