import pytest
import torch

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.costs import QWEN3_8B, Costs, costs, in_dimensions_of
from draftsmith.algorithms.registry import algorithm, all_algorithms
from draftsmith.drafts.draft import Draft
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft


@pytest.mark.parametrize("method", all_algorithms(), ids=lambda method: method.name)
def test_costs_are_those_of_the_draft_itself(method: Algorithm) -> None:
    base = tiny_draft(tiny_target(), block_size=6).config
    config = in_dimensions_of(base, method)
    found = costs(method, config, torch.float32)
    counted = sum(parameter.numel() for parameter in Draft.from_config(config).parameters())
    shared = sum(parameter.numel() for parameter in Draft.from_config(base).parameters())
    assert (found.parameters, found.extra_parameters) == (counted, counted - shared)
    assert found.bytes_per_token == sum(method.capture(config).widths.values()) * 4 == 2 * costs(
        method, config
    ).bytes_per_token  # fmt: skip
    assert found.proposals == method.block_layout(config).max_proposals


def test_the_published_drafts_of_qwen3_8b() -> None:
    dflash, dflash2 = (costs(algorithm(n), in_dimensions_of(QWEN3_8B, algorithm(n))) for n in ("dflash", "dflash2"))
    assert dflash == Costs(bytes_per_token=5 * 4096 * 2, proposals=15, parameters=1_048_626_432, extra_parameters=0)
    convolutions = 5 * 2 * (2 * 2 * 4096 + 4096 * 2 * 2 * 4096 // 16)
    assert dflash2.extra_parameters == convolutions + 2 * 151936 * 256 + 256 * 4096


def test_a_head_that_is_there_keeps_its_sizes() -> None:
    head = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 5}
    config = tiny_draft(tiny_target(), architecture="dflash2", head=head).config
    assert in_dimensions_of(config, algorithm("dflash2")) == config
