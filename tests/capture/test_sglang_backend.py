"""The backend `sglang` against an engine of ours, in a process of its own, that calls the hook as SGLang does.

No SGLang runs here; `benchmarks/peers/sglang_capture.py` tries the real one.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.capture import sglang as backend_module
from draftsmith.capture.backends import BACKENDS
from draftsmith.capture.options import CaptureOptions, SglangOptions
from draftsmith.capture.run import capture
from draftsmith.capture.sglang import SglangBackend, check_capture, check_version, engine_arguments
from draftsmith.capture.sglang_process import telling_lines
from draftsmith.capture.sglang_states import keep_states, state_file, take_states, write_states
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.features.shards import finished_shards
from draftsmith.features.tables import ShardTokens
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from tests.support.tiny import tiny_model, tiny_target

from . import recorded_sglang
from .samples import provenance, random_samples

LENGTHS = (5, 9, 1, 8)
HUB = TargetOptions(path="some/model")
LAYOUT = CaptureLayout((2, 0, 1), 32, final_state=True, dtype=torch.float32)
ONE_TAP = CaptureLayout((1,), 32, final_state=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return str(directory)


@pytest.fixture
def make(saved: str, tmp_path: Path) -> Iterator[Callable[..., SglangBackend]]:
    """Makes backends with an engine of `recorded_sglang`; closes them."""
    made: list[SglangBackend] = []
    storage = tmp_path / "storage"
    storage.mkdir()

    def backend(start: Any, layout: CaptureLayout = LAYOUT, **settings: Any) -> SglangBackend:
        options = SglangOptions(storage=storage, **{"timeout_seconds": 60, **settings})
        made.append(SglangBackend(TargetOptions(path=saved), torch.float32, layout, options, start=start))
        return made[-1]

    yield backend
    for each in made:
        each.close()
    assert not list(storage.iterdir())


def wanted(sample: Sample, layout: CaptureLayout) -> dict[str, Tensor]:
    ids = sample.input_ids.tolist()
    taps = torch.cat([recorded_sglang.states(ids, layer) for layer in layout.tap_ids], dim=-1)
    return {TAPS: taps, FINAL_STATE: recorded_sglang.states(ids, recorded_sglang.FINAL)}


def test_what_the_hook_hands_over_is_put_into_the_layouts_order(make: Any) -> None:
    samples = random_samples(LENGTHS)
    backend = make(recorded_sglang.start_with_lists)
    found = [*backend.features(samples[:2]), *backend.features(samples[2:])]
    for sample, features in zip(samples, found, strict=True):
        assert features.keys() == {TAPS, FINAL_STATE}
        for name, states in wanted(sample, LAYOUT).items():
            assert torch.equal(features[name], states)


def test_an_engine_that_does_not_start_says_why(make: Any) -> None:
    with pytest.raises(DraftsmithError, match=r"ended while starting .*\n  ValueError: The model captured 3 aux"):
        make(recorded_sglang.fail_to_start)


def test_an_engine_that_is_killed_ends_the_capture_with_its_message_and_what_is_captured_stays(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "check_version", lambda: None)
    monkeypatch.setattr(SglangBackend.__init__, "__kwdefaults__", {"start": recorded_sglang.start_and_die})
    samples = random_samples(LENGTHS)
    info = TargetInfo.load(TargetOptions(path=saved))
    sglang = SglangOptions(storage=tmp_path, timeout_seconds=60)
    options = CaptureOptions(
        backend="sglang", sglang=sglang, dtype="float32", tokens_per_batch=9, check_samples=0, max_refused_share=0.5
    )
    with pytest.raises(DraftsmithError, match=r"(?s)ended while prefilling 1 documents.*CUDA error: out of memory"):
        capture(info, samples, LAYOUT, tmp_path / "store", options, provenance(tiny_target()))
    (shard,) = finished_shards(tmp_path / "store")
    kept = ShardTokens.read(tmp_path / "store" / shard.entry.tokens_file.name)
    assert kept.sample_ids == [samples[1].id]  # the longest runs first; and this process was not killed


def test_a_model_that_does_not_call_the_hooked_module_and_an_engine_that_hangs_are_told(make: Any) -> None:
    backend = make(recorded_sglang.start_without_states)
    with pytest.raises(DraftsmithError, match=r"left no taps \[5, 96\] in torch.float32 .* there is nothing"):
        backend.features(random_samples([5]))
    backend._engine.timeout_seconds = 0.5
    with pytest.raises(DraftsmithError, match=r"(?s)prefilling 1 documents, has said nothing for 0\.5 s.*is starting"):
        backend.features(random_samples([5]))
    with pytest.raises(DraftsmithError, match=r"(?s)ended while prefilling|ended while between"):
        backend.features(random_samples([5]))


def test_states_pass_through_a_file_once(tmp_path: Path) -> None:
    states = torch.randn(7, 12)[:, ::2]
    write_states(tmp_path / "x", states)
    with pytest.raises(ValueError, match="168 bytes"):
        take_states(tmp_path / "x", [7, 5], torch.float32)
    taken = take_states(tmp_path / "x", [7, 6], torch.float32)
    assert torch.equal(taken, states)
    assert not (tmp_path / "x").exists()
    with pytest.raises(FileNotFoundError):
        take_states(tmp_path / "x", [7, 6], torch.float32)
    write_states(tmp_path / "x", states)
    with pytest.raises(FileExistsError):
        write_states(tmp_path / "x", states)


class _Mode:
    def __init__(self, extend: bool) -> None:
        self.extend = extend

    def is_extend(self) -> bool:
        return self.extend


def inputs(rids: list[str], lengths: list[int], *, start: int = 0, extend: bool = True, taps: Any = 0) -> Any:
    rows = sum(lengths)
    batch = SimpleNamespace(
        rids=rids,
        forward_mode=_Mode(extend),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=[start] * len(rids),
    )
    states = torch.arange(rows, dtype=torch.float32)[:, None].expand(-1, 4) if taps == 0 else taps
    return torch.zeros(rows), torch.ones(rows, 2), None, batch, states


def test_only_whole_prefills_of_draftsmiths_own_requests_are_kept(tmp_path: Path) -> None:
    keep_states(inputs(["other", "draftsmith-1"], [3, 2]), tmp_path, final_state=True)
    assert {path.name for path in tmp_path.iterdir()} == {"draftsmith-1.taps.float32", "draftsmith-1.final.float32"}
    rows = take_states(state_file(tmp_path, "draftsmith-1", "taps", torch.float32), [2, 4], torch.float32)
    assert rows[:, 0].tolist() == [3, 4]
    keep_states(inputs(["draftsmith-2"], [1], extend=False), tmp_path, final_state=True)
    keep_states(inputs(["other"], [1]), tmp_path, final_state=True)
    assert not list(tmp_path.glob("draftsmith-2*"))
    with pytest.raises(RuntimeError, match="prefilled from token 4 on"):
        keep_states(inputs(["draftsmith-3"], [2], start=4), tmp_path, final_state=True)
    with pytest.raises(RuntimeError, match="no tapped layers"):
        keep_states(inputs(["draftsmith-4"], [2], taps=None), tmp_path, final_state=True)


def test_the_telling_lines_of_a_log_are_those_of_its_last_traceback() -> None:
    log = ["a", "Traceback (most recent call last):", "  File x", "    y", "ValueError: z", "killed", "bye"]
    assert telling_lines(log) == ["ValueError: z", "killed", "bye"]
    assert telling_lines(["a", "b"]) == ["a", "b"]
    assert telling_lines(["Traceback (most recent call last):", "  File x"])[-1] == "  File x"


@pytest.mark.parametrize(("method", "algorithm"), [("dflash", "DFLASH"), ("eagle3", "EAGLE3")])
def test_sglang_is_told_the_convention_and_the_layers(method: Any, algorithm: str) -> None:
    layout = CaptureLayout((17, 1, 9), 32, final_state=False)
    options = SglangOptions(capture_method=method)
    arguments = engine_arguments(HUB, torch.bfloat16, layout, options, Path("/dev/shm/x"))
    assert arguments["speculative_algorithm"] == algorithm
    # 0-based, as taps are: SGLang's hooks add the one themselves.
    assert arguments["return_aux_hidden_state_layer_ids"] == [1, 9, 17]
    assert arguments["enable_return_aux_hidden_states"]
    assert arguments["disable_radix_cache"]
    assert arguments["chunked_prefill_size"] == -1
    assert arguments["disable_cuda_graph"]
    assert arguments["disable_prefill_cuda_graph"]
    assert arguments["dtype"] == "bfloat16"
    (hook,) = arguments["forward_hooks"]
    assert hook["config"] == {"directory": "/dev/shm/x", "final_state": False}


def test_sglang_loads_the_target_as_the_recipe_says() -> None:
    said = TargetOptions(path="some/model", dtype="float16", revision="v2", trust_remote_code=True)
    options = SglangOptions(engine={"tp_size": 2, "attention_backend": "triton"})
    arguments = engine_arguments(said, torch.float16, ONE_TAP, options, Path("x"))
    assert (arguments["model_path"], arguments["dtype"]) == ("some/model", "float16")
    assert (arguments["revision"], arguments["trust_remote_code"]) == ("v2", True)
    assert (arguments["tp_size"], arguments["attention_backend"]) == (2, "triton")
    options = SglangOptions(engine={"dtype": "float32", "chunked_prefill_size": 512})
    with pytest.raises(DraftsmithError, match=r"capture.sglang.engine names chunked_prefill_size, dtype"):
        engine_arguments(said, torch.float16, ONE_TAP, options, Path("x"))


@pytest.mark.parametrize(
    ("device", "kind", "gpu"), [("auto", None, 2), ("cuda", "cuda", 2), ("cuda:5", "cuda", 5), ("cpu", "cpu", 2)]
)
def test_sglang_runs_where_the_recipe_says(
    device: str, kind: str | None, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")  # the third process of a machine
    said = TargetOptions(path="some/model", device=device)
    arguments = engine_arguments(said, torch.float32, ONE_TAP, SglangOptions(), Path("x"))
    assert (arguments["device"], arguments["base_gpu_id"]) == (kind, gpu)


@pytest.mark.parametrize("device", ["cuda:x", "mps", "gpu"])
def test_sglang_is_not_asked_for_a_device_of_another_name(device: str) -> None:
    said = TargetOptions(path="some/model", device=device)
    with pytest.raises(DraftsmithError, match=f"target.device is '{device}'; use 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        engine_arguments(said, torch.float32, ONE_TAP, SglangOptions(), Path("x"))


def test_what_sglang_cannot_capture_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(DraftsmithError, match=r"taps layer 3, the target's last one.*capture.backend=hf or vllm"):
        check_capture(CaptureLayout((1, 3), 32, False), 4, "LlamaForCausalLM", SglangOptions())
    with pytest.raises(DraftsmithError, match=r"runs Qwen2ForCausalLM without `set_dflash.*capture_method=eagle3"):
        check_capture(ONE_TAP, 4, "Qwen2ForCausalLM", SglangOptions())
    check_capture(ONE_TAP, 4, "Qwen2ForCausalLM", SglangOptions(capture_method="eagle3"))
    with pytest.raises(DraftsmithError, match=r"runs GemmaForCausalLM without.*use capture.backend=hf$"):
        check_capture(ONE_TAP, 4, "GemmaForCausalLM", SglangOptions())
    info = replace(tiny_target().info, options=HUB)
    with pytest.raises(DraftsmithError, match="the target's last one"):
        BACKENDS["sglang"].longest(info, CaptureLayout((3,), 32, False), CaptureOptions(backend="sglang"))
    longest = BACKENDS["sglang"].longest(info, ONE_TAP, CaptureOptions(backend="sglang"))
    assert longest == info.max_position_embeddings - 7


@pytest.mark.parametrize(
    ("version", "good"), [("0.5.9", False), ("0.5.23", True), ("0.5.24.post1", True), ("0.6.0rc1", True)]
)
def test_an_sglang_without_the_hooks_is_refused(version: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if good:
        check_version()
        return
    with pytest.raises(DraftsmithError, match=r"sglang is 0.5.9.*sglang>=0.5.23 is needed"):
        check_version()


def test_a_missing_sglang_is_named() -> None:
    with pytest.raises(DraftsmithError, match="sglang is not installed"):
        BACKENDS["sglang"].make(replace(tiny_target().info, options=HUB), ONE_TAP, CaptureOptions(backend="sglang"))
