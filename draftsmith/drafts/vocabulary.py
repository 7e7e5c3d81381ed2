"""A draft's own output head, over a part of the target's vocabulary (EAGLE-3, arXiv 2503.01840)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError


class DraftVocabulary(nn.Module):
    """V' of the target's V tokens, and a row of an output head for each.

    `draft_ids` [V'] int64, ascending: the target's id of each row; as the order is the target's, the first of equal
    logits is the one with the lowest id. `head_rows.weight` [V', H]. A fresh one holds the V' lowest ids, until
    `choose` says which.
    """

    draft_ids: Tensor

    def __init__(self, size: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.head_rows = nn.Linear(hidden_size, size, bias=False)
        self.register_buffer("draft_ids", torch.empty(size, dtype=torch.int64))

    def reset_parameters(self) -> None:
        """The rows are drawn by the draft, as every projection's."""
        torch.arange(len(self.draft_ids), out=self.draft_ids)

    def choose(self, ids: Tensor) -> None:
        """Takes the target's ids [V'] int64, in any order, as the tokens that the rows are for.

        Raises `DraftsmithError` unless there are V' of them, all different and in [0, V).
        """
        chosen = ids.to(self.draft_ids).sort().values
        if fault := self.fault(chosen):
            raise DraftsmithError(fault)
        self.draft_ids.copy_(chosen)

    def fault(self, ids: Tensor) -> str | None:
        """Why ids [n] cannot be `draft_ids`; None where they can."""
        wanted = f"allowed: {len(self.draft_ids)} different ids in ascending order, from 0 to {self.vocab_size - 1}"
        if ids.shape != self.draft_ids.shape:
            return f"draft_ids has the shape {list(ids.shape)}; {wanted}"
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            return f"draft_ids runs from {int(ids.min())} to {int(ids.max())}; {wanted}"
        if bool((ids[1:] <= ids[:-1]).any()):
            return f"draft_ids repeats an id, or is not in ascending order; {wanted}"
        return None

    def logits(self, hidden: Tensor, product: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear) -> Tensor:
        """hidden [..., H] -> [..., V'], in the order of `draft_ids`."""
        return product(hidden.to(self.head_rows.weight.dtype), self.head_rows.weight)

    def target_ids(self, index: Tensor) -> Tensor:
        """Places in the draft's vocabulary [...] int64 -> the target's ids [...]."""
        return self.draft_ids[index]

    def index(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's ids [...] int64 -> (places in the draft's vocabulary [...] int64, whether it has the token
        [...] bool). The place of a token that it does not have is some place in [0, V')."""
        place = torch.searchsorted(self.draft_ids, ids).clamp_max(len(self.draft_ids) - 1)
        return place, self.draft_ids[place] == ids

    def spread(self, values: Tensor, elsewhere: float = 0.0) -> Tensor:
        """values [..., V'] of the draft's tokens -> [..., V] of the target's, with `elsewhere` for those that the draft
        does not have."""
        everywhere = values.new_full((*values.shape[:-1], self.vocab_size), elsewhere)
        return everywhere.index_copy(-1, self.draft_ids, values)
