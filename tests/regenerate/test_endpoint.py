"""The endpoint backend against a real HTTP server on the loopback interface."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate import EndpointOptions, RegenerateOptions, regenerate


class Server(ThreadingHTTPServer):
    """Echoes the last question back; `replies` maps questions to [(status, body or None for the echo), ...] to send
    first, one a request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.replies: dict[str, list[tuple[int, Any]]] = {}
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.under_way = 0
        self.most_under_way = 0
        self.delay = 0.0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
            planned = self.server.replies.get(question)
            status, reply = planned.pop(0) if planned else (200, None)
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.under_way -= 1
        if status == 0:
            self.close_connection = True
            return
        if reply is None:
            reply = completion(f"You said: {question}")
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def completion(content: str | None, finish_reason: str = "stop", **message: str) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}],
        "usage": {"completion_tokens": 5},
    }


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def options(server: Server, **endpoint: Any) -> RegenerateOptions:
    settings = {"base_url": server.url, "model": "tiny", "backoff_seconds": 0.001, "concurrency": 3, **endpoint}
    return RegenerateOptions(max_new_tokens=20, temperature=0.5, top_k=4, endpoint=EndpointOptions(**settings))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def many(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", (f"question {index}",)) for index in range(count)]


def test_answers_turn_by_turn(server: Server, tmp_path: Path) -> None:
    prompts = [*many(4), Prompt("long", ("one", "two"), category="x", system="be kind")]
    report = regenerate(None, prompts, tmp_path / "out.jsonl", options(server))
    records = lines(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [prompt.id for prompt in prompts]
    assert records[-1] == {
        "id": "long",
        "category": "x",
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "You said: one"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "You said: two"},
        ],
        "finish_reason": "stop",
    }
    assert (report.answered, report.tokens, report.cut) == (5, 30, 0)


def test_the_request_says_what_was_configured(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_TEST_KEY", "k1")
    data = DataOptions(enable_thinking=False, system_prompt="be brief")
    regenerate(None, many(1), tmp_path / "out.jsonl", options(server, api_key_env="DRAFTSMITH_TEST_KEY"), data=data)
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k1"
    assert 0 <= body.pop("seed") < 2**31
    assert body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "question 0"}],
        "n": 1,
        "max_tokens": 20,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert [message["role"] for message in lines(tmp_path / "out.jsonl")[0]["messages"]] == ["user", "assistant"]


def test_what_is_off_is_said_and_not_left_to_the_servers_defaults(server: Server, tmp_path: Path) -> None:
    """Servers take what the target's generation_config.json says for every field that is silent."""
    endpoint = options(server).endpoint
    regenerate(None, many(1), tmp_path / "all.jsonl", RegenerateOptions(endpoint=endpoint))
    shorter = options(server, leave_out=("top_k", "n", "min_p")).endpoint
    regenerate(None, many(1), tmp_path / "fewer.jsonl", RegenerateOptions(endpoint=shorter))
    (_, _, every), (_, _, fewer) = server.requests
    off = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert off.items() <= every.items()
    assert set(every) - set(fewer) == {"top_k", "n", "min_p"}


def test_without_a_key_and_thinking_nothing_is_sent_for_them(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTSMITH_TEST_KEY", raising=False)
    regenerate(None, many(1), tmp_path / "out.jsonl", options(server, api_key_env="DRAFTSMITH_TEST_KEY"))
    ((_, headers, body),) = server.requests
    assert "Authorization" not in headers
    assert "chat_template_kwargs" not in body


def test_reasoning_and_cut_answers_are_kept(server: Server, tmp_path: Path) -> None:
    server.replies["one"] = [(200, completion("two", reasoning_content="thus"))]
    server.replies["three"] = [(200, completion(None, "length", reasoning="hmm"))]  # vLLM's name for it
    prompts = [Prompt("a", ("one",)), Prompt("b", ("three", "never asked"))]
    report = regenerate(None, prompts, tmp_path / "out.jsonl", options(server))
    first, second = lines(tmp_path / "out.jsonl")
    assert first["messages"][1] == {"role": "assistant", "content": "two", "reasoning_content": "thus"}
    assert second["messages"][1:] == [{"role": "assistant", "content": "", "reasoning_content": "hmm"}]
    assert second["finish_reason"] == "length"
    assert report.cut == 1


def test_token_ids_are_kept_where_every_answer_has_them(server: Server, tmp_path: Path) -> None:
    def with_ids(ids: Any) -> tuple[int, Any]:
        reply = completion("two")
        reply["choices"][0]["token_ids"] = ids
        return 200, reply

    server.replies = {"one": [with_ids([4, 2])], "three": [with_ids([5])], "four": [with_ids(None)]}
    prompts = [Prompt("a", ("one",)), Prompt("b", ("three", "four"))]
    regenerate(None, prompts, tmp_path / "out.jsonl", options(server))
    first, second = lines(tmp_path / "out.jsonl")
    assert first["answer_token_ids"] == [[4, 2]]
    assert "answer_token_ids" not in second


def test_concurrency_is_used_and_bounded(server: Server, tmp_path: Path) -> None:
    server.delay = 0.05
    regenerate(None, many(12), tmp_path / "out.jsonl", options(server))
    assert server.most_under_way == 3


def test_passing_faults_are_retried(server: Server, tmp_path: Path) -> None:
    server.replies = {
        "question 0": [(503, {"error": "busy"}), (429, {}), (0, None)],
        "question 1": [(500, {})],
    }
    report = regenerate(None, many(3), tmp_path / "out.jsonl", options(server, retries=3))
    assert report.answered == 3
    asked = Counter(body["messages"][-1]["content"] for _, _, body in server.requests)
    assert asked == {"question 0": 4, "question 1": 2, "question 2": 1}


def test_a_lasting_fault_keeps_what_is_done_and_can_be_resumed(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = many(6)
    server.replies["question 2"] = [(503, {"error": "busy"})] * 3
    with pytest.raises(DraftsmithError, match=r"prompt 'p2': .* failed 3 times, at last with HTTP 503: .*busy"):
        regenerate(None, prompts, out, options(server, retries=2, concurrency=1))
    assert {record["id"] for record in lines(out)} >= {"p0", "p1"}
    server.requests.clear()
    report = regenerate(None, prompts, out, options(server, retries=2, concurrency=5))
    assert report.resumed + report.answered == 6
    assert len(server.requests) == report.answered <= 4
    assert [record["id"] for record in lines(out)] == [prompt.id for prompt in prompts]


def test_a_refused_request_is_not_retried(server: Server, tmp_path: Path) -> None:
    server.replies["question 0"] = [(404, {"error": "no such model"})]
    with pytest.raises(DraftsmithError, match=r"refuses the request with HTTP 404: .*no such model"):
        regenerate(None, many(1), tmp_path / "out.jsonl", options(server))
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [{"choices": []}, ["?"], {"choices": [{"message": 3}]}])
def test_a_reply_that_is_something_else_ends_the_run(server: Server, tmp_path: Path, reply: Any) -> None:
    server.replies["question 0"] = [(200, reply)]
    with pytest.raises(DraftsmithError, match=r"prompt 'p0': .*not a chat completion"):
        regenerate(None, many(1), tmp_path / "out.jsonl", options(server))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((400, {"error": "maximum context length is 512"}), "HTTP 400: .*maximum context length"),
        ((422, {}), "HTTP 422"),
        ((200, completion("x", "tool_calls")), "ended the answer with 'tool_calls'"),
        ((200, completion("", "content_filter")), "ended the answer with 'content_filter'"),
        ((200, {"choices": [{"message": {"content": "x"}, "finish_reason": None}]}), "ended the answer with None"),
    ],
)
def test_one_prompt_without_an_answer_does_not_stop_the_others(
    server: Server, tmp_path: Path, reply: tuple[int, Any], reason: str
) -> None:
    out = tmp_path / "out.jsonl"
    prompts = [*many(6), Prompt("late", ("fine", "not fine"))]
    server.replies = {"question 2": [reply] * 2, "not fine": [reply] * 2}
    allowed = options(server).model_copy(update={"max_refused_share": 0.3})
    report = regenerate(None, prompts, out, allowed)
    assert [record["id"] for record in lines(out)] == ["p0", "p1", "p3", "p4", "p5"]
    assert (report.answered, report.refused, report.refusals_path) == (5, 2, tmp_path / "out.refused.jsonl")
    refused = {line["id"]: line["reason"] for line in lines(tmp_path / "out.refused.jsonl")}
    assert set(refused) == {"p2", "late"}
    assert all(re.search(reason, why) for why in refused.values())
    # Too many: the others are kept all the same.
    with pytest.raises(DraftsmithError, match=r"2 of 7 prompts have no answer: '\w+': .*max_refused_share.*are kept"):
        regenerate(None, prompts, out, options(server))
    assert len(lines(out)) == 5
    # The server can answer them now.
    report = regenerate(None, prompts, out, options(server))
    assert (report.resumed, report.answered, report.refused) == (5, 2, 0)
    assert not (tmp_path / "out.refused.jsonl").exists()


def test_where_every_prompt_is_refused_the_rest_is_not_tried(server: Server, tmp_path: Path) -> None:
    server.replies = {f"question {index}": [(400, {"error": "unknown field top_k"})] for index in range(60)}
    server.delay = 0.02
    with pytest.raises(DraftsmithError, match=r"the first 16 prompts were all refused.*unknown field top_k"):
        regenerate(None, many(60), tmp_path / "out.jsonl", options(server))
    assert len(server.requests) < 60
    assert len(lines(tmp_path / "out.refused.jsonl")) == 16


def test_a_prompt_over_which_the_server_fails_is_refused_at_the_last_try(server: Server, tmp_path: Path) -> None:
    server.replies["question 1"] = [(500, {"error": "assert"})] * 3
    allowed = options(server, retries=2).model_copy(update={"max_refused_share": 0.5})
    report = regenerate(None, many(3), tmp_path / "out.jsonl", allowed)
    assert (report.answered, report.refused) == (2, 1)


@pytest.mark.parametrize(
    "reply", [completion(""), completion(None), completion(" \n", reasoning=""), completion(None, "length")]
)
def test_an_empty_answer_is_none(server: Server, tmp_path: Path, reply: Any) -> None:
    server.replies["question 1"] = [(200, reply)]
    allowing = options(server).model_copy(update={"max_refused_share": 0.5})
    report = regenerate(None, many(3), tmp_path / "out.jsonl", allowing)
    assert (report.answered, report.refused) == (2, 1)
    assert [record["id"] for record in lines(tmp_path / "out.jsonl")] == ["p0", "p2"]
    assert "gave an empty answer" in report.refusals_path.read_text()
    # The next run asks again.
    assert regenerate(None, many(3), tmp_path / "out.jsonl", allowing).answered == 1
    strict = options(server).model_copy(update={"max_refused_share": 0.1})
    server.replies["question 0"] = [(200, reply)]
    with pytest.raises(DraftsmithError, match=r"1 of 3 prompts have no answer: 'p0': .* gave an empty answer"):
        regenerate(None, many(3), tmp_path / "other.jsonl", strict)


def test_no_server_at_all(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(DraftsmithError, match=r"failed 2 times, at last with .*; see that the server is up"):
        regenerate(None, many(1), tmp_path / "out.jsonl", options(server, retries=1))


def test_a_template_of_ones_own_cannot_be_sent(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="a server renders with its own template"):
        regenerate(
            None, many(1), tmp_path / "out.jsonl", options(server), data=DataOptions(chat_template=tmp_path / "x.jinja")
        )


def test_only_http_addresses() -> None:
    with pytest.raises(ValueError, match="base_url"):
        EndpointOptions(base_url="file:///etc/hosts", model="x")
