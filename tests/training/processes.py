"""Groups of training processes, which are forks (`tests.support.forks`) where a launcher would start them from nothing.

Each gets what a launcher would give it, ranks and an address in its environment, and a group ends when one of its
processes fails.
"""

import socket
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support.forks import fork
from tests.training.distributed_run import run_jobs


class ProcessGroup:
    """`count` processes that do the jobs (keywords of `train_job`), one job after the other; the process of rank r
    writes what it says to `said-r` in `directory`. One process alone is started without ranks."""

    def __init__(self, count: int, jobs: list[dict[str, Any]], directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._said = [directory / f"said-{rank}" for rank in range(count)]
        self._processes = []
        for rank, said in enumerate(self._said):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if count > 1 else {}
            self._processes.append(fork(run_jobs, jobs, said=said, environment=environment))

    def pid(self, rank: int = 0) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def running(self) -> bool:
        """Whether every process is still at work."""
        return all(process.is_alive() for process in self._processes)

    def finish(self, timeout: float = 300) -> list[int | None]:
        """Wait for the end; the exit codes, as `subprocess` counts them. Where one fails, the others are killed."""
        deadline, left = time.monotonic() + timeout, list(self._processes)
        while left:
            ended = wait([process.sentinel for process in left], deadline - time.monotonic())
            assert ended, f"still running after {timeout} s: {self.output()}"
            for process in [process for process in left if process.sentinel in ended]:
                process.join()
                left.remove(process)
                if process.exitcode != 0:
                    for other in left:
                        other.kill()
        return [process.exitcode for process in self._processes]

    def output(self) -> str:
        return "".join(path.read_text() for path in self._said if path.exists())


def run_group(count: int, jobs: list[dict[str, Any]], directory: Path) -> None:
    """Do the jobs in a group of processes, none of which may fail."""
    group = ProcessGroup(count, jobs, directory)
    assert set(group.finish()) == {0}, group.output()[-6000:]
