"""The stages of one run, each a method: what they read and write, and when they need not run again."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.base.files import file_sha256
from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry
from draftsmith.bench.figures import figures
from draftsmith.bench.headline import summary_lines
from draftsmith.bench.machine import machine
from draftsmith.bench.measure import bench, write_benchmark
from draftsmith.bench.records import VERSION, BenchReport, read_report
from draftsmith.bench.tune import tune
from draftsmith.blocks.accept import counted_verifies
from draftsmith.capture.backends import BACKENDS
from draftsmith.capture.online import OnlineFeatures
from draftsmith.data.chat import answer_text, render_prompt, stop_token_ids
from draftsmith.data.conversations import read_conversations
from draftsmith.data.options import SHIPPED_PROMPTS
from draftsmith.data.prompts import find_prompts
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.decoding.tuning import Tuning
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.export.card import Measured
from draftsmith.export.fingerprint import directory_fingerprint
from draftsmith.export.options import ExportOptions
from draftsmith.export.run import export_run
from draftsmith.features.check import check_store
from draftsmith.features.manifest import MANIFEST_FILE
from draftsmith.features.reader import Store
from draftsmith.parallel.ranks import is_first, process_count
from draftsmith.regenerate import check_answers, regenerate, unanswered
from draftsmith.run.recipe import RunDirectory
from draftsmith.run.stamps import Stamps
from draftsmith.stages.common import one_process, use_own_device
from draftsmith.stages.evaluate import by_generating
from draftsmith.stages.store_stages import StoreStages
from draftsmith.targets.ends import TargetOutline
from draftsmith.targets.options import TargetOptions
from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.forecast import forecast
from draftsmith.training.hooks import Hooks
from draftsmith.training.record import CHECKPOINTS, RECORD_FILE
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from draftsmith.training.start import find_start


class Workspace(StoreStages):
    """A recipe's run directory and the stages that fill it (those of the feature store: `StoreStages`)."""

    # --- what several stages need -----------------------------------------------------------------------------------

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return stop_token_ids(self.target.tokenizer, self.target.model.generation_config)

    def load_draft(self, directory: Path | None) -> Draft:
        """The draft at `directory`, or the run's exported one, in the target's dtype and on its device."""
        path = directory or self.recipe.draft_directory
        if not path.is_dir():
            fix = "name an existing one with --draft" if directory else "run `draftsmith export` first, or give --draft"
            raise DraftsmithError(f"there is no draft directory {path}; {fix}")
        return Draft.load(path, dtype=self.target.dtype, device=self.target.device).eval()

    # --- stages -----------------------------------------------------------------------------------------------------

    def regenerate(self, *, fresh: bool = False) -> None:
        """Answers to `data.prompts` by the target itself -> `answers.jsonl`."""
        one_process("regenerate")
        recipe, out = self.recipe, self.recipe.answers
        if recipe.data.prompts is None:
            raise DraftsmithError(
                f"data.prompts is not set; name a JSONL file of prompts, or {SHIPPED_PROMPTS!r} for the package's own"
            )
        prompts = find_prompts(recipe.data.prompts, "train")

        def work() -> None:
            target = None if recipe.regenerate.endpoint is not None else self.target
            report = regenerate(
                target, prompts, out, recipe.regenerate, self.progress, data=recipe.data, engine=recipe.engine
            )
            self.say(f"answers: {report.line()}")
            if report.refused:
                self.say(f"answers: {report.refused:,} prompts have none; {report.refusals_path} says why")

        settings = {
            "prompts": [asdict(prompt) for prompt in prompts],
            **self._settings("regenerate", "target", "regenerate"),
            "data": self._template_settings(),
        }
        # Whether answers that are there may stay is said beside them, and not by this stage's settings.
        keep = not (fresh or self.stamps.redo)
        if keep:
            check_answers(out, recipe.regenerate)
        self._perform(
            "regenerate",
            settings,
            out,
            work,
            fresh=fresh,
            keep_changed=keep,
            whole=lambda: not unanswered(out, prompts),
        )

    def train(self, *, resume: bool = False, fresh: bool = False) -> None:
        """The feature store, or with `train.features: online` the conversations and the target -> run checkpoints below
        `train/`; `resume` goes on from the last of them (a workspace that may redo stages also goes on by itself where
        an interrupted training has the same settings).

        Raises `KeyboardInterrupt` when a signal stopped the training, whose state is saved by then.
        """
        if fresh:
            one_process("--fresh")
        recipe, directory = self.recipe, self.recipe.training
        online = recipe.train.features == "online"
        store = None if online else Store.open(recipe.features)

        def work() -> None:
            use_own_device()
            source = StoreSource(store) if store is not None else self._online_features()
            busy = source.busy if isinstance(source, OnlineFeatures) else None
            evaluate = self._evaluation_by_generating(busy) if recipe.train.eval_prompts else None
            origin = self._provenance()
            unfinished = RunCheckpoints(directory / CHECKPOINTS).latest() is not None
            if recipe.draft.init_from is None and not unfinished:  # a warm start's and a run's own cannot be changed
                self._check_mask_token(draft_config(recipe.draft, self._info))
            # Features that were computed are good whatever ends the training.
            with closing(source) if isinstance(source, OnlineFeatures) else nullcontext():
                result = train(
                    recipe.draft,
                    TargetOutline(self._info, self._ends),
                    source,
                    directory,
                    recipe.train,
                    recipe.track,
                    provenance=origin,
                    resume=resume or (self.stamps.redo and unfinished),
                    hooks=Hooks(self.progress, evaluate),
                )
            if result.interrupted_by is not None:
                self.say(f"training: stopped at step {result.step} of {result.total_steps} and saved; --resume goes on")
                raise KeyboardInterrupt
            best = "" if result.best_step is None else f", the best at {result.best_step:,}"
            self.say(f"training: {result.step:,} steps{best}; checkpoints and metrics in {directory}")

        settings = self._settings("train", "draft", "train")
        if online:
            settings |= {**self._settings("train", "target", "capture"), **self._data_settings()}
        else:
            settings |= {"features": file_sha256(recipe.features / MANIFEST_FILE)}
        self._perform("train", settings, directory, work, fresh=fresh, keep_changed=resume)

    def plan_training(self, *, resume: bool = False) -> None:
        """Says what `train` would load, what would be fresh, what differs and what it takes; changes nothing.

        Reads the target's configuration and tokenizer, the run's checkpoints, `draft.init_from`, and of a feature store
        what documents it holds. Raises `DraftsmithError` where `train` would, after everything has been said.
        """
        recipe, source = self.recipe, None
        if recipe.train.features == "store" and (recipe.features / MANIFEST_FILE).is_file():
            source = StoreSource(Store.open(recipe.features))
        start = find_start(recipe.draft, self._info, recipe.training, resume=resume)
        for line in start.lines():
            self.say(f"train: {line}")
        for line in start.warnings():
            self.say(f"warning: {line}")
        for line in forecast(start, self._info, source, recipe.train):
            self.say(f"train: {line}")
        start.check(recipe.draft.model_dump(mode="json"), recipe.train.model_dump(mode="json"))
        if start.latest is None:
            self._check_mask_token(start.config)
        if source is not None:
            check_store(source.header, algorithm(recipe.draft.algorithm).capture(start.config))

    def export(self, out: Path | None = None, *, layout: str | None = None) -> None:
        """The chosen run checkpoint -> a draft directory, read again and compared. `layout` replaces the recipe's."""
        recipe = self.recipe
        options = recipe.export if layout is None else recipe.export.model_copy(update={"layout": layout})
        export_directory(recipe.run, options, out, say=self.say, target=recipe.target)

    def bench(self, *, drafts: Sequence[Path] = (), tuned: Path | None = None, fresh: bool = False) -> BenchReport:
        """Accept length, speed and equality of drafts on `bench.prompts` -> `bench.json`, `bench.jsonl`, `bench.html`.

        drafts: draft directories; none: the one that `export` wrote. tuned: a file of `tune`, for a single draft.
        """
        one_process("bench")
        recipe = self.recipe
        directories = list(drafts) or [recipe.draft_directory]
        tuning = None if tuned is None else Tuning.read(tuned)
        if tuning is not None and len(directories) > 1:
            raise DraftsmithError(f"--tuned {tuned} is for one draft, and {len(directories)} are to be measured")
        prompts = find_prompts(recipe.bench.prompts, "heldout")[: recipe.bench.limit]
        entries = []
        for name, directory in zip(draft_names(directories), directories, strict=True):
            loaded, options = self.load_draft(directory if drafts else None), None
            if tuning is not None:
                loaded, options = tuning.apply(loaded, recipe.engine)
            entries.append(DraftEntry(name, loaded, directory, options))

        def work() -> None:
            report = bench(
                self.target,
                entries,
                prompts,
                recipe.bench,
                self._chat,
                recipe.engine,
                stop_token_ids=self.stop_ids,
                progress=self.progress,
            )
            write_benchmark(report, recipe.bench_json, recipe.bench_lines, recipe.bench_page)

        settings = {
            "drafts": {entry.name: directory_fingerprint(d) for entry, d in zip(entries, directories, strict=True)},
            "tuned": None if tuning is None else tuning.model_dump(mode="json"),
            "format": VERSION,
            "machine": machine(self.target.device),
            "prompts": [asdict(prompt) for prompt in prompts],
            **self._settings("bench", "target", "bench", "engine"),
            "data": self._template_settings(),
        }
        self._perform("bench", settings, recipe.bench_json, work, fresh=fresh, redo=True)
        report = read_report(recipe.bench_json)
        for line in summary_lines(report):
            self.say(f"bench: {line}")
        self.say(f"bench: {recipe.bench_json}, {recipe.bench_lines}, {recipe.bench_page}")
        return report

    def tune(
        self, *, draft: Path | None = None, block_sizes: Sequence[int] | None = None, out: Path | None = None
    ) -> Tuning:
        """The fastest settings for a draft on `bench.prompts` -> `tuned.json`, or `out`."""
        one_process("tune")
        recipe = self.recipe
        prompts = find_prompts(recipe.bench.prompts, "heldout")[: recipe.bench.limit]
        loaded = self.load_draft(draft)
        tuning = tune(
            self.target,
            loaded,
            [self._chat.prompt_ids(prompt, 0, []) for prompt in prompts],
            recipe.bench,
            recipe.engine,
            stop_token_ids=self.stop_ids,
            block_sizes=block_sizes,
            progress=self.progress,
            say=lambda line: self.say(f"tune: {line}"),
        )
        path = out or recipe.tuned
        tuning.write(path)
        self.say(f"tune: the first of these stands in {path}; use it with --tuned {path}")
        return tuning

    def generate(
        self,
        texts: Sequence[str],
        *,
        draft: Path | None,
        plain: bool,
        tuned: Path | None = None,
        max_new_tokens: int,
        sampling: SamplingOptions,
        seed: int,
    ) -> list[Generation]:
        """Answers to `texts`, printed one after the other."""
        one_process("generate")
        if not all(text.strip() for text in texts):
            raise DraftsmithError("a prompt is empty; ask something with --prompt, or on standard input")
        tuning = None if tuned is None else Tuning.read(tuned)
        loaded, options = None if plain else self.load_draft(draft), self.recipe.engine
        if loaded is None:
            options = options.without_draft()
        elif tuning is not None:
            loaded, options = tuning.apply(loaded, options)
        messages = [[{"role": "user", "content": text}] for text in texts]
        tokenizer = self.target.tokenizer
        prompts = [render_prompt(message, tokenizer, self.recipe.data) for message in messages]
        request = Request.of(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_token_ids=self.stop_ids, seed=seed
        )
        start = time.perf_counter()
        generations = Engine(self.target, loaded, options).decode(request)
        seconds = time.perf_counter() - start
        print("\n\n".join(answer_text(generation.token_ids, tokenizer) for generation in generations))
        tokens = sum(len(generation.token_ids) for generation in generations)
        lengths = [n for one in generations for n in counted_verifies(one.accept_lengths, one.finish_reason)]
        detail = "" if plain or not lengths else f", accept length {sum(lengths) / len(lengths):.2f}"
        self.say(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} tokens/s{detail}")
        return generations

    # --- inputs of stages --------------------------------------------------------------------------------------------

    def _online_features(self) -> OnlineFeatures:
        """The target, to be asked for features while training."""
        recipe, cache = self.recipe, self.recipe.train.online.cache
        if cache is not None and process_count() > 1:
            raise DraftsmithError(
                f"train.online.cache is {cache!r} with {process_count()} processes, and one process fills a cache; "
                "leave it out, or run `draftsmith capture` and train with train.features=store"
            )
        # Loaded only where it runs in this process, and first: its ends would else be read a second time.
        target = self.target if BACKENDS[recipe.capture.backend].loads_target else self._info
        samples = self._samples(read_conversations(self._conversations_file()))
        layout, origin = self._capture_layout(), self._provenance()
        return OnlineFeatures(target, samples, layout, recipe.capture, origin, cache=cache)

    def _evaluation_by_generating(
        self, busy: AbstractContextManager[Any] | None
    ) -> Callable[[Draft], dict[str, float]]:
        """The engine on the first `train.eval_prompts` of the held-out prompts; the first process alone loads it."""
        recipe = self.recipe
        prompts = find_prompts(recipe.bench.prompts, "heldout")[: recipe.train.eval_prompts]
        if not is_first():
            return _not_asked
        self.target.check_decoding()  # which else the first evaluation would find
        return by_generating(
            self.target,
            [self._chat.prompt_ids(prompt, 0, []) for prompt in prompts],
            max_new_tokens=recipe.train.eval_prompt_tokens,
            stop_token_ids=self.stop_ids,
            engine=recipe.engine,
            busy=busy,
        )

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _chat(self) -> Chat:
        return Chat(self.target.tokenizer, self.recipe.data)


def _not_asked(draft: Draft) -> dict[str, float]:
    raise RuntimeError("the first process evaluates for all of them")


def export_directory(
    run: Path,
    options: ExportOptions,
    out: Path | None,
    *,
    say: Callable[[str], object],
    target: TargetOptions | None = None,
) -> None:
    """The export of a run directory (or of the training directory inside one), for which its recipe is not needed.

    out None: `draft/` in the run directory. target None: where the run's features came from. The card names the accept
    length of the run's benchmark, and of which prompts, if that measured these very weights, with nothing that holds
    proposals back.
    """
    one_process("export")
    training = run if (run / RECORD_FILE).is_file() else RunDirectory(run).training
    files = RunDirectory(training.parent)
    directory = out or files.draft_directory
    measured: dict[str, Measured] = {}
    bench = Stamps(files.run, redo=False).finished("bench")
    if bench is not None and _proposes_all(bench) and files.bench_json.is_file():
        report = read_report(files.bench_json)
        for draft in report.drafts:
            found, setting = figures(report, draft, report.batch_sizes[0]), report.setting
            if found.accept_length is not None:
                measured[str(bench["drafts"][draft.name])] = Measured(
                    found.accept_length.value, found.prompts, setting["prompts"], setting["temperature"]
                )
    exported = export_run(training, options, directory, target=target, measured=measured)
    say(f"draft: step {exported.step:,} in layout {options.layout} at {directory}; reads back as it was written")


def _proposes_all(bench: Mapping[str, Any]) -> bool:
    """Whether a benchmark with these settings let drafts propose whole blocks, as far as the settings say: those of
    `tune`, fewer proposals, and a method's own options (a threshold, say) make shorter accept lengths. A stamp that is
    older than an option does not say it, and nothing was held back by it then."""
    engine = bench.get("engine") or bench["bench"].get("engine", {})  # an older stamp's lie below `bench`
    return bench.get("tuned") is None and engine.get("num_proposals") is None and not engine.get("proposer")


def draft_names(directories: Sequence[Path]) -> list[str]:
    """Short names that tell draft directories apart: a directory that is just called `draft` has its run's name too.

    Raises `DraftsmithError` for a directory that is named twice.
    """
    twice = next((path for path in directories if directories.count(path) > 1), None)
    if twice is not None:
        raise DraftsmithError(
            f"the draft {twice} is named twice; name each once (bench.repeats times a draft more often)"
        )
    own = ["/".join(path.resolve().parts[-2:]) if path.name == "draft" else path.name for path in directories]
    return own if len(set(own)) == len(own) else [str(path) for path in directories]
