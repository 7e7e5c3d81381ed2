"""Whole numbers rounded to multiples."""


def round_up(count: int, step: int) -> int:
    """The smallest multiple of `step` (at least 1) that is not below `count`."""
    return -(-count // step) * step
