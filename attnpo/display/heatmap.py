"""Heat maps of token weights as self-contained HTML and in the terminal.

The HTML needs no script, no font and no file besides itself; every text of the data is escaped and every line of a
response takes its own direction (left to right or right to left).
"""

import html
import math
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnpo.display.heat import LEGEND, LEVELS, RGB, HeatRow, HeatSide, HeatToken, level, over, readable, tint, visible
from attnpo.schema import Message

# ------------------------------------------------------------------------------------------------ HTML

_STYLE = """
.heat { --ink:#1d1f24; --soft:#666b75; --line:#d5d9e0; --card:#fff; --mark:#b3261e;
  color:var(--ink); font:15px/1.5 system-ui,sans-serif; -webkit-print-color-adjust:exact; print-color-adjust:exact; }
.heat * { box-sizing:border-box; }
.heat-row { border:1px solid var(--line); border-radius:10px; background:var(--card); padding:14px 16px;
  margin:0 0 18px; }
.heat-head { display:flex; flex-wrap:wrap; gap:4px 16px; color:var(--soft); font-size:13px; }
.heat-head b { color:var(--ink); }
.heat-prompt { margin:10px 0; padding:8px 12px; border-left:3px solid var(--line); max-height:16em; overflow:auto; }
.heat-prompt p { margin:0 0 4px; }
.heat-prompt i { font-style:normal; color:var(--soft); font-size:12px; }
.heat-text { white-space:pre-wrap; overflow-wrap:anywhere; unicode-bidi:plaintext; text-align:start; }
.heat-sides { display:grid; grid-template-columns:1fr 1fr; gap:14px; }
.heat-side { min-width:0; border-top:3px solid var(--line); padding-top:8px; }
.heat-side.chosen { border-top-color:#2e9e6b; } .heat-side.rejected { border-top-color:#b9504a; }
.heat-side h3 { margin:0; font-size:14px; } .heat-side small { color:var(--soft); display:block; margin-bottom:6px; }
.heat-tokens { line-height:1.9; }
.heat-tokens span, .heat-legend span { border-radius:3px; padding:2px 0; box-decoration-break:clone;
  -webkit-box-decoration-break:clone; }
.heat-legend { display:flex; flex-wrap:wrap; align-items:center; gap:6px; margin:0 0 14px; font-size:13px;
  color:var(--soft); }
.heat-legend span { padding:2px 8px; border:1px solid var(--line); color:var(--ink); }
.heat .lost { background:repeating-linear-gradient(135deg,transparent 0 3px,rgba(128,128,128,.30) 3px 5px);
  text-decoration:underline dashed var(--mark) 2px; text-underline-offset:3px; }
.heat .end { border:1px solid var(--soft); font:12px/1.2 ui-monospace,monospace; padding:1px 4px;
  unicode-bidi:isolate; }
.heat .bad { outline:2px solid var(--mark); }
@media (max-width:720px) { .heat-sides { grid-template-columns:1fr; } }
@media screen and (prefers-color-scheme:dark) {
  .heat { --ink:#e6e8ec; --soft:#9aa1ad; --line:#3a3f49; --card:#1c1f25; --mark:#ff8a80; } }
@media print { .heat-prompt { max-height:none; } .heat-row { break-inside:avoid-page; } }
"""

_DARK_INK = 9  # from this shade on the tint is opaque enough to need dark letters on a dark page, too


def heatmap_html(rows: Sequence[HeatRow], *, page: bool = True, title: str = "Token weights") -> str:
    """The heat maps of ``rows``: a whole page, or with ``page`` False a fragment to put into one (style included)."""
    signed = any(token.weight < 0 for row in rows for _, side in row.sides for token in side.tokens)
    body = "\n".join(_row_html(row) for row in rows)
    fragment = (
        f'<style>{_STYLE}{_shade_rules(signed)}</style>\n<div class="heat">\n{_legend_html(signed)}\n{body}\n</div>'
    )
    if not page:
        return fragment
    name = html.escape(visible(title))
    return (
        '<!DOCTYPE html>\n<html><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><style>body{{margin:0 auto;padding:20px;max-width:1280px;background:#f4f5f7}}"
        "@media screen and (prefers-color-scheme:dark){body{background:#121418}}"
        "@media print{body{background:none;padding:0}}</style></head>\n"
        f'<body><h1 class="heat" style="font-size:22px">{name}</h1>\n{fragment}\n</body></html>\n'
    )


def _shade_rules(signed: bool) -> str:
    rules = []
    for prefix, negative in (("h", False), ("v", True))[: 2 if signed else 1]:
        for shade in range(-LEVELS, LEVELS + 1):
            red, green, blue, opacity = tint(shade, negative)
            ink = ";color:#1b1205" if shade >= _DARK_INK and not negative else ""
            rules.append(f".heat .{prefix}{shade + LEVELS}{{background:rgba({red},{green},{blue},{opacity:.3f}){ink}}}")
    return "\n".join(rules) + "\n"


def _shade_class(relative: float) -> str:
    return f"{'v' if relative < 0 else 'h'}{level(relative) + LEVELS}"


def _legend_html(signed: bool) -> str:
    scale = "".join(f'<span class="{_shade_class(value)}">{html.escape(name)}</span>' for name, value in LEGEND)
    negative = f'<span class="{_shade_class(-1.0)}">negative</span>' if signed else ""
    return (
        f'<div class="heat-legend">weight relative to uniform (w·|y|) {scale}{negative}'
        '<span class="lost">no partner in the source\'s tokens</span><span class="end">end of turn</span></div>'
    )


def _row_html(row: HeatRow) -> str:
    head = [f"<b>pair {_shown(row.pair_id[:12])}</b>"]
    head += [f"<span>{_shown(row.note)}</span>"] if row.note else []
    head += [f"<span>round {n}: {_shown(one.summary())}</span>" for n, one in enumerate(row.verdicts, 1)]
    prompt = "".join(f"<p>{_message_html(message)}</p>" for message in row.prompt)
    sides = "".join(_side_html(name, side) for name, side in row.sides)
    return (
        f'<section class="heat-row"><div class="heat-head">{"".join(head)}</div>'
        f'<div class="heat-prompt">{prompt}</div><div class="heat-sides">{sides}</div></section>'
    )


def _message_html(message: Message) -> str:
    text = html.escape(readable(message["content"]))
    return f'<i>{_shown(message["role"])}</i><br><span class="heat-text" style="display:block">{text}</span>'


def _side_html(name: str, side: HeatSide) -> str:
    tokens = "".join(_token_html(side, token) for token in side.tokens)
    heavy = " · ".join(f"{text} {relative:.2f}" for text, relative in side.heaviest())
    below = f"<small>heaviest (w·|y|): <bdi>{html.escape(heavy)}</bdi></small>" if heavy else ""
    return (
        f'<div class="heat-side {name}"><h3>{name}</h3><small>{html.escape(side.summary())}</small>'
        f'<div class="heat-text heat-tokens" dir="auto">{tokens}</div>{below}</div>'
    )


def _token_html(side: HeatSide, token: HeatToken) -> str:
    relative = side.relative(token)
    classes = [_shade_class(relative)]
    hover = f"{relative:.2f}"
    if not math.isfinite(relative):
        classes = ["bad"]
    if token.end:
        classes.append("end")
        hover += ", end of turn"
    elif not token.matched:
        classes = ["lost"]
        hover += ", no partner"
    return f'<span class="{" ".join(classes)}" title="{hover}">{_shown(token.text) or "▯"}</span>'


def _shown(text: str) -> str:
    return html.escape(visible(text))


# ------------------------------------------------------------------------------------------------ terminal

_DARK: RGB = (24, 26, 31)
_LIGHT_LETTERS, _DARK_LETTERS = "#e6e8ec", "#1b1205"


def heatmap_terminal(rows: Sequence[HeatRow], console: Console, *, numbers: bool | None = None) -> None:
    """Nothing; writes the heat maps of ``rows`` to ``console``, both responses side by side where 100 columns fit.

    ``numbers`` writes w * |y| behind each token; by default where the console shows no colour.
    """
    with_numbers = console.color_system is None if numbers is None else numbers
    console.print(_legend_text())
    for row in rows:
        heads = [f"pair {row.pair_id[:12]}", *([row.note] if row.note else [])]
        heads += [f"round {n}: {one.summary()}" for n, one in enumerate(row.verdicts, 1)]
        console.rule(Text(visible(heads[0])), align="left")
        for line in heads[1:]:
            console.print(Text(visible(line), style="dim"))
        for message in row.prompt:
            role = Text(f"{visible(message['role'])}: ", style="bold")
            console.print(role + Text(readable(message["content"])))
        panels = [_side_panel(name, side, with_numbers) for name, side in row.sides]
        console.print(_beside(panels) if console.width >= 100 else Group(*panels))


def _beside(panels: Sequence[RenderableType]) -> Table:
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1, overflow="fold")
    grid.add_row(*panels)
    return grid


def _side_panel(name: str, side: HeatSide, numbers: bool) -> Panel:
    text = Text(overflow="fold")
    text.append(side.summary() + "\n", style="dim")
    for token in side.tokens:
        text.append(visible(token.text) or "▯", style=_token_style(side, token))
        if numbers:
            text.append("|." if not token.matched else f"|{side.relative(token):.2f}", style="dim")
            text.append(" ")
    colour = "green" if name == "chosen" else "red"
    return Panel(text, title=name, title_align="left", border_style=colour)


def _token_style(side: HeatSide, token: HeatToken) -> Style:
    relative = side.relative(token)
    if not math.isfinite(relative):
        return Style(reverse=True, blink=True)
    if not token.matched:
        return Style(dim=True, underline=True, strike=True)
    return _shade_style(relative) + Style(italic=token.end, underline=token.end)


def _shade_style(relative: float) -> Style:
    shade = level(relative)
    red, green, blue = over(tint(shade, relative < 0), _DARK)
    letters = _DARK_LETTERS if shade >= _DARK_INK - 3 and relative >= 0 else _LIGHT_LETTERS
    return Style(color=letters, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _legend_text() -> Columns:
    parts = [Text("weight relative to uniform (w·|y|):")]
    parts += [Text(f" {name} ", style=_shade_style(value)) for name, value in LEGEND]
    parts += [
        Text("no partner", style=Style(dim=True, underline=True, strike=True)),
        Text("end of turn", style=Style(italic=True, underline=True)),
    ]
    return Columns(parts, padding=(0, 1))
