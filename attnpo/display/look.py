"""Look that figures share: colours of arms, panels, legends, and files in PNG and SVG for light and dark pages."""

import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnpo.display.page import svg_beside
from attnpo.system.files import name_file_in_errors

Number = float | int  # whole numbers are welcome wherever figures take numbers

DPI = 150
# Okabe and Ito's colours, which stay distinct for colour-blind readers, in an order that starts with strong contrast;
# then others of middle lightness, so that all are seen on white and on a dark page.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8E5BB5", "#A0522D", "#7F7F7F", "#A8A400",
    "#C2185B", "#2F8F9D",
)  # fmt: skip
MARKERS = ("o", "^", "D", "v", "P", "X", "*", "p")
STYLES = ("-", "--", "-.", ":")  # lines beyond the palette repeat its colours in another style
INK, SOFT, GRID, PAPER = "#33363c", "#9aa0aa", "#dfe2e7", "#ffffff"
# What an SVG becomes on a dark page: the same hues, lighter where they would sink into it.
_DARK = {
    INK: "#e6e8ec", GRID: "#363b45", PAPER: "#1c1f25", "#000000": "#e6e8ec", "#0072B2": "#4f8dff",
    "#56B4E9": "#8ed4f7", "#8E5BB5": "#b78fdb", "#A0522D": "#d18c64", "#7F7F7F": "#a9a9a9",
    "#C2185B": "#f0629a", "#2F8F9D": "#4fb8c8",
}  # fmt: skip
Corner = Literal["best", "upper left", "lower left", "lower right", "upper center", "center left"]


# As a decorator: what a function draws has this look, and no one else's settings change.
styled = matplotlib.rc_context(
    {
        "text.parse_math": False, "text.color": INK, "axes.titlesize": 10.5, "axes.titlelocation": "left",
        "axes.labelsize": 9, "axes.labelcolor": INK, "axes.facecolor": "none", "axes.edgecolor": SOFT,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
        "grid.color": GRID, "grid.linewidth": 0.7, "xtick.labelsize": 8, "ytick.labelsize": 8, "xtick.color": INK,
        "ytick.color": INK, "xtick.major.size": 3, "ytick.major.size": 3, "legend.fontsize": 8,
        "legend.frameon": False, "legend.labelcolor": INK,
    }
)  # fmt: skip


def new_figure(width: Number, height: Number, title: str = "") -> Figure:
    """Returns an empty figure of ``width`` x ``height`` inches that no window shows."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    if title:
        figure.suptitle(title, fontsize=12, x=0.012, ha="left")
    return figure


def save(
    figure: Figure,
    path: Path | str,
    *,
    h_pad: float | None = None,
    w_pad: float | None = None,
    rect: tuple[float, float, float, float] | None = None,
) -> Path:
    """Writes the figure as a PNG and beside it as an SVG, makes their folder first, empties it, and returns the PNG.

    The SVG keeps its text as text, has no background and takes lighter lines where its reader prefers dark pages.
    The rest is of ``Figure.tight_layout``.
    """
    figure.tight_layout(h_pad=h_pad, w_pad=w_pad, rect=rect)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    drawing = io.StringIO()
    with (
        name_file_in_errors(target),
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"attnpo {target.stem}"}),
    ):
        figure.savefig(target, format="png", dpi=DPI)
        figure.savefig(drawing, format="svg", facecolor="none", metadata={"Date": None})
    with name_file_in_errors(svg_beside(target)):
        svg_beside(target).write_text(adaptive(drawing.getvalue()), encoding="utf-8")
    figure.clear()
    return target


def adaptive(svg: str) -> str:
    """Returns an SVG of matplotlib's with a style that changes its colours on a dark page."""
    rules = "".join(
        f'[style*="{part}: {light.lower()}"]{{{part}:{dark} !important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    opening, tag, rest = svg.partition("<defs>")
    return f"{opening}{style}{tag}{rest}"


# ------------------------------------------------------------------------------------------------ arms


@dataclass(frozen=True)
class Look:
    """Look of an arm in every figure; ``note`` is put behind its name."""

    colour: str
    marker: str = "o"
    style: str = "-"
    filled: bool = True
    note: str = ""

    @property
    def line_colours(self) -> dict[str, Any]:
        """Returns the colours of its lines and inside of its markers."""
        return {"color": self.colour, "markerfacecolor": self.colour if self.filled else PAPER}

    def label(self, arm: str) -> str:
        """Returns the arm's name for a legend or an axis."""
        return f"{arm} ({self.note})" if self.note else arm


Looks = Mapping[str, Look]


def looks_of(
    arms: Iterable[str],
    control: str | None = None,
    *,
    altered: Collection[str] = (),
    told: Collection[str] = (),
) -> dict[str, Look]:
    """Returns a look for each arm, the same in every figure of a study.

    The ``control`` that others are compared with is black (white on a dark page), dashed and square; arms in
    ``altered``, whose weights a transform has changed, have hollow markers; those in ``told``, which know the truth,
    dotted lines. Colours repeat, with another line and marker, after the twelfth of the others.
    """
    looks: dict[str, Look] = {}
    number = 0
    for arm in dict.fromkeys(arms):
        if arm == control:
            looks[arm] = Look(INK, "s", "--", note="control")
            continue
        turn, place = divmod(number, len(COLOURS))
        style = ":" if arm in told else STYLES[turn % 3]
        marker = MARKERS[(number + turn) % len(MARKERS)]
        note = "knows the truth" if arm in told else "altered" if arm in altered else ""
        looks[arm] = Look(COLOURS[place], marker, style, arm not in altered, note)
        number += 1
    return looks


@dataclass(frozen=True)
class Level:
    """Score with the ends of its interval where there is one."""

    score: Number
    low: Number = math.nan
    high: Number = math.nan

    @property
    def is_bounded(self) -> bool:
        """Returns whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def level_of(value: "Level | Number") -> Level:
    """Returns a number as a level without an interval."""
    return value if isinstance(value, Level) else Level(value)


def axis_limits(values: Sequence[Number], ends: Sequence[Number] = (), margin: float = 0.06) -> tuple[float, float]:
    """Returns the limits of an axis that shows ``values``, and ``ends`` of intervals as far as one span beyond them.

    Of eight values and more those are left out that lie three times the distance between the quartiles, and a fifth of
    the largest value, beyond them: such a value would press all others together and is drawn at the edge instead.
    """
    finite = sorted(float(value) for value in values if math.isfinite(value))
    if not finite:
        return 0.0, 1.0
    if len(finite) >= 8:
        low, high = finite[len(finite) // 4], finite[-1 - len(finite) // 4]
        reach = 3 * (high - low) + 0.2 * max(abs(low), abs(high)) + 1e-9
        finite = [value for value in finite if low - reach <= value <= high + reach]
    span = finite[-1] - finite[0] or max(abs(finite[0]), 1e-3) * 0.2
    reached = [float(end) for end in ends if math.isfinite(end)]
    low = max(min([finite[0], *reached]), finite[0] - span)
    high = min(max([finite[-1], *reached]), finite[-1] + span)
    room = margin * (high - low) if high > low else span
    return low - room, high + room


# ------------------------------------------------------------------------------------------------ parts of a figure


def panel(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> Axes:
    """Gives ``axes`` titles, and returns them."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return axes


def legend(axes: Axes, loc: Corner = "best", *, bbox_to_anchor: tuple[float, float] | None = None) -> None:
    """Names the labelled lines of ``axes``, if there are any."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=loc, bbox_to_anchor=bbox_to_anchor)


def draw_interval(
    axes: Axes,
    at: Number,
    low: Number,
    high: Number,
    *,
    across: bool = False,
    color: str,
    linewidth: float,
    alpha: float,
) -> None:
    """Draws an interval, where there is one, as a bar at a place; ``across``: from left to right."""
    if math.isfinite(low) and math.isfinite(high):
        ends, places = [low, high], [at, at]
        axes.plot(*((ends, places) if across else (places, ends)), color=color, linewidth=linewidth, alpha=alpha)
