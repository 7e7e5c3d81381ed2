"""The frozen language model that a draft speaks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError
from draftsmith.targets.attention import CachedAttention, draftsmith_attention
from draftsmith.targets.cache import KeyValueCache
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.taps import check_tap_ids, tap_layers


@dataclass(frozen=True)
class TargetStates:
    """What a target forward returns.

    taps [B, w, T*H], the tapped layers' outputs in the order asked for, or None if none were; final_state [B, w, H], the
    state after the final norm, which enters the output head, or None if it was not asked for.
    """

    taps: Tensor | None
    final_state: Tensor | None


class Target:
    """A Hugging Face causal language model, seen as draftsmith needs it."""

    def __init__(self, model: Any, tokenizer: Any, source: str, revision: str | None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        self.revision = revision
        self.text_config = model.config.get_text_config()
        self.ends = TargetEnds.from_model(model, self.text_config)
        self._decoder = model.get_decoder()
        self._layers: nn.ModuleList = self._decoder.layers

    @classmethod
    def from_model(cls, hf_model: Any, tokenizer: Any = None) -> "Target":
        """Wrap a model already in memory."""
        return cls(hf_model, tokenizer, hf_model.config._name_or_path or "in memory", None)

    @property
    def hidden_size(self) -> int:
        return self.ends.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.ends.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def max_position_embeddings(self) -> int:
        return self.text_config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        return self.ends.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ends.head_weight.dtype

    def new_cache(self, batch: int, max_length: int) -> KeyValueCache:
        """An empty cache for `batch` rows of up to `max_length` tokens."""
        config = self.text_config
        heads = config.num_attention_heads
        return KeyValueCache.allocate(
            self.num_layers,
            batch,
            getattr(config, "num_key_value_heads", None) or heads,
            max_length,
            getattr(config, "head_dim", None) or self.hidden_size // heads,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        tap_ids: Sequence[int] = (),
        final_state: bool = True,
        cache: KeyValueCache | None = None,
    ) -> TargetStates:
        """Run the target on input_ids [B, w] int64 at positions [B, w] int64.

        Without a cache: plain causal attention over the given rows. Rows are right-padded; positions on the padded tail
        must go on counting. If the final state is not wanted, no layer above the highest tap runs.
        With a cache: keys and values are written at `positions`, and each query sees its row's entries at positions up
        to its own. All layers run. The output head runs in neither case (`ends.project` is that).
        """
        if tap_ids:
            check_tap_ids(tap_ids, self.num_layers)
        elif not final_state and cache is None:
            raise DraftsmithError("a target forward without taps, final state or cache computes nothing; ask for one")
        stop = cache is None and not final_state
        last_hidden = None
        with tap_layers(self._layers, tap_ids, stop_after_last=stop) as outputs:
            last_hidden = self._run_decoder(input_ids, positions, cache)
        taps = torch.cat([outputs[i] for i in tap_ids], dim=-1) if tap_ids else None
        return TargetStates(taps, last_hidden if final_state else None)

    def _run_decoder(self, input_ids: Tensor, positions: Tensor, cache: KeyValueCache | None) -> Tensor:
        """The state after the final norm [B, w, H]."""
        if cache is None:
            return self._decoder(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        attention = CachedAttention(cache, positions)
        with draftsmith_attention(self._decoder.config):
            output = self._decoder(
                input_ids=input_ids, position_ids=positions, use_cache=False, draftsmith_attention=attention
            )
        if attention.layers_run != self.num_layers:
            raise DraftsmithError(
                f"{type(self._decoder).__name__} ran {attention.layers_run} of its {self.num_layers} layers through "
                "draftsmith's attention; this model type cannot be decoded with draftsmith"
            )
        return output.last_hidden_state
