"""A setting that is on, off, or decided by draftsmith."""

from typing import Annotated, Literal

from pydantic import BeforeValidator


def _from_yaml(value: object) -> object:
    """YAML reads on and off without quotes as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_from_yaml)]
