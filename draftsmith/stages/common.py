"""What the stages of a run have in common: its recipe, its target, and when a stage need not run again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftsmith.base.progress import Progress
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.parallel.ranks import local_rank, process_count
from draftsmith.regenerate import RegenerateOptions
from draftsmith.run.provenance import provenance
from draftsmith.run.recipe import Recipe
from draftsmith.run.stamps import Stamps
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.load import load_tokenizer
from draftsmith.targets.location import locate
from draftsmith.targets.target import Target

_NEVER: dict[str, frozenset[str]] = {
    "target": frozenset({"device"}),
    "regenerate": RegenerateOptions.WITHOUT_EFFECT,
    "capture": frozenset({"tokens_per_batch", "force", "sglang", "vllm", "check_samples", "max_refused_share"}),
    "train": frozenset(
        {"device", "data_workers", "attention", "compile", "graphs", "gradient_checkpointing", "parallel"}
    ),
}
# The target's fused kernels are those of cached forwards, and features come from its own code.
_NOT_FOR_FEATURES = _NEVER | {"target": frozenset({"device", "fuse"})}

WITHOUT_EFFECT: dict[str, dict[str, frozenset[str]]] = {
    "regenerate": _NEVER,
    "capture": _NOT_FOR_FEATURES,
    "train": _NOT_FOR_FEATURES,
    "bench": _NEVER,
}
"""Stage -> section -> fields that are no part of the stage's settings: where and how fast work is done changes nothing
about what comes out. (What `bench` measures does depend on the machine, which it puts among its settings itself.)"""


class Stages:
    """A recipe's run directory.

    `say` gets a line or two at the end of each stage. `redo`: whether a stage whose settings have changed since it was
    done is made anew (True) or is an error (False). Stages that are finished with the same settings are skipped.
    """

    def __init__(self, recipe: Recipe, *, progress: Progress, say: Callable[[str], object], redo: bool = False) -> None:
        self.recipe = recipe
        self.progress = progress
        self.say = say
        self.stamps = Stamps(recipe.run, redo=redo, without_effect=WITHOUT_EFFECT)

    @cached_property
    def target(self) -> Target:
        """The recipe's target, loaded once."""
        options = self.recipe.target
        with self.progress.stage("load target", total=1, unit="models") as stage:
            target = Target.load(**options.model_dump())
            stage.advance()
        if target.tokenizer is None:
            raise no_tokenizer(options.path)
        return target

    @property
    def _info(self) -> TargetInfo:
        """What the target's configuration says: of the loaded target where there is one, else read alone."""
        if "target" in vars(self):
            return replace(self.target.info, options=self.recipe.target)
        return self._info_alone

    @cached_property
    def _info_alone(self) -> TargetInfo:
        return TargetInfo.load(self.recipe.target)

    @property
    def _ends(self) -> TargetEnds:
        """The target's embedding and output head: of the loaded target where there is one, else read alone."""
        return self.target.ends if "target" in vars(self) else self._ends_alone

    @cached_property
    def _ends_alone(self) -> TargetEnds:
        return TargetEnds.load(**self.recipe.target.model_dump(exclude={"fuse"}))  # the ends have no layers to fuse

    @cached_property
    def _tokenizer(self) -> Any:
        """The target's tokenizer, None for a target that has none."""
        options = self.recipe.target
        if "target" in vars(self):
            return self.target.tokenizer
        where = locate(options.path)
        return load_tokenizer(where, revision=options.revision, trust_remote_code=options.trust_remote_code)

    def _provenance(self) -> Provenance:
        """Who makes, or made, the features."""
        return provenance(self._info, self._ends, self._tokenizer, self.recipe.data)

    def _settings(self, stage: str, *sections: str) -> dict[str, Any]:
        """The recipe's sections as settings of `stage`: what its output depends on."""
        left_out = WITHOUT_EFFECT[stage]
        return {
            name: getattr(self.recipe, name).model_dump(mode="json", exclude=set(left_out.get(name, ())))
            for name in sections
        }

    def _template_settings(self) -> dict[str, Any]:
        """What decides how a prompt is rendered."""
        data = self.recipe.data
        return {
            **data.model_dump(mode="json", include={"system_prompt", "enable_thinking"}),
            "chat_template": data.chat_template_text,
        }

    def _perform(
        self,
        stage: str,
        settings: dict[str, Any],
        output: Path,
        work: Callable[[], bool | None],
        *,
        fresh: bool,
        parts: Sequence[Path] = (),
        whole: Callable[[], bool] | None = None,
        **options: bool,
    ) -> None:
        """Run a stage unless it is done. parts: files in `output` without which it is not; whole: as for `Stamps`."""
        if fresh:
            self.stamps.forget(stage, [output])
        if not self.stamps.perform(stage, settings, [output, *parts], work, whole=whole, **options):
            self.say(f"{stage}: done already with these settings ({output})")


def no_tokenizer(path: str) -> DraftsmithError:
    """What to raise where a target's tokenizer is needed and missing."""
    return DraftsmithError(
        f"the target {path} has no tokenizer beside its weights; put the model's tokenizer files there"
    )


def use_own_device() -> None:
    """Let `cuda` mean, in each of the processes that a launcher started, another GPU of the machine."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())


def one_process(what: str) -> None:
    """Raises `DraftsmithError` where a launcher started several processes for `what`, a command or an option."""
    if process_count() > 1:
        raise DraftsmithError(
            f"{what} works in one process; {process_count()} were started: run it without a launcher (WORLD_SIZE says "
            "how many there are)"
        )
