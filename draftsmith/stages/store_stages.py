"""The stages that fill a run's feature store: capture, its new loss masks, and features of other projects."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.base.files import file_sha256
from draftsmith.capture.backends import BACKENDS
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.imports import ImportOptions, import_features
from draftsmith.capture.remask import remask
from draftsmith.capture.run import capture
from draftsmith.data.conversations import read_conversations
from draftsmith.data.mask_token import check_mask_token
from draftsmith.data.sample import Conversation, Sample
from draftsmith.data.tokenize import tokenize_all
from draftsmith.drafts.config import DraftConfig
from draftsmith.errors import DraftsmithError
from draftsmith.features.manifest import MANIFEST_FILE, StoreError, read_manifest
from draftsmith.features.schema import CaptureLayout
from draftsmith.stages.common import Stages, no_tokenizer, one_process, use_own_device
from draftsmith.targets.final_norm import load_final_norm
from draftsmith.training.warm_start import read_warm_start


class StoreStages(Stages):
    """Everything that ends in `features/`."""

    def capture(self, *, fresh: bool = False) -> None:
        """Conversations through the target -> the feature store `features/`."""
        if fresh:
            one_process("--fresh")
        recipe, directory = self.recipe, self.recipe.features
        source = self._conversations_file()
        conversations = read_conversations(source)

        def work() -> None:
            use_own_device()
            # What the recipe and the data have of faults is found before the target is loaded.
            layout = self._capture_layout()
            samples = self._samples(conversations)
            target = self.target if BACKENDS[recipe.capture.backend].loads_target else self._info
            report = capture(target, samples, layout, directory, recipe.capture, self._provenance(), self.progress)
            for line in report.lines():
                self.say(f"features: {line}")

        self._perform("capture", self._capture_settings(), directory, work, fresh=fresh, parts=self._files(fresh))

    def remask(self) -> None:
        """The loss masks that the data gives now -> the feature store `features/`, whose features stay as they are."""
        one_process("--remask")
        recipe, directory = self.recipe, self.recipe.features
        conversations = read_conversations(self._conversations_file())

        def work() -> bool:
            report = remask(
                directory,
                self._samples(conversations),
                self._provenance(),
                max_length=self._info.max_position_embeddings,
                max_refused_share=recipe.capture.max_refused_share,
            )
            for line in report.lines():
                self.say(f"features: {line}")
            return report.finished  # masks of a store that is not whole are new, and its capture goes on

        self._perform("capture", self._capture_settings(), directory, work, fresh=False, keep_changed=True)

    def import_features(self, files: ImportOptions, *, fresh: bool = False) -> None:
        """Feature files of another project -> the feature store `features/`; the options say what files do not."""
        one_process("--import")
        recipe, directory = self.recipe, self.recipe.features

        def work() -> None:
            if files.check_samples:
                _ = self.target
            layout = self._capture_layout()
            samples: list[Sample] = []
            if recipe.data.conversations is not None:
                samples = self._samples(read_conversations(recipe.data.conversations))
            pre_norm = layout.final_state and files.final_state == "pre_norm"
            report = import_features(
                files,
                layout,
                directory,
                recipe.capture,
                self._provenance(),
                max_length=self._info.max_position_embeddings,
                samples=samples,
                norm=self._final_norm() if pre_norm else None,
                check=HfBackend(self.target, layout) if files.check_samples else None,
                progress=self.progress,
            )
            for line in report.lines():
                self.say(f"features: {line}")

        settings = {
            "import": [str(files.directory), files.source, list(files.tap_ids), files.final_state],
            **self._settings("capture", "target", "draft", "capture"),
            "data": self._template_settings(),
        }
        self._perform("capture", settings, directory, work, fresh=fresh, parts=self._files(fresh))

    def _samples(self, conversations: Iterable[Conversation]) -> list[Sample]:
        """Conversations, tokenised. Raises `DraftsmithError` for a target without tokenizer, and as `tokenize_all`."""
        if self._tokenizer is None:
            raise no_tokenizer(self.recipe.target.path)
        samples, tokenized = tokenize_all(conversations, self._tokenizer, self.recipe.data)
        self.say(f"conversations: {tokenized.line()}")
        row, longest = self.recipe.train.tokens_per_row, max(samples, key=lambda sample: len(sample.input_ids))
        if len(longest.input_ids) > row:
            raise DraftsmithError(
                f"conversation {longest.id!r} has {len(longest.input_ids)} tokens, and a row of the training takes "
                f"{row} (train.tokens_per_row); raise that, or cut conversations to it (data.max_length)"
            )
        return samples

    def _final_norm(self) -> nn.Module:
        """The target's final norm on the CPU, in the dtype that its options name; reads no other weights."""
        return load_final_norm(**self.recipe.target.model_dump(exclude={"fuse", "device"}))

    def _files(self, fresh: bool) -> list[Path]:
        """The files that make the store a whole one; where one is missing, capture goes on."""
        directory = self.recipe.features
        manifest = directory / MANIFEST_FILE
        if fresh or not manifest.is_file():
            return [manifest]
        try:
            return [manifest, *(directory / entry.name for entry in read_manifest(directory).files)]
        except StoreError as error:
            raise DraftsmithError(f"{error}; delete it and capture again: what is finished is kept") from error

    def _capture_settings(self) -> dict[str, Any]:
        """What decides the records of a capture."""
        section = self.recipe.draft
        # Without taps of its own, and without a checkpoint, a draft taps as many layers as it has.
        by_depth = section.value("target_layer_ids") is None and section.num_taps is None and section.init_from is None
        return {
            "draft": {
                **section.model_dump(include={"algorithm", "target_layer_ids", "num_taps", "init_from"}),
                **({"num_hidden_layers": section.value("num_hidden_layers")} if by_depth else {}),
            },
            **self._settings("capture", "target", "capture"),
            **self._data_settings(),
        }

    def _conversations_file(self) -> Path:
        """What is learnt from. Raises `DraftsmithError` where it is not there, and for answers of this run that are not
        all there, or were given to other prompts than those that are learnt."""
        source = self.recipe.data.conversations or self.recipe.answers
        if not source.is_file():
            where = "data.conversations" if self.recipe.data.conversations else "the answers of this run"
            raise DraftsmithError(
                f"there is no file {source} ({where}); run `draftsmith regenerate` first, or name conversations in "
                "data.conversations"
            )
        if self.recipe.data.conversations is None:
            self._check_answered(source)
        return source

    def _check_answered(self, answers: Path) -> None:
        begun = self.stamps.begun("regenerate")
        if begun is None:
            return
        settings, finished = begun
        alone = f"learn from these alone with data.conversations={answers}"
        if not finished:
            with answers.open("rb") as file:
                there = sum(line.endswith(b"\n") for line in file)
            raise DraftsmithError(
                f"{answers} holds {there:,} answers to {len(settings['prompts']):,} prompts: `draftsmith regenerate` "
                f"has not finished; run it again, which goes on where it stopped, or {alone}"
            )
        now = self._template_settings()
        for name in ("system_prompt", "enable_thinking"):
            then = settings["data"].get(name)
            if then != now[name]:
                raise DraftsmithError(
                    f"the answers of this run were given with data.{name} {then!r}, and it is {now[name]!r} now: they "
                    f"would be learnt after another prompt than they were given to; set it back, or {alone}"
                )

    def _data_settings(self) -> dict[str, Any]:
        """What decides the samples."""
        data = self.recipe.data.model_dump(mode="json", exclude={"prompts", "conversations"})
        return {"conversations": file_sha256(self._conversations_file()), "data": data}

    def _capture_layout(self) -> CaptureLayout:
        """The features that training this recipe's draft needs."""
        section = self.recipe.draft
        warm = read_warm_start(section.init_from) if section.init_from else None
        config = draft_config(section, self._info, warm.config if warm else None)
        if warm is not None:
            warm.check(config)  # rather before hours of capture than after them
        self._check_mask_token(config)
        return algorithm(section.algorithm).capture(config)

    def _check_mask_token(self, config: DraftConfig) -> None:
        """Raise `DraftsmithError` for a mask token that is in every text. A warm start has the one it was trained with,
        and is warned of it."""
        tokenizer = self._tokenizer
        if config.block is None or tokenizer is None:
            return
        try:
            check_mask_token(config.block.mask_token_id, tokenizer, self.recipe.data, self._info.vocab_size)
        except DraftsmithError as error:
            if self.recipe.draft.init_from is None:
                raise
            self.say(f"warning: {error}")
