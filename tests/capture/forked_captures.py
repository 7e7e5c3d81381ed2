"""Captures by several processes, whole and killed, in a process of its own.

It forks each group of processes, with the environment that a launcher would give them: so a group costs a fraction of a
second, most of which goes by in waiting, so that several killed captures are under way at a time.
"""

import json
import os
import random
import shutil
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.features.manifest import StoreError
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.verify import verify_store
from tests.features.stores import equal
from tests.support.tiny import tiny_target

from .samples import random_samples, run_capture

LAYOUT = CaptureLayout((0,), 32, final_state=True)
LENGTHS = [3 + (7 * number) % 41 for number in range(17)]
POISON = 5
CHAINS = 3
OPTIONS = {"dtype": "float32", "tokens_per_batch": 60, "shard_bytes": 13_000}


class Forks:
    """Groups of forked processes that capture with one target."""

    def __init__(self) -> None:
        self.target = tiny_target(num_layers=1)  # quickly computed: what is tried here is the storing

    def start(self, count: int, directory: Path, say: Path, **changes: Any) -> list[int]:
        """Fork a group that captures into `directory`; each process writes what it says to `say`-RANK."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(count):
            process = os.fork()
            if process == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                path = say.with_name(f"{say.name}-{rank}")
                path.write_text(self.capture(directory, rank, **changes))
                os._exit(0)
            processes.append(process)
        return processes

    def capture(
        self,
        directory: Path,
        rank: int,
        *,
        lengths: list[int] = LENGTHS,
        uneven: bool = False,
        poisoned: bool = False,
        **options: Any,
    ) -> str:
        """One process's part; uneven: the processes but the first are given one sample less; poisoned: the target gives
        NaN for the token POISON and what follows it."""
        samples = random_samples(lengths)
        if poisoned:
            self.target.model.model.embed_tokens.weight.data[POISON] = float("nan")
        if uneven and rank != 0:
            samples = samples[:-1]
        try:
            report = run_capture(self.target, samples, LAYOUT, directory, **{**OPTIONS, **options})
        except DraftsmithError as error:
            return f"error: {error}"
        return f"{report.captured} {report.resumed}"

    def run(self, count: int, directory: Path, say: Path, **changes: Any) -> list[str]:
        """A whole group; what each process said."""
        processes = self.start(count, directory, say, **changes)
        assert all(os.waitpid(process, 0)[1] == 0 for process in processes)
        return [say.with_name(f"{say.name}-{rank}").read_text() for rank in range(count)]


def main(directory: Path, seed: int, kills: int) -> None:
    """Writes `outcome.json` in `directory`: what each process of each named job said, and how many captures were killed
    in the middle, how many of them went on from something, and how many stores came out."""
    torch.set_num_threads(1)
    forks = Forks()
    one = directory / "one"
    said = {"one": forks.run(1, one, directory / "said-one")}
    # Begun by one process, which was killed: its first shards. Writer 2, whom nobody succeeds, left half a shard.
    begun = directory / "begun"
    shutil.copytree(one, begun)
    for path in sorted(begun.glob("*.tokens.safetensors"))[2:]:
        path.unlink()
    (begun / "manifest.json").unlink()
    (begun / "shard-0002-000000.features.safetensors").write_bytes(b"half")

    def job(name: str, place: Path, **changes: Any) -> None:
        said[name] = forks.run(2, place, directory / f"said-{name}", **changes)

    start = time.monotonic()
    job("two", directory / "two")
    duration = time.monotonic() - start
    job("begun", begun)
    job("single", directory / "single", lengths=[5])
    job("uneven", directory / "uneven", uneven=True)
    job("poisoned", directory / "poisoned", poisoned=True, max_refused_share=0.9)
    job("other", one, dtype="fp8")
    job("again", directory / "two")
    counts = chains_of_kills(forks, directory, seed, kills, duration)
    (directory / "outcome.json").write_text(json.dumps({"said": said, **counts}))


def chains_of_kills(forks: Forks, directory: Path, seed: int, kills: int, duration: float) -> dict[str, int]:
    """`kill_captures` in `CHAINS` processes side by side; the sums of what they counted."""
    children = []
    for number in range(CHAINS):
        place = directory / f"chain-{number}"
        place.mkdir()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                share = -(-kills // CHAINS)
                found = kill_captures(forks, directory / "one", place, random.Random(seed + number), share, duration)
                (place / "found.json").write_text(json.dumps(found))
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * CHAINS
    counts = [json.loads((directory / f"chain-{number}" / "found.json").read_text()) for number in range(CHAINS)]
    return {name: sum(found[name] for found in counts) for name in counts[0]}


def kill_captures(
    forks: Forks, one: Path, directory: Path, chance: random.Random, kills: int, duration: float
) -> dict[str, int]:
    """Kill groups of one to three processes at random moments until `kills` were killed while they worked; each is
    followed by another on the same directory, until one is left to finish, whose store is that at `one`."""
    whole = {record.sample_id: record for record in Store.open(one)}
    killed = resumed = stores = 0
    while killed < kills:
        place = directory / f"store-{stores}"
        while True:
            say = directory / "said"
            processes = forks.start(chance.choice((1, 1, 2, 3)), place, say)
            time.sleep(chance.uniform(0.0, 1.1) * duration)
            # How long a capture takes depends on what else the machine does: two of three are to be caught at work.
            at_work = kill(processes, chance)
            duration *= 1.1 if at_work else 0.8
            if not at_work:
                break
            killed += 1
            if (place / "manifest.json").exists():  # killed after its last write
                assert len(Store.open(place)) == len(whole)
            elif place.exists():
                with pytest.raises(StoreError, match="not finished"):
                    Store.open(place)
        resumed += int(directory.joinpath("said-0").read_text().split()[1]) > 0
        check(place, whole)
        stores += 1
    return {"killed": killed, "resumed": resumed, "stores": stores}


def kill(processes: list[int], chance: random.Random) -> bool:
    """Kill one process, and the others as a launcher would then; whether any was still at work."""
    for process in chance.sample(processes, len(processes)):
        os.kill(process, signal.SIGKILL)
    ends = [os.waitpid(process, 0)[1] for process in processes]
    return any(map(os.WIFSIGNALED, ends))


def check(place: Path, whole: dict[str, Any]) -> None:
    """The store at `place` holds the records of `whole`, no more and no less, and nothing else lies there."""
    store = Store.open(place)
    assert len(store) == len(whole)
    assert all(equal(record, whole[record.sample_id]) for record in store)
    assert verify_store(place) == []
    files = {entry.name for shard in store.manifest.shards for entry in (shard.tokens_file, shard.features_file)}
    assert {path.name for path in place.glob("*.safetensors*")} == files | {store.manifest.index.name}
