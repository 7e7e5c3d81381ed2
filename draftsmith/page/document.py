"""The frame of a page, and its tables."""

from collections.abc import Sequence
from html import escape

from draftsmith.page.style import STYLE


def page(title: str, body: str, subtitle: str = "") -> str:
    """The whole document; `body` is HTML, `title` and `subtitle` are text."""
    below = f'<p class="dim">{escape(subtitle)}</p>' if subtitle else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>\n<header><h1>{escape(title)}</h1>{below}</header>\n{body}\n"
        "</main></body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """An HTML table of texts; columns from `numbers_from` on are set as numbers. No header: no head row."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="number"' if column >= numbers_from else "" for column in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head = f"<tr>{cells('th', header)}</tr>" if header else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def fact_table(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values."""
    return table((), rows, numbers_from=2)


def figure(content: str, caption: str = "", title: str = "") -> str:
    """A framed drawing; `content` is HTML, the others are text."""
    above = f"<h3>{escape(title)}</h3>" if title else ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{above}{content}{below}</figure>"
