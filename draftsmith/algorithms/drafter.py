"""What decoding asks of a method: a `Drafter`, which proposes tokens and keeps what it must remember between steps.

A step of the engine is: propose, verify by the target, commit, update. The drafter does the first and the last; how it
comes by its tokens (a block of masked slots, a chain with a state of its own) is its own affair. All of it is a
function of tensors on the device without host synchronisation, so that a CUDA graph can hold a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from draftsmith.targets.target import TargetStates

# --- what a drafter is given -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatesWanted:
    """The states of the target that a drafter reads: tap_ids, the tapped layers (`targets.taps`), in the order of
    `TargetStates.taps`; final_state: whether it also reads the state after the final norm."""

    tap_ids: tuple[int, ...] = ()
    final_state: bool = False


class Sampler(Protocol):
    """Turns logits into tokens under each row's own sampling options and noise; made by whoever decodes.

    greedy: whether every row takes its most likely token. temperature [batch] fp32, 0 in such rows. filtered [batch]
    bool: rows with top-k or top-p; None when there are none. seeds, anchors [batch] int64: they number each row's
    noise (`kernels.noise`), for drafters that draw by themselves.
    """

    @property
    def greedy(self) -> bool: ...
    @property
    def temperature(self) -> Tensor: ...
    @property
    def filtered(self) -> Tensor | None: ...
    @property
    def seeds(self) -> Tensor: ...
    @property
    def anchors(self) -> Tensor: ...

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        """logits [batch, V] -> (ids [batch] int64, q [batch, V] or None).

        Greedy: argmax, ties to the lowest id, q None. Sampling: draws from the processed distribution and returns it as
        q. `draw` (0, 1, ...) numbers the draws of one step, so that each uses fresh noise. A drafter to which only some
        tokens are possible may hand over theirs alone, in order of ids; the results then count among these.
        """
        ...


# --- what a drafter gives --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposals:
    """The tokens proposed after each row's anchor.

    token_ids [batch, N] int64; q [batch, N, V], the distribution over the target's vocabulary that each was drawn
    from, None for deterministic proposals; count [batch] int64, how many of the N are worth verifying (None: all); the
    verifier treats the rest as not proposed. parents [batch, N] int64: the proposal that each one follows, -1 for the
    anchor (None: a chain, each follows the one before it); a tree has N <= 63 proposals, parents before their children,
    different siblings and no q. states [batch, ...]: the draft's states that the tokens were made from; a row in which
    they are not finite has failed (None: not checked).
    """

    token_ids: Tensor
    q: Tensor | None = None
    count: Tensor | None = None
    parents: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def of_draws(cls, draws: Sequence[tuple[Tensor, Tensor | None]], count: Tensor | None = None) -> "Proposals":
        """A chain of what a `Sampler` gave for one token after the other, over the whole vocabulary."""
        distributions = [q for _, q in draws if q is not None]
        return cls(
            torch.stack([ids for ids, _ in draws], dim=1),
            torch.stack(distributions, dim=1) if distributions else None,
            count,
        )


class DraftState(Protocol):
    """What a drafter keeps of the rows in some slots, in storage that never moves; opaque to everybody else."""

    def rows(self, begin: int, end: int) -> Self:
        """The same storage, seen for slots begin .. end - 1 only."""
        ...

    def erase(self, slots: Sequence[int]) -> None:
        """Makes these slots as they were at first, whatever they hold."""
        ...


StateT = TypeVar("StateT", bound=DraftState)


class Drafter(Protocol[StateT]):
    """Proposes tokens for rows in slots.

    wants: what it reads of the target's passes. width: tokens of a verify, the anchor and the proposals. reach: cache
    positions from a row's anchor on that `propose` and the verify touch, at least `width`.

    A row's life: `read` its prompt, in chunks; then, again and again, `propose` after its anchor (its last token, which
    the target has not read yet) and `update` with what the verify made of it. Slots without a row are computed along;
    what is read for them has no tokens of its own (`valid` and `count` 0).
    """

    @property
    def wants(self) -> StatesWanted: ...
    @property
    def width(self) -> int: ...
    @property
    def reach(self) -> int: ...

    def new_state(self, slots: int, length: int) -> StateT:
        """The state of this many slots without rows; length: positions that a row may have, `reach` included."""
        ...

    def read(self, state: StateT, ids: Tensor, states: TargetStates, start: Tensor, valid: Tensor) -> None:
        """Takes in a chunk of each row's prompt: ids [slots, w] int64 at positions start .. start + w - 1, start
        [slots] int64, and the target's states of them. valid [slots] int64: how many of the w are a row's own; the rest
        is padding, which the row's next tokens overwrite. A chunk at position 0 begins a new row in its slot."""
        ...

    def propose(self, state: StateT, anchors: Tensor, anchor_ids: Tensor, extent: int, sampler: Sampler) -> Proposals:
        """The tokens after each row's last one: anchors [slots] int64, its position, and anchor_ids [slots] int64, its
        id. No row's anchor + `reach` exceeds `extent`. All positions before the anchor have been taken in."""
        ...

    def update(self, state: StateT, ids: Tensor, states: TargetStates, start: Tensor, count: Tensor) -> None:
        """Takes in a verify: ids [slots, w] int64, the anchor and the proposals after it (of a tree: in the order of
        the path that stands), at positions start .. start + w - 1 (start [slots] int64: the anchors), with the target's
        states of them. count [slots] int64: how many of
        them stand, the anchor among them; 0 in slots to which nothing was committed. The row's next anchor is not
        among them."""
        ...


AnyDrafter: TypeAlias = Drafter[Any]
"""A drafter whose state is nobody else's business."""
