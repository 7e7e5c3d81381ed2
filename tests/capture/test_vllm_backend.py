"""The backend `vllm` against a server of ours that answers, locks and writes as vLLM's connector does.

The real one runs in tests/interop_vllm.
"""

import fcntl
import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.capture.backends import BACKENDS
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions, VllmOptions
from draftsmith.capture.run import capture
from draftsmith.capture.vllm import VllmBackend
from draftsmith.capture.vllm_server import read_and_remove, server_command, server_layers
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model

from .samples import provenance, random_samples

LENGTHS = (5, 9, 1, 8)


def layers_before(target: Target, sample: Sample, layer_ids: list[int]) -> Tensor:
    """What layers read [S, n, H], in ascending order; the id after the last layer: what it wrote, before the norm."""
    layout = CaptureLayout(tuple(sorted(layer_id - 1 for layer_id in layer_ids)), target.hidden_size, False)
    (features,) = HfBackend(target, layout).features([sample])
    return features["taps"].unflatten(-1, (-1, target.hidden_size))


class HiddenStatesServer(ThreadingHTTPServer):
    """Answers completions as a vLLM server with `ExampleHiddenStatesConnector` does: states go into a file that is
    locked until it is written.

    layer_ids: those it was started with, None: without the connector; dtype: what it runs in; window: the tokens of a
    request, answer included; writes: False for one whose writer dies.
    """

    def __init__(self, name: str, target: Target, storage: Path, layer_ids: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.target, self.storage = name, target, storage
        self.layer_ids: list[int] | None = layer_ids
        self.dtype, self.window, self.writes = torch.float32, 512, True
        self.requests: list[dict[str, Any]] = []
        self.writers: list[threading.Thread] = []
        self.computing = threading.Lock()

    def keep(self, ids: list[int], layer_ids: list[int]) -> str:
        path = self.storage / f"cmpl-{len(self.requests)}.safetensors"
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        sample = Sample("x", torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool))

        with self.computing:
            states = layers_before(self.target, sample, layer_ids).to(self.dtype).contiguous()

        def write() -> None:  # after the reply has gone out
            if self.writes:
                save_file({"hidden_states": states, "token_ids": sample.input_ids}, path)
            lock.close()

        self.writers.append(threading.Timer(0.02, write))
        self.writers[-1].start()
        return str(path)


class _Handler(BaseHTTPRequestHandler):
    server: HiddenStatesServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._reply(200, {"data": [{"id": self.server.name, "max_model_len": self.server.window}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, **request})
        if len(request["prompt"]) >= self.server.window:
            self._reply(400, {"error": {"message": "max_tokens must be at least 1, got 0."}})
            return
        reply: dict[str, Any] = {"choices": [{"text": "x", "finish_reason": "length"}]}
        if self.server.layer_ids is not None:
            path = self.server.keep(request["prompt"], self.server.layer_ids)
            reply["kv_transfer_params"] = {"hidden_states_path": path}
        self._reply(200, reply)

    def _reply(self, status: int, reply: Any) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
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
        layers = server_layers(layout, self.target.num_layers)
        self.server = HiddenStatesServer(self.path, self.target, self.storage, layers)
        self.options = VllmOptions(
            base_url=f"http://127.0.0.1:{self.server.server_port}/v1", concurrency=3, retries=0, timeout_seconds=5
        )
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def backend(self, layout: CaptureLayout, **settings: Any) -> VllmBackend:
        norm = self.target.model.get_decoder().norm
        options = self.options.model_copy(update={k: v for k, v in settings.items() if k in VllmOptions.model_fields})
        other = {name: value for name, value in settings.items() if name not in VllmOptions.model_fields}
        target = TargetOptions(path=self.path)
        return VllmBackend(target, self.target.num_layers, torch.float32, layout, options, norm=norm, **other)

    def capture(self, samples: list[Sample], out: Path, layout: CaptureLayout | None = None, **settings: Any) -> Any:
        defaults: dict[str, Any] = {"backend": "vllm", "vllm": self.options, "dtype": "float32", "tokens_per_batch": 18}
        info = TargetInfo.load(TargetOptions(path=self.path))
        options = CaptureOptions(**{**defaults, **settings})
        return capture(info, samples, layout or LAYOUT, out, options, provenance(self.target))

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


@pytest.mark.parametrize("checked", [0, 2])
def test_a_capture_through_vllm_is_the_capture_of_the_target(served: Served, tmp_path: Path, checked: int) -> None:
    samples = random_samples(LENGTHS)
    served.capture(samples, tmp_path / "vllm", check_samples=checked)
    options = CaptureOptions(dtype="float32", tokens_per_batch=18)
    capture(served.target, samples, LAYOUT, tmp_path / "hf", options, provenance(served.target))
    a, b = Store.open(tmp_path / "vllm"), Store.open(tmp_path / "hf")
    for sample in samples:
        for name in LAYOUT.widths:
            ours, theirs = (store[store.index_of(sample.id)].features[name] for store in (a, b))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(served.server.requests) == len(samples) + checked
    request = served.server.requests[0]
    assert request["path"] == "/v1/completions"
    assert (request["model"], request["max_tokens"], request["temperature"]) == (served.path, 1, 0.0)
    assert not list(served.storage.iterdir())  # read and removed


def test_a_server_with_other_layers_is_refused(served: Served) -> None:
    other = CaptureLayout((1,), 32, final_state=True, dtype=torch.float32)
    with pytest.raises(DraftsmithError, match=r"states \[5, 3, 32\].*eagle_aux_hidden_state_layer_ids \[2, 4\]"):
        served.backend(other).features(random_samples([5]))


def test_as_many_other_layers_are_seen_before_anything_is_stored(served: Served, tmp_path: Path) -> None:
    """Layers counted as taps are: the right number of them, each one too low."""
    served.server.layer_ids = [1, 2, 3]
    layout = CaptureLayout((1, 2, 3), 32, final_state=False, dtype=torch.float32)
    with pytest.raises(DraftsmithError, match=r"gives as layer 1 is layer 0 of the target.*check_samples=0"):
        served.capture(random_samples(LENGTHS), tmp_path / "store", layout)
    assert not list((tmp_path / "store").glob("shard-*"))
    served.capture(random_samples(LENGTHS), tmp_path / "unchecked", layout, check_samples=0)


def test_another_model_of_the_same_sizes_is_seen(served: Served, tmp_path: Path) -> None:
    served.server.target = Target.from_model(tiny_model(seed=9))
    with pytest.raises(DraftsmithError, match=r"layer \d.*(differs from the target's by|is layer \d of the target)"):
        served.capture(random_samples(LENGTHS), tmp_path / "store")


def test_a_server_of_another_dtype_is_refused(served: Served, tmp_path: Path) -> None:
    served.server.dtype = torch.bfloat16
    with pytest.raises(DraftsmithError, match=r"in bfloat16, and target.dtype is float32: .*--dtype float32"):
        served.capture(random_samples(LENGTHS), tmp_path / "store", check_samples=0)
    assert not list((tmp_path / "store").glob("shard-*"))


def test_documents_longer_than_the_servers_window_are_refused_and_the_others_captured(
    served: Served, tmp_path: Path
) -> None:
    served.server.window = 9  # one position is for the answer
    report = served.capture(random_samples(LENGTHS), tmp_path / "store", max_refused_share=0.5)
    assert report.captured == 3
    assert [len(ids) for ids in report.refused.values()] == [1]


def test_a_server_that_keeps_no_states_one_of_another_model_and_none_are_named(served: Served) -> None:
    served.server.layer_ids = None
    with pytest.raises(DraftsmithError, match=r"names no hidden_states_path; start the server with\nvllm serve"):
        served.backend(LAYOUT).features(random_samples([5]))
    assert served.backend(LAYOUT).longest() == 511
    with pytest.raises(DraftsmithError, match=r"serves '.*model', not 'other' \(capture.vllm.model"):
        served.backend(LAYOUT, model="other").longest()
    nobody = "http://127.0.0.1:9/v1"
    with pytest.raises(DraftsmithError, match=r"no answer from http://127\.0\.0\.1:9/v1 .*start the server with"):
        served.backend(LAYOUT, base_url=nobody).longest()
    with pytest.raises(DraftsmithError, match=r"no answer from http://127\.0\.0\.1:9/v1/completions"):
        served.backend(LAYOUT, base_url=nobody).features(random_samples([5]))


def test_a_target_that_vllm_cannot_tap_is_named_in_place_of_a_command(served: Served, tmp_path: Path) -> None:
    backend = served.backend(LAYOUT, base_url="http://127.0.0.1:9/v1", architecture="Gemma3ForCausalLM")
    with pytest.raises(DraftsmithError, match=r"runs Gemma3ForCausalLM without `SupportsEagle3`.*capture.backend=hf"):
        backend.longest()


def test_a_server_that_dies_while_it_writes_is_told_from_a_directory_that_is_not_shared(
    served: Served, tmp_path: Path
) -> None:
    served.server.writes = False
    with pytest.raises(DraftsmithError, match=r"began .*cmpl-\d.* and did not write it: it has stopped"):
        served.backend(LAYOUT).features(random_samples([5]))
    assert not list(served.storage.iterdir())
    with pytest.raises(DraftsmithError, match="must lie on a directory that this machine sees too"):
        read_and_remove(tmp_path / "elsewhere" / "x.safetensors", 1.0)


def test_a_file_that_is_never_finished_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with (tmp_path / "x.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DraftsmithError, match=r"has not written .* within 0\.05 s"):
            read_and_remove(path, 0.05)


def test_the_final_norm_is_read_as_the_recipe_says(served: Served) -> None:
    def norm(dtype: str) -> nn.Module:
        info = TargetInfo.load(TargetOptions(path=served.path, dtype=dtype))
        backend = BACKENDS["vllm"].make(info, LAYOUT, CaptureOptions(backend="vllm", vllm=served.options))
        assert isinstance(backend, VllmBackend)
        assert isinstance(backend.norm, nn.Module)
        assert str(backend.dtype) == f"torch.{dtype}"
        return backend.norm

    for dtype in (torch.float32, torch.bfloat16):
        (weight,) = norm(str(dtype).removeprefix("torch.")).parameters()
        assert (weight.dtype, weight.device.type) == (dtype, "cpu")
    with pytest.raises(DraftsmithError, match="no final norm was given"):
        VllmBackend(
            TargetOptions(path=served.path), served.target.num_layers, torch.float32, LAYOUT, served.options, norm=None
        )
    with pytest.raises(DraftsmithError, match="in memory only"):
        served.target.info.loading()


def test_the_server_counts_layers_by_what_they_read() -> None:
    """Trap 14."""
    layout = CaptureLayout((1, 17, 9), 32, final_state=True)
    assert server_layers(layout, 36) == [2, 10, 18, 36]


def test_the_printed_command_says_everything(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "a model")
    layout = CaptureLayout((1,), 32, final_state=False)
    target = TargetOptions(path=str(tmp_path / "a model"), revision="v2", trust_remote_code=True)
    options = VllmOptions(base_url="http://localhost:8123/v1", model="tiny")
    words = shlex.split(server_command(target, "float16", layout, 4, options).replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", str(tmp_path / "a model")]
    given = dict(zip(words[3:-1:2], words[4::2], strict=True))
    assert given.pop("--speculative-config").endswith('{"eagle_aux_hidden_state_layer_ids": [2]}}}')
    assert json.loads(given.pop("--kv-transfer-config"))["kv_connector"] == "ExampleHiddenStatesConnector"
    assert given == {"--dtype": "float16", "--served-model-name": "tiny", "--revision": "v2", "--port": "8123"}
    assert words[-1] == "--trust-remote-code"
    cpu = server_command(target, "float32", layout, 4, options.model_copy(update={"server_device": "cpu"}))
    assert cpu.startswith("python -m vllm.entrypoints.openai.api_server --model")
    assert '"kv_connector_module_path": "draftsmith.capture.vllm_cpu_connector"' in cpu
