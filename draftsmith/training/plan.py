"""Which rows of documents every optimiser step consumes, in an order that only the seed and the epoch decide."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from draftsmith.errors import DraftsmithError
from draftsmith.features.packing import epoch_rows

Rows = list[list[int]]
"""Rows of documents, each document by its number."""


@dataclass(frozen=True)
class Forward:
    """The rows of one forward of one process. All processes meet in every forward, so one that has no row left repeats
    another row that is not `counted`: it has no labels and adds nothing to any sum."""

    rows: Rows
    counted: bool = True


def deal(rows: Rows, rows_per_forward: int, rank: int, num_ranks: int) -> list[Forward]:
    """The forwards of process `rank`: it takes rows rank, rank + num_ranks, ..., `rows_per_forward` at a time.

    Every process gets the same number of forwards, and together they take every row once. rows must not be empty.
    """
    count = -(-len(rows) // (num_ranks * rows_per_forward))
    own = rows[rank::num_ranks]
    parts = [own[i * rows_per_forward : (i + 1) * rows_per_forward] for i in range(count)]
    return [Forward(part) if part else Forward(rows[:1], counted=False) for part in parts]


class StepPlan:
    """Which rows every optimiser step consumes, for all processes together.

    An epoch is the documents shuffled by (seed, epoch) and packed into rows; step i of it takes rows
    [i * rows_per_step, (i + 1) * rows_per_step), the last one what is left. How many processes share a step changes
    nothing. lengths and names (for errors): of the documents, which the plan numbers from 0.
    """

    def __init__(
        self,
        lengths: list[int],
        names: list[str],
        *,
        tokens_per_row: int,
        rows_per_step: int,
        rows_per_forward: int,
        seed: int,
    ) -> None:
        self._rows_per_step = rows_per_step
        self.rows_per_forward = rows_per_forward

        @lru_cache(maxsize=2)
        def rows(epoch: int) -> Rows:
            return epoch_rows(lengths, tokens_per_row, seed, epoch, names)

        self.rows: Callable[[int], Rows] = rows

    def steps_in(self, epoch: int) -> int:
        """Optimiser steps of one epoch."""
        return -(-len(self.rows(epoch)) // self._rows_per_step)

    def following(self, epoch: int, step_in_epoch: int) -> tuple[int, int]:
        """The position after the given one."""
        return (epoch, step_in_epoch + 1) if step_in_epoch + 1 < self.steps_in(epoch) else (epoch + 1, 0)

    def positions(self, epoch: int, step_in_epoch: int) -> Iterator[tuple[int, int]]:
        """(epoch, step in it) of every step from the given one on, without end."""
        while True:
            for step in range(step_in_epoch, self.steps_in(epoch)):
                yield epoch, step
            epoch, step_in_epoch = epoch + 1, 0

    def forwards(self, epoch: int, step: int, rank: int, num_ranks: int) -> list[Forward]:
        """What one process forwards in one step."""
        start = step * self._rows_per_step
        return deal(self.rows(epoch)[start : start + self._rows_per_step], self.rows_per_forward, rank, num_ranks)


def check_rows_per_step(rows_per_step: int, rows_per_forward: int, num_ranks: int) -> None:
    """Raise `DraftsmithError` unless a step is the same whole number of forwards in every process."""
    if rows_per_step % (num_ranks * rows_per_forward):
        raise DraftsmithError(
            f"train.rows_per_step is {rows_per_step}, with {num_ranks} processes x train.rows_per_forward "
            f"{rows_per_forward}; it must be a multiple of {num_ranks * rows_per_forward}"
        )
