"""The translation between engines' states and ours, against the shapes and calls that their sources show.

No engine runs here: sglang 0.5.23 and vllm 0.33.0 were read, not executed.
"""

import fcntl
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.capture.backends import BACKENDS
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions, SglangOptions, VllmOptions
from draftsmith.capture.run import capture
from draftsmith.capture.sglang import SglangBackend, check_version, engine_arguments
from draftsmith.capture.vllm import VllmBackend, server_command, server_layers
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.run.outline import TargetOutline
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model, tiny_target

from .samples import provenance, random_samples

LENGTHS = (5, 9, 1, 8)
MODEL = TargetOptions(path="some/model")


def layers_before(target: Target, sample: Sample, layer_ids: list[int]) -> Tensor:
    """What layers read [S, n, H], in ascending order; the id after the last layer: what it wrote, before the norm."""
    layout = CaptureLayout(tuple(sorted(layer_id - 1 for layer_id in layer_ids)), target.hidden_size, False)
    (features,) = HfBackend(target, layout).features([sample])
    return features["taps"].unflatten(-1, (-1, target.hidden_size))


class RecordedEngine:
    """Answers as `sglang.Engine.generate` does: a list of replies with the prompt's rows as nested lists."""

    def __init__(self, target: Target, arguments: dict[str, Any]) -> None:
        self.target = target
        self.layer_ids = arguments["return_aux_hidden_state_layer_ids"]
        self.calls: list[dict[str, Any]] = []

    def generate(self, **call: Any) -> list[dict[str, Any]]:
        self.calls.append(call)
        replies = []
        for ids in call["input_ids"]:
            sample = Sample("x", torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool))
            rows = layers_before(self.target, sample, [layer_id + 1 for layer_id in self.layer_ids]).flatten(-2)
            replies.append({"text": "", "output_ids": [1], "meta_info": {"hidden_states": [rows.tolist()]}})
        return replies


def test_what_sglang_returns_is_put_into_the_layouts_order() -> None:
    target = tiny_target()
    layout = CaptureLayout((2, 0, 1), 32, final_state=False)
    engine = RecordedEngine(target, engine_arguments(MODEL, layout, SglangOptions()))
    samples = random_samples(LENGTHS)
    found = SglangBackend(engine, layout).features(samples)
    wanted = HfBackend(target, layout).features(samples)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours["taps"], theirs["taps"], rtol=1e-5, atol=1e-5)
    (call,) = engine.calls
    assert call["return_hidden_states"] is True
    assert call["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize(("method", "algorithm"), [("dflash", "DFLASH"), ("eagle3", "EAGLE3")])
def test_sglang_is_told_the_convention_and_the_layers(method: Any, algorithm: str) -> None:
    layout = CaptureLayout((17, 1, 9), 32, final_state=False)
    arguments = engine_arguments(MODEL, layout, SglangOptions(capture_method=method))
    assert arguments["speculative_algorithm"] == algorithm
    # 0-based, as taps are: SGLang's hooks add the one themselves.
    assert arguments["return_aux_hidden_state_layer_ids"] == [1, 9, 17]
    assert arguments["enable_return_aux_hidden_states"]
    assert arguments["disable_radix_cache"]
    assert arguments["chunked_prefill_size"] == -1


def test_sglang_loads_the_target_as_the_recipe_says() -> None:
    said = TargetOptions(path="some/model", dtype="float16", revision="v2", trust_remote_code=True)
    arguments = engine_arguments(said, CaptureLayout((1,), 32, final_state=False), SglangOptions())
    assert (arguments["model_path"], arguments["dtype"]) == ("some/model", "float16")
    assert (arguments["revision"], arguments["trust_remote_code"]) == ("v2", True)
    assert not engine_arguments(MODEL, CaptureLayout((1,), 32, False), SglangOptions())["trust_remote_code"]


@pytest.mark.parametrize(
    ("device", "kind", "gpu"), [("auto", None, 2), ("cuda", "cuda", 2), ("cuda:5", "cuda", 5), ("cpu", "cpu", 2)]
)
def test_sglang_runs_where_the_recipe_says(
    device: str, kind: str | None, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")  # the third process of a machine
    said = TargetOptions(path="some/model", device=device)
    arguments = engine_arguments(said, CaptureLayout((1,), 32, final_state=False), SglangOptions())
    assert (arguments["device"], arguments["base_gpu_id"]) == (kind, gpu)


@pytest.mark.parametrize("device", ["cuda:x", "mps", "gpu"])
def test_sglang_is_not_asked_for_a_device_of_another_name(device: str) -> None:
    said = TargetOptions(path="some/model", device=device)
    with pytest.raises(DraftsmithError, match=f"target.device is '{device}'; use 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        engine_arguments(said, CaptureLayout((1,), 32, final_state=False), SglangOptions())


def test_sglang_cannot_give_a_final_state() -> None:
    with pytest.raises(DraftsmithError, match="needs the target's final state; SGLang returns"):
        engine_arguments(MODEL, CaptureLayout((1,), 32, final_state=True), SglangOptions())


@pytest.mark.parametrize(
    ("hidden_states", "message"),
    [([], "no hidden states"), (None, "no hidden states"), ([[[0.0] * 64] * 3], r"hidden states \[3, 64\].*\[5, 64\]")],
)
def test_replies_of_sglang_that_do_not_fit_are_refused(hidden_states: Any, message: str) -> None:
    class Engine:
        def generate(self, **call: Any) -> list[dict[str, Any]]:
            return [{"meta_info": {"hidden_states": hidden_states}}]

    with pytest.raises(DraftsmithError, match=message):
        SglangBackend(Engine(), CaptureLayout((0, 1), 32, final_state=False)).features(random_samples([5]))


@pytest.mark.parametrize(
    ("version", "good"), [("0.5.9", False), ("0.5.23", True), ("0.5.24.post1", True), ("0.6.0", True)]
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
        BACKENDS["sglang"].make(
            TargetOutline.of(tiny_target(), MODEL), CaptureLayout((1,), 32, False), CaptureOptions()
        )


class HiddenStatesServer(ThreadingHTTPServer):
    """Answers completions as a vLLM server with `ExampleHiddenStatesConnector` does: states go into a file that is
    locked until it is written."""

    def __init__(self, target: Target, storage: Path, layer_ids: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.storage, self.layer_ids = target, storage, layer_ids
        self.requests: list[dict[str, Any]] = []
        self.writers: list[threading.Thread] = []
        self.computing = threading.Lock()

    def keep(self, ids: list[int]) -> str:
        path = self.storage / f"cmpl-{len(self.requests)}.safetensors"
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        sample = Sample("x", torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool))

        with self.computing:
            states = layers_before(self.target, sample, self.layer_ids).contiguous()

        def write() -> None:  # after the reply has gone out
            save_file({"hidden_states": states, "token_ids": sample.input_ids}, path)
            lock.close()

        self.writers.append(threading.Timer(0.02, write))
        self.writers[-1].start()
        return str(path)


class _Handler(BaseHTTPRequestHandler):
    server: HiddenStatesServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, **request})
        reply: dict[str, Any] = {"choices": [{"text": "x", "finish_reason": "length"}]}
        if self.server.layer_ids:
            reply["kv_transfer_params"] = {"hidden_states_path": self.server.keep(request["prompt"])}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Served:
    """A saved target and a server of it."""

    def __init__(self, directory: Path, layout: CaptureLayout) -> None:
        model = tiny_model()
        model.save_pretrained(directory / "model")
        self.path = str(directory / "model")
        self.target = Target.from_model(model)
        self.storage = directory / "storage"
        self.storage.mkdir()
        self.server = HiddenStatesServer(self.target, self.storage, server_layers(layout, self.target.num_layers))
        self.options = VllmOptions(base_url=f"http://127.0.0.1:{self.server.server_port}/v1", concurrency=3)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def backend(self, layout: CaptureLayout, options: VllmOptions | None = None) -> VllmBackend:
        norm = self.target.model.get_decoder().norm
        return VllmBackend(self.path, self.target.num_layers, layout, options or self.options, norm)

    def __enter__(self) -> "Served":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.thread.join()
        for writer in self.server.writers:
            writer.join()
        self.server.server_close()


LAYOUT = CaptureLayout((3, 0, 2), 32, final_state=True, dtype=torch.float32)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, LAYOUT) as served:
        yield served


def test_a_capture_through_vllm_is_the_capture_of_the_target(served: Served, tmp_path: Path) -> None:
    samples = random_samples(LENGTHS)
    options = CaptureOptions(backend="vllm", vllm=served.options, dtype="float32", tokens_per_batch=18)

    outline = TargetOutline.load(TargetOptions(path=served.path))  # nothing of the model's layers is read here
    capture(outline, samples, LAYOUT, tmp_path / "vllm", options, provenance(served.target))
    options = CaptureOptions(dtype="float32", tokens_per_batch=18)
    capture(served.target, samples, LAYOUT, tmp_path / "hf", options, provenance(served.target))
    a, b = Store.open(tmp_path / "vllm"), Store.open(tmp_path / "hf")
    for sample in samples:
        for name in LAYOUT.widths:
            ours, theirs = (store[store.index_of(sample.id)].features[name] for store in (a, b))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(served.server.requests) == len(samples)
    request = served.server.requests[0]
    assert request["path"] == "/v1/completions"
    assert (request["model"], request["max_tokens"], request["temperature"]) == (served.path, 1, 0.0)
    assert not list(served.storage.iterdir())  # read and removed


def test_a_server_with_other_layers_is_refused(served: Served) -> None:
    other = CaptureLayout((1,), 32, final_state=True, dtype=torch.float32)
    backend = served.backend(other)
    with pytest.raises(DraftsmithError, match=r"states \[5, 3, 32\].*eagle_aux_hidden_state_layer_ids \[2, 4\]"):
        backend.features(random_samples([5]))


def test_a_server_that_keeps_no_states_and_one_that_is_not_there_are_named(served: Served) -> None:
    backend = served.backend(LAYOUT)
    served.server.layer_ids = []
    with pytest.raises(DraftsmithError, match=r"names no hidden_states_path; start the server with\nvllm serve"):
        backend.features(random_samples([5]))
    nobody = VllmOptions(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(DraftsmithError, match=r"no answer from http://127\.0\.0\.1:9/v1/completions"):
        served.backend(LAYOUT, nobody).features(random_samples([5]))


def test_the_final_norm_is_read_as_the_recipe_says(served: Served) -> None:
    def norm(dtype: str) -> nn.Module:
        outline = TargetOutline.load(TargetOptions(path=served.path, dtype=dtype))
        backend = BACKENDS["vllm"].make(outline, LAYOUT, CaptureOptions(backend="vllm", vllm=served.options))
        assert isinstance(backend, VllmBackend)
        assert isinstance(backend.norm, nn.Module)
        return backend.norm

    for dtype in (torch.float32, torch.bfloat16):
        (weight,) = norm(str(dtype).removeprefix("torch.")).parameters()
        assert (weight.dtype, weight.device.type) == (dtype, "cpu")
    with pytest.raises(DraftsmithError, match="no final norm was given"):
        VllmBackend(served.path, served.target.num_layers, LAYOUT, served.options)
    with pytest.raises(DraftsmithError, match="in memory only"):
        TargetOutline.of(served.target).final_norm()


def test_the_server_counts_layers_by_what_they_read() -> None:
    """Trap 14."""
    layout = CaptureLayout((1, 17, 9), 32, final_state=True)
    assert server_layers(layout, 36) == [2, 10, 18, 36]
    assert '"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 36]' in server_command("some/model", layout, 36)
