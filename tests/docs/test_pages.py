"""What stands in the documentation exists: commands and options parse, recipe keys are known, code compiles, links lead
somewhere, and every page is in the navigation."""

import itertools
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import get_args

import click
import pytest
import typer
import yaml
from pydantic import BaseModel

from draftsmith.algorithms.registry import all_algorithms
from draftsmith.bench.options import BenchOptions
from draftsmith.cli.app import app
from draftsmith.data.named import DATA_SETS
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import LAYOUTS, WRITABLE
from draftsmith.run.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"] if "dev" not in page.parts)
RECIPES = [f"smollm2-{method}" for method in ("dflash", "dspark", "dflash2", "domino", "dta")]
GROUP = typer.main.get_command(app)


def blocks(language):
    """(page, code) of every fenced block in a language ("": blocks that name none)."""
    found = []
    for page in PAGES:
        inside, code = None, []
        for line in page.read_text(encoding="utf-8").splitlines():
            fence = re.fullmatch(r" *```(\w*)", line)
            if fence and inside is None:
                inside, code = fence.group(1), []
            elif fence:
                if inside == language:
                    found.append((page, "\n".join(code)))
                inside = None
            else:
                code.append(line)
        assert inside is None, f"{page.name}: a block is not closed"
    return found


def names(found):
    return [f"{page.name}-{number}" for number, (page, _) in enumerate(found)]


def commands():
    """Every `draftsmith ...` command of a shell block, continued lines joined, and of `python -m draftsmith`."""
    found = []
    for page, code in [*blocks("bash"), *blocks("")]:
        for line in code.replace("\\\n", " ").splitlines():
            if re.match(r"draftsmith |(torchrun|accelerate) .*draftsmith ", line):
                words = list(itertools.takewhile(lambda word: word != ">", shlex.split(line, comments=True)))
                found.append((page, words[words.index("draftsmith") + 1 :]))
    return found


COMMANDS = commands()


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=names(COMMANDS))
def test_commands_parse_and_override_what_recipes_have(page, words):
    command = GROUP.commands[words[0]]
    try:
        context = command.make_context(words[0], words[1:])
    except click.ClickException as error:
        pytest.fail(f"{page.name}: draftsmith {' '.join(words)}: {error.format_message()}")
    for override in context.params.get("overrides") or ():
        assert re.match(r"[\w.]+=", override), f"{page.name}: {override!r} is not an override"
        faults = []
        for recipe in RECIPES:
            try:
                load_recipe(recipe, [override, "target.path=x"])
                break
            except DraftsmithError as error:
                faults.append(str(error))
        else:
            pytest.fail(f"{page.name}: {override}: {faults[0]}")


def test_commands_are_found():
    assert len(COMMANDS) > 30
    assert {words[0] for _, words in COMMANDS} >= set(GROUP.commands)


def test_every_method_has_a_page_with_source_cost_and_use():
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.stem != "index":
            assert "## Cost and use" in text, page.name
            assert re.search(r"\| (paper|source) \|", text), page.name
            assert "| when |" in text, page.name
    assert {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} >= {m.name for m in all_algorithms()}


PYTHON = blocks("python")


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=names(PYTHON))
def test_python_compiles_and_imports_what_exists(page, code):
    compile(code, page.name, "exec")
    for line in re.findall(r"^(?:from draftsmith\S* import .+|import draftsmith.*)$", code, re.MULTILINE):
        exec(line, {})


def test_yaml_and_json_blocks_are_well_formed():
    for page, code in blocks("yaml"):
        found = yaml.safe_load(code)
        assert isinstance(found, dict), page.name
        known = set(load_recipe("smollm2-dflash", ["target.path=x"]).model_dump())
        assert set(found) <= known, f"{page.name}: {set(found) - known}"
    for _, code in blocks("json"):
        for line in code.splitlines():
            json.loads(line)


def anchors(page):
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


def sections(model, name):
    """(name, fields) of a part of a recipe and of the parts within it."""
    yield name, set(model.model_fields)
    for field, info in model.model_fields.items():
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind, f"{name}.{field}" if name else field)


def test_every_field_of_a_recipe_is_listed_with_its_section():
    listed = defaultdict(set)
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for entry in page.split("\n## Fields\n")[1].split("\n## ")[0].split("\n- ")[1:]:
        name, rest = re.match(r"`([\w.]+)`[^:]*:(.*)", entry, re.DOTALL).groups()
        listed[name] |= set(re.findall(r"`(\w+)`", rest))
    for name, fields in sections(Recipe, ""):
        if name and not name.startswith("draft"):
            assert {field for field in fields if f"{name}.{field}" not in listed} == listed[name], name


def test_lists_in_help_and_docstrings_are_those_of_the_code():
    for command in ("export", "convert"):
        (option,) = (one for one in GROUP.commands[command].params if one.name == "layout")
        assert set(WRITABLE) == set(re.findall(r"\w+", option.help)) & {*LAYOUTS}, command
    for text in (
        BenchOptions.model_fields["prompts"].description,
        (ROOT / "docs" / "data.md").read_text(encoding="utf-8"),
    ):
        assert {name for name in DATA_SETS if f"`{name}`" in text} == set(DATA_SETS)


def test_every_page_is_in_the_navigation():
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for inner in (node.values() if isinstance(node, dict) else node) for leaf in leaves(inner)]

    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) <= there
    # Measurements of single parts are reached from the page on performance.
    assert {page for page in there - set(listed) if not page.startswith("performance/")} == set()
