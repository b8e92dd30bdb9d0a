"""Heat maps of token weights as self-contained HTML, in the terminal, and as SVG.

The HTML needs no external font, script or file; all text from data is escaped, and each line of a response has its own
direction (left to right or right to left).
"""

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Column, Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from attnpo.display.heat import (
    DARK_INK,
    LEGEND,
    RGB,
    blend,
    get_tint,
    make_readable,
    make_visible,
    shade_class,
    shade_of,
    shade_rules,
)
from attnpo.display.pair_record import PairRecord, WeightedResponse
from attnpo.display.templating import render
from attnpo.system.files import write_atomically

# ------------------------------------------------------------------------------------------------ HTML


def heatmap_html(pairs: Sequence[PairRecord], *, page: bool = True, title: str = "Token weights") -> str:
    """Renders the heat maps of ``pairs`` as HTML.

    Returns a whole page or, if ``page`` is False, a fragment (including its style) to embed in a page.
    """
    signed = any(bool((side.weights < 0).any()) for pair in pairs for _, side in pair.sides)
    legend = [(name, shade_class(value)) for name, value in (*LEGEND, *([("negative", -1.0)] if signed else []))]
    rules = shade_rules(".heat ", signed)
    fragment = render("heatmap.html", pairs=pairs, legend=legend, shade_rules=rules, spans_of=_iter_spans)
    return render("frame.html", title=title, body=fragment) if page else fragment


def _iter_spans(side: WeightedResponse) -> Iterator[tuple[str, str, str]]:
    """Yields each token's CSS classes, hover text and text."""
    rows = zip(side.tokens, side.relative.tolist(), side.matched_flags, side.end_flags, strict=True)
    for place, (text, relative, matched, end) in enumerate(rows):
        shade = shade_class(relative) if math.isfinite(relative) else "bad"
        kind, said = (f"{shade} end", ", end of turn") if end else (shade, "") if matched else ("lost", ", no partner")
        yield kind, f"{relative:.2f}{said}, {side.describe_token(place)}", text


# ------------------------------------------------------------------------------------------------ terminal

_DARK: RGB = (24, 26, 31)
_WHITE: RGB = (255, 255, 255)
_LIGHT_LETTERS, _DARK_LETTERS = "#e6e8ec", "#1b1205"


def heatmap_terminal(
    pairs: Sequence[PairRecord], console: Console, *, numbers: bool | None = None, paper: bool = False
) -> None:
    """Prints the heat maps of ``pairs`` to ``console``, with responses side by side if it is at least 100 columns wide.

    ``numbers``: whether to print w * |y| after each token; by default only if the console has no colours. ``paper``:
    whether to render for an image on a white background; right-to-left lines are then reordered here.
    """
    with_numbers = console.color_system is None if numbers is None else numbers
    console.print(_legend_text(paper))
    for one in pairs:
        heads = [f"pair {one.pair.pair_id[:12]}", *([one.note] if one.note else []), *one.round_summaries]
        console.rule(Text(make_visible(heads[0])), align="left", style="dim" if paper else "rule.line")
        for line in heads[1:]:
            console.print(Text(make_visible(line), style="dim"))
        for message in one.pair.prompt:
            role = Text(f"{make_visible(message['role'])}: ", style="bold")
            console.print(role + Text(make_readable(message["content"])))
        panels = [_side_panel(name, side, with_numbers, paper) for name, side in one.sides]
        console.print(_side_by_side(panels) if console.width >= 100 else Group(*panels))


def write_svg(pairs: Sequence[PairRecord], path: Path | str) -> Path:
    """Draws the heat maps of ``pairs`` as one SVG on a white background, 130 characters wide; returns its path."""
    out = io.StringIO()  # otherwise a notebook would display the printed text
    console = Console(
        record=True, width=130, file=out, force_terminal=True, force_jupyter=False, color_system="truecolor"
    )
    heatmap_terminal(pairs, console, paper=True)
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, console.export_svg(theme=DEFAULT_TERMINAL_THEME, code_format=_SVG))
    return target


# Rich's default draws a window frame and loads a font from the network.
_SVG = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs><rect width="100%" height="100%" fill="#ffffff"/>
<g>{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def _side_by_side(panels: Sequence[RenderableType]) -> Table:
    grid = Table.grid(*(Column(ratio=1, overflow="fold") for _ in panels), expand=True)
    grid.add_row(*panels)
    return grid


def _side_panel(name: str, side: WeightedResponse, numbers: bool, paper: bool) -> Panel:
    text = Text(overflow="fold")
    for token, relative, matched, end in zip(
        side.tokens, side.relative.tolist(), side.matched_flags, side.end_flags, strict=True
    ):
        text.append(make_visible(token) or "▯", style=_token_style(relative, matched, end, paper))
        if numbers:
            text.append("|." if not (matched or end) else f"|{relative:.2f}", style="dim")
            text.append(" ")
    body = _MirroredText(text) if paper and side.is_right_to_left else text
    head = Text(side.summary(), style="dim", overflow="fold")
    return Panel(Group(head, body), title=name, title_align="left", border_style="green" if name == "chosen" else "red")


class _MirroredText:
    """Text whose tokens start at the right edge of each line; the viewer determines the order within a token."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.text.wrap(console, options.max_width):
            parts = line.divide(sorted({span.start for span in line.spans}))
            yield Text.assemble(*reversed(parts), justify="right")


def _token_style(relative: float, matched: bool, end: bool, paper: bool) -> Style:
    if not math.isfinite(relative):
        return Style(reverse=True, blink=True)
    if not (matched or end):
        return Style(dim=True, underline=True, strike=True)
    return shade_style(relative, paper) + Style(italic=end, underline=end)


def shade_style(relative: float | int, paper: bool = False) -> Style:
    """Returns the text and background colours for a finite relative weight, on a dark terminal or on ``paper``."""
    shade = shade_of(relative)
    red, green, blue = blend(get_tint(shade, relative < 0), _WHITE if paper else _DARK)
    letters = _DARK_LETTERS if paper or (shade >= DARK_INK - 3 and relative >= 0) else _LIGHT_LETTERS
    return Style(color=letters, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _legend_text(paper: bool) -> Columns:
    parts = [Text("weight relative to uniform (w·|y|):")]
    parts += [Text(f" {name} ", style=shade_style(value, paper)) for name, value in LEGEND]
    parts += [
        Text("no partner", style=Style(dim=True, underline=True, strike=True)),
        Text("end of turn", style=Style(italic=True, underline=True)),
    ]
    return Columns(parts, padding=(0, 1))
