"""Runs a draft against plain decoding of the same target, in one process, in turn, and reports both."""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.options import BenchOptions
from draftsmith.bench.page import render_page
from draftsmith.bench.report import BenchReport, PromptResult, Speed, equal_tokens
from draftsmith.decoding.generate import Generation, generate
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.progress import Progress, SilentProgress
from draftsmith.targets.target import Target


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt ready to decode: its token ids (chat template applied) and the kind it is counted under."""

    id: str
    token_ids: list[int]
    category: str | None = None


def bench(
    target: Target,
    draft: Draft,
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    *,
    stop_token_ids: Sequence[int] = (),
    draft_name: str = "",
    progress: Progress | None = None,
) -> BenchReport:
    """Measures accept length, speed and equality of speculative decoding.

    Every batch is decoded plainly and speculatively one after the other, the order changing from one to the next, so
    that neither side owns the warmer machine; `options.warmup` rounds over the first batch come before, untimed.
    Raises `DraftsmithError` when there is no prompt.
    """
    if not prompts:
        raise DraftsmithError("bench has no prompts; name a JSONL file with at least one prompt in `bench.prompts`")
    batches = [prompts[i : i + options.batch_size] for i in range(0, len(prompts), options.batch_size)]
    runs = _Runs(target, draft, options, tuple(stop_token_ids))
    for _ in range(options.warmup):
        runs.timed(batches[0], speculative=False)
        runs.timed(batches[0], speculative=True)

    results: list[PromptResult] = []
    seconds = {False: 0.0, True: 0.0}
    tokens = {False: 0, True: 0}
    with (progress or SilentProgress()).stage("Bench", total=len(prompts), unit="prompts") as stage:
        for index, batch in enumerate(batches):
            fastest: dict[bool, float] = {}
            outputs: dict[bool, list[Generation]] = {}
            for repeat in range(options.repeats):
                first = (index + repeat) % 2 == 1
                for speculative in (first, not first):
                    outputs[speculative], elapsed = runs.timed(batch, speculative=speculative)
                    fastest[speculative] = min(elapsed, fastest.get(speculative, elapsed))
            for speculative in (False, True):
                seconds[speculative] += fastest[speculative]
                tokens[speculative] += sum(len(generation.token_ids) for generation in outputs[speculative])
            results += _prompt_results(batch, outputs[False], outputs[True], greedy=options.temperature == 0.0)
            committed = [length for result in results for length in result.accept_lengths]
            stage.advance(len(batch), accept=f"{sum(committed) / max(len(committed), 1):.2f}")
    return BenchReport(
        setting=_setting(target, draft, options, draft_name),
        plain=Speed(tokens=tokens[False], seconds=seconds[False]),
        speculative=Speed(tokens=tokens[True], seconds=seconds[True]),
        prompts=results,
    )


def write_report(report: BenchReport, json_path: Path, page_path: Path) -> None:
    """Writes `bench.json` and its HTML page."""
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page_path.write_text(render_page(report), encoding="utf-8")


@dataclass(frozen=True)
class _Runs:
    """The two decoders under the same options."""

    target: Target
    draft: Draft
    options: BenchOptions
    stop_token_ids: tuple[int, ...]

    def timed(self, batch: Sequence[BenchPrompt], *, speculative: bool) -> tuple[list[Generation], float]:
        """The batch's generations and the seconds of wall time they took."""
        self._wait_for_device()
        start = time.perf_counter()
        generations = generate(
            self.target,
            self.draft if speculative else None,
            [prompt.token_ids for prompt in batch],
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            top_k=self.options.top_k,
            stop_token_ids=self.stop_token_ids,
            seed=self.options.seed,
        )
        self._wait_for_device()
        return generations, time.perf_counter() - start

    def _wait_for_device(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def _prompt_results(
    batch: Sequence[BenchPrompt], plain: Sequence[Generation], speculative: Sequence[Generation], *, greedy: bool
) -> list[PromptResult]:
    return [
        PromptResult(
            id=prompt.id,
            category=prompt.category,
            prompt_tokens=len(prompt.token_ids),
            new_tokens=len(drafted.token_ids),
            accept_lengths=list(drafted.accept_lengths),
            finish_reason=drafted.finish_reason,
            equal_tokens=equal_tokens(reference.token_ids, drafted.token_ids) if greedy else None,
            plain_tokens=len(reference.token_ids) if greedy else None,
        )
        for prompt, reference, drafted in zip(batch, plain, speculative, strict=True)
    ]


def _setting(target: Target, draft: Draft, options: BenchOptions, draft_name: str) -> dict[str, Any]:
    device = target.device
    return {
        "target": str(target.source),
        "draft": draft_name or draft.config.architecture,
        "draft_layers": draft.config.num_hidden_layers,
        "block_size": draft.config.block_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or str(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **options.model_dump(),
    }
