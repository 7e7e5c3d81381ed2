"""One pass of a target over a cache: which tokens run, where they lie, and whose they are."""

from functools import cached_property

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.visibility import MAX_TREE, CachePattern
from draftsmith.kernels.recurrent.kept import Pass
from draftsmith.targets.cache import KeysValues, TargetCache


class CachedPass:
    """w new tokens of every slot, over what `cache` keeps of the tokens before them.

    positions [slots, w] int64: where each token stands in its text. places [slots, w] int64: where in the cache its
    entry goes; None: at its position, or in a tree one after the other from the first token's position on. valid
    [slots] int64: how many of the tokens are a slot's own, 0 for a slot that is only computed along; the rest must
    leave nothing that a later pass sees (None: all are its own). tentative: tokens may be rejected, and
    `cache.keep` says afterwards which stand; otherwise all valid ones do. ancestors [slots, w] int64: the tokens are a
    tree, in which token i sees, of the new ones, those whose bit is set (`kernels.attention.visibility.ancestors_of`)
    and stands as far behind the first as its depth; None: a chain.

    Raises `DraftsmithError` for a tree that is too wide.
    """

    def __init__(
        self,
        cache: TargetCache,
        positions: Tensor,
        *,
        valid: Tensor | None = None,
        places: Tensor | None = None,
        ancestors: Tensor | None = None,
        tentative: bool = False,
    ) -> None:
        width = positions.shape[1]
        if ancestors is not None and width > MAX_TREE:
            raise DraftsmithError(f"a tree of {width} tokens in one pass; allowed are at most {MAX_TREE}")
        self.cache = cache
        self.positions = positions
        self.valid = valid
        self.ancestors = ancestors
        self.tentative = tentative
        self.at_positions = places is None and ancestors is None
        if places is None:
            places = positions
            if ancestors is not None:
                places = positions[:, :1] + torch.arange(width, device=positions.device)
        self.places = places
        self.queries = places
        """Where each query stands among the cache's entries [slots, w] int64: at its own place in a chain; in a tree as
        far behind the first token's place as it is deep."""
        if ancestors is not None:
            self.queries = places[:, :1] + (positions - positions[:, :1])
        self._ran: list[int] = []
        self._patterns: dict[int | None, CachePattern] = {}

    def keys_values(self, layer: int) -> KeysValues:
        """What an attention layer keeps. Raises `DraftsmithError` for a layer of another kind."""
        kept = self.cache.layers[layer]
        if not isinstance(kept, KeysValues):
            raise DraftsmithError(
                f"layer {layer} attends to earlier tokens, but the cache keeps a {type(kept).__name__} for it: the "
                "configuration gives this layer another kind than the model"
            )
        return kept

    def pattern(self, window: int | None) -> CachePattern:
        """Who sees whom in a layer with this window; one for all layers that have the same."""
        if window not in self._patterns:
            self._patterns[window] = CachePattern(self.queries, True, window, self.ancestors)
        return self._patterns[window]

    @cached_property
    def recurrent(self) -> Pass:
        """What recurrent layers have to know. A slot that is only computed along begins no text."""
        begins = self.positions[:, 0] == 0
        if self.valid is not None:
            begins = begins & (self.valid > 0)
        return Pass(begins, self.valid, self.tentative)

    def ran(self, layer: int) -> None:
        """Notes that a layer has run over the cache; whoever runs one says so."""
        self._ran.append(layer)

    def check_all_ran(self, num_layers: int, model: str) -> None:
        """Raises `DraftsmithError` unless every layer has run over the cache, once."""
        if sorted(self._ran) != list(range(num_layers)):
            missing = sorted(set(range(num_layers)).difference(self._ran))
            fault = f"did not run its layers {missing}" if missing else "ran some of its layers more than once"
            raise DraftsmithError(f"{model} {fault} over the cache; this model type cannot be decoded with draftsmith")
