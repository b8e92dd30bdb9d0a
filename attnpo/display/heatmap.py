"""Heat maps of token weights as self-contained HTML and in the terminal.

The HTML needs no font and no file besides itself, and a script only to switch a pair to another layer or round; every
text of the data is escaped and every line of a response takes its own direction (left to right or right to left).
"""

import json
import math
from collections.abc import Sequence

from markupsafe import Markup
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from attnpo.display.heat import (
    LEGEND,
    LEVELS,
    OCTAVES,
    RGB,
    HeatRow,
    HeatSide,
    HeatToken,
    level,
    over,
    readable,
    tint,
    visible,
)
from attnpo.display.templating import render

# ------------------------------------------------------------------------------------------------ HTML

_DARK_INK = 9  # from this shade on the tint is opaque enough to need dark letters on a dark page, too


def heatmap_html(rows: Sequence[HeatRow], *, page: bool = True, title: str = "Token weights") -> str:
    """Returns the heat maps of ``rows``: a whole page, or with ``page`` False a fragment to put into one (style
    included).
    """
    signed = any(token.weight < 0 for row in rows for _, side in row.sides for token in side.tokens)
    legend = [(name, _shade_class(value)) for name, value in (*LEGEND, *([("negative", -1.0)] if signed else []))]
    fragment = render(
        "heatmap.html",
        rows=rows,
        legend=legend,
        shade_rules=_shade_rules(signed),
        look_of=_look,
        rounds_of=_rounds,
        levels=LEVELS,
        octaves=OCTAVES,
    )
    return render("frame.html", title=title, body=fragment) if page else fragment


def _shade_rules(signed: bool) -> str:
    rules = []
    for prefix, negative in (("h", False), ("v", True))[: 2 if signed else 1]:
        for shade in range(-LEVELS, LEVELS + 1):
            red, green, blue, opacity = tint(shade, negative)
            ink = ";color:#1b1205" if shade >= _DARK_INK and not negative else ""
            rules.append(f".heat .{prefix}{shade + LEVELS}{{background:rgba({red},{green},{blue},{opacity:.3f}){ink}}}")
    return "\n".join(rules)


def _shade_class(relative: float) -> str:
    return f"{'v' if relative < 0 else 'h'}{level(relative) + LEVELS}"


def _look(side: HeatSide, token: HeatToken) -> tuple[str, str]:
    """Returns the classes of a token and the text that appears over it."""
    relative = side.relative(token)
    classes = _shade_class(relative) if math.isfinite(relative) else "bad"
    facts = f", {token.facts()}" if token.facts() else ""
    if token.end:
        return f"{classes} end", f"{relative:.2f}, end of turn{facts}"
    if token.matched:
        return classes, f"{relative:.2f}{facts}"
    return "lost", f"{relative:.2f}, no partner{facts}"


def _rounds(row: HeatRow) -> Markup:
    """Returns what a row can be switched to, as JSON that is safe within a script element."""
    data = [
        {
            "name": one.name,
            "layers": one.layers,
            **{
                name: {"tokens": [[visible(text) or "▯", *rest] for text, *rest in side.tokens], "rows": side.rows}
                for name, side in (("chosen", one.chosen), ("rejected", one.rejected))
            },
        }
        for one in row.rounds
    ]
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


# ------------------------------------------------------------------------------------------------ terminal

_DARK: RGB = (24, 26, 31)
_LIGHT_LETTERS, _DARK_LETTERS = "#e6e8ec", "#1b1205"


def heatmap_terminal(rows: Sequence[HeatRow], console: Console, *, numbers: bool | None = None) -> None:
    """Writes the heat maps of ``rows`` to ``console``, both responses side by side where 100 columns fit.

    ``numbers`` writes w * |y| after each token; by default where the console shows no colour.
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
    grid = Table.grid(*(Column(ratio=1, overflow="fold") for _ in panels), expand=True)
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
    return Panel(text, title=name, title_align="left", border_style="green" if name == "chosen" else "red")


def _token_style(side: HeatSide, token: HeatToken) -> Style:
    relative = side.relative(token)
    if not math.isfinite(relative):
        return Style(reverse=True, blink=True)
    if not token.matched:
        return Style(dim=True, underline=True, strike=True)
    return shade_style(relative) + Style(italic=token.end, underline=token.end)


def shade_style(relative: float | int) -> Style:
    """Letters and background of a finite weight relative to uniform, for a terminal with colours."""
    shade = level(relative)
    red, green, blue = over(tint(shade, relative < 0), _DARK)
    letters = _DARK_LETTERS if shade >= _DARK_INK - 3 and relative >= 0 else _LIGHT_LETTERS
    return Style(color=letters, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _legend_text() -> Columns:
    parts = [Text("weight relative to uniform (w·|y|):")]
    parts += [Text(f" {name} ", style=shade_style(value)) for name, value in LEGEND]
    parts += [
        Text("no partner", style=Style(dim=True, underline=True, strike=True)),
        Text("end of turn", style=Style(italic=True, underline=True)),
    ]
    return Columns(parts, padding=(0, 1))
