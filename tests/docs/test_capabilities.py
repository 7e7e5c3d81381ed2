"""The tables of what works: "refused" is what the code refuses, "tested" what a test shows that runs on any machine.

`SHOWN` names those tests. A cell that the code accepts and no test shows is "untested".
"""

import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import get_args

import pytest
import torch

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.costs import QWEN3_8B, costs, in_dimensions_of
from draftsmith.algorithms.registry import all_algorithms
from draftsmith.capture.options import CaptureOptions, SglangOptions
from draftsmith.capture.sglang import check_capture
from draftsmith.drafts.directory import family
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.export.serve import NotServed, ServedTarget, serve_commands
from draftsmith.layouts import LAYOUTS, WRITABLE
from tests.docs.showing import collect, runs_everywhere, shown_methods
from tests.layouts.drafts import HEADS, simple_draft, target_ends
from tests.support.fillers import filler_of
from tests.support.tiny import KINDS, tiny_target
from tests.support.tiny_draft import tiny_draft

DOCS = Path(__file__).parents[2] / "docs"
METHODS = {method.name: method for method in all_algorithms()}

LEARNS = "tests/capture/test_every_method_online.py::test_online_training_is_training_from_a_capture"
DECODES = "tests/decoding/test_every_method.py::test_greedy_output_is_plain_decodings"
EXPORTS = "tests/export/test_export_run.py::test_every_layout_holds_the_runs_draft_or_says_why_not"
LOSSLESS = "tests/test_losslessness.py"
ROLLOUTS = "tests/algorithms/test_rollouts.py"
DPACE = "tests/families/test_dta.py::test_dpace_commits_the_maximum"
VLLM_CAPTURES = "tests/interop_vllm/test_capture.py::test_features_of_every_method"
VLLM_DECODES = "tests/interop_vllm/test_drafts.py::test_tokens_and_verifies_are_those_of_draftsmiths_engine"
SHOWN: dict[str, dict[str, list[str]]] = {
    "methods": {"train": [LEARNS]},
    "capture": {"hf": [LEARNS], "train.features=online": [LEARNS]},
    "layouts": {layout: [f"{EXPORTS}[METHOD-{layout}]"] for layout in WRITABLE},
    "decoding": {
        "greedy": [f"{DECODES}[METHOD-all-proposals]"],
        "sampling": [
            f"{LOSSLESS}::test_sampled_output_has_the_targets_distribution[deterministic-T=1]",
            *(
                f"tests/families/test_{name}.py::test_sampled_output_has_the_targets_distribution"
                for name in ("dflash2", "domino", "dspark")
            ),
        ],
        "fewer proposals": [f"{DECODES}[METHOD-fewer-proposals]"],
        "smaller blocks": [f"{DECODES}[METHOD-smaller-blocks]"],
        "min_survival": [
            "tests/families/test_dspark.py::test_greedy_equals_plain_decoding_when_the_draft_is_often_right"
        ],
        "rollout: dense, pruned": [f"{ROLLOUTS}::test_the_engine_generates_the_targets_own_tokens"],
        "tensor_parallel": [f"{ROLLOUTS}::test_two_and_four_processes_equal_one"],
    },
}
"""Table -> column -> tests: FILE::FUNCTION with all its parameters, or one of them, in which METHOD is each method."""
RUN: dict[str, dict[str, list[str]]] = {
    "capture": {"vllm": [f"{VLLM_CAPTURES}[METHOD]"]},
    "servers": {f"vLLM, {layout}": [f"{VLLM_DECODES}[METHOD-{layout}]"] for layout in ("zlab", "speculators")},
}
"""As `SHOWN`, of tests that run another program, where `make interop-vllm` has installed it."""
IMITATED: dict[str, dict[str, list[str]]] = {
    "capture": {"sglang": ["tests/capture/test_sglang_backend.py"]},
    "servers": {"SGLang, sglang": ["tests/layouts/test_consumers.py"]},
}
"""Table -> column -> files of tests that answer as another program does."""
SHOWN_OR_RUN = [tests for tables in (SHOWN, RUN) for columns in tables.values() for tests in columns.values()]


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


# --- what tests show --------------------------------------------------------------------------------------------------


@cache
def collected():
    templates = [template for tests in SHOWN_OR_RUN for template in tests]
    named = [*templates, DPACE, f"{LOSSLESS}::test_greedy_equals_plain_decoding"]
    return collect({template.partition("::")[0] for template in named})


def methods_of(template: str, where=runs_everywhere) -> set[str]:
    """The methods that a test of `SHOWN` or `RUN` shows something of; where: which tests count."""
    name, bracket, _ = template.partition("[")
    items = [item for item in collected()[name] if where(item)] if name in collected() else []
    if not bracket:
        return {method for item in items for method in shown_methods(item)}
    wanted = {template.replace("METHOD", method) for method in METHODS}
    return {method for item in items if item.nodeid in wanted for method in shown_methods(item)}


def is_shown(name: str, column: str, method: Algorithm) -> bool:
    """Whether a test shows it for the method; for what is done with its drafts, which of a method say its architecture
    only, one of any method with that architecture will do."""
    covered = {shown for template in SHOWN.get(name, {}).get(column, []) for shown in methods_of(template)}
    names = {method.name, method.architecture} if name in ("layouts", "decoding") else {method.name}
    return bool(covered & names)


def is_run(name: str, column: str, method: Algorithm) -> bool:
    """As `is_shown`, by tests that run another program."""
    return any(method.name in methods_of(template, runs_vllm) for template in RUN.get(name, {}).get(column, []))


def runs_vllm(item: pytest.Item) -> bool:
    return item.get_closest_marker("vllm") is not None and item.get_closest_marker("slow") is None


def test_every_test_named_here_is_there_and_runs_on_any_machine():
    for columns in SHOWN.values():
        for template in (template for tests in columns.values() for template in tests):
            assert methods_of(template), f"{template}: no such test, or one that is not always run"
    for columns in RUN.values():
        for template in (template for tests in columns.values() for template in tests):
            assert methods_of(template, runs_vllm), f"{template}: no such test, or not one of `make interop-vllm`"
    for columns in IMITATED.values():
        assert all((DOCS.parent / file).is_file() for files in columns.values() for file in files)
    assert methods_of(DPACE) == {"dflash"}


def test_a_test_that_is_not_there_shows_nothing():
    assert methods_of(f"{DECODES}[METHOD-longer-blocks]") == set()
    assert methods_of(f"{DECODES}_and_more") == set()
    assert methods_of(SHOWN["decoding"]["min_survival"][0]) == {"dspark"}
    assert methods_of(SHOWN["decoding"]["sampling"][0]) == {"dflash"}
    assert methods_of(SHOWN["decoding"]["sampling"][2]) == {"domino"}
    assert methods_of(f"{DECODES}[METHOD-all-proposals]") == set(METHODS)


# --- what the code accepts --------------------------------------------------------------------------------------------


def accepted(work) -> bool:
    try:
        work()
    except DraftsmithError:
        return False
    return True


def write(draft: Draft, layout: str) -> None:
    tensors = {name.split(".", 1)[1]: value for name, value in draft.state_dict().items()}
    LAYOUTS[layout].write(draft.config.to_dict(), tensors, family(), target_ends())


def check(name: str, method: Algorithm, accepts: dict[str, list[bool]]) -> None:
    """The row says of each column what the code accepts (of the variants tried: column -> accepted) and tests show."""
    said = table("capabilities.md", f"table: {name}")[method.name]
    assert set(said) == set(accepts)
    for column, variants in accepts.items():
        if not any(variants):
            wanted = "refused"
        elif is_run(name, column, method):
            wanted = "run"
        elif column in IMITATED.get(name, {}):
            wanted = "imitated"
        elif not is_shown(name, column, method):
            wanted = "untested"
        else:
            wanted = "tested" if all(variants) else "partly"
        assert word(said[column]) == wanted, f"{method.name}, {column}: {said[column]}; the code accepts {variants}"


@pytest.mark.parametrize("name", ["capture", "layouts", "servers", "decoding"])
def test_every_method_has_its_row(name):
    assert set(table("capabilities.md", f"table: {name}")) == set(METHODS)


def test_methods():
    rows = table("capabilities.md", "table: methods").values()
    cells = {row["draft.algorithm"]: word(row["train"]) for row in rows}
    weighting = next(name for name in cells if name.startswith("a weighting of"))
    assert cells.pop(weighting) == ("tested" if methods_of(DPACE) else "untested")
    assert cells == {
        name: "tested" if is_shown("methods", "train", method) else "untested" for name, method in METHODS.items()
    }


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_layouts(method: Algorithm):
    drafts = [simple_draft(method.architecture, head) for head in range(len(HEADS[method.architecture]))]
    check("layouts", method, {layout: [accepted(partial(write, d, layout)) for d in drafts] for layout in WRITABLE})


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_capture(method: Algorithm):
    layout = method.capture(simple_draft(method.architecture).config)
    accepts = dict.fromkeys(
        (*get_args(CaptureOptions.model_fields["backend"].annotation), "train.features=online"), True
    )
    accepts["sglang"] = accepted(lambda: check_capture(layout, 40, None, SglangOptions()))
    check("capture", method, {column: [accepts_it] for column, accepts_it in accepts.items()})


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_servers(method: Algorithm):
    heads = range(len(HEADS[method.architecture]))
    configs = [simple_draft(method.architecture, head).config for head in heads]
    served: dict[str, list[bool]] = {}
    for column in ("vLLM, zlab", "vLLM, speculators", "SGLang, sglang"):
        server, layout = column.split(", ")
        ways = [serve_commands(config, layout, ServedTarget("target", "target"), "draft") for config in configs]
        said = [next(way for name, way in each.items() if name.startswith(server)) for each in ways]
        served[column] = [not isinstance(way, NotServed) for way in said]
    check("servers", method, served)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group that holds this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_decoding(method: Algorithm):
    target = tiny_target()
    head = HEADS[method.architecture][0]
    draft = tiny_draft(target, architecture=method.architecture, head=head, block_size=6)
    tried = {
        "greedy": lambda: filler_of(method, draft, target.ends),
        "sampling": lambda: filler_of(method, draft, target.ends),
        "fewer proposals": lambda: filler_of(method, draft, target.ends, 2),
        "smaller blocks": lambda: filler_of(method, draft.with_block_size(4), target.ends),
        "min_survival": lambda: filler_of(method, draft, target.ends, min_survival=0.5),
        "rollout: dense, pruned": lambda: [
            filler_of(method, draft, target.ends, rollout=r) for r in ("dense", "pruned")
        ],
        "tensor_parallel": lambda: filler_of(method, draft, target.ends, rollout="dense", tensor_parallel=True),
    }
    check("decoding", method, {feature: [accepted(work)] for feature, work in tried.items()})


def test_targets():
    rows = table("capabilities.md", "table: targets")
    (kinds,) = [name for name, cells in rows.items() if "random models of these types" in cells[""]]
    listed = [kind.removesuffix("(text)").replace(" ", "").replace("-", "_").lower() for kind in kinds.split(",")]
    items = collected()[f"{LOSSLESS}::test_greedy_equals_plain_decoding"]
    assert set(listed) == {item.callspec.params["kind"] for item in items} == {*KINDS, "qwen3_moe"}


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
