"""Figures for studies: reward against KL, arm comparisons, scores by layer, gains by world."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnpo.display.look import (
    COLOURS,
    INK,
    MARKERS,
    PAPER,
    SOFT,
    ArmStyle,
    ArmStyles,
    Number,
    ScoreInterval,
    add_legend,
    as_score_interval,
    axis_limits,
    draw_interval,
    label_axes,
    make_arm_styles,
    new_figure,
    save_figure,
    styled,
)

# ------------------------------------------------------------------------------------------------ reward against KL

FAR = 3.0  # times the largest limit that a figure reaches; points beyond it are drawn at its edge
HOW = "bars: 95 % intervals; ring: point selected on validation"


@dataclass(frozen=True)
class FrontierPoint:
    """Reward and KL (nats) at one of an arm's grid points; ``label`` names the point ("beta 0.1, lr 5e-5").

    ``low``, ``high``: bounds of the reward's interval, NaN if unknown. ``best``: whether validation selected this
    point.
    """

    arm: str
    kl: Number
    reward: Number
    label: str = ""
    low: Number = math.nan
    high: Number = math.nan
    best: bool = False

    @property
    def root_kl(self) -> float:
        """Returns the square root of a KL, its axis coordinate. Negative KL is estimation noise and counts as 0."""
        return math.sqrt(max(0.0, self.kl))


@styled
def frontier_figure(
    points: Iterable[FrontierPoint],
    path: Path | str,
    *,
    limits: Sequence[Number] = (),
    base_reward: ScoreInterval | Number | None = None,
    title: str = "",
    ylabel: str = "reward",
    looks: ArmStyles | None = None,
) -> Path:
    """Plots reward against KL, with one line per arm through its grid points in order of KL; returns the PNG's path.

    The best points are ringed, have bolder intervals and are named in the legend. ``base_reward`` is drawn as a dotted
    line with its interval as a band. The KL axis has a square-root scale, the same scale on which rewards at a given KL
    are interpolated. Negative KL (estimation noise) is drawn at 0. ``limits``: KL values marked by vertical lines.
    Points beyond ``FAR`` times the largest limit, or with an extreme reward (``axis_limits``), are drawn at the edge as
    hollow arrows with their values, so that they do not compress the scale. Non-finite points are omitted and counted
    below the figure. ``looks``: line styles of the study's arms.
    """
    every = list(points)
    drawn = [point for point in every if math.isfinite(point.kl) and math.isfinite(point.reward)]
    base = (
        None
        if base_reward is None or not math.isfinite(as_score_interval(base_reward).score)
        else as_score_interval(base_reward)
    )
    edge = FAR * max(limits) if limits else math.inf
    near = [point for point in drawn if point.kl <= edge] or drawn
    low, high = axis_limits(
        [*(point.reward for point in near), *([base.score] if base else [])],
        [*(end for one in near for end in (one.low, one.high)), *([base.low, base.high] if base else [])],
    )
    figure = new_figure(8.4, 5.6)
    axes = figure.add_subplot()
    left_out = len(every) - len(drawn)
    notes = [f"non-finite points omitted: {left_out}"] if left_out else []
    beyond = [point for point in drawn if point not in near or not low <= point.reward <= high]
    notes += ["hollow arrow at the edge: point outside the figure, with its value"] if beyond else []
    marks = ["dash-dotted: KL at which arms are compared"] if limits else []
    label_axes(axes, title, "\n".join(["KL to the base, nats (root scale)", HOW, *marks, *notes]), ylabel)
    top = _set_root_axis(axes, max((point.kl for point in near), default=1.0), limits)
    axes.set_ylim(low, high)
    seen = looks or make_arm_styles(point.arm for point in drawn)
    for arm in dict.fromkeys(point.arm for point in drawn):
        line = sorted((point for point in drawn if point.arm == arm), key=lambda point: point.kl)
        _draw_arm(axes, arm, line, beyond, seen[arm])
    _draw_outliers(axes, beyond, seen, top, (low, high))
    if base is not None:
        axes.axhline(base.score, color=INK, linewidth=0.9, linestyle=":", label="base")
        if base.has_interval:
            axes.axhspan(base.low, base.high, color=SOFT, alpha=0.18, linewidth=0)
    for limit in limits:
        if 0 <= limit <= top:
            axes.axvline(math.sqrt(limit), color=SOFT, linewidth=0.9, linestyle="-.")
    add_legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return save_figure(figure, path)


def _draw_arm(
    axes: Axes, arm: str, line: Sequence[FrontierPoint], beyond: Sequence[FrontierPoint], look: ArmStyle
) -> None:
    inside = [point for point in line if point not in beyond]
    chosen = ", ".join(point.label for point in line if point.best and point.label)
    name = f"{look.label(arm)}\n    best: {chosen}" if chosen else look.label(arm)
    places, rewards = [point.root_kl for point in inside], [point.reward for point in inside]
    shape: dict[str, Any] = {"marker": look.marker, "linestyle": look.style, "markersize": 5, "linewidth": 1.4}
    axes.plot(places, rewards, alpha=0.9, label=name, **shape, **look.line_colours)
    for point in inside:
        width, depth = (2.4, 0.65) if point.best else (1.0, 0.3)
        draw_interval(axes, point.root_kl, point.low, point.high, color=look.colour, linewidth=width, alpha=depth)
        if point.best:
            ring: dict[str, Any] = {"fillstyle": "none", "markeredgewidth": 1.8, "markersize": 13}
            axes.plot(point.root_kl, point.reward, "o", color=look.colour, **ring)


def _draw_outliers(
    axes: Axes, beyond: Sequence[FrontierPoint], looks: ArmStyles, top: float, span: tuple[float, float]
) -> None:
    """Draws points outside the figure as arrows at its edge, labelled with their values."""
    low, high = span
    for point in beyond:
        right, over = point.kl > top, point.reward > high
        marker = ">" if right else "^" if over else "v"
        at = (math.sqrt(top) if right else point.root_kl, min(max(point.reward, low), high))
        told = [f"KL {point.kl:.3g}"] if right else []
        told += [f"reward {point.reward:.2f}"] if not low <= point.reward <= high else []
        colour = looks[point.arm].colour
        axes.plot(*at, marker, color=colour, markerfacecolor=PAPER, markersize=8, clip_on=False)
        aside, align = ((-7, 0), "right") if right else ((0, -12 if over else 9), "center")
        away: dict[str, Any] = {"xytext": aside, "textcoords": "offset points", "ha": align, "va": "center"}
        axes.annotate(", ".join(told), at, fontsize=7.5, color=colour, **away)


def _set_root_axis(axes: Axes, largest: Number, limits: Sequence[Number]) -> float:
    """Sets ticks at round KL values on the square-root axis; returns the KL at its right end, above all limits."""
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


# ------------------------------------------------------------------------------------------------ arms


@dataclass(frozen=True)
class ArmPanel:
    """Panel showing one metric for each arm. ``levels``: values at selected points. ``others``: values at other points.

    ``line``: name and value of a dotted reference line.
    """

    title: str
    xlabel: str
    levels: Mapping[str, ScoreInterval]
    others: Mapping[str, Sequence[Number]] = field(default_factory=dict)
    line: tuple[str, ScoreInterval] | None = None


@styled
def arm_figure(
    panels: Sequence[ArmPanel],
    path: Path | str,
    *,
    title: str = "",
    note: str = "",
    control: str | None = None,
    looks: ArmStyles | None = None,
) -> Path:
    """Draws the panels side by side, with one row per arm in the first panel's order; returns the PNG's path.

    The interval of the ``control`` is drawn as a band behind all arms. Non-finite values are omitted, as are small
    markers far from all others (``axis_limits``), which would compress the scale. ``note`` is printed below the first
    panel.
    """
    arms = list(dict.fromkeys(arm for shown in panels for arm in shown.levels))
    seen = looks or make_arm_styles(arms, control)
    figure = new_figure(2.6 + 3.6 * max(1, len(panels)), 1.5 + 0.34 * max(3, len(arms)), title)
    grid = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for place, (axes, shown) in enumerate(zip(grid, panels, strict=False)):
        marked = f"; dotted: {shown.line[0]}" if shown.line is not None and math.isfinite(shown.line[1].score) else ""
        label_axes(axes, shown.title, shown.xlabel + marked + (f"\n{note}" if note and place == 0 else ""))
        _draw_arms(axes, shown, arms, seen, control)
    for axes in grid[:1]:
        axes.set_yticks(range(len(arms)), [seen[arm].label(arm) for arm in arms])
        axes.set_ylim(len(arms) - 0.4, -0.6)
    return save_figure(figure, path)


def _draw_arms(axes: Axes, shown: ArmPanel, arms: Sequence[str], looks: ArmStyles, control: str | None) -> None:
    line = [] if shown.line is None or not math.isfinite(shown.line[1].score) else [shown.line[1]]
    levels = {arm: level for arm, level in shown.levels.items() if math.isfinite(level.score)}
    ends = [end for level in [*levels.values(), *line] for end in (level.low, level.high)]
    limits = axis_limits([level.score for level in [*levels.values(), *line]], ends)
    behind = [value for values in shown.others.values() for value in values]
    inner = axis_limits([*behind, *(level.score for level in levels.values())])
    low, high = min(limits[0], inner[0]), max(limits[1], inner[1])
    for place, arm in enumerate(arms):
        look, level = looks[arm], levels.get(arm)
        others = [value for value in shown.others.get(arm, ()) if low <= value <= high]
        axes.plot(others, [place] * len(others), "|", color=look.colour, markersize=6, alpha=0.45)
        if level is None:
            continue
        draw_interval(axes, place, level.low, level.high, across=True, color=look.colour, linewidth=2.4, alpha=0.65)
        axes.plot(level.score, place, look.marker, markersize=7, **look.line_colours)
    if control in levels and levels[control].has_interval:
        axes.axvspan(levels[control].low, levels[control].high, color=SOFT, alpha=0.18, linewidth=0)
    for marked in line:
        axes.axvline(marked.score, color=INK, linewidth=0.9, linestyle=":")
    axes.set_xlim(low, high)


# ------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class LayerPoint:
    """Score at a layer (counted from 1) with the bounds of its interval, NaN if unknown. ``arm``: the arm measured."""

    layer: int
    score: Number
    low: Number = math.nan
    high: Number = math.nan
    arm: str = ""


@styled
def layer_curve(
    points: Iterable[LayerPoint],
    path: Path | str,
    *,
    baselines: Mapping[str, ScoreInterval | Number] | None = None,
    ylabel: str = "score",
    title: str = "",
    looks: ArmStyles | None = None,
    control: str | None = None,
) -> Path:
    """Draws the score per layer, and the baselines in a second panel, all with intervals; returns the PNG's path.

    Points are coloured by ``LayerPoint.arm``. Baselines are drawn as lines through both panels, and the interval of the
    ``control`` is drawn as a band. Non-finite points and baselines are omitted. ``looks``: line styles of the study's
    arms.
    """
    kept = sorted((point for point in points if math.isfinite(point.score)), key=lambda point: point.layer)
    levels = {name: as_score_interval(value) for name, value in (baselines or {}).items()}
    levels = {name: level for name, level in levels.items() if math.isfinite(level.score)}
    seen = {"": ArmStyle(COLOURS[0]), **make_arm_styles(levels, control), **dict(looks or {})}
    wide = 0.3 * len(levels) + 0.3
    figure = new_figure(6.4 + (wide + 2.4) * bool(levels), 4.4)
    shares = [5.4, wide] if levels else [1.0]
    grid = figure.subplots(1, len(shares), sharey=True, squeeze=False, gridspec_kw={"width_ratios": shares})[0]
    bounded = any(map(math.isfinite, [*(one.low for one in kept), *(one.low for one in levels.values())]))
    label_axes(grid[0], title, "layer\nbars: 95 % intervals" if bounded else "layer", ylabel)
    layers = [point.layer for point in kept]
    own = any(point.arm for point in kept)
    grid[0].plot(layers, [point.score for point in kept], color=SOFT if own else COLOURS[0], linewidth=1.6)
    for point in kept:
        colour, marker = seen[point.arm].colour, seen[point.arm].marker
        draw_interval(grid[0], point.layer, point.low, point.high, color=colour, linewidth=2.4, alpha=0.55)
        grid[0].plot([point.layer], [point.score], marker, color=colour, markersize=7)
    grid[0].set_xticks(layers if len(layers) <= 16 else layers[:: -(-len(layers) // 16)])
    for axes in grid[1:]:
        _draw_baselines(axes, grid, levels, seen, control)
    scores = [*(point.score for point in kept), *(level.score for level in levels.values())]
    ends = [(one.low, one.high) for one in kept] + [(one.low, one.high) for one in levels.values()]
    grid[0].set_ylim(*axis_limits(scores, [end for both in ends for end in both]))
    return save_figure(figure, path)


def _draw_baselines(
    axes: Axes, grid: Iterable[Axes], levels: Mapping[str, ScoreInterval], looks: ArmStyles, control: str | None
) -> None:
    """Draws each baseline as a point with its interval, and its level as a line through all panels."""
    label_axes(axes, "")
    axes.tick_params(left=False, labelleft=False)
    for place, (name, level) in enumerate(levels.items()):
        look = looks[name]
        draw_interval(axes, place, level.low, level.high, color=look.colour, linewidth=2.4, alpha=0.55)
        named = f"{look.label(name)} {level.score:.3g}"
        axes.plot(place, level.score, look.marker, markersize=7, label=named, **look.line_colours)
        for each in grid:
            each.axhline(level.score, color=look.colour, linewidth=0.9, linestyle=":", alpha=0.7, zorder=1)
            if name == control and level.has_interval:
                each.axhspan(level.low, level.high, color=SOFT, alpha=0.15, linewidth=0)
    axes.set_xticks([])
    axes.set_xlim(-0.6, len(levels) - 0.4)
    add_legend(axes, loc="center left", bbox_to_anchor=(1.02, 0.5))


@dataclass(frozen=True)
class LayerPanel:
    """Panel of curves over layers. ``lines``: for each curve name, one mapping from layer to value per seed."""

    title: str
    ylabel: str
    lines: Mapping[str, Sequence[Mapping[int, Number]]]


@styled
def layer_panels(panels: Sequence[LayerPanel], path: Path | str) -> Path:
    """Draws the panels side by side; returns the PNG's path."""
    figure = new_figure(3.7 * max(1, len(panels)), 3.6)
    for place, shown in enumerate(panels, 1):
        axes = figure.add_subplot(1, max(1, len(panels)), place)
        label_axes(axes, shown.title, "layer", shown.ylabel)
        layers = sorted({layer for rows in shown.lines.values() for row in rows for layer in row})
        for number, (name, rows) in enumerate(shown.lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            values = [[row.get(layer, math.nan) for layer in layers] for row in rows]
            for line in values if len(rows) > 1 else ():
                axes.plot(layers, line, color=colour, linewidth=0.8, alpha=0.35)
            finite = [[value for value in at if math.isfinite(value)] for at in zip(*values, strict=True)]
            means = [sum(at) / len(at) if at else math.nan for at in finite]
            axes.plot(layers, means, color=colour, marker=MARKERS[number % len(MARKERS)], linewidth=1.8, label=name)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        axes.set_xticks(layers if len(layers) <= 8 else layers[:: -(-len(layers) // 8)])
        if len(shown.lines) > 1:
            add_legend(axes)
    return save_figure(figure, path)


# ------------------------------------------------------------------------------------------------ gains


@dataclass(frozen=True)
class GainPoint:
    """Difference from the control at one scale position, with interval. ``equal``: whether both reach the KL level."""

    place: Number
    gain: Number
    low: Number = math.nan
    high: Number = math.nan
    equal: bool = True


GAINS = "bars: 95 % intervals; hollow: not at equal KL; above 0: better"


@styled
def gain_figure(
    panels: Mapping[str, Mapping[str, Sequence[GainPoint]]],
    path: Path | str,
    *,
    xlabel: str,
    ylabel: str = "difference",
    title: str = "",
    looks: ArmStyles | None = None,
) -> Path:
    """Draws differences from a control along a scale, one panel per title and one line per arm; returns the PNG's path.

    Panels share both axes. At each position the arms are slightly offset from each other, with intervals as bars.
    Points that are not at equal KL are hollow; non-finite points are omitted. ``looks``: line styles of the study's
    arms.
    """
    seen = looks or make_arm_styles(name for lines in panels.values() for name in lines)
    figure = new_figure(2.0 + 3.2 * max(1, len(panels)), 4.2, title)
    drawn: list[Axes] = []
    for number, (name, lines) in enumerate(panels.items(), 1):
        beside = drawn[0] if drawn else None
        axes = figure.add_subplot(1, len(panels), number, sharex=beside, sharey=beside)
        label_axes(axes, name, xlabel, "" if drawn else ylabel)
        _draw_gains(axes, lines, seen)
        drawn.append(axes)
    for last in drawn[-1:]:
        add_legend(last, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.text(0.012, 0.02, GAINS, fontsize=9)
    return save_figure(figure, path, rect=(0, 0.05, 1, 1))


def _draw_gains(axes: Axes, lines: Mapping[str, Sequence[GainPoint]], looks: ArmStyles) -> None:
    kept = {name: [one for one in line if math.isfinite(one.gain)] for name, line in lines.items()}
    places = sorted({float(one.place) for line in kept.values() for one in line})
    gap = min((after - before for before, after in itertools.pairwise(places)), default=1.0)
    axes.axhline(0.0, color=INK, linewidth=0.9, linestyle=":")
    for number, (name, line) in enumerate(kept.items()):
        look = looks[name]
        line_of: dict[str, Any] = {"color": look.colour, "marker": look.marker, "markersize": 6}
        aside = gap * 0.06 * (number - (len(kept) - 1) / 2)
        at = [one.place + aside for one in line]
        gained = [one.gain for one in line]
        axes.plot(at, gained, linewidth=1.3, linestyle=look.style, label=look.label(name), **line_of)
        for place, one in zip(at, line, strict=True):
            draw_interval(axes, place, one.low, one.high, color=look.colour, linewidth=1.6, alpha=0.4)
            if not one.equal:
                axes.plot(place, one.gain, markerfacecolor=PAPER, **line_of)
    axes.set_xticks(places)
