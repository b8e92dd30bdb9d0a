"""A pair's heat map as a PNG: both responses side by side, drawn token by token in a fixed-width font.

One token may span lines. Lines of a right-to-left response run from the right edge; the order of letters inside a
token is left to the font library. Characters without a glyph in the fonts at hand show as boxes.
"""

import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnpo.display.heat import LEGEND, HeatRow, HeatSide, HeatToken, level, over, readable, tint, visible
from attnpo.display.look import DPI, new_figure, save

FONTS = ["DejaVu Sans Mono", "DejaVu Sans"]
CELL_PIXELS = 11  # a whole number, because the renderer rounds the advance of every character
CELL = CELL_PIXELS / DPI  # inches a character of the fixed-width font takes
SIZE = 72 * CELL / 0.60205  # points; the font advances by 0.60205 of its size
LINE = 0.205  # inches from line to line
WIDTH, MARGIN, GAP = 12.0, 0.25, 0.35  # inches
COLUMN = (WIDTH - 2 * MARGIN - GAP) / 2
CELLS = int(COLUMN / CELL)
PROMPT_LINES = 6
INK, SOFT, LOST = "#1d1f24", "#666b75", "#b3261e"
WHITE = (255, 255, 255)


@dataclass(frozen=True)
class _Piece:
    """A part of a token on one line: where it starts (cells), how wide it is, what it says."""

    token: HeatToken
    line: int
    start: int
    cells: int
    text: str


def heatmap_figure(row: HeatRow, path: Path | str, *, max_tokens: int = 1000, svg: bool = True) -> Path:
    """Draws one pair as a PNG, 12 inches wide and as high as the longer response needs, and returns its path.

    Shows prompt (its first lines), verdicts, coverage, effective number of weights and legend. Tokens after the first
    ``max_tokens`` of a response are not drawn, which a line below it says. ``svg`` writes an SVG beside it.
    """
    sides = [(name, side, list(_pieces(side.tokens[:max_tokens]))) for name, side in row.sides]
    head = _head_lines(row)
    lines = max((piece.line + 1 for _, _, pieces in sides for piece in pieces), default=1)
    height = 2 * MARGIN + LINE * (len(head) + lines + 3.8)
    figure = new_figure(WIDTH, height)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        axes = _page(figure, height)
        _draw_legend(axes, MARGIN)
        for number, (text, colour, weight) in enumerate(head):
            _write(axes, MARGIN, MARGIN + LINE * (number + 2.0), text, colour, weight=weight)
        top = MARGIN + LINE * (len(head) + 2.2)
        for number, (name, side, pieces) in enumerate(sides):
            _draw_side(axes, MARGIN + number * (COLUMN + GAP), top, name, side, pieces, max_tokens)
        return save(figure, path, adapts=False, svg=svg)


def _page(figure: Figure, height: float) -> Axes:
    """Axes over the whole figure that count inches from its top left corner."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    return axes


def _head_lines(row: HeatRow) -> list[tuple[str, str, str]]:
    """(text, colour, font weight) of the lines above the responses."""
    title = f"pair {row.pair_id[:12]}" + (f"   {row.note}" if row.note else "")
    lines = [(visible(title), INK, "bold")]
    lines += [(f"round {n}: {one.summary()}", SOFT, "normal") for n, one in enumerate(row.verdicts, 1)]
    width = int((WIDTH - 2 * MARGIN) / CELL)
    prompt: list[str] = []
    for message in row.prompt:
        for line in readable(f"{message['role']}: {message['content']}").split("\n"):
            prompt += textwrap.wrap(line, width) or [""]
    if len(prompt) > PROMPT_LINES:
        prompt = [*prompt[: PROMPT_LINES - 1], f"... {len(prompt) - PROMPT_LINES + 1} more lines"]
    return [*lines, *((line, INK, "normal") for line in prompt)]


def _pieces(tokens: tuple[HeatToken, ...]) -> Iterator[_Piece]:
    """Yields tokens laid out on lines of ``CELLS`` cells; a token breaks where its text does or the line ends."""
    line = column = 0
    for token in tokens:
        for number, part in enumerate((visible(token.text) or "▯").replace("\t", " ").split("\n")):
            if number:
                line, column = line + 1, 0
            width = _cells(part)
            if column and column + width > CELLS and width <= CELLS:
                line, column = line + 1, 0
            for chunk in _chunks(part, CELLS - column if column < CELLS - 1 else CELLS):
                cells = _cells(chunk)
                if column and column + cells > CELLS:
                    line, column = line + 1, 0
                yield _Piece(token, line, column, cells, chunk)
                column += cells


def _chunks(text: str, room: int) -> Iterator[str]:
    """``text`` cut so that the first part fits into ``room`` cells and the others into a line each."""
    chunk, used = "", 0
    for char in text:
        cells = _cells(char)
        if chunk and used + cells > room:
            yield chunk
            chunk, used, room = "", 0, CELLS
        chunk, used = chunk + char, used + cells
    if chunk:
        yield chunk


def _cells(text: str) -> int:
    """Cells of a fixed-width font: 2 for wide East Asian characters, 0 for combining ones."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _draw_side(
    axes: Axes, left: float, top: float, name: str, side: HeatSide, pieces: list[_Piece], max_tokens: int
) -> None:
    colour = "#2e9e6b" if name == "chosen" else "#b9504a"
    axes.plot([left, left + COLUMN], [top, top], color=colour, linewidth=2.2)
    _write(axes, left, top + 0.8 * LINE, name, colour, weight="bold")
    for number, line in enumerate(textwrap.wrap(side.summary(), CELLS - len(name) - 2)[:1]):
        _write(axes, left + (len(name) + 2) * CELL, top + (0.8 + number) * LINE, line, SOFT)
    for piece in pieces:
        _draw_piece(axes, left, top + 1.9 * LINE, side, piece)
    if len(side.tokens) > max_tokens:
        below = top + LINE * (2.9 + max((piece.line for piece in pieces), default=0))
        _write(axes, left, below, f"... {len(side.tokens) - max_tokens} more tokens not drawn", SOFT)


def _draw_piece(axes: Axes, left: float, top: float, side: HeatSide, piece: _Piece) -> None:
    start = CELLS - piece.start - piece.cells if side.right_to_left else piece.start
    x, y, width = left + start * CELL, top + piece.line * LINE, piece.cells * CELL
    relative = side.relative(piece.token)
    lost = not piece.token.matched and not piece.token.end
    if not lost:
        fill = "#{:02x}{:02x}{:02x}".format(*over(tint(level(relative), relative < 0), WHITE))
        axes.add_patch(Rectangle((x, y - 0.44 * LINE), width, 0.88 * LINE, facecolor=fill, edgecolor="none"))
    else:
        axes.add_patch(
            Rectangle(
                (x, y - 0.44 * LINE), width, 0.88 * LINE, facecolor="none", edgecolor="#b9bdc6", hatch="//////", lw=0
            )
        )
        axes.plot([x, x + width], [y + 0.40 * LINE] * 2, color=LOST, linewidth=1.1, linestyle=(0, (2, 1.2)))
    if piece.token.end:
        axes.add_patch(
            Rectangle((x, y - 0.44 * LINE), width, 0.88 * LINE, facecolor="none", edgecolor=SOFT, linewidth=0.8)
        )
    _write(axes, x + width / 2, y, piece.text, INK, align="center")


def _draw_legend(axes: Axes, y: float) -> None:
    title = "weight relative to uniform (w*|y|)"
    _write(axes, MARGIN, y, title, SOFT)
    x = MARGIN + (len(title) + 1.5) * CELL
    samples = [(name, HeatToken(name, value)) for name, value in LEGEND]
    samples += [("no partner", HeatToken("", 0.0, matched=False)), ("end of turn", HeatToken("", 0.0, end=True))]
    for name, token in samples:
        text = f" {name} "
        _draw_piece(axes, x, y, HeatSide((token,), length=1.0), _Piece(token, 0, 0, len(text), text))
        x += (len(text) + 1) * CELL


def _write(
    axes: Axes, x: float, y: float, text: str, colour: str, *, weight: str = "normal", align: str = "left"
) -> None:
    axes.text(
        x, y, text, fontsize=SIZE, fontfamily=FONTS, color=colour, fontweight=weight, ha=align, va="center_baseline",
        parse_math=False,
    )  # fmt: skip
