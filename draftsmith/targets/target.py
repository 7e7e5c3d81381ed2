"""The frozen language model that a draft speaks for."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.base.devices import current, resolve_device
from draftsmith.base.dtypes import parse_dtype
from draftsmith.base.switch import SWITCH_NAMES
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import need_triton
from draftsmith.targets.attention import CachedAttention, RecordingAttention, draftsmith_attention
from draftsmith.targets.cache import KeysValuesShape, Room, StaticCache, TargetCache
from draftsmith.targets.cached_probe import check_cached
from draftsmith.targets.decoder import decoder_of
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.experts import capturable_experts
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.layers import LayerKind, known_kinds
from draftsmith.targets.load import load_model, load_tokenizer
from draftsmith.targets.location import locate
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.probe import check_model
from draftsmith.targets.rope import tell_window
from draftsmith.targets.taps import check_tap_ids, tap_layers

if TYPE_CHECKING:
    from draftsmith.targets.fused import FusedDecoder

_log = logging.getLogger(__name__)

# Tokens of the comparison of the fused decoder with the model's own code.
_FUSE_PROBE = 6


@dataclass(frozen=True)
class TargetStates:
    """What a target forward returns.

    taps [B, w, T*H], the tapped layers' outputs in the order asked for, or None if none were; final_state [B, w, H],
    the state after the final norm, which enters the output head, or None if it was not asked for.
    """

    taps: Tensor | None
    final_state: Tensor | None


class Target:
    """A Hugging Face causal language model, seen as draftsmith needs it: frozen, in evaluation mode.

    info: what its configuration says; ends: its embedding and output head; model: the Hugging Face model; tokenizer:
    its tokenizer, or None.
    """

    def __init__(self, info: TargetInfo, ends: TargetEnds, model: Any, tokenizer: Any = None) -> None:
        """Raises `DraftsmithError` for a model that is not a decoder-only causal LM, or whose embeddings or logits are
        not what `ends` compute (checked on a few tokens)."""
        self.info = info
        self.ends = ends
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._decoder = decoder_of(model)
        self._layers = _decoder_layers(model, info.source)
        self._fused: FusedDecoder | None = None
        self._decodable = False
        tell_window(info.source, info.text_config)
        check_model(model, self._decoder, self._layers, ends)

    @classmethod
    def from_model(cls, hf_model: Any, tokenizer: Any = None) -> "Target":
        """Wrap a Hugging Face causal LM already in memory, sharing its weights; it is put into evaluation mode.

        Raises `DraftsmithError` for a model that is not a decoder-only causal LM, or whose embeddings or logits
        draftsmith cannot compute exactly (checked on a few tokens).
        """
        return cls._of(hf_model, tokenizer, hf_model.config._name_or_path or "in memory")

    @classmethod
    def _of(cls, model: Any, tokenizer: Any, source: str) -> "Target":
        _decoder_layers(model, source)
        info = TargetInfo.of_model(model, source)
        return cls(info, TargetEnds.from_model(model, info), model, tokenizer)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        fuse: str = "auto",
    ) -> "Target":
        """Load a target: a hub id, a local model directory, or a .gguf file (dequantised once, see `targets.gguf`).

        dtype: 'auto' (the checkpoint's), 'float32', 'bfloat16', 'float16'; device: 'auto', 'cpu', 'cuda', 'cuda:N'.
        fuse: 'on' calls `fuse`; 'auto' does so on a CUDA device for the kinds of model that can be fused, and says in
        the log why another one is not; 'off' not.
        Weights are read from safetensors only. `tokenizer` is None for a local directory that has none.
        Raises `DraftsmithError` for a missing path, something that is not a causal LM, weights that are missing or
        do not fit, or a device that is not there; and as `from_model`.
        """
        if fuse not in SWITCH_NAMES:
            raise DraftsmithError(f"fuse is {fuse!r}; allowed: {', '.join(map(repr, SWITCH_NAMES))}")
        location = locate(path)
        resolved_device, resolved_dtype = resolve_device(device), parse_dtype(dtype)
        model = load_model(
            location, dtype=resolved_dtype, device=resolved_device, revision=revision,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        tokenizer = load_tokenizer(location, revision=revision, trust_remote_code=trust_remote_code)
        target = cls._of(model, tokenizer, location.source)
        if fuse == "on" or (fuse == "auto" and target._fuses_by_itself()):
            target.fuse()
        return target

    def fuse(self) -> None:
        """Joins the model's weights and runs cached forwards through fused kernels from now on (`targets.fused`).

        The model's parameters become views of the joined ones; forwards without a cache go on running the model's own
        code. On a CPU the same operations run as plain PyTorch, which is for tests. Raises `DraftsmithError` for a
        model that cannot be fused, or whose fused states are not its own on a few tokens, and without Triton.
        """
        if self._fused is not None:
            return
        self._need_triton()
        from draftsmith.targets.fused import fuse

        with current(self.device):
            self._fused = fuse(
                self._decoder, self.text_config, self.ends.embed, partial(self.new_cache, 1, _FUSE_PROBE)
            )

    @property
    def fused(self) -> bool:
        """Whether cached forwards run through fused kernels."""
        return self._fused is not None

    def _fuses_by_itself(self) -> bool:
        """Whether 'auto' fuses this target: on a CUDA device, if it is of a kind that can be fused."""
        if self.device.type != "cuda":
            return False
        self._need_triton()
        from draftsmith.targets.joining import fusing_fault

        fault = fusing_fault(self._decoder, self.text_config)
        if fault is not None:
            _log.warning("target %s is not fused, so that its own code decodes: %s", self.source, fault)
        return fault is None

    def _need_triton(self) -> None:
        need_triton(
            f"fusing the target {self.source}",
            ", which decoding on a CUDA device needs in any case, or set target.fuse to 'off'",
        )

    @property
    def source(self) -> str:
        """As in `TargetInfo`."""
        return self.info.source

    @property
    def revision(self) -> str | None:
        """As in `TargetInfo`."""
        return self.info.revision

    @property
    def text_config(self) -> Any:
        """As in `TargetInfo`."""
        return self.info.text_config

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.info.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output head."""
        return self.info.vocab_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.info.num_layers

    @property
    def max_position_embeddings(self) -> int:
        """Positions that a text may have (`TargetInfo`)."""
        return self.info.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """Of the output head, where states and logits come out."""
        return self.ends.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the output head."""
        return self.ends.head_weight.dtype

    def new_cache(self, slots: int, length: int, width: int = 1) -> StaticCache:
        """An empty cache for `slots` texts of up to `length` tokens, for `forward`; width: most tokens of a tentative
        pass.

        Raises `DraftsmithError` as `check_decoding`.
        """
        self.check_decoding()
        return self._allocate(slots, length, width)

    def check_decoding(self) -> None:
        """Raise `DraftsmithError`, with the reason, for a target that cannot be decoded: passes over a cache would not
        give what its forward gives. Looked at once, on a few tokens (`targets.cached_probe`)."""
        if self._decodable:
            return

        def run_over_cache(input_ids: Tensor, run: CachedPass, attention: CachedAttention) -> None:
            with capturable_experts(self._decoder.config, self.device, self.dtype):
                self._run_over_cache(input_ids, run, (), attention)

        with torch.no_grad(), current(self.device):
            check_cached(self._decoder, self.info, lambda length: self._allocate(1, length, 1), run_over_cache)
        self._decodable = True

    def _allocate(self, slots: int, length: int, width: int) -> StaticCache:
        kinds = self._layer_kinds()
        attention = self._attention_shapes
        shapes = [kind.shape(self.text_config, index, attention.get(index)) for index, kind in enumerate(kinds)]
        return StaticCache.allocate(shapes, Room(slots, length, width, self.dtype, self.device))

    @cached_property
    def _attention_shapes(self) -> dict[int, KeysValuesShape]:
        """What each layer that attends keeps of a token: asked of the layers themselves, in one pass over two tokens,
        because configurations say it in many ways."""
        recorder, ids = RecordingAttention(), torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        with torch.no_grad(), current(self.device), draftsmith_attention(self._decoder.config):
            self._decoder(input_ids=ids, position_ids=positions, use_cache=False, draftsmith_attention=recorder)
        return recorder.shapes

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        tap_ids: Sequence[int] = (),
        final_state: bool = True,
        cache: TargetCache | None = None,
        valid: Tensor | None = None,
        places: Tensor | None = None,
        ancestors: Tensor | None = None,
        tentative: bool = False,
    ) -> TargetStates:
        """Run the target on input_ids [B, w] int64 at positions [B, w] int64.

        Without a cache: plain causal attention over the given rows. Rows are right-padded; positions on the padded tail
        must go on counting. If the final state is not wanted, no layer above the highest tap runs.
        With a cache: the pass runs over what the cache keeps of each row's earlier tokens, and adds its own; all layers
        run. `valid`, `places`, `ancestors` and `tentative` are those of `targets.passes.CachedPass`; without them all
        tokens are the rows' own and stand, and an entry lies at its token's position.
        The output head runs in neither case (`ends.project` is that).
        """
        if tap_ids:
            check_tap_ids(tap_ids, self.num_layers)
        elif not final_state and cache is None:
            raise DraftsmithError("a target forward without taps, final state or cache computes nothing; ask for one")
        if cache is None and (valid is not None or places is not None or ancestors is not None or tentative):
            raise DraftsmithError("valid, places, ancestors and tentative are for passes over a cache; give one")
        stop = cache is None and not final_state
        last_hidden: Tensor | None = None
        with current(self.device):
            if cache is None:
                with tap_layers(self._layers, tap_ids, stop_after_last=stop) as outputs:
                    last_hidden = self._decoder(
                        input_ids=input_ids, position_ids=positions, use_cache=False
                    ).last_hidden_state
            else:
                run = CachedPass(cache, positions, valid=valid, places=places, ancestors=ancestors, tentative=tentative)
                with capturable_experts(self._decoder.config, self.device, self.dtype):
                    last_hidden, outputs = self._run_over_cache(input_ids, run, tap_ids)
                if not tentative:
                    cache.settle()
        taps = torch.cat([outputs[i] for i in tap_ids], dim=-1) if tap_ids else None
        return TargetStates(taps, last_hidden if final_state else None)

    def _layer_kinds(self) -> tuple[LayerKind, ...]:
        return known_kinds(self.info.layer_kinds, self.source, self.text_config.model_type)

    def _run_over_cache(
        self, input_ids: Tensor, run: CachedPass, tap_ids: Sequence[int], attention: CachedAttention | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The state after the final norm [B, w, H], and the outputs of the tapped layers [B, w, H] by tap id.

        attention: runs the model's own code with this one; None: by the fused layers where there are any.
        """
        if self._fused is not None and attention is None:
            return self._fused.forward(self.ends.embed(input_ids), run, tap_ids)
        attention = attention or CachedAttention(run)
        kinds = self._layer_kinds()
        with ExitStack() as stack:
            outputs = stack.enter_context(tap_layers(self._layers, tap_ids, stop_after_last=False))
            stack.enter_context(draftsmith_attention(self._decoder.config, attention.implementation))
            for index, (kind, layer) in enumerate(zip(kinds, self._layers, strict=True)):
                stack.enter_context(kind.running(layer, index, run))
            states = self._decoder(
                input_ids=input_ids,
                position_ids=run.positions,
                use_cache=False,
                draftsmith_attention=attention,
            ).last_hidden_state
        run.check_all_ran(self.num_layers, type(self._decoder).__name__)
        return states, outputs


def _decoder_layers(model: Any, source: str) -> nn.ModuleList:
    """The decoder's layers. Raises `DraftsmithError` for a model that is not a decoder-only causal LM."""
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or model.config.is_encoder_decoder:
        raise DraftsmithError(
            f"target {source} is a {type(model).__name__}; a decoder-only causal language model is needed "
            "(Llama, Qwen, Mistral, Gemma and their like)"
        )
    return layers
