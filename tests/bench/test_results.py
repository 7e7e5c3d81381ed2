"""The script behind the results page: its settings are recipes that exist, and the table says what was measured."""

import importlib.util
import sys
from pathlib import Path

import pytest

from draftsmith.run.recipe import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results():
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_method_has_a_recipe_that_takes_its_settings(results):
    for method, own in results.METHODS.items():
        recipe = load_recipe(f"smollm2-{method}", [*results.SHARED, *own, "target.path=x", "run=y"])
        assert recipe.train.seed == 0
        assert recipe.draft.block_size == 16


def measured(value, low, high):
    return {"value": value, "low": low, "high": high}


def line(part, steps, **benches):
    machine = {"device": "a GPU", "torch": "2.11.0"}
    return {"part": part, "machine": machine, "steps": steps, "training_seconds": 169.6, "benches": benches}


def test_the_table_says_what_was_measured_and_what_was_not(results):
    accepted = {"accept_length": measured(3.714, 3.6, 3.831), "equal_prompts": 0.25, "equal_at_width": 1.0}
    alone = {"tokens_per_second": measured(2500.4, 2400, 2600), "speedup": measured(2.5, 2.41, 2.62)}
    alone["decode_speedup"] = None
    both = {
        "gsm8k": {"accepted": accepted, "alone": alone},
        "mt-bench": {"accepted": accepted | {"equal_at_width": 0.993}},
    }
    whole = line("dflash", 5120, **both) | {"calibration": {"calibration_seconds": 61.4}}
    cut = line("dspark", 4100, gsm8k={"accepted": accepted})
    header, rule, first, second, _, told = results.table_lines([whole, cut])
    assert header.count("|") == rule.count("|") == first.count("|") == second.count("|")
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells == [
        *("DFlash", "5,120", "170 s", "61 s"),
        *("3.71 (3.60 to 3.83)", "25.00 % / 100 %", "3.71 (3.60 to 3.83)", "25.00 % / 99.30 %"),
        *("1,000", "2,500", "2.50x (2.41 to 2.62)", "-"),
    ]
    assert [cell.strip() for cell in second.strip("|").split("|")][3:] == [
        *("-", "3.71 (3.60 to 3.83)", "25.00 % / 100 %", "-", "-", "-", "-", "-", "-")
    ]
    assert told == "Measured on: device a GPU, torch 2.11.0."
