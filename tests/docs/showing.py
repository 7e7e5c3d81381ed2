"""Which methods a test shows something of: by its parameters, or by what its code names."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.every_method import METHODS

ROOT = Path(__file__).parents[2]
NOT_EVERYWHERE = {"gpu", "interop", "vllm", "skip", "skipif", "xfail"}
"""Marks of tests that a check on a CPU may leave out."""


class _Collector:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collect(files: set[str]) -> dict[str, list[pytest.Item]]:
    """The tests of these files as pytest finds them, none of them run: FILE::FUNCTION -> its items."""
    collector = _Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        # Without the plugins that take hold of the whole process, which belongs to the session outside.
        kept_out = [
            f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "threadexception", "unraisableexception")
        ]
        options = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-o", "addopts=", "-s", "-qqq"]
        status = pytest.main(["--collect-only", *options, *kept_out, *(str(ROOT / f) for f in files)], [collector])
    assert status == pytest.ExitCode.OK, f"pytest could not collect {sorted(files)}"
    found: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in collector.items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found


def runs_everywhere(item: pytest.Item) -> bool:
    return not NOT_EVERYWHERE & {mark.name for mark in item.iter_markers()}


def shown_methods(item: Any) -> set[str]:
    """The methods among the item's parameters; without any, those that the test's code names."""
    parameters = set(re.split(r"[-\[\]]", item.nodeid.partition("[")[2]))
    return parameters & set(METHODS) or _named(Path(item.path), item.originalname)


@cache
def _named(path: Path, function: str) -> set[str]:
    """Methods named by a string in a function, or in whatever of its own file it uses, fixtures included. A small draft
    whose architecture nobody names is DFlash's."""
    defined: dict[str, ast.stmt] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                defined[name] = statement
            case ast.Assign(targets=[ast.Name(id=name)]):
                defined[name] = statement
    strings: set[str] = set()
    used, waiting = set(), [function]
    while waiting:
        name = waiting.pop()
        used.add(name)
        for node in ast.walk(defined[name]) if name in defined else ():
            match node:
                case ast.Constant(value=str(value)):
                    strings.add(value)
                case ast.Name(id=other) | ast.arg(arg=other) if other not in used:
                    waiting.append(other)
    return strings & set(METHODS) or ({"dflash"} if "tiny_draft" in used else set())
