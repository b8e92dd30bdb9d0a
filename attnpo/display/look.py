"""Shared figure style: arm colours, axes, legends, and PNG and SVG output for light and dark pages."""

import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnpo.display.page import svg_path
from attnpo.system.files import name_file_in_errors

Number = float | int  # figures accept integers wherever they accept floats

DPI = 150
# Okabe and Ito's colours, distinct for colour-blind readers, ordered by contrast; then others of medium lightness,
# visible on white and on dark pages.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8E5BB5", "#A0522D", "#7F7F7F", "#A8A400",
    "#C2185B", "#2F8F9D",
)  # fmt: skip
MARKERS = ("o", "^", "D", "v", "P", "X", "*", "p")
STYLES = ("-", "--", "-.", ":")  # further lines repeat the colours in another style
INK, SOFT, GRID, PAPER = "#33363c", "#9aa0aa", "#dfe2e7", "#ffffff"
# Colours of an SVG on a dark page: the same hues, lighter if necessary.
_DARK = {
    INK: "#e6e8ec", GRID: "#363b45", PAPER: "#1c1f25", "#000000": "#e6e8ec", "#0072B2": "#4f8dff",
    "#56B4E9": "#8ed4f7", "#8E5BB5": "#b78fdb", "#A0522D": "#d18c64", "#7F7F7F": "#a9a9a9",
    "#C2185B": "#f0629a", "#2F8F9D": "#4fb8c8",
}  # fmt: skip
Corner = Literal["best", "upper left", "lower left", "lower right", "upper center", "center left"]


# Decorator: sets this style for everything that a function draws, without changing global settings.
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
    """Creates an empty figure of ``width`` x ``height`` inches without opening a window."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    if title:
        figure.suptitle(title, fontsize=12, x=0.012, ha="left")
    return figure


def save_figure(
    figure: Figure,
    path: Path | str,
    *,
    h_pad: float | None = None,
    w_pad: float | None = None,
    rect: tuple[float, float, float, float] | None = None,
) -> Path:
    """Saves a PNG of the figure and an SVG next to the PNG, clears the figure, and returns the PNG's path.

    Creates the folder if needed. The SVG keeps text as text, has a transparent background and uses lighter lines if the
    reader prefers dark mode. The other arguments are passed to ``Figure.tight_layout``.
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
    with name_file_in_errors(svg_path(target)):
        svg_path(target).write_text(add_dark_mode(drawing.getvalue()), encoding="utf-8")
    figure.clear()
    return target


def add_dark_mode(svg: str) -> str:
    """Adds a style to a matplotlib SVG that changes its colours in dark mode."""
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
class ArmStyle:
    """Style of an arm in all figures; ``note`` is appended to the arm's name."""

    colour: str
    marker: str = "o"
    style: str = "-"
    filled: bool = True
    note: str = ""

    @property
    def line_colours(self) -> dict[str, Any]:
        """Returns the colours of lines and marker faces."""
        return {"color": self.colour, "markerfacecolor": self.colour if self.filled else PAPER}

    def label(self, arm: str) -> str:
        """Returns the arm's name for a legend or an axis."""
        return f"{arm} ({self.note})" if self.note else arm


ArmStyles = Mapping[str, ArmStyle]


def make_arm_styles(
    arms: Iterable[str],
    control: str | None = None,
    *,
    altered: Collection[str] = (),
    told: Collection[str] = (),
) -> dict[str, ArmStyle]:
    """Assigns a style to each arm, used in all figures of a study.

    The ``control`` is black (white in dark mode), with dashed lines and square markers. Arms in ``altered`` (weights
    changed by a transform) have hollow markers; arms in ``told`` (which know the true weights) have dotted lines.
    Colours repeat after twelve arms, but with different line styles and markers.
    """
    looks: dict[str, ArmStyle] = {}
    number = 0
    for arm in dict.fromkeys(arms):
        if arm == control:
            looks[arm] = ArmStyle(INK, "s", "--", note="control")
            continue
        turn, place = divmod(number, len(COLOURS))
        style = ":" if arm in told else STYLES[turn % 3]
        marker = MARKERS[(number + turn) % len(MARKERS)]
        note = "knows the truth" if arm in told else "altered" if arm in altered else ""
        looks[arm] = ArmStyle(COLOURS[place], marker, style, arm not in altered, note)
        number += 1
    return looks


@dataclass(frozen=True)
class ScoreInterval:
    """Score with the bounds of its confidence interval, if there is one."""

    score: Number
    low: Number = math.nan
    high: Number = math.nan

    @property
    def has_interval(self) -> bool:
        """Returns whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def as_score_interval(value: "ScoreInterval | Number") -> ScoreInterval:
    """Converts a number to a score without an interval."""
    return value if isinstance(value, ScoreInterval) else ScoreInterval(value)


def axis_limits(values: Sequence[Number], ends: Sequence[Number] = (), margin: float = 0.06) -> tuple[float, float]:
    """Returns axis limits that cover ``values`` and, up to one value range beyond them, the interval ``ends``.

    With eight or more values, outliers are ignored, because they would compress the other values; they are drawn at the
    edge instead. A value is an outlier if its distance to the nearest quartile exceeds three times the interquartile
    range plus a fifth of the larger absolute quartile.
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


def label_axes(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> Axes:
    """Sets title and axis labels; returns ``axes``."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return axes


def add_legend(axes: Axes, loc: Corner = "best", *, bbox_to_anchor: tuple[float, float] | None = None) -> None:
    """Adds a legend if ``axes`` has labelled lines."""
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
    """Draws a finite interval as a bar at ``at``: vertical, or horizontal if ``across`` is set."""
    if math.isfinite(low) and math.isfinite(high):
        ends, places = [low, high], [at, at]
        axes.plot(*((ends, places) if across else (places, ends)), color=color, linewidth=linewidth, alpha=alpha)
