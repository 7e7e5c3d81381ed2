"""Generated text, every token shaded by how it came."""

from html import escape

from draftsmith.bench.headline import plural
from draftsmith.bench.records import ShownText, ShownToken
from draftsmith.page.style import SHADES

_ABOUT = (
    '<p class="dim">Each token is shaded by how it came; point at one for its slot and chances. A run of shaded tokens '
    "and the one after it were committed by a single verify.</p>"
)
_OTHER_MARKS = (
    '<i class="c">corrected by the target</i> <i class="b">bonus after a whole block</i> '
    '<i class="p">first token, or not known</i>'
)

_HOW = {
    "prefill": "first token: the prompt's own pass",
    "accepted": "drafted and accepted",
    "corrected": "corrected by the target",
    "bonus": "bonus: the whole block was accepted",
    "ended": "last token: drafted or the target's own, which is not known",
}
_MARKS = {"prefill": "p", "corrected": "c", "bonus": "b", "ended": "p"}


def legend(proposals: int) -> str:
    """What the shades mean, of drafts that propose up to `proposals` tokens."""
    shades = ['<i class="a1">accepted, slot 1</i>']
    if proposals >= SHADES // 2:
        shades.append(f'<i class="a{SHADES // 2}">slot {SHADES // 2}</i>')
    if proposals >= SHADES:
        shades.append(f'<i class="a{SHADES}">slot {SHADES}{" and later" if proposals > SHADES else ""}</i>')
    return f'{_ABOUT}<p class="tokens legend">{" ".join(shades)} {_OTHER_MARKS}</p>'


def render_text(text: ShownText, unfolded: bool) -> str:
    """One answer, to be unfolded."""
    verifies = sum(token.slot == 1 for token in text.tokens)
    drafted = sum(token.came == "accepted" for token in text.tokens)
    turn = f", turn {text.turn + 1}" if text.turn else ""
    kind = f"{text.category}, " if text.category else ""
    about = f"{kind}{len(text.tokens)} tokens, {drafted} of them drafted"
    about += f", in {plural(verifies, 'verify', 'verifies')}" if verifies else ""
    return (
        f"<details{' open' if unfolded else ''}><summary>{escape(text.decoder)} · {escape(text.prompt + turn)} "
        f'<span class="dim">{escape(about)}</span></summary><p class="question">{escape(text.question)}</p>'
        f'<p class="tokens">{"".join(_token(token) for token in text.tokens)}</p></details>'
    )


def _token(token: ShownToken) -> str:
    kind = _MARKS.get(token.came) or f"a{min(token.slot, SHADES)}"
    # A line break inside a mark would stretch it over the rest of the line.
    body = token.text.rstrip("\n")
    breaks = "\n" * (len(token.text) - len(body))
    shown = escape(body) or ("⏎" if breaks else "·")
    return f'<i class="{kind}" data-tip="{escape(_tip(token))}">{shown}</i>{breaks}'


def _tip(token: ShownToken) -> str:
    lines = [_HOW[token.came] + (f", slot {token.slot}" if token.came in ("accepted", "corrected") else "")]
    if token.target is not None:
        lines.append(f"target gave it {_chance(token.target)}")
    if token.draft is not None:
        lines.append(f"draft gave it {_chance(token.draft)}")
    if token.instead is not None:
        sure = "" if token.instead_chance is None else f" ({_chance(token.instead_chance)})"
        lines.append(f"draft had said {token.instead!r}{sure}")
    return "\n".join(lines)


def _chance(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"
