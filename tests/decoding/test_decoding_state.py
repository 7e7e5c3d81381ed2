import torch

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.pool import SlotPool
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.kernels.state.commit import commit
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.state.open_step import open_step
from draftsmith.targets.cache import KeysValuesShape, Room, StaticCache

WIDTH = 4


class Rows:
    """Slots whose prompts are read, and what the host makes of their reports."""

    def __init__(self, prompts: list[list[int]], max_new_tokens: int, stop: list[int], window: int = 100) -> None:
        request = Request.of(
            prompts, max_new_tokens=max_new_tokens, sampling=SamplingOptions(), stop_token_ids=stop, seed=0
        )
        self.answers = [Answer(request, row, window) for row in range(len(prompts))]
        longest = max(answer.limit for answer in self.answers)
        cache = StaticCache.allocate([KeysValuesShape(1, 1, 1)], Room(len(prompts), 1, 1, torch.float32, "cpu"))
        state = DecodingState.empty(len(prompts), longest, WIDTH, 2, torch.device("cpu"))
        self.pool = SlotPool(state, cache, None)
        self.pool.place(0, self.answers)
        state.finished.fill_(False)

    @property
    def state(self) -> DecodingState:
        return self.pool.state

    def commit(self, tokens: list[list[int]], counts: list[int]) -> list[int]:
        ids = torch.tensor(tokens)
        commit(self.state, ids, torch.tensor(counts), torch.ones_like(ids, dtype=torch.bool))
        lines = self.state.report.tolist()
        for answer, line in zip(self.answers, lines, strict=True):
            if not answer.finished:
                answer.read(line, verified=True)
        return [line[1] for line in lines]

    def committed(self) -> list[list[int]]:
        """The tokens on the device, which must be those that the host knows."""
        rows = zip(self.state.tokens.tolist(), self.answers, self.state.length.tolist(), strict=True)
        found = [row[len(answer.prompt) : end] for row, answer, end in rows]
        assert found == [answer.token_ids for answer in self.answers]
        return found


def test_random_commits_equal_the_plain_loop() -> None:
    """Ragged rows, two stop ids, limits by max_new_tokens and by the window, all at once."""
    generator = torch.Generator().manual_seed(0)
    count, stop = 64, [3, 11]
    prompts = [torch.randint(30, (1 + row % 9,), generator=generator).tolist() for row in range(count)]
    prompts[0] = [3, 11, 3]  # stop ids in a prompt stop nothing
    rows = Rows(prompts, 15, stop, window=20)
    expected: list[list[int]] = [[] for _ in prompts]
    history: list[list[int]] = [[] for _ in prompts]
    reasons = ["" for _ in prompts]
    for _ in range(20):
        tokens = torch.randint(30, (count, WIDTH), generator=generator)
        counts = torch.randint(1, WIDTH + 1, (count,), generator=generator)
        rows.commit(tokens.tolist(), counts.tolist())
        for row in range(count):
            if reasons[row]:
                continue
            before = len(expected[row])
            for token in tokens[row, : counts[row]].tolist():
                expected[row].append(token)
                if token in stop:
                    reasons[row] = "stop"
                elif len(expected[row]) == 15 or len(prompts[row]) + len(expected[row]) == 20:
                    reasons[row] = "length"
                if reasons[row]:
                    break
            history[row].append(len(expected[row]) - before)
    assert rows.committed() == expected
    assert rows.state.finished.all()
    assert [answer.finish_reason for answer in rows.answers] == reasons
    assert set(reasons) == {"stop", "length"}
    assert [answer.accept_lengths for answer in rows.answers] == history
    assert [row[: len(prompt)] for row, prompt in zip(rows.state.tokens.tolist(), prompts, strict=True)] == prompts


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    rows = Rows([[1]], 3, [9])
    assert rows.commit([[5, 6, 9, 7]], [4]) == [3]
    assert rows.answers[0].finish_reason == "stop"


def test_a_stop_id_past_the_limit_or_past_the_count_is_none() -> None:
    rows = Rows([[1], [1]], 3, [9])
    assert rows.commit([[5, 6, 7, 9], [5, 9, 9, 9]], [4, 1]) == [3, 1]
    assert [answer.finish_reason for answer in rows.answers] == ["length", None]


def test_the_room_for_stop_ids_that_are_not_there_stops_nothing() -> None:
    rows = Rows([[1]], 5, [9])  # room for two
    assert rows.commit([[0, 0, 0, 0]], [4]) == [4]
    assert not rows.answers[0].finished


def test_finished_rows_do_not_change() -> None:
    rows = Rows([[1, 2], [1]], 2, [9])
    rows.commit([[9, 0, 0, 0], [4, 0, 0, 0]], [1, 1])
    before = rows.committed()[0], list(rows.answers[0].accept_lengths)
    assert rows.commit([[7, 7, 7, 7], [9, 7, 7, 7]], [4, 4]) == [0, 1]
    assert (rows.committed()[0], rows.answers[0].accept_lengths) == before
    assert rows.committed()[1] == [4, 9]


def test_verify_positions_stay_in_the_window() -> None:
    rows = Rows([[1, 2, 3], [1]], 6, [], window=5)
    rows.commit([[4, 5, 6, 7], [4, 5, 6, 7]], [1, 1])
    anchors, ids, positions, valid = open_step(rows.state, width=WIDTH, own=WIDTH, num_ids=3, window=5)
    assert positions.tolist() == [[3, 4, 4, 4], [1, 2, 3, 4]]
    assert anchors.tolist() == [3, 1]
    assert valid.tolist() == [2, 4]
    rows.state.finished[1] = True
    assert open_step(rows.state, width=WIDTH, own=1, num_ids=3, window=5)[3].tolist() == [1, 0]
    assert ids.tolist() == [[4, 0, 0], [4, 0, 0]]


def test_a_slot_forgets_the_row_before() -> None:
    rows = Rows([[1, 2, 3], [1]], 4, [9])
    rows.commit([[9, 0, 0, 0], [4, 0, 0, 0]], [1, 1])
    rows.pool.release([0])
    request = Request.of([[7, 7]], max_new_tokens=3, sampling=SamplingOptions(0.5, 0.9, 3), seed=[12])
    fresh = Answer(request, 0, 100)
    rows.pool.place(0, [fresh])
    state = rows.state
    assert (state.length[0], state.limit[0], state.seeds[0], state.stop_count[0]) == (2, 5, 12, 0)
    assert state.finished.tolist() == [True, False]
    assert not state.stopped[0]
    assert (state.temperature[0], state.top_k[0]) == (0.5, 3)
    assert state.tokens[1, :2].tolist() == [1, 4]  # the neighbour's
