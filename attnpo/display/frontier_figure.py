"""The frontier: reward against KL to the base, a line per arm over its grid."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnpo.display.look import (
    INK,
    PAPER,
    SOFT,
    Level,
    Look,
    Looks,
    Number,
    fitting,
    legend,
    level_of,
    looks_of,
    new_figure,
    panel,
    save,
)

FAR = 3.0  # times the largest limit that a figure reaches; points beyond it are drawn at its edge
HOW = "bars: 95 % intervals; ring: the point chosen on validation"


@dataclass(frozen=True)
class FrontierPoint:
    """Reward and KL (nats) of one point of an arm's grid; ``label`` names the point ("beta 0.1, lr 5e-5").

    ``low`` and ``high``: ends of the reward's interval where there is one. ``best``: the point chosen on validation.
    """

    arm: str
    kl: Number
    reward: Number
    label: str = ""
    low: Number = math.nan
    high: Number = math.nan
    best: bool = False

    @property
    def root(self) -> float:
        """Its place on the axis; KL below 0 is an estimate's noise."""
        return math.sqrt(max(0.0, self.kl))

    @property
    def finite(self) -> bool:
        """Returns whether it can be drawn."""
        return math.isfinite(self.kl) and math.isfinite(self.reward)


def frontier(
    points: Iterable[FrontierPoint],
    path: Path | str,
    *,
    limits: Sequence[Number] = (),
    base_reward: Level | Number | None = None,
    title: str = "",
    ylabel: str = "reward",
    looks: Looks | None = None,
) -> Path:
    """Draws reward against KL, a line per arm over its grid in order of KL; returns the PNG's path.

    The best points are ringed, with bolder intervals, and named in the legend. ``base_reward`` is a dotted line, its
    interval a band. KL has a root axis, on which rewards at a KL are interpolated; KL below 0 (an estimate's noise) is
    drawn at 0. ``limits``: KL values to mark by vertical lines. A point more than ``FAR`` times beyond the largest, or
    far off in reward (``fitting``), stands at the edge as a hollow arrow with its number, since it would press all
    others together. Points that are not finite are left out and counted below. ``looks``: those of the study's arms.
    """
    every = list(points)
    drawn = [point for point in every if point.finite]
    base = None if base_reward is None or not math.isfinite(level_of(base_reward).score) else level_of(base_reward)
    edge = FAR * max(limits) if limits else math.inf
    near = [point for point in drawn if point.kl <= edge] or drawn
    low, high = fitting(
        [*(point.reward for point in near), *([base.score] if base else [])],
        [*(end for one in near for end in (one.low, one.high)), *([base.low, base.high] if base else [])],
    )
    figure = new_figure(8.4, 5.6)
    axes = figure.add_subplot()
    left_out = len(every) - len(drawn)
    notes = [f"{left_out} points not finite, left out"] if left_out else []
    beyond = [point for point in drawn if point not in near or not low <= point.reward <= high]
    notes += ["hollow arrow at the edge: a point beyond it, with its number"] if beyond else []
    marks = ["dash-dotted: KL at which arms are compared"] if limits else []
    panel(axes, title, "\n".join(["KL to the base, nats (root scale)", HOW, *marks, *notes]), ylabel)
    top = _root_axis(axes, max((point.kl for point in near), default=1.0), limits)
    axes.set_ylim(low, high)
    seen = looks or looks_of(point.arm for point in drawn)
    for arm in dict.fromkeys(point.arm for point in drawn):
        line = sorted((point for point in drawn if point.arm == arm), key=lambda point: point.kl)
        _draw_arm(axes, arm, line, beyond, seen[arm])
    _draw_beyond(axes, beyond, seen, top, (low, high))
    if base is not None:
        axes.axhline(base.score, color=INK, linewidth=0.9, linestyle=":", label="base")
        if base.bounded:
            axes.axhspan(base.low, base.high, color=SOFT, alpha=0.18, linewidth=0)
    for limit in limits:
        if 0 <= limit <= top:
            axes.axvline(math.sqrt(limit), color=SOFT, linewidth=0.9, linestyle="-.")
    legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return save(figure, path)


def _draw_arm(axes: Axes, arm: str, line: Sequence[FrontierPoint], beyond: Sequence[FrontierPoint], look: Look) -> None:
    inside = [point for point in line if point not in beyond]
    chosen = ", ".join(point.label for point in line if point.best and point.label)
    name = f"{look.named(arm)}\n    best: {chosen}" if chosen else look.named(arm)
    drawing: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.style}
    axes.plot(
        [point.root for point in inside],
        [point.reward for point in inside],
        markersize=5,
        linewidth=1.4,
        alpha=0.9,
        label=name,
        markerfacecolor=look.face,
        **drawing,
    )
    for point in inside:
        if math.isfinite(point.low) and math.isfinite(point.high):
            width, depth = (2.4, 0.65) if point.best else (1.0, 0.3)
            axes.plot([point.root] * 2, [point.low, point.high], color=look.colour, linewidth=width, alpha=depth)
        if point.best:
            axes.plot(
                [point.root],
                [point.reward],
                "o",
                color=look.colour,
                fillstyle="none",
                markeredgewidth=1.8,
                markersize=13,
            )


def _draw_beyond(
    axes: Axes, beyond: Sequence[FrontierPoint], looks: Looks, top: float, span: tuple[float, float]
) -> None:
    """Arrows at the edge for points beyond it, with the number that lies there."""
    low, high = span
    for point in beyond:
        right, over = point.kl > top, point.reward > high
        marker = ">" if right else "^" if over else "v"
        at = (math.sqrt(top) if right else point.root, min(max(point.reward, low), high))
        told = [f"KL {point.kl:.3g}"] if right else []
        told += [f"reward {point.reward:.2f}"] if not low <= point.reward <= high else []
        colour = looks[point.arm].colour
        axes.plot(*([value] for value in at), marker, color=colour, markerfacecolor=PAPER, markersize=8, clip_on=False)
        axes.annotate(
            ", ".join(told),
            at,
            xytext=(-7, 0) if right else (0, 9 if not over else -12),
            textcoords="offset points",
            ha="right" if right else "center",
            va="center",
            fontsize=7.5,
            color=colour,
        )


def _root_axis(axes: Axes, largest: Number, limits: Sequence[Number]) -> float:
    """Puts round KL values and the limits on an axis that counts roots of KL; returns the KL at its right end."""
    top = max(largest, *limits, 0.1) * 1.06
    edge = math.sqrt(top)
    ticks, last, gap = [0.0], math.inf, 0.09 * edge
    for value in (step * 10.0**power for power in range(5, -4, -1) for step in (5, 3, 2, 1)):
        if value <= top and gap <= math.sqrt(value) <= last - gap:
            ticks.append(value)
            last = math.sqrt(value)
    axes.set_xlim(-0.02 * edge, edge)
    axes.xaxis.set_major_locator(FixedLocator([math.sqrt(value) for value in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda root, _: f"{root * root:.3g}"))
    return top
