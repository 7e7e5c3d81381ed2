"""A setting that is on, off, or decided by draftsmith."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator

_Name = Literal["auto", "on", "off"]
SWITCH_NAMES: tuple[str, ...] = get_args(_Name)


def _from_yaml(value: object) -> object:
    """YAML reads on and off without quotes as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[_Name, BeforeValidator(_from_yaml)]
