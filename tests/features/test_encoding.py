"""8-bit features: how wrong they may be, and that decoding adds nothing."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.features.encoding import decode, encode, finite_rows
from draftsmith.features.reader import Store
from draftsmith.features.schema import FP8, CaptureLayout
from draftsmith.features.verify import verify_store

from . import stores

LAYOUT = CaptureLayout((4, 1, 2), 24, final_state=True, dtype=FP8)
NAMES = list(LAYOUT.widths)


def features(rows: int, seed: int, dtype: torch.dtype, spread: float = 3.0) -> dict[str, torch.Tensor]:
    """Values whose sizes differ by orders of magnitude, within a row and between rows."""
    generator = torch.Generator().manual_seed(seed)

    def values(width: int) -> torch.Tensor:
        normal = torch.randn(rows, width, generator=generator)
        sizes = torch.exp(spread * torch.randn(rows, width, generator=generator))
        return (normal * sizes * torch.exp(2 * torch.randn(rows, 1, generator=generator))).to(dtype)

    return {name: values(width) for name, width in LAYOUT.widths.items()}


def by_layer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(-1, (-1, LAYOUT.hidden_size)).double()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 7),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.floats(0.0, 5.0),
)
def test_the_error_is_within_what_is_stated(rows: int, seed: int, dtype: torch.dtype, spread: float) -> None:
    given_features = features(rows, seed, dtype, spread)
    stored = encode(given_features, LAYOUT)
    assert {name: (t.shape[1], t.dtype) for name, t in stored.items()} == LAYOUT.stored
    assert finite_rows(stored).all()
    decoded = decode(stored, LAYOUT, NAMES)
    for name in NAMES:
        assert decoded[name].dtype == torch.bfloat16
        wanted, found = by_layer(given_features[name]), by_layer(decoded[name])
        largest = wanted.abs().amax(dim=-1, keepdim=True)
        assert ((found - wanted).abs() <= torch.maximum(wanted.abs() / 16, largest / 2**17)).all()
    # What was decoded is encoded to itself: nothing is lost by storing it again.
    again = decode(encode(decoded, LAYOUT), LAYOUT, NAMES)
    assert all(torch.equal(again[name], decoded[name]) for name in NAMES)


def test_the_relative_error_of_ordinary_features() -> None:
    """Of normally distributed values: 2.6 % of a row's length."""
    given_features = features(400, 1, torch.float32, spread=0.0)
    decoded = decode(encode(given_features, LAYOUT), LAYOUT, NAMES)
    error = torch.cat([(decoded[n].float() - given_features[n]).norm(dim=-1) for n in NAMES])
    length = torch.cat([given_features[n].norm(dim=-1) for n in NAMES])
    assert float((error / length).mean()) == pytest.approx(0.026, abs=0.003)


def test_every_token_and_layer_has_its_own_scale() -> None:
    given_features = features(5, 2, torch.float32)
    stored = encode(given_features, LAYOUT)
    louder = {name: tensor.clone() for name, tensor in given_features.items()}
    louder["taps"][3, 24:48] *= 2.0**9  # token 3, second tapped layer
    changed = encode(louder, LAYOUT)
    difference = changed["taps.exponent"].int() - stored["taps.exponent"].int()
    assert difference[3, 1] == 9
    assert difference.count_nonzero() == 1
    assert torch.equal(changed["taps"].view(torch.uint8), stored["taps"].view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.3e38])
@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_stored_is_found_in_its_row(name: str, value: float) -> None:
    given_features = features(6, 3, torch.float32)
    given_features[name][4, 7] = value
    assert finite_rows(encode(given_features, LAYOUT)).tolist() == [True] * 4 + [False, True]


def test_zeros_and_the_smallest_values() -> None:
    given_features = {name: torch.zeros(3, width) for name, width in LAYOUT.widths.items()}
    given_features["taps"][1, 0] = 1e-30
    given_features["final_state"][2, 5] = -1e-44
    stored = encode(given_features, LAYOUT)
    assert finite_rows(stored).all()
    decoded = decode(stored, LAYOUT, NAMES)
    assert decoded["taps"].count_nonzero() == 1
    assert float(decoded["taps"][1, 0]) == pytest.approx(1e-30, rel=1 / 16)
    assert decoded["final_state"].count_nonzero() == 0


def test_float16_features_have_room_for_their_scales() -> None:
    given_features = {name: tensor.half() for name, tensor in features(5, 4, torch.float32, spread=1.0).items()}
    wide = {name: tensor.float() for name, tensor in given_features.items()}
    a, b = encode(given_features, LAYOUT), encode(wide, LAYOUT)
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def test_a_store_of_8_bits_reads_as_bfloat16(tmp_path: Path) -> None:
    layout = stores.layout(dtype=FP8)
    records = stores.records([3, 9, 1, 7], layout)
    manifest = stores.write_store(tmp_path, records, layout, shard_bytes=200)
    assert manifest.dtype == "fp8"
    assert verify_store(tmp_path) == []
    for item, read in zip(records, Store.open(tmp_path), strict=True):
        assert stores.equal(read, stores.as_read(item, layout))
        assert all(tensor.dtype == torch.bfloat16 for tensor in read.features.values())
    only = Store.open(tmp_path, features=["final_state"])[1]
    assert list(only.features) == ["final_state"]
    bytes_of_features = sum(shard.features_file.bytes for shard in manifest.shards)
    assert manifest.tokens * layout.bytes_per_token <= bytes_of_features
    assert layout.bytes_per_token == (3 * 3) + (2 + 1)  # values, and exponents of two taps and the final state
