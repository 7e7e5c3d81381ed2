"""The one style of all pages: light and dark, on screen and on paper.

Colours of series are Okabe and Ito's, which people with any common kind of colour blindness tell apart; where a colour
says something, an underline, a mark or a word says it too.
"""

SERIES = 7
"""Colours of series, `--c0` to `--c6`, before they begin again."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2129; --dim: #646b78; --line: #e3e0da; --grid: #ece9e3; --plain: #9aa0aa;
  --accept: 0, 114, 178; --correct: #c24d00; --bonus: #00805d; --tip: #1d2129; --tip-ink: #ffffff;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0558a; --c4: #3a9bd4; --c5: #b98300; --c6: #6a5acd; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14161b; --card: #1b1e25; --ink: #e8e9ec; --dim: #9aa1ae; --line: #2c313b; --grid: #282d36; --plain: #7d8591;
  --accept: 86, 180, 233; --correct: #ff8f45; --bonus: #3fcf9f; --tip: #f1f2f4; --tip-ink: #14161b;
  --c0: #56b4e9; --c1: #ff8f45; --c2: #3fcf9f; --c3: #e08fbf; --c4: #8fd0f5; --c5: #f0c04a; --c6: #a79bff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: "Inter", "Segoe UI", "Helvetica Neue", "DejaVu Sans", system-ui, sans-serif;
  -webkit-font-smoothing: antialiased; }
main { max-width: 1080px; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { overflow-wrap: anywhere; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.02em; font-weight: 650;
  margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; letter-spacing: -.01em; font-weight: 620; margin: 3rem 0 .35rem; }
h3 { font-size: .95rem; font-weight: 600; margin: 0 0 .5rem; }
p { margin: .25rem 0 .9rem; max-width: 80ch; } .dim, figcaption { color: var(--dim); } figcaption { font-size: .85rem; }
.lede { font-size: 1.06rem; } .lede b { font-weight: 620; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 1rem; margin: 1.6rem 0 0; }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.25rem; }
figure { margin: .8rem 0 0; } .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr));
  gap: 1rem; } .pair figure { margin: 0; } .pair.uneven { align-items: start; }
.card .big { font-size: 2.1rem; line-height: 1.15; font-weight: 640; letter-spacing: -.03em;
  font-variant-numeric: tabular-nums; }
.card .big small { font-size: 1rem; font-weight: 500; letter-spacing: 0; color: var(--dim); }
.card .what { font-size: .82rem; color: var(--dim); } .numbers { display: flex; gap: 2.2rem; margin-top: .5rem; }
 .card .name { font-size: .82rem; font-weight: 600; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--dim); font-size: 12px; font-variant-numeric: tabular-nums; }
svg text.strong { fill: var(--ink); }
svg line.grid { stroke: var(--grid); } svg line.axis { stroke: var(--line); }
svg .whisker { stroke: var(--ink); stroke-width: 1.4; opacity: .75; fill: none; }
svg polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
.keys { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 0 0 .6rem; font-size: .85rem; color: var(--dim); }
.key::before { content: ""; display: inline-block; width: .75em; height: .75em; border-radius: 3px; margin-right: .45em;
  background: var(--k); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--dim); } th, td { padding: .38rem .9rem .38rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; white-space: nowrap; } td { overflow-wrap: anywhere; }
td:first-child { overflow-wrap: normal; } .card:not(.scroll) td:first-child { white-space: nowrap; }
.scroll { overflow-x: auto; } .scroll td { overflow-wrap: normal; white-space: nowrap; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: .7rem 0; }
details > *:not(summary) { margin-left: 1.25rem; margin-right: 1.25rem; }
details > :last-child { margin-bottom: 1.1rem; }
summary { cursor: pointer; padding: .75rem 1.25rem; font-weight: 600; } summary span { font-weight: 400; }
.question { white-space: pre-wrap; color: var(--dim); border-left: 3px solid var(--line); padding-left: .9rem;
  font-size: .9rem; max-width: 90ch; }
.tokens { white-space: pre-wrap; line-height: 2.05; font-size: .95rem; max-width: 104ch; overflow-wrap: anywhere;
  font-family: "JetBrains Mono", "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.tokens i { font-style: normal; position: relative; border-radius: 3px; padding: .18em 0; cursor: default;
  border-bottom: 2px solid transparent; }
.tokens i.c { border-bottom-color: var(--correct); color: var(--correct); font-weight: 600; }
.tokens i.b { border-bottom: 3px double var(--bonus); color: var(--bonus); }
.tokens i.p { border-bottom: 2px dotted var(--plain); }
.tokens i:hover { outline: 1.5px solid var(--ink); z-index: 2; }
.tokens i:hover::after { content: attr(data-tip); position: absolute; left: 0; top: 100%; z-index: 3; margin-top: .3em;
  white-space: pre; background: var(--tip); color: var(--tip-ink); border-radius: 6px; padding: .45em .7em;
  font: 12px/1.5 "Inter", "DejaVu Sans", system-ui, sans-serif; pointer-events: none;
  box-shadow: 0 4px 18px rgba(0, 0, 0, .25); }
.legend i { padding: .1em .4em; white-space: nowrap; } .legend { line-height: 2; font-size: .88rem; }
@media (max-width: 1400px) { .tokens i { position: static; } /* beside a token it might reach past the window */
  .tokens i:hover::after { position: fixed; left: 50%; top: auto; bottom: 1rem; transform: translateX(-50%);
    width: max-content; max-width: 92vw; white-space: pre-wrap; } }
@media (max-width: 640px) { main { padding: 1.6rem .9rem 3rem; } .pair { grid-template-columns: 1fr; } }
@media print { :root { color-scheme: light; --paper: #fff; --card: #fff; --ink: #000; --dim: #444; --line: #ccc;
    --grid: #e5e5e5; --accept: 0, 114, 178; --correct: #a03d00; --bonus: #006346; --plain: #888;
    --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0558a; --c4: #3a9bd4; --c5: #b98300; --c6: #6a5acd; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; } figure, .card, tr { break-inside: avoid; }
  h2 { break-after: avoid; } * { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
"""

SHADES = 8
"""Steps of the shade of accepted tokens, `.a1` to `.a8`: the deeper, the later the slot."""

STYLE += "".join(
    f".tokens i.a{step} {{ background: rgba(var(--accept), {0.17 + 0.045 * (step - 1):.3f}); }}\n"
    for step in range(1, SHADES + 1)
)
