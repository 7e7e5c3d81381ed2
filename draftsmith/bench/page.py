"""The benchmark as one HTML page that needs nothing else (`draftsmith.page`)."""

from collections.abc import Callable, Sequence
from html import escape

from draftsmith.bench.figures import UNCATEGORISED, Figures, all_figures
from draftsmith.bench.headline import estimate, gibibytes, milliseconds, number, percent, plural
from draftsmith.bench.intervals import Estimate
from draftsmith.bench.page_text import legend, render_text
from draftsmith.bench.records import PLAIN, BenchReport
from draftsmith.page.charts import Bar, bars, colour, columns, line_chart
from draftsmith.page.document import fact_table, figure, page, table

PLAIN_COLOUR = "var(--plain)"


def render_page(report: BenchReport) -> str:
    """The whole page as HTML."""
    figures = all_figures(report)
    names = [draft.name for draft in report.drafts]
    drafted = [f for f in figures if f.decoder != PLAIN]
    first = [f for f in drafted if f.batch_size == report.batch_sizes[0]]
    setting = report.setting
    target = str(setting["target"]).rsplit("/", 1)[-1]
    sampling = "greedy" if setting["temperature"] == 0 else f"temperature {setting['temperature']}"
    asked = plural(first[0].prompts, "prompt", "prompts")
    subtitle = (
        f"{target} in {setting['dtype']} on {setting['device']}, {asked}, {sampling}, up to "
        f"{setting['max_new_tokens']} new tokens"
    )
    body = [
        f'<p class="lede">{_lede(first)}</p>',
        f'<div class="facts">{"".join(_card(f, names) for f in first)}</div>',
        "<h2>Speed</h2>",
        '<p class="dim">New tokens a second, with 95 % intervals over rounds. The decoders took turns in one process.'
        "</p>",
        '<div class="pair">',
        _speed(figures, names, lambda f: f.decode_tokens_per_second, "Decoding", "After each answer's first token."),
        _speed(figures, names, lambda f: f.tokens_per_second, "End to end", "The prompt's own pass included."),
        "</div>",
        "<h2>Accept length</h2>",
        '<p class="dim">Tokens committed per verify: the accepted proposals and one token of the target\'s own. '
        "Intervals are over prompts.</p>",
        '<div class="pair uneven">',
        _accept_length(drafted, names, len(report.batch_sizes) > 1),
        _categories(first, names),
        "</div>",
        "<h2>Where blocks end</h2>",
        '<div class="pair">',
        _slots(first, joint=False),
        _slots(first, joint=True),
        "</div>",
        f'<div style="margin-top:1rem">{_histogram(first)}</div>',
        *_texts(report),
        "<h2>All figures</h2>",
        f'<div class="card scroll">{_figure_table(figures)}</div>',
        "<h2>By prompt</h2>",
        f'<div class="card scroll">{_prompt_table(report)}</div>',
        "<h2>Setting</h2>",
        f'<div class="card">{_setting_table(report)}</div>',
    ]
    return page("Speculative decoding against plain decoding", "\n".join(body), subtitle)


# --- headline ---------------------------------------------------------------------------------------------------------


def _lede(first: Sequence[Figures]) -> str:
    best = max(first, key=lambda f: f.decode_speedup.value if f.decode_speedup else 0.0)
    who = f"<b>{escape(best.decoder)}</b>"
    speed = (
        f"decodes <b>{number(best.decode_speedup.value)} times</b> as fast as the target alone"
        if best.decode_speedup
        else "decodes"
    )
    length = "" if best.accept_length is None else f", committing <b>{best.accept_length.value:.2f}</b> tokens a verify"
    equal = ""
    if best.equal_share is not None:
        equal = (
            f" {percent(best.equal_share)} of its tokens are those of plain greedy decoding; "
            f"{percent(best.equal_at_width)} of its answers are, where both pass as many tokens at a time."
        )
    return f"{who} {speed} at batch size {best.batch_size}{length}.{equal}"


def _card(found: Figures, names: Sequence[str]) -> str:
    mark = colour(names.index(found.decoder))
    length, speed = found.accept_length, found.decode_speedup
    return (
        '<div class="card"><div class="name">'
        f'<span class="key" style="--k: {mark}">{escape(found.decoder)}</span></div>'
        f'<div class="numbers"><div><div class="big">{number(None if length is None else length.value)}</div>'
        f'<div class="what">accept length{_between(length)}</div></div>'
        f'<div><div class="big">{number(None if speed is None else speed.value)}<small> x</small></div>'
        f'<div class="what">as fast as plain, decoding{_between(speed)}</div></div></div></div>'
    )


def _between(value: Estimate | None) -> str:
    if value is None or value.low is None or value.high is None:
        return ""
    return f"<br>{value.low:.2f} to {value.high:.2f}"


# --- charts -----------------------------------------------------------------------------------------------------------


def _speed(
    figures: Sequence[Figures],
    names: Sequence[str],
    of: Callable[[Figures], Estimate | None],
    title: str,
    caption: str,
) -> str:
    groups: dict[str, list[Bar]] = {}
    for found in figures:
        speed = of(found)
        if speed is not None:
            group = groups.setdefault(found.batch, [])
            group.append(_bar(found.decoder, speed, f"{speed.value:,.0f}" if speed.value >= 100 else None, names))
    return figure(bars(groups, f"{title}, tokens a second"), caption, title)


def _bar(name: str, value: Estimate, shown: str | None, names: Sequence[str]) -> Bar:
    tint = PLAIN_COLOUR if name == PLAIN else colour(names.index(name))
    return Bar(name, value.value, shown or f"{value.value:.2f}", tint, value.low, value.high)


def _accept_length(drafted: Sequence[Figures], names: Sequence[str], several_sizes: bool) -> str:
    groups: dict[str, list[Bar]] = {}
    for found in drafted:
        if found.accept_length is not None:
            group = found.batch if several_sizes else ""
            groups.setdefault(group, []).append(_bar(found.decoder, found.accept_length, None, names))
    return figure(bars(groups, "accept length"), "Bars begin at 0; a draft that is never right has 1.", "All prompts")


def _categories(first: Sequence[Figures], names: Sequence[str]) -> str:
    groups: dict[str, list[Bar]] = {}
    for found in first:
        for category, length in found.accept_length_by_category.items():
            groups.setdefault(category, []).append(_bar(found.decoder, length, None, names))
    if set(groups) == {UNCATEGORISED}:
        return ""  # the chart of all prompts says it
    return figure(bars(groups, "accept length by category"), title="By category")


def _slots(first: Sequence[Figures], *, joint: bool) -> str:
    curves = {}
    for found in first:
        shares = found.slots.joint if joint else found.slots.conditional
        curves[found.decoder] = [(slot, share) for slot, share in enumerate(shares, start=1) if share is not None]
    title = "Verifies that get past a slot" if joint else "Acceptance of a slot that is reached"
    caption = (
        "The chance that a block is right up to and including the slot."
        if joint
        else "Of the blocks that are right up to here, the share that is right here too."
    )
    return figure(line_chart(curves, "slot", bounds=(0.0, 1.0)), caption, title)


def _histogram(first: Sequence[Figures]) -> str:
    shares = {f.decoder: [count / sum(f.histogram) for count in f.histogram] for f in first if f.histogram}
    return figure(columns(shares, "tokens committed", width=1000), "Share of verifies.", "Tokens committed per verify")


# --- texts and tables -------------------------------------------------------------------------------------------------


def _texts(report: BenchReport) -> list[str]:
    if not report.shown:
        return []
    prompts = list(dict.fromkeys(text.prompt for text in report.shown))
    texts = sorted(report.shown, key=lambda text: (prompts.index(text.prompt), text.turn))
    first = (texts[0].prompt, texts[0].turn)
    shown = [render_text(text, (text.prompt, text.turn) == first) for text in texts]
    most = max(decoder.proposals for decoder in report.decoders)
    return ["<h2>How the text came</h2>", legend(most), *shown]


def _figure_table(figures: Sequence[Figures]) -> str:
    header = (
        "decoder", "batch", "accept length", "tokens/s", "decode tokens/s", "speed-up", "decode speed-up",
        "first token", "cycle", "equal tokens", "equal answers", "equal at the same width", "memory",
    )  # fmt: skip
    rows = [
        (
            f.decoder,
            str(f.batch_size),
            estimate(f.accept_length),
            estimate(f.tokens_per_second, 1),
            estimate(f.decode_tokens_per_second, 1),
            estimate(f.speedup, 2, "x"),
            estimate(f.decode_speedup, 2, "x"),
            milliseconds(f.first_token_seconds, 1),
            milliseconds(f.cycle_seconds, 2),
            percent(f.equal_share),
            percent(f.equal_prompts),
            percent(f.equal_at_width),
            gibibytes(f.memory_bytes),
        )
        for f in figures
    ]
    return table(header, rows, numbers_from=1)


def _prompt_table(report: BenchReport) -> str:
    rows = []
    for answer in report.answers:
        if answer.decoder == PLAIN:
            continue
        counted = answer.counted
        rows.append(
            (
                answer.prompt + (f", turn {answer.turn + 1}" if answer.turn else ""),
                answer.category or "",
                answer.decoder,
                str(answer.batch_size),
                str(answer.seed),
                str(len(answer.token_ids)),
                number(sum(counted) / len(counted)) if counted else "-",
                answer.finish_reason,
                _equality(answer.equal_tokens, answer.plain_tokens, len(answer.token_ids), answer.equal_at_width),
            )
        )
    header = ("prompt", "category", "draft", "batch", "seed", "new tokens", "accept length", "finish", "equal")
    return table(header, rows, numbers_from=3)


def _equality(equal: int | None, plain: int | None, length: int, at_width: bool | None) -> str:
    if equal is None:
        return "-"
    if equal == plain == length:
        return "yes"
    return "at the same width" if at_width else "no"


def _setting_table(report: BenchReport) -> str:
    rows = [(name, str(value)) for name, value in report.setting.items()]
    for draft in report.drafts:
        blocks = f"blocks of {draft.block_size}, " if draft.block_size else ""
        described = (
            f"{draft.method}, {plural(draft.layers, 'layer', 'layers')}, {blocks}"
            f"{plural(draft.proposals, 'proposal', 'proposals')}"
        )
        own = f", {draft.engine}" if draft.engine else ""
        rows.append((f"draft {draft.name}", f"{described}{own}; {draft.directory or 'in memory'}"))
    return fact_table(rows)
