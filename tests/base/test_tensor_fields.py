from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftsmith.base.tensor_fields import TensorFields


@dataclass(frozen=True)
class Inner(TensorFields):
    mask: Tensor
    count: int


@dataclass(frozen=True)
class Outer(TensorFields):
    ids: Tensor
    named: dict[str, Tensor]
    inner: Inner
    names: list[str]


@pytest.fixture
def outer() -> Outer:
    named = {"b": torch.ones(2), "a": torch.zeros(3)}
    return Outer(torch.arange(4), named, Inner(torch.ones(1, dtype=torch.bool), 7), ["x"])


def test_tensors_are_listed_in_the_order_of_the_fields(outer):
    assert list(outer.tensors()) == ["ids", "named.b", "named.a", "inner.mask"]
    assert outer.tensors()["inner.mask"] is outer.inner.mask


def test_a_copy_takes_other_tensors_in_that_order_and_keeps_the_rest(outer):
    others = [torch.full((number,), number) for number in range(4)]
    given = iter(others)
    copy = outer.mapped(lambda _: next(given))
    assert all(one is other for one, other in zip(copy.tensors().values(), others, strict=True))
    assert (copy.inner.count, copy.names) == (7, ["x"])
    assert torch.equal(outer.ids, torch.arange(4))


def test_everything_moves(outer):
    moved = outer.to("meta")
    assert all(tensor.is_meta for tensor in moved.tensors().values())
    assert [tensor.shape for tensor in moved.tensors().values()] == [t.shape for t in outer.tensors().values()]
