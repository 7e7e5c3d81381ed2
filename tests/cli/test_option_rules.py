"""Options that would be ignored are refused by name, before the recipe is read."""

import itertools
from pathlib import Path

import pytest

from draftsmith.capture.imports import ImportOptions
from draftsmith.cli.option_rules import CHECKED_IMPORTS, import_request
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import Recipe
from draftsmith.stages.common import WITHOUT_EFFECT
from tests.cli.test_cli import fails

RECIPE = "nowhere.yaml"  # never read: the options are looked at first
IMPORT = ("--import", "files", "--from", "specforge", "--tap-ids", "1,2", "--final-state", "none")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("capture", RECIPE, "--remask", "--fresh"), ("--remask", "--fresh")),
        (("capture", RECIPE, "--remask", *IMPORT), ("--import", "--remask")),
        (("capture", RECIPE, "--check-samples", "3"), ("--check-samples", "--import")),
        (("capture", RECIPE, "--remask", "--check-samples", "2"), ("--check-samples", "--import")),
        (("capture", RECIPE, "--tap-ids", "1"), ("--tap-ids", "--import")),
        (("capture", RECIPE, "--from", "specforge", "--final-state", "none"), ("--from", "--final-state", "--import")),
        (("capture", RECIPE, *IMPORT, "--check-samples", "-1"), ("--check-samples is -1",)),
        (("train", RECIPE, "--dry-run", "--fresh"), ("--dry-run", "--fresh")),
        (("train", RECIPE, "--resume", "--fresh"), ("--resume", "--fresh")),
        (("generate", RECIPE, "-p", "x", "--plain", "--draft", "d"), ("--plain", "--draft")),
        (
            ("generate", RECIPE, "-p", "x", "--plain", "--tuned", "t", "--draft", "d"),
            ("--plain", "--draft and --tuned"),
        ),
        (("inspect", "nowhere", "--sample", "a", "--verify"), ("--sample", "--verify")),
        (("inspect", "nowhere", "--tokenizer", "t"), ("--tokenizer", "--sample")),
        (
            ("convert", "a", "b", "--layout", "sglang", "--target", "t"),
            ("the target t is given", "'sglang'", "speculators", "--target"),
        ),
        (("algorithms", "draft.num_hidden_layers=3"), ("draft.num_hidden_layers=3", "--recipe")),
    ],
    ids=lambda value: " ".join(value[1:]) if value[0] in ("capture", "train", "generate", "inspect") else None,
)
def test_options_that_would_be_ignored_are_refused(arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    message = fails(*arguments)
    assert "nowhere" not in message
    for name in named:
        assert name in message


def test_an_import_says_all_or_is_none(tmp_path: Path) -> None:
    assert import_request(None, None, None, None, None, remask=True) is None
    asked = import_request(tmp_path, "modelopt", "9,1", "pre_norm", None, remask=False)
    assert asked == ImportOptions(tmp_path, "modelopt", (9, 1), "pre_norm", CHECKED_IMPORTS)
    unchecked = import_request(tmp_path, "modelopt", "9", "none", 0, remask=False)
    assert unchecked is not None
    assert unchecked.check_samples == 0
    said = {"--from": "modelopt", "--tap-ids": "9", "--final-state": "none"}
    for count in range(3):
        for names in itertools.combinations(said, count):
            values = [said[name] if name in names else None for name in said]
            missing = ", ".join(name for name in said if name not in names)
            with pytest.raises(DraftsmithError, match=rf"\({missing} missing\)"):
                import_request(tmp_path, values[0], values[1], values[2], None, remask=False)


def test_settings_without_effect_are_fields_of_the_recipe() -> None:
    """A field that was renamed would count as a setting without a word."""
    for stage, sections in WITHOUT_EFFECT.items():
        for section, fields in sections.items():
            options = Recipe.model_fields[section].annotation
            assert options is not None
            assert fields <= set(options.model_fields), (stage, section)
