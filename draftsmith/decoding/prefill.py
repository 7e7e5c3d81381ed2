"""How prompts are read: rows that came together, chunk by chunk, with little padding.

On a GPU a pass over few tokens takes as long as its launches, so such passes are replayed from graphs, and padded to a
few widths so that the graphs are few. Padding is tokens that mean nothing, behind a row's own: what they leave in the
caches lies past the row's length, as it does for the shorter rows of any pass.
"""

from dataclasses import dataclass

from draftsmith.decoding.answer import Answer

PASS_TOKENS = 16384
"""Most tokens in one pass when many rows are read together: it bounds the memory of a pass."""

SMALL_PASS = 2048
"""Most tokens, padding included, of a pass that is padded to one of `WIDTHS` and held in a graph. With more, the device
takes longer than the host's launches, and padding would cost what it computes."""

WIDTHS = (64, 128, 192, 256, 384, 512)
"""Tokens of a row in such a pass."""

_FREE_PADDING = 256
"""Padded tokens that cost next to nothing: a pass reads the weights, however few tokens it has."""


@dataclass
class PrefillGroup:
    """Rows in neighbouring slots, from `first` on, whose prompts are read together; the longest comes first, so that
    rows whose prompt is read drop out at the end. begin: how far all of them are."""

    first: int
    answers: list[Answer]
    begin: int = 0

    def next_width(self, chunk: int) -> int:
        """Tokens of the next pass: as many as leave little padding, at most `chunk` a row and `PASS_TOKENS` in all."""
        left = [len(answer.prompt) - self.begin for answer in self.answers]  # falling
        most = min(chunk, max(PASS_TOKENS // len(left), 1))
        best = min(left[-1], most)
        for width in sorted({min(value, most) for value in left}):
            padding = sum(max(width - value, 0) for value in left)
            useful = sum(min(width, value) for value in left)
            if padding <= max(_FREE_PADDING, useful // 4):
                best = max(best, width)
        return best

    def advance(self, width: int) -> list[bool]:
        """Counts a pass; which of the rows ended in it. They leave the group."""
        self.begin += width
        ended = [len(answer.prompt) <= self.begin for answer in self.answers]
        self.answers = [answer for answer in self.answers if len(answer.prompt) > self.begin]
        return ended


def graph_width(width: int, rows: int, most: int) -> int | None:
    """The width that a pass over `rows` rows takes in place of `width`, 1 <= width <= most: the next of `WIDTHS`, at
    most `most`. None for a pass that is too large for a graph."""
    wider = min((one for one in WIDTHS if one >= width), default=None)
    if wider is None or rows * min(wider, most) > SMALL_PASS:
        return None
    return min(wider, most)


def groups_of(slots: list[int], answers: list[Answer], most: int | None) -> list[PrefillGroup]:
    """Puts rows into slots (as many, rising): groups of rows in neighbouring slots, at most `most` each."""
    ordered = sorted(answers, key=lambda answer: -len(answer.prompt))
    groups: list[PrefillGroup] = []
    for slot, answer in zip(slots, ordered, strict=True):
        last = groups[-1] if groups else None
        joins = last is not None and last.first + len(last.answers) == slot
        if last is None or not joins or len(last.answers) == most:
            groups.append(PrefillGroup(slot, [answer]))
        else:
            last.answers.append(answer)
    return groups
