"""A store that does not fit the draft stops the run, and says why (traps 20 and 21)."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftsmith.features.check import check_store
from draftsmith.features.identity import target_identity
from draftsmith.features.manifest import StoreError

from . import stores

LAYOUT = stores.layout(final_state=True)
HEADER = stores.header(LAYOUT)


def test_a_store_that_fits_passes_silently(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_store(HEADER, LAYOUT, stores.TARGET, stores.TOKENIZER)
    assert not caplog.records


def test_more_than_needed_fits_and_less_does_not() -> None:
    without = stores.layout(final_state=False)
    check_store(HEADER, without, stores.TARGET, stores.TOKENIZER)
    with pytest.raises(StoreError, match="final_state: the store has none, the draft needs the target's final state"):
        check_store(stores.header(without), LAYOUT, stores.TARGET, stores.TOKENIZER)


def test_the_precision_of_a_store_does_not_matter() -> None:
    check_store(HEADER, replace(LAYOUT, dtype=torch.float32))


@pytest.mark.parametrize("tap_ids", [(1, 4), (4,), (4, 1, 2), (4, 2)])
def test_other_taps_or_another_order_are_refused(tap_ids: tuple[int, ...]) -> None:
    with pytest.raises(StoreError) as error:
        check_store(HEADER, replace(LAYOUT, tap_ids=tap_ids))
    assert f"tap_ids: the store has [4, 1], the draft needs {list(tap_ids)}" in str(error.value)


def test_another_width_is_refused() -> None:
    with pytest.raises(StoreError, match="hidden_size: the store has 3, the draft needs 4"):
        check_store(HEADER, replace(LAYOUT, hidden_size=4))


@pytest.mark.parametrize(
    ("field", "value"), [("config_hash", "9" * 64), ("weights_hash", "9" * 64), ("vocab_size", 54), ("num_layers", 7)]
)
def test_another_target_is_refused(field: str, value: object) -> None:
    with pytest.raises(StoreError, match=rf"target\.{field}: the store has .*, the draft needs {value}"):
        check_store(HEADER, LAYOUT, stores.TARGET.model_copy(update={field: value}))


def test_layers_that_only_one_of_the_two_knows_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    known = stores.TARGET.model_copy(update={"layers_hash": "9" * 64})
    other = known.model_copy(update={"layers_hash": "8" * 64})
    moved = known.model_copy(update={"source": "moved"})
    stored = HEADER.model_copy(update={"target": known})
    with pytest.raises(StoreError, match=r"target\.layers_hash: the store has 9+ .*, the draft needs 8+"):
        check_store(stored, LAYOUT, other)
    for header, target in ((stored, stores.TARGET), (HEADER, known), (stored, known)):
        check_store(header, LAYOUT, target)
    assert not caplog.messages
    check_store(stored, LAYOUT, moved)
    check_store(HEADER, LAYOUT, moved)
    assert "shape and sampled weights are equal" in caplog.messages[0]
    assert "sampled weights of the output head (no others are known)" in caplog.messages[1]


@pytest.mark.parametrize("field", ["vocabulary_hash", "template_hash"])
def test_another_tokenizer_or_template_is_refused(field: str) -> None:
    """Trap 22: a draft trained on one template is not served with another."""
    tokenizer = stores.TOKENIZER.model_copy(update={field: "9" * 64})
    with pytest.raises(StoreError, match=rf"tokenizer\.{field}: the store has .*, the draft needs 9+"):
        check_store(HEADER, LAYOUT, stores.TARGET, tokenizer)
    unknown = HEADER.model_copy(update={"tokenizer": None})
    with pytest.raises(StoreError, match="tokenizer: the store has no record of it"):
        check_store(unknown, LAYOUT, stores.TARGET, tokenizer)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(StoreError) as error:
        check_store(
            HEADER, replace(LAYOUT, tap_ids=(0,), hidden_size=5), stores.TARGET.model_copy(update={"num_layers": 9})
        )
    assert all(field in str(error.value) for field in ("tap_ids", "hidden_size", "target.num_layers"))


@pytest.mark.parametrize(("field", "value"), [("source", "moved/model"), ("revision", "abc")])
def test_the_same_target_elsewhere_is_told(caplog: pytest.LogCaptureFixture, field: str, value: str) -> None:
    with caplog.at_level(logging.WARNING):
        check_store(HEADER, LAYOUT, stores.TARGET.model_copy(update={field: value}))
    (message,) = caplog.messages
    assert f"target.{field}" in message
    assert value in message


def _config(**changes: object) -> SimpleNamespace:
    fields = {"model_type": "llama", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 3} | changes
    return SimpleNamespace(**fields)


def test_a_target_is_told_by_shape_and_weights_not_by_place_or_precision() -> None:
    head = torch.randn(50, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    one = target_identity("a", None, _config(), head)
    other_place = target_identity("b", "main", _config(), head.float())
    assert one.config_hash == other_place.config_hash
    assert one.weights_hash == other_place.weights_hash
    changed = head.clone()
    changed[49, 7] += 1
    assert target_identity("a", None, _config(), changed).weights_hash != one.weights_hash
    assert target_identity("a", None, _config(model_type="qwen3"), head).config_hash != one.config_hash
