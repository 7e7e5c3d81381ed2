"""Run by torchrun: trains the counting language in this process group. Arguments: store, run directory, options as
JSON."""

import json
import sys
from pathlib import Path

import torch

from draftsmith.features.reader import Store
from draftsmith.training.options import TrainOptions
from draftsmith.training.run import train
from tests.training.counting import QUIET, counting_target, section


def main() -> None:
    torch.set_num_threads(1)
    store, run_dir, options = sys.argv[1:4]
    target = counting_target()
    train(
        draft_section=section(),
        target=target,
        ends=target.ends,
        store=Store.open(store),
        run_dir=Path(run_dir),
        options=TrainOptions(**json.loads(options)),
        track=QUIET,
    )


if __name__ == "__main__":
    main()
