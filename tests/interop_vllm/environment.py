"""The environment that `make interop-vllm` makes, and what is started in it."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from draftsmith.base.http import JsonServer, NoAnswer, NotJson

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DRAFTSMITH_VLLM_PYTHON", ROOT / ".venv-interop-vllm/bin/python"))
SCRIPTS = ROOT / "tests/interop_env"
MARKS = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make interop-vllm` makes"),
]
LONGEST_START = 300.0

_SMALL = ["--enforce-eager", "--max-num-seqs", "8"]


def _variables(**more: str) -> dict[str, str]:
    own = {
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),  # draftsmith's connector
    }
    return {**os.environ, **own, **more}


def run_jobs(directory: Path, jobs: dict[str, dict[str, Any]], *, interpreted: bool) -> dict[str, dict[str, Any]]:
    """Each job through an engine of its own, all in one process. interpreted: with Triton's interpreter, by which
    vLLM's second model runner works on a CPU."""
    for name, job in jobs.items():
        (directory / f"{name}.json").write_text(json.dumps(job))
    variables = _variables(**({"TRITON_INTERPRET": "1"} if interpreted else {}))
    process = subprocess.run(
        [PYTHON, SCRIPTS / "vllm_generate.py", directory], env=variables, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {name: json.loads((directory / f"{name}.answers.json").read_text()) for name in jobs}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """vLLM's OpenAI-compatible server, by a shell command; the words after `python -m` as users would type them."""

    def __init__(self, command: str | Sequence[str], port: int, directory: Path, *more: str) -> None:
        words = shlex.split(command.replace("\\\n", "")) if isinstance(command, str) else list(command)
        assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
        self.log = directory / f"server-{port}.log"
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), *words[1:], *_SMALL, *more],
                env=_variables(),
                cwd=directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def died(self) -> bool:
        """Whether the server has ended by itself; it is waited for until it answers or has."""
        deadline = time.monotonic() + LONGEST_START
        with JsonServer(self.url, connections=1, timeout_seconds=5.0) as server:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    return True
                try:
                    server.get("/v1/models")
                    return False
                except (NoAnswer, NotJson):
                    time.sleep(0.5)
        raise AssertionError(f"no answer within {LONGEST_START} s: {self.words()}")

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def __enter__(self) -> Self:
        assert not self.died(), self.words()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ends the server and its engine."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
