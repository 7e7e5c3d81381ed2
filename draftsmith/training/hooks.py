"""What training calls of its caller's while it runs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.parallel.processes import raise_together
from draftsmith.training.parallel import whole

EvaluateGenerate = Callable[[Draft], dict[str, float]]
"""A real-generation evaluation: gets the draft in its export dtype, returns named numbers."""


@dataclass(frozen=True)
class Hooks:
    """progress: told of every step. evaluate_generate: called at every evaluation, in the main process."""

    progress: Progress = field(default_factory=SilentProgress)
    evaluate_generate: EvaluateGenerate | None = None

    def generate(self, draft: Draft, accelerator: Accelerator) -> dict[str, float]:
        """The numbers of the real-generation evaluation of a copy of `draft`, by `generate_NAME`; on the main process,
        while the others, which have to call this as well, wait for it."""
        if self.evaluate_generate is None:
            return {}
        weights = whole(draft.state_dict())
        values: dict[str, float] = {}
        failure = None
        if accelerator.is_main_process:
            dtype = draft.config.torch_dtype
            with torch.device("meta"):
                copy = Draft(draft.config)
            kept = {n: w.to(dtype if w.is_floating_point() else w.dtype, copy=True) for n, w in weights.items()}
            copy.load_state_dict(kept, assign=True)
            try:
                values = self.evaluate_generate(copy.to(draft.device).eval())
            except DraftsmithError as error:
                failure = error
        raise_together(failure)
        return {f"generate_{name}": value for name, value in values.items()}
