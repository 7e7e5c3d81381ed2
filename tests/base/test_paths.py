"""`~` in every place where a path can be written: no directory of that name is made or looked for."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer
from pydantic import BaseModel, TypeAdapter
from typer.testing import CliRunner

from draftsmith.base.paths import user_path
from draftsmith.cli.app import app
from draftsmith.cli.option_paths import cli_path
from draftsmith.data.prompts import find_prompts
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import Recipe, find_recipe, parse_recipe

MINIMAL = {
    "run": "~/runs/x",
    "target": {"path": "~/target"},
    "draft": {"algorithm": "dflash", "block_size": 8, "num_hidden_layers": 2, "mask_token_id": 5, "init_from": "~/d"},
    "data": {"prompts": "~/p.jsonl", "conversations": "~/c.jsonl", "chat_template": "~/t.jinja"},
    "train": {"features": "online", "online": {"cache": "~/cache"}},
    "bench": {"prompts": "~/b.jsonl"},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_home_directory_is_written_out(home: Path) -> None:
    assert user_path("~/x") == home / "x"
    assert user_path("a/~/x") == Path("a/~/x")
    with pytest.raises(DraftsmithError, match=r"there is no home directory ~nobody-there; write the path out"):
        user_path("~nobody-there/x")
    with pytest.raises(typer.BadParameter, match="no home directory ~nobody-there"):
        cli_path("~nobody-there/x")


def test_every_place_of_a_recipe(home: Path) -> None:
    recipe = parse_recipe(MINIMAL)
    assert recipe.run == home / "runs/x"
    assert recipe.target.path == str(home / "target")
    assert recipe.draft.init_from == str(home / "d")
    assert (recipe.data.prompts, recipe.bench.prompts) == (str(home / "p.jsonl"), str(home / "b.jsonl"))
    assert (recipe.data.conversations, recipe.data.chat_template) == (home / "c.jsonl", home / "t.jinja")
    assert recipe.train.online.cache == str(home / "cache")
    with pytest.raises(DraftsmithError, match=r"target\.path is '~nobody-there/t': ~nobody-there/t: there is no home"):
        parse_recipe({**MINIMAL, "target": {"path": "~nobody-there/t"}})


def test_names_stay_names() -> None:
    fields = {**MINIMAL, "target": {"path": "Qwen/Qwen3-4B"}, "bench": {"prompts": "mt-bench"}}
    assert (parse_recipe(fields).target.path, parse_recipe(fields).bench.prompts) == ("Qwen/Qwen3-4B", "mt-bench")


def paths_in(annotation: Any) -> bool:
    return annotation is Path or any(paths_in(argument) for argument in get_args(annotation))


def fields_of(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}", field
        stack = [field.annotation]
        while stack:
            part = stack.pop()
            stack += get_args(part)
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields_of(part, f"{above}{name}.")


def test_no_path_field_leaves_the_home_directory_out(home: Path) -> None:
    found = {name: field for name, field in fields_of(Recipe) if paths_in(field.annotation)}
    assert set(found) >= {"run", "data.conversations", "data.chat_template"}
    for name, field in found.items():
        kind = TypeAdapter(Annotated[field.annotation, None, *field.metadata])
        assert kind.validate_python("~/x") == home / "x", name


def test_no_option_of_the_command_line_leaves_it_out() -> None:
    checked = 0
    for command in app.registered_commands:
        for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
            if paths_in(parameter.annotation):
                (option,) = parameter.annotation.__metadata__
                assert option.parser is cli_path, f"{command.callback.__name__} {parameter.name}"
                checked += 1
    assert checked >= 12


def test_files_are_found_at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "p.jsonl").write_text('{"prompt": "hi"}\n')
    (home / "r.yaml").write_text("run: x\n")
    (home / "rows.jsonl").write_text('{"question": "one?", "answer": "1"}\n')
    assert find_prompts(parse_recipe(MINIMAL).data.prompts, "train")[0].id == "p-1"
    assert len(find_prompts("gsm8k@~/rows.jsonl", "heldout")) == 1
    assert find_recipe("~/r.yaml") == home / "r.yaml"
    with pytest.raises(DraftsmithError, match=str(home / "nowhere")):
        Draft.load("~/nowhere")
    result = CliRunner().invoke(app, ["inspect", "~/nowhere"])
    assert result.exit_code == 1
    assert str(home / "nowhere") in result.stderr.replace("\n", "")
    assert not (home / "~").exists()
