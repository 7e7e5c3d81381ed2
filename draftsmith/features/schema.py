"""What a store holds for one method: the one owner of tensor names, widths and dtypes of features."""

from dataclasses import dataclass

import torch

TAPS = "taps"
FINAL_STATE = "final_state"
EXPONENT = ".exponent"
"""Ends the name of the tensor that holds the scales of an 8-bit feature."""

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CaptureLayout:
    """The features that a method needs of every token.

    `tap_ids` are 0-based decoder layers whose output is kept, concatenated in this order (`targets.taps`);
    `final_state` says whether the state that enters the output head (after the final norm) is kept too. `dtype` is what
    files hold; torch.float8_e4m3fn stands for 8-bit values with a scale per token and layer (`features.encoding`).
    """

    tap_ids: tuple[int, ...]
    hidden_size: int
    final_state: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def widths(self) -> dict[str, int]:
        """Feature name -> width of one token's row, as records carry it."""
        widths = {TAPS: len(self.tap_ids) * self.hidden_size}
        if self.final_state:
            widths[FINAL_STATE] = self.hidden_size
        return widths

    @property
    def feature_dtype(self) -> torch.dtype:
        """The dtype of a record's features when they are read."""
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    def stored_of(self, name: str) -> dict[str, tuple[int, torch.dtype]]:
        """The tensors that files hold for the feature `name`: name -> (width, dtype)."""
        width = self.widths[name]
        stored = {name: (width, self.dtype)}
        if self.dtype == FP8:
            stored[name + EXPONENT] = (width // self.hidden_size, torch.int8)
        return stored

    @property
    def stored(self) -> dict[str, tuple[int, torch.dtype]]:
        """All tensors that files hold: name -> (width of one token's row, dtype)."""
        return {name: kind for feature in self.widths for name, kind in self.stored_of(feature).items()}

    @property
    def bytes_per_token(self) -> int:
        """Bytes of features that one token takes in a store of `dtype`."""
        return sum(width * dtype.itemsize for width, dtype in self.stored.values())
