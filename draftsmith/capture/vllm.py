"""The backend `vllm`: a vLLM server runs the target and leaves hidden states in files on a directory that both see.

Read from the source of vllm 0.33.0 (`ExampleHiddenStatesConnector`, `ExtractHiddenStatesConfig`, the completions
protocol): a server with the speculative method `extract_hidden_states` and that connector answers a completion with
`kv_transfer_params.hidden_states_path`. The file, complete once a shared lock on PATH.lock is granted, holds
`hidden_states` [S, n, H], the n layers in ascending order, and `token_ids` [S]. Layer ids count what a layer reads, one
higher than taps; the id that is the number of layers is the last layer's output, before the final norm.
"""

import fcntl
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.capture.options import VllmOptions
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.layouts.layer_ids import to_layer_input_ids


def server_layers(layout: CaptureLayout, num_layers: int) -> list[int]:
    """The layer ids that the server has to be started with, ascending."""
    last = {num_layers} if layout.final_state else set()
    return sorted({*to_layer_input_ids(layout.tap_ids), *last})


def server_command(path: str, layout: CaptureLayout, num_layers: int) -> str:
    """How to start a server for a layout."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": server_layers(layout, num_layers)},
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/hidden_states"},
    }
    return (
        f"vllm serve {path} --speculative-config '{json.dumps(speculative)}' "
        f"--kv-transfer-config '{json.dumps(transfer)}'"
    )


def features_of(
    stored: dict[str, Tensor],
    sample: Sample,
    layout: CaptureLayout,
    num_layers: int,
    norm: Callable[[Tensor], Tensor] | None,
) -> dict[str, Tensor]:
    """The layout's features of a document from a file's tensors; `norm`: the target's final norm, for a final state.

    Raises `DraftsmithError` where the file is of other tokens, layers or widths.
    """
    layers = server_layers(layout, num_layers)
    states, token_ids = stored.get("hidden_states"), stored.get("token_ids")
    wanted = [sample.input_ids.shape[0], len(layers), layout.hidden_size]
    if states is None or token_ids is None or list(states.shape) != wanted:
        found = None if states is None else list(states.shape)
        raise DraftsmithError(
            f"the vLLM server gave hidden states {found} for sample {sample.id!r}; layers {layers} of its tokens are "
            f"{wanted}: start the server with eagle_aux_hidden_state_layer_ids {layers}"
        )
    if not torch.equal(token_ids.to(torch.int64), sample.input_ids):
        raise DraftsmithError(f"the vLLM server gave the hidden states of other tokens for sample {sample.id!r}")
    columns = [layers.index(layer) for layer in to_layer_input_ids(layout.tap_ids)]
    features = {TAPS: states[:, columns].flatten(-2)}
    if layout.final_state:
        assert norm is not None
        features[FINAL_STATE] = norm(states[:, layers.index(num_layers)])
    return features


class VllmBackend:
    """A running server; see `CaptureBackend`.

    path: the target's; norm: its final norm on the CPU, which a layout with a final state needs.
    """

    def __init__(
        self,
        path: str,
        num_layers: int,
        layout: CaptureLayout,
        options: VllmOptions,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if layout.final_state and norm is None:
            raise DraftsmithError(
                "the draft needs the target's final state, and no final norm was given: vLLM keeps the state before it"
            )
        self.layout = layout
        self.num_layers = num_layers
        self.options = options
        self.url = options.base_url.rstrip("/") + "/completions"
        self.model = options.model or path
        self.command = server_command(path, layout, num_layers)
        self.norm = norm

    @torch.no_grad()
    def features(self, samples: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """As `CaptureBackend.features`, on the CPU. The server's files are removed."""
        with ThreadPoolExecutor(self.options.concurrency) as pool:
            return list(pool.map(self._features, samples))

    def _features(self, sample: Sample) -> dict[str, Tensor]:
        path = self._ask(sample)
        stored = _load(path)
        return features_of(stored, sample, self.layout, self.num_layers, self.norm)

    def _ask(self, sample: Sample) -> Path:
        """Have the server run one document; the file in which it leaves the states."""
        body = {"model": self.model, "prompt": sample.input_ids.tolist(), "max_tokens": 1, "temperature": 0.0}
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.options.timeout_seconds) as reply:
                parsed: Any = json.loads(reply.read())
            return Path(parsed["kv_transfer_params"]["hidden_states_path"])
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode(errors="replace")
            raise DraftsmithError(f"sample {sample.id!r}: {self.url} answers HTTP {error.code}: {detail}") from error
        except (OSError, http.client.HTTPException) as error:
            raise DraftsmithError(
                f"sample {sample.id!r}: no answer from {self.url} ({error}); start the server with\n{self.command}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise DraftsmithError(
                f"sample {sample.id!r}: the reply of {self.url} names no hidden_states_path; start the server with\n"
                f"{self.command}"
            ) from error


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that the server is done with; it and its lock are removed."""
    lock = path.with_name(path.name + ".lock")
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # granted when the server has written the file
        tensors = load_file(path)
        path.unlink()
        lock.unlink()
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(
            f"cannot read {path}, where the vLLM server has left hidden states ({error}); it must lie on a directory "
            "that this machine sees too (shared_storage_path)"
        ) from error
    return tensors
