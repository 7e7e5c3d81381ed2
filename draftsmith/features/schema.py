"""What a store holds for one method: the one owner of tensor names, widths and dtypes of features."""

from dataclasses import dataclass

import torch

TAPS = "taps"
FINAL_STATE = "final_state"


@dataclass(frozen=True)
class CaptureLayout:
    """The features that a method needs of every token.

    `tap_ids` are 0-based decoder layers whose output is kept, concatenated in this order (methods.md section 1);
    `final_state` says whether the state that enters the output head (after the final norm) is kept too.
    """

    tap_ids: tuple[int, ...]
    hidden_size: int
    final_state: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def widths(self) -> dict[str, int]:
        """Feature tensor name -> width of one token's row."""
        widths = {TAPS: len(self.tap_ids) * self.hidden_size}
        if self.final_state:
            widths[FINAL_STATE] = self.hidden_size
        return widths

    @property
    def bytes_per_token(self) -> int:
        """Bytes of features that one token takes in a store of `dtype`."""
        return sum(self.widths.values()) * self.dtype.itemsize
