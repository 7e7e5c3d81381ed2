"""Keys and values of a batch of ragged rows, in storage that never moves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError


class KeyValueCache:
    """Keys and values of every target layer for `batch` rows of up to `max_length` tokens.

    The entry of the token at position p of a row lies at index p of that row, so nothing has to be counted: whoever
    writes says the positions, and whoever reads sees the entries up to its own position. Entries further right carry no
    weight, whatever (finite) values they hold, so rolling a row back needs no erasing. Storage is allocated once and
    written in place, so that a captured graph stays valid.

    keys, values: one tensor [batch, kv_heads, max_length, head_dim] a layer.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys = tuple(keys)
        self.values = tuple(values)

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        batch: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KeyValueCache":
        """Zeroed storage. Zeros and not empty memory: a masked entry has weight 0, but 0 * NaN would still be NaN."""
        if batch < 1 or max_length < 1:
            raise DraftsmithError(f"a cache of {batch} rows x {max_length} tokens; both must be at least 1")
        shape = (batch, kv_heads, max_length, head_dim)
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        return cls(keys, values)

    @property
    def num_layers(self) -> int:
        """Layers of the target, each with keys and values of its own."""
        return len(self.keys)

    @property
    def batch(self) -> int:
        """Rows."""
        return self.keys[0].shape[0]

    @property
    def max_length(self) -> int:
        """Positions of a row."""
        return self.keys[0].shape[2]

    def view(self, limit: int) -> "KeyValueCache":
        """The same storage seen only up to position `limit` (exclusive), for a caller who knows on the host that no row
        is longer: attention then reads `limit` entries a row and not `max_length`. Writes go to the shared storage."""
        if not 1 <= limit <= self.max_length:
            raise DraftsmithError(f"a view of {limit} positions of a cache of {self.max_length}; allowed is 1 to that")
        return KeyValueCache([k[:, :, :limit] for k in self.keys], [v[:, :, :limit] for v in self.values])

    def write(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values [batch, kv_heads, w, head_dim] at `positions` [batch, w] int64; return the layer's whole
        (keys, values) [batch, kv_heads, max_length, head_dim]. Positions of one row must differ from each other."""
        stored_keys, stored_values = self.keys[layer], self.values[layer]
        expected = (self.batch, stored_keys.shape[1], positions.shape[1], stored_keys.shape[3])
        if keys.shape != expected or values.shape != expected:
            raise DraftsmithError(
                f"layer {layer} gives keys {tuple(keys.shape)} and values {tuple(values.shape)}, the cache holds "
                f"{expected}: this kind of attention is not supported for cached decoding"
            )
        index = positions[:, None, :, None].expand(keys.shape)
        stored_keys.scatter_(2, index, keys)
        stored_values.scatter_(2, index, values)
        return stored_keys, stored_values
