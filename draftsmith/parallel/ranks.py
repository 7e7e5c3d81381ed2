"""What a launcher (torchrun, accelerate launch) tells the processes that it starts together, through the environment.

Without a launcher there is one process, the first one.
"""

import os


def process_rank() -> int:
    """This process's number among those started together."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """How many processes were started together, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_first() -> bool:
    """Whether this process is the one of those started together that speaks for all."""
    return process_rank() == 0
