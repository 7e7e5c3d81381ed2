"""Prompts that get no answer: noted beside the answers, counted, and too many at some point."""

import json
from collections.abc import Sequence
from pathlib import Path

from draftsmith.base.files import replacing
from draftsmith.data.prompts import Prompt
from draftsmith.errors import DraftsmithError

SHOWN = 3
HOPELESS_AFTER = 16
"""Refusals from the first prompt on, none answered, after which the fault is not looked for in the prompts."""


class PromptRefused(Exception):
    """This prompt has no answer that can be trained on, for a reason that another prompt need not share."""

    def __init__(self, prompt_id: str, reason: str) -> None:
        super().__init__(f"prompt {prompt_id!r}: {reason}")
        self.prompt_id = prompt_id
        self.reason = reason


def refused_file(answers: Path) -> Path:
    """Where the prompts without an answer are noted, beside the answers."""
    return answers.with_name(f"{answers.stem}.refused{answers.suffix}")


class RefusedPrompts:
    """The prompts refused in this run, in a file beside the answers at `answers`: lines {id, reason}.

    A later run asks them again, since a refusal may lie in the server's settings; so the file is of the last run.
    """

    def __init__(self, answers: Path, total: int, max_share: float) -> None:
        self.path = refused_file(answers)
        self.total = total
        self.max_share = max_share
        self.reasons: dict[str, str] = {}

    def add(self, refused: PromptRefused) -> None:
        """Note one."""
        self.reasons[refused.prompt_id] = refused.reason

    def check_hope(self) -> None:
        """For a run without any answer yet: raise `DraftsmithError` where so far each of many prompts was refused."""
        if len(self.reasons) < HOPELESS_AFTER:
            return
        self._write()
        name, reason = next(iter(self.reasons.items()))
        raise DraftsmithError(
            f"the first {len(self.reasons)} prompts were all refused, and the others are not tried: {name!r}: "
            f"{reason}; all reasons are in {self.path}"
        )

    def finish(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that are not refused. The file is written, or removed where there are none.

        Raises `DraftsmithError` where more than the allowed share is refused, or all are.
        """
        self._write()
        self.check_share()
        return [prompt for prompt in prompts if prompt.id not in self.reasons]

    def check_share(self) -> None:
        """Raise `DraftsmithError` where more than the allowed share is refused, or all are."""
        count = len(self.reasons)
        if count == 0 or (count <= self.max_share * self.total and count < self.total):
            return
        shown = "; ".join(f"{name!r}: {reason}" for name, reason in list(self.reasons.items())[:SHOWN])
        more = f"; and {count - SHOWN} more in {self.path}" if count > SHOWN else ""
        raise DraftsmithError(
            f"{count} of {self.total} prompts have no answer: {shown}{more}. At most a share of {self.max_share:g} is "
            "allowed (regenerate.max_refused_share), never all. The other answers are kept: change or remove these "
            "prompts, or raise the share, and run again"
        )

    def _write(self) -> None:
        if not self.reasons:
            self.path.unlink(missing_ok=True)
            return
        lines = [json.dumps({"id": name, "reason": reason}) + "\n" for name, reason in self.reasons.items()]
        with replacing(self.path) as file:
            file.write("".join(lines).encode())
