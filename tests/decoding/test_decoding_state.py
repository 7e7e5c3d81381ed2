import torch

from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.decoding.state import DecodingState, new_state
from draftsmith.decoding.verify import Verdict

WIDTH = 4


def state_of(prompts: list[list[int]], max_new_tokens: int, stop: list[int], window: int = 100) -> DecodingState:
    request = Request.of(
        prompts, max_new_tokens=max_new_tokens, sampling=SamplingOptions(), stop_token_ids=stop, seed=0
    )
    return new_state(request, window, WIDTH, torch.device("cpu"))


def committed_tokens(state: DecodingState) -> list[list[int]]:
    return [
        row[begin:end]
        for row, begin, end in zip(
            state.tokens.tolist(), state.prompt_length.tolist(), state.length.tolist(), strict=True
        )
    ]


def commit(state: DecodingState, tokens: list[list[int]], counts: list[int]) -> list[int]:
    committed = state.commit(Verdict(torch.tensor(tokens), torch.tensor(counts)))
    state.record(committed)
    return committed.tolist()


def test_random_commits_equal_the_plain_loop() -> None:
    """Ragged rows, two stop ids, limits by max_new_tokens and by the window, all at once."""
    generator = torch.Generator().manual_seed(0)
    rows, stop = 64, [3, 11]
    prompts = [torch.randint(30, (1 + row % 9,), generator=generator).tolist() for row in range(rows)]
    prompts[0] = [3, 11, 3]  # stop ids in a prompt stop nothing
    state = state_of(prompts, 15, stop, window=20)
    expected: list[list[int]] = [[] for _ in prompts]
    history: list[list[int]] = [[] for _ in prompts]
    reasons = ["" for _ in prompts]
    for _ in range(20):
        tokens = torch.randint(30, (rows, WIDTH), generator=generator)
        counts = torch.randint(1, WIDTH + 1, (rows,), generator=generator)
        commit(state, tokens.tolist(), counts.tolist())
        for row in range(rows):
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
    assert committed_tokens(state) == expected
    assert state.finished.all()
    assert state.stopped.tolist() == [reason == "stop" for reason in reasons]
    assert set(reasons) == {"stop", "length"}
    found = [lengths[:count] for lengths, count in zip(state.accept_lengths, state.verifies, strict=True)]
    assert [lengths.tolist() for lengths in found] == history
    assert [row[: len(prompt)] for row, prompt in zip(state.tokens.tolist(), prompts, strict=True)] == prompts


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    state = state_of([[1]], 3, [9])
    assert commit(state, [[5, 6, 9, 7]], [4]) == [3]
    assert state.stopped.tolist() == [True]


def test_a_stop_id_past_the_limit_or_past_the_count_is_none() -> None:
    state = state_of([[1], [1]], 3, [9])
    assert commit(state, [[5, 6, 7, 9], [5, 9, 9, 9]], [4, 1]) == [3, 1]
    assert state.stopped.tolist() == [False, False]
    assert state.finished.tolist() == [True, False]


def test_finished_rows_do_not_change() -> None:
    state = state_of([[1, 2], [1]], 2, [9])
    commit(state, [[9, 0, 0, 0], [4, 0, 0, 0]], [1, 1])
    before = committed_tokens(state)[0], state.verifies[0].item()
    assert commit(state, [[7, 7, 7, 7], [9, 7, 7, 7]], [4, 4]) == [0, 1]
    assert (committed_tokens(state)[0], state.verifies[0].item()) == before
    assert committed_tokens(state)[1] == [4, 9]


def test_verify_positions_stay_below_the_limit() -> None:
    state = state_of([[1, 2, 3], [1]], 6, [], window=5)  # limits 5 and 5
    commit(state, [[4, 5, 6, 7], [4, 5, 6, 7]], [1, 1])
    assert state.verify_positions(WIDTH).tolist() == [[3, 4, 4, 4], [1, 2, 3, 4]]
