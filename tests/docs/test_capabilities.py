"""The tables of what works, against what the code accepts and refuses."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.costs import QWEN3_8B, costs, in_dimensions_of
from draftsmith.algorithms.registry import all_algorithms
from draftsmith.capture.options import SglangOptions
from draftsmith.capture.sglang import engine_arguments
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import LAYOUTS
from draftsmith.targets.options import TargetOptions
from tests.layouts.drafts import HEADS, simple_draft, target_ends
from tests.tiny import tiny_target
from tests.tiny_draft import tiny_draft

DOCS = Path(__file__).parents[2] / "docs"
METHODS = {method.name: method for method in all_algorithms()}


def table(page: str, name: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell of the table after a marker comment."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = text[text.index(f"<!-- {name}") :].splitlines()[1:]
    rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    header, body = rows[0], []
    for line, row in zip(lines[2:], rows[2:], strict=True):
        if not line.startswith("|"):
            break
        body.append(row)
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in body}


def word(cell: str) -> str:
    return re.match(r"\w+", cell).group()


def accepted(work) -> bool:
    try:
        work()
    except DraftsmithError:
        return False
    return True


def write(draft: Draft, layout: str) -> None:
    tensors = {name.split(".", 1)[1]: value for name, value in draft.state_dict().items()}
    LAYOUTS[layout].write(draft.config.to_dict(), tensors, target_ends())


@pytest.mark.parametrize("name", ["table: capture", "table: layouts", "table: decoding"])
def test_every_method_has_its_row(name):
    rows = table("capabilities.md", name)
    assert set(rows) == set(METHODS)
    assert {word(cell) for row in rows.values() for cell in row.values()} <= {"tested", "untested", "refused", "partly"}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_layouts(method: Algorithm):
    said = table("capabilities.md", "table: layouts")[method.name]
    for layout, cell in said.items():
        drafts = [simple_draft(method.architecture, head) for head in range(len(HEADS[method.architecture]))]
        written = [accepted(partial(write, draft, layout)) for draft in drafts]
        expected = {"tested"} if all(written) else {"partly"} if any(written) else {"refused"}
        assert word(cell) in expected, f"{method.name} in {layout}: {cell}, and the code writes {written}"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_capture(method: Algorithm):
    layout = method.capture(simple_draft(method.architecture).config)
    refused = not accepted(lambda: engine_arguments(TargetOptions(path="target"), layout, SglangOptions()))
    assert (table("capabilities.md", "table: capture")[method.name]["sglang"] == "refused") == refused


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group that holds this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_decoding(method: Algorithm):
    said = table("capabilities.md", "table: decoding")[method.name]
    target = tiny_target()
    head = HEADS[method.architecture][0]
    draft = tiny_draft(target, architecture=method.architecture, head=head, block_size=6)
    tried = {
        "fewer proposals": lambda: method.proposer(draft, target.ends, 2),
        "smaller blocks": lambda: method.proposer(draft.with_block_size(4), target.ends),
        "min_survival": lambda: method.proposer(draft, target.ends, min_survival=0.5),
        "rollout: dense, pruned": lambda: [method.proposer(draft, target.ends, rollout=r) for r in ("dense", "pruned")],
        "tensor_parallel": lambda: method.proposer(draft, target.ends, rollout="dense", tensor_parallel=True),
    }
    assert set(said) == {"greedy", "sampling", *tried}
    for feature, work in tried.items():
        assert (said[feature] != "refused") == accepted(work), f"{method.name}: {feature}"


def test_costs():
    said = table("methods/index.md", "costs")
    assert set(said) == set(METHODS)
    for name, row in said.items():
        found = costs(METHODS[name], in_dimensions_of(QWEN3_8B, METHODS[name]))
        assert list(row.values()) == [
            f"{found.bytes_per_token:,} bytes",
            str(found.proposals),
            f"{found.parameters:,}",
            f"{found.extra_parameters:,}",
        ]
