"""YaRN at export: what the configuration becomes, what the rotation becomes, and what is refused."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafts.rope import inverse_frequencies
from draftsmith.errors import DraftsmithError
from draftsmith.export.options import RopeScaling
from draftsmith.run.recipe import load_export_options
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)


def test_positions_grow_by_the_factor() -> None:
    config = tiny_draft(TARGET).config
    scaled = RopeScaling(factor=2.5).applied_to(config)
    assert scaled.max_position_embeddings == 1280
    assert scaled.rope.as_parameters() == {
        "rope_theta": 5000.0,
        "rope_type": "yarn",
        "partial_rotary_factor": 1.0,
        "factor": 2.5,
        "original_max_position_embeddings": 512,
    }
    assert (
        RopeScaling(factor=4.0, original_max_position_embeddings=100).applied_to(config).max_position_embeddings == 400
    )
    changed = {"rope", "max_position_embeddings"}
    assert scaled.model_dump(exclude=changed) == config.model_dump(exclude=changed)


def test_frequencies_are_yarns_written_out() -> None:
    """Arxiv 2309.00071: high frequencies stay, low ones are divided by the factor, a ramp lies between."""
    theta, dim, original, factor, fast, slow = 5000.0, 12, 512, 4.0, 8.0, 2.0
    scaling = RopeScaling(factor=factor, beta_fast=fast, beta_slow=slow)
    found, attention = inverse_frequencies(scaling.applied_to(tiny_draft(TARGET).config))

    def turns_at(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(turns_at(fast)), math.ceil(turns_at(slow))
    wanted = []
    for i in range(dim // 2):
        plain = theta ** (-2 * i / dim)
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        wanted.append(plain * (1 - share) + plain / factor * share)
    torch.testing.assert_close(found, torch.tensor(wanted))
    assert attention == pytest.approx(0.1 * math.log(factor) + 1.0)


def test_a_rope_that_is_scaled_already_is_refused() -> None:
    config = tiny_draft(TARGET, rope={"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0}).config
    with pytest.raises(DraftsmithError) as error:
        RopeScaling(factor=2.0).applied_to(config)
    assert str(error.value) == (
        "export.rope_scaling asks for 'yarn', but the draft was trained with rope_type 'linear' already "
        "({'rope_theta': 9.0, 'rope_type': 'linear', 'partial_rotary_factor': 1.0, 'factor': 2.0}); leave "
        "export.rope_scaling out"
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("export.rope_scaling.factor=1.0", "export.rope_scaling.factor is 1.0: input should be greater than 1"),
        ("export.rope_scaling={rope_type: yarn}", "export.rope_scaling.factor is missing"),
        ("export.rope_scaling={rope_type: linear, factor: 2.0}", "export.rope_scaling.rope_type is 'linear'"),
        ("export.lay_out=zlab", "unknown key `lay_out` in section `export`; did you mean `layout`?"),
        ("train.lr=1e-4", "unknown key `train` at the top of the recipe; valid keys: export"),
        ("export.which=first", "export.which is 'first': input should be 'best' or 'last'"),
    ],
)
def test_a_run_directorys_overrides_are_checked(override: str, text: str) -> None:
    with pytest.raises(DraftsmithError) as error:
        load_export_options([override])
    assert text in str(error.value)


def test_a_run_directorys_overrides_are_read() -> None:
    given: list[Any] = ["export.which=last", "export.layout=sglang", "export.rope_scaling={factor: 4}"]
    options = load_export_options(given)
    assert (options.which, options.layout) == ("last", "sglang")
    assert options.rope_scaling == RopeScaling(factor=4.0)
    assert load_export_options([]).rope_scaling is None
