"""Capture through a real vLLM server, started by the command that draftsmith prints, is the capture of the target."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.registry import all_algorithms
from draftsmith.capture.options import CaptureOptions, VllmOptions
from draftsmith.capture.run import capture
from draftsmith.capture.vllm_server import server_command
from draftsmith.data.options import DataOptions
from draftsmith.data.sample import Conversation, Sample
from draftsmith.data.tokenize import tokenize_all
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target
from tests.layouts.drafts import simple_draft

from .drafts import saved_target
from .environment import MARKS, Server, free_port

pytestmark = MARKS

WINDOW = 256
LAYOUT = CaptureLayout((3, 0, 2), 128, final_state=True, dtype=torch.float32)
"""The server extracts ids 1, 3 and 4: what three taps need; the last layer's output is what a final state needs too."""


def samples(target: Target) -> list[Sample]:
    """Documents of one token to nearly the window, some that begin alike, and conversations of many turns."""
    vocab_size = target.vocab_size
    lengths = (1, 5, 16, 17, 64, 200, WINDOW - 1)
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(4, vocab_size, (length,), generator=generator) for length in lengths]
    shared = texts[-2][:120]
    texts += [torch.cat([shared, text[:20]]) for text in texts[3:]]
    found = [Sample(f"text-{n}", ids, torch.ones_like(ids, dtype=torch.bool)) for n, ids in enumerate(texts)]
    turns = [
        {"role": role, "content": f"{text} {turn}"}
        for turn in range(4)
        for role, text in (("user", "the user said"), ("assistant", "one two"))
    ]
    talks = [Conversation(f"talk-{n}", tuple(turns[:n])) for n in (2, 6, 8)]
    spoken, _ = tokenize_all(talks, target.tokenizer, DataOptions(max_length=WINDOW - 1))
    assert len(spoken) == len(talks)
    return [*found, *spoken]


class Served:
    """A server for `layout`, and captures through it."""

    def __init__(self, directory: Path, kind: str, dtype: str, layout: CaptureLayout, *more: str) -> None:
        self.directory = directory
        self.options = TargetOptions(path=str(saved_target(kind)), dtype=dtype, device="cpu")
        self.target = Target.load(**self.options.model_dump())
        identity = target_identity("tiny", None, self.target.text_config, self.target.ends.head_weight)
        self.provenance = Provenance(identity, None)
        port = free_port()
        self.vllm = VllmOptions(base_url=f"http://127.0.0.1:{port}/v1", server_device="cpu")
        command = server_command(self.options, dtype, layout, self.target.num_layers, self.vllm)
        self.server = Server(command, port, directory, "--max-model-len", str(WINDOW), *more)

    def capture(self, name: str, layout: CaptureLayout, *, backend: str = "vllm", **changes: Any) -> Store:
        target: Any = self.target
        dtype = self.options.dtype
        if backend == "vllm":
            target = TargetInfo.load(self.options.model_copy(update=changes.pop("target", {})))
        options = CaptureOptions(backend=backend, vllm=self.vllm, dtype=dtype, **changes)
        capture(target, samples(self.target), layout, self.directory / name, options, self.provenance)
        return Store.open(self.directory / name)


def errors(found: Store, wanted: Store) -> Tensor:
    """|found - wanted| / |wanted| of every token, layer and document, [N]."""
    distances = []
    for sample_id in wanted.sample_ids:
        ours, theirs = (store[store.index_of(sample_id)] for store in (found, wanted))
        assert torch.equal(ours.input_ids, theirs.input_ids)
        for name, states in theirs.features.items():
            a, b = (each.float().unflatten(-1, (-1, 128)) for each in (ours.features[name], states))
            distances.append(((a - b).norm(dim=-1) / b.norm(dim=-1)).flatten())
    return torch.cat(distances)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """float32, with the prefix cache, prompts in chunks of 64 tokens."""
    served = Served(tmp_path_factory.mktemp("exact"), "llama", "float32", LAYOUT, "--max-num-batched-tokens", "64")
    with served.server:
        yield served


@pytest.mark.parametrize("method", [method.name for method in all_algorithms()])
def test_features_of_every_method(exact: Served, method: str) -> None:
    algorithm = next(each for each in all_algorithms() if each.name == method)
    layout = algorithm.capture(simple_draft(algorithm.architecture).config)
    # The running server extracts three layers: two taps and the last one for a final state, or three taps.
    layout = replace(LAYOUT, tap_ids=(2, 0) if layout.final_state else (3, 0, 2), final_state=layout.final_state)
    ours = exact.capture(f"{method}-vllm", layout)
    theirs = exact.capture(f"{method}-hf", layout, backend="hf")
    assert float(errors(ours, theirs).max()) < 2e-4


def test_other_layers_another_dtype_and_the_window_are_noticed(exact: Served) -> None:
    shifted = replace(LAYOUT, tap_ids=(2, 1, 0), final_state=False)  # as many layers, other ones
    with pytest.raises(DraftsmithError, match=r"is layer \d of the target"):
        exact.capture("shifted", shifted)
    with pytest.raises(DraftsmithError, match=r"runs the target in float32, and target.dtype is bfloat16"):
        exact.capture("other-dtype", LAYOUT, target={"dtype": "bfloat16"})
    long = [Sample("long", torch.full((WINDOW,), 7), torch.ones(WINDOW, dtype=torch.bool)), *samples(exact.target)]
    info = TargetInfo.load(exact.options)
    options = CaptureOptions(backend="vllm", vllm=exact.vllm, dtype="float32", max_refused_share=0.2)
    report = capture(info, long, LAYOUT, exact.directory / "long", options, exact.provenance)
    assert [list(ids) for ids in report.refused.values()] == [["long"]]
    assert report.captured == len(long) - 1


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(exact: Served, tmp_path: Path) -> None:
    """Without the prefix cache, and with prompts in one go."""
    reference = exact.capture("reference", LAYOUT, backend="hf")
    served = Served(tmp_path, "llama", "bfloat16", LAYOUT, "--no-enable-prefix-caching")
    with served.server:
        ours = served.capture("ours", LAYOUT)
    theirs = served.capture("theirs", LAYOUT, backend="hf")
    found, usual = errors(ours, reference), errors(theirs, reference)
    assert float(found.median()) < 1.5 * float(usual.median())
    assert float(found.max()) < 2.0 * float(usual.max())
    assert 1e-4 < float(usual.median()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "qwen3_moe"])
def test_other_kinds_of_targets(tmp_path: Path, kind: str) -> None:
    served = Served(tmp_path, kind, "float32", LAYOUT)
    with served.server:
        ours = served.capture("ours", LAYOUT)
    assert float(errors(ours, served.capture("theirs", LAYOUT, backend="hf")).max()) < 2e-4


@pytest.mark.slow
def test_gemma_3_is_refused_by_vllm_as_draftsmith_says(tmp_path: Path) -> None:
    served = Served(tmp_path, "gemma3", "float32", LAYOUT)
    try:
        assert served.server.died()
    finally:
        served.server.end()
    assert "does not support EAGLE3 interface" in served.server.log.read_text()
    with pytest.raises(DraftsmithError, match="runs Gemma3ForCausalLM without `SupportsEagle3`"):
        served.capture("refused", LAYOUT)
