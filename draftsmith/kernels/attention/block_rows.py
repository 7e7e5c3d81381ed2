"""How many rows of a tile a block takes; apart from the kernels, so that it can be asked where there is no Triton."""


def rows_of_a_block(group: int, block_size: int) -> int:
    """Rows that the tile of one block needs, for so many query heads a key head (`group`): both are rounded up to
    powers of two, which the shapes of a tile have to be."""
    return _power_of_two(group) * _power_of_two(block_size)


def _power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (number - 1).bit_length()
