"""The HTTP client against a real server on the loopback interface."""

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftsmith.base.http import JsonServer, NoAnswer, NotJson, Refused
from draftsmith.errors import DraftsmithError

Reply = tuple[int, bytes, dict[str, str]]


class Server(ThreadingHTTPServer):
    """Sends the planned replies one after the other, a byte each `drip` seconds; then `{"path": ...}`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.planned: list[Reply] = []
        self.drip = 0.0
        self.asked = 0

    def client(self, **settings: Any) -> JsonServer:
        defaults: dict[str, Any] = {"connections": 2, "timeout_seconds": 5.0, "backoff_seconds": 0.001}
        return JsonServer(f"http://127.0.0.1:{self.server_port}/v1/", **{**defaults, **settings})


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked += 1
        default: Reply = (200, b'{"path": "%s"}' % self.path.encode(), {})
        status, body, headers = self.server.planned.pop(0) if self.server.planned else default
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for byte in body:
            if self.server.drip:
                time.sleep(self.server.drip)
            try:
                self.wfile.write(bytes([byte]))
            except OSError:  # the client has had enough
                return

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_paths_lie_below_the_base(server: Server) -> None:
    with server.client() as client:
        assert client.get("/models") == {"path": "/v1/models"}
        assert client.post("/completions", {"a": 1}) == {"path": "/v1/completions"}


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_passing_faults_are_tried_again_and_said(server: Server, status: int, caplog: pytest.LogCaptureFixture) -> None:
    server.planned = [(status, b"busy", {})] * 2
    with caplog.at_level(logging.WARNING), server.client(retries=2) as client:
        assert client.get("/x") == {"path": "/v1/x"}
    assert server.asked == 3
    assert [r.message for r in caplog.records if "try 2 of 3" in r.message and f"HTTP {status}: busy" in r.message]
    assert len(caplog.records) == 1  # of many lines at a time one


def test_how_a_lasting_fault_ends(server: Server) -> None:
    server.planned = [(503, b"busy", {})] * 2
    with server.client(retries=1) as client:
        with pytest.raises(NoAnswer, match="failed 2 times, at last with HTTP 503: busy"):
            client.get("/x")
        server.planned = [(500, b"assert", {})] * 2  # the server is up, and fails over this request
        with pytest.raises(Refused, match="HTTP 500: assert") as caught:
            client.get("/x")
    assert caught.value.status == 500


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_other_statuses_are_final(server: Server, status: int) -> None:
    server.planned = [(status, b"no", {})]
    with server.client(retries=3) as client, pytest.raises(Refused, match=f"HTTP {status}: no"):
        client.get("/x")
    assert server.asked == 1


def test_the_wait_that_a_server_names_counts(server: Server) -> None:
    server.planned = [(429, b"", {"Retry-After": "0"}), (429, b"", {"Retry-After": "soon"})]
    with server.client(retries=2) as client:
        assert client.get("/x")


def test_a_reply_that_drips_has_a_deadline(server: Server) -> None:
    server.planned, server.drip = [(200, b"[" + b" " * 2000 + b"]", {})], 0.02
    with server.client(timeout_seconds=0.2) as client, pytest.raises(NoAnswer, match=r"no whole reply within 0\.2 s"):
        client.get("/x")


def test_no_server_and_no_json(server: Server) -> None:
    server.planned = [(200, b"<html>", {})]
    with server.client() as client, pytest.raises(NotJson, match="<html>"):
        client.get("/x")
    with (
        JsonServer("http://127.0.0.1:9", connections=1, timeout_seconds=1.0) as nobody,
        pytest.raises(NoAnswer, match="failed 1 times, at last with ConnectError"),
    ):
        nobody.get("/x")
    with pytest.raises(DraftsmithError, match="is no address"):
        JsonServer("http://[::1", connections=1, timeout_seconds=1.0)
