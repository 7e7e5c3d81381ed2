"""Static caches: views, erasing, and keeping what stands of a pass."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.targets.cache import KeysValuesShape, Room, StaticCache
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.layers import known_kinds, register_layer_kind
from draftsmith.targets.layers.attention import FullAttention
from tests.support.tiny import tiny_target

ROOM = Room(slots=3, length=20, width=6, dtype=torch.float64, device="cpu")
EQUAL = [KeysValuesShape(2, 4, 4)] * 3
OWN = [KeysValuesShape(2, 4, 4), KeysValuesShape(1, 6, 6), KeysValuesShape(3, 5, 2)]


def filled(shapes: list[KeysValuesShape], seed: int = 0) -> StaticCache:
    cache = StaticCache.allocate(shapes, ROOM)
    generator = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return cache


def plainly_kept(cache: StaticCache, count: list[int], path: list[list[int]]) -> list[Tensor]:
    """Entry by entry, from a copy."""
    found = [tensor.clone() for tensor in cache.tensors]
    for before, after in zip(cache.tensors, found, strict=True):
        for slot, (stands, places) in enumerate(zip(count, path, strict=True)):
            for step in range(stands):
                after[slot, :, places[0] + step] = before[slot, :, places[step]]
    return found


@pytest.mark.parametrize("shapes", [EQUAL, OWN], ids=["equal layers", "layers of their own shapes"])
def test_entries_of_a_path_are_moved_together(shapes: list[KeysValuesShape]) -> None:
    path = [[4, 5, 8, 9], [0, 2, 3, 5], [14, 16, 18, 19]]
    for count in ([4, 4, 4], [3, 1, 0], [0, 2, 4]):
        cache = filled(shapes)
        expected = plainly_kept(cache, count, path)
        before = [tensor.clone() for tensor in cache.tensors]
        cache.keep(torch.tensor(count), torch.tensor(path))
        assert all(map(torch.equal, cache.tensors, expected))
        assert not any(map(torch.equal, cache.tensors, before))
        other = filled(shapes)
        other.keep(torch.tensor(count), torch.tensor([[4, 6, 8, 9], [0, 1, 3, 5], [14, 15, 18, 19]]))
        assert not any(map(torch.equal, other.tensors, expected))


@pytest.mark.parametrize("shapes", [EQUAL, OWN], ids=["equal layers", "layers of their own shapes"])
def test_a_chain_is_kept_where_it_lies(shapes: list[KeysValuesShape]) -> None:
    cache, before = filled(shapes), filled(shapes)
    cache.keep(torch.tensor([1, 0, 5]))
    cache.keep(torch.tensor([3, 2, 3]), torch.tensor([[1, 2, 3], [9, 10, 11], [17, 18, 19]]))
    assert all(map(torch.equal, cache.tensors, before.tensors))


@pytest.mark.parametrize("shapes", [EQUAL, OWN], ids=["equal layers", "layers of their own shapes"])
def test_views_share_the_storage(shapes: list[KeysValuesShape]) -> None:
    cache = filled(shapes)
    part = cache.rows(1, 3).view(7)
    assert (part.length, cache.length) == (7, 20)
    for layer, tensor in zip(part.layers, shapes, strict=True):
        keys, values = layer.tensors
        assert keys.shape == (2, tensor.kv_heads, 7, tensor.key_dim)
        assert values.shape == (2, tensor.kv_heads, 7, tensor.value_dim)
    for whole, seen in zip(cache.tensors, part.tensors, strict=True):
        assert torch.equal(seen, whole[1:3, :, :7])
        seen.fill_(2.5)
        assert (whole[1:3, :, :7] == 2.5).all()
        assert not (whole[0] == 2.5).any()
        assert not (whole[:, :, 7:] == 2.5).any()


@pytest.mark.parametrize("shapes", [EQUAL, OWN], ids=["equal layers", "layers of their own shapes"])
def test_erasing_leaves_not_even_nan(shapes: list[KeysValuesShape]) -> None:
    cache, before = filled(shapes), filled(shapes)
    for tensor in cache.tensors:
        tensor[[0, 2]] = float("nan")
    cache.erase([0, 2])
    for tensor, kept in zip(cache.tensors, before.tensors, strict=True):
        assert (tensor[[0, 2]] == 0).all()
        assert torch.equal(tensor[1], kept[1])


def test_one_slot_seen_as_several() -> None:
    cache = filled(EQUAL).rows(1, 2)
    seen = cache.repeated(5)
    for tensor, one in zip(seen.tensors, cache.tensors, strict=True):
        assert torch.equal(tensor, one.repeat(5, 1, 1, 1))
    with pytest.raises(DraftsmithError, match="only a cache of equal attention layers"):
        filled(OWN).rows(1, 2).repeated(5)


def test_kinds_are_registered_once() -> None:
    with pytest.raises(DraftsmithError, match="there is a layer kind named 'full_attention' already"):
        register_layer_kind(FullAttention())


def test_kinds_come_from_the_configuration_and_shapes_from_the_layers() -> None:
    target = tiny_target("gemma3")
    info = target.info
    assert info.layer_kinds == ("sliding_attention", "full_attention") * 2
    for index, kind in enumerate(known_kinds(info.layer_kinds, "tiny")):
        assert kind.name == info.layer_kinds[index]
        given = KeysValuesShape(index + 1, 8, 6)
        assert kind.shape(info.text_config, index, given) == given
    assert [layer.keys.shape for layer in target.new_cache(3, 20).layers] == [(3, 2, 20, 8)] * 4
    without = SimpleNamespace(num_attention_heads=4, hidden_size=24, num_hidden_layers=2, model_type="none")
    assert TargetInfo(without).layer_kinds == ("full_attention",) * 2
    with pytest.raises(DraftsmithError, match="layer 1 of this none model calls no attention function"):
        FullAttention().shape(without, 1, None)
