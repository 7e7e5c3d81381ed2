"""How kernels cut their work, in one vocabulary for all of them."""

from typing import NamedTuple


class Tiling(NamedTuple):
    """Sizes of a kernel's tiles and numbers of its programs. Each kernel says which fields it has; the others are 1.

    Kernels choose their tilings by the shapes of their operands and by the device. Another one, given to measure or to
    test it, has the same result up to rounding. (A tuple, because one is made at every launch.)
    """

    rows: int = 1
    """Of a tile's moving operand: queries, states, heads. A power of two."""
    columns: int = 1
    """Of its other operand: keys, outputs, tokens of a vocabulary."""
    depth: int = 1
    """Of the inner dimension that is read at once."""
    splits: int = 1
    """Programs that share one inner dimension, or one context."""
    programs: int = 1
    """On a multiprocessor."""
    held: int = 1
    """Tiles of weights that are fetched before the kernel waits for its predecessor."""
    warps: int = 4
    """Of a program."""
    stages: int = 1
    """Tiles on their way at once."""
