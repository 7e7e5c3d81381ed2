"""Operations are called by their public names: which way runs is decided in `draftsmith.kernels`, and nowhere else."""

import ast
from pathlib import Path

import draftsmith

ROOT = Path(draftsmith.__file__).parent


def test_nobody_else_imports_triton_or_a_reference() -> None:
    seen = set()
    for path in ROOT.rglob("*.py"):
        if ROOT / "kernels" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert module.split(".")[0] != "triton", path
            assert not any(name.split(".")[0] == "triton" for name in names), path
            if module.startswith("draftsmith.kernels."):
                seen.add(module)
                assert not any(name.endswith(("_reference", "_kernel")) for name in names), path
    assert len(seen) > 15  # the rule is about something
