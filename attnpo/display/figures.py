"""Figures of runs and studies: training curves, scores over layers, gains over worlds."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attnpo.display.look import (
    COLOURS,
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

_SMOOTH_FROM = 40  # from this many points on a curve is drawn with its running mean


# ------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class _Curve:
    column: str
    label: str
    colour: str


@dataclass(frozen=True)
class _Panel:
    title: str
    curves: tuple[_Curve, ...]
    level: float | None = None
    smooth: bool = True


def _both(title: str, name: str, level: float | None = None) -> _Panel:
    return _Panel(
        title,
        (_Curve(f"train/{name}", "train", COLOURS[0]), _Curve(f"val/{name}", "validation", COLOURS[1])),
        level,
    )


PANELS = (
    _both("loss", "loss", math.log(2)),
    _both("rewards/margins", "rewards/margins", 0.0),
    _both("rewards/accuracies", "rewards/accuracies", 0.5),
    _Panel(
        "rewards (validation dashed)",
        (
            _Curve("train/rewards/chosen", "chosen", COLOURS[2]),
            _Curve("train/rewards/rejected", "rejected", COLOURS[3]),
            _Curve("val/rewards/chosen", "", COLOURS[2]),
            _Curve("val/rewards/rejected", "", COLOURS[3]),
        ),
        0.0,
    ),
    _Panel("learning rate", (_Curve("train/lr", "", COLOURS[6]),), smooth=False),
    _Panel("gradient norm", (_Curve("train/grad_norm", "", COLOURS[6]),)),
)


def training_curves(csv_rows: Sequence[Mapping[str, Number]], path: Path | str, title: str = "") -> Path:
    """Draws loss, margins, accuracies, rewards, learning rate and gradient norm over steps; returns the PNG's path.

    ``csv_rows``: a mapping per step with what was logged then ("step", "train/loss", "val/loss", ...); a column may be
    missing everywhere or in any row. Values that are not finite are left out and counted in the panel's title. Dotted
    lines: ln 2 for the loss before the first step of DPO, 0 for rewards, 0.5 for the accuracy of a coin.
    """
    figure = new_figure(12, 6.6)
    if title:
        figure.suptitle(title, fontsize=12, color=INK, x=0.012, ha="left", parse_math=False)
    grid = figure.subplots(2, 3)
    for axes, shown in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axes, shown, csv_rows)
    figure.tight_layout(rect=(0, 0, 1, 0.97 if title else 1), h_pad=1.6, w_pad=1.6)
    return save(figure, path)


def _draw_panel(axes: Axes, shown: _Panel, rows: Sequence[Mapping[str, Number]]) -> None:
    dropped = drawn = 0
    for curve in shown.curves:
        steps, values, bad = _series(rows, curve.column)
        dropped += bad
        if not len(values):
            continue
        drawn += 1
        if curve.column.startswith("val/"):
            axes.plot(steps, values, "--o", color=curve.colour, markersize=3.5, linewidth=1.4, label=curve.label)
        elif len(values) < _SMOOTH_FROM or not shown.smooth:
            axes.plot(
                steps, values, ".-" if len(values) < 5 else "-", color=curve.colour, linewidth=1.4, label=curve.label
            )
        else:
            axes.plot(steps, values, color=curve.colour, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _running_mean(values), color=curve.colour, linewidth=1.6, label=curve.label)
    panel(axes, shown.title + (f" ({dropped} not finite)" if dropped else ""), "optimiser step")
    if not drawn:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=SOFT)
        axes.set(xticks=[], yticks=[])
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    if shown.level is not None:
        axes.axhline(shown.level, color=INK, linewidth=0.9, linestyle=":")
    legend(axes, loc="best")


def _series(
    rows: Sequence[Mapping[str, Number]], column: str
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"], int]:
    """Steps and values of a column in order of steps, and how many logged values were not finite."""
    logged = [(float(row.get("step", number)), float(row[column])) for number, row in enumerate(rows) if column in row]
    kept = sorted(pair for pair in logged if math.isfinite(pair[0]) and math.isfinite(pair[1]))
    table = np.array(kept, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1], len(logged) - len(kept)


def _running_mean(values: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
    """Returns the mean over a centred window of about a fifteenth of the curve, shorter at its ends."""
    half = max(2, len(values) // 30)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return np.asarray((total[high] - total[low]) / (high - low), dtype=np.float64)


# ------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class LayerPoint:
    """A score at a layer (counted from 1), with the ends of its interval where there is one; ``arm``: whose it is."""

    layer: int
    score: Number
    low: Number = math.nan
    high: Number = math.nan
    arm: str = ""


def layer_curve(
    points: Iterable[LayerPoint],
    path: Path | str,
    *,
    baselines: Mapping[str, Level | Number] | None = None,
    ylabel: str = "score",
    title: str = "",
    looks: Looks | None = None,
    control: str | None = None,
) -> Path:
    """Draws the score per layer and, in a panel beside it, the baselines, all with intervals; returns the PNG's path.

    ``LayerPoint.arm`` gives a point that arm's colour. The level of each baseline runs through both panels, the
    interval of the ``control`` as a band. Points and baselines that are not finite are left out. ``looks``: those of
    the study's arms.
    """
    kept = sorted((point for point in points if math.isfinite(point.score)), key=lambda point: point.layer)
    levels = {name: level_of(value) for name, value in (baselines or {}).items()}
    levels = {name: level for name, level in levels.items() if math.isfinite(level.score)}
    seen = {"": Look(COLOURS[0]), **looks_of(levels, control), **dict(looks or {})}
    wide = 0.3 * len(levels) + 0.3
    figure = new_figure(6.4 + (wide + 2.4) * bool(levels), 4.4)
    shares = [5.4, wide] if levels else [1.0]
    grid = figure.subplots(1, len(shares), sharey=True, squeeze=False, gridspec_kw={"width_ratios": shares})[0]
    panel(grid[0], title, "layer\nbars: 95 % intervals" if _any_bounded(kept, levels) else "layer", ylabel)
    layers = [point.layer for point in kept]
    own = any(point.arm for point in kept)
    grid[0].plot(layers, [point.score for point in kept], color=SOFT if own else COLOURS[0], linewidth=1.6)
    for point in kept:
        colour, marker = seen[point.arm].colour, seen[point.arm].marker
        if math.isfinite(point.low) and math.isfinite(point.high):
            grid[0].plot([point.layer] * 2, [point.low, point.high], color=colour, linewidth=2.4, alpha=0.55)
        grid[0].plot([point.layer], [point.score], marker, color=colour, markersize=7)
    grid[0].set_xticks(layers if len(layers) <= 16 else layers[:: -(-len(layers) // 16)])
    for axes in grid[1:]:
        _draw_levels(axes, grid, levels, seen, control)
    scores = [*(point.score for point in kept), *(level.score for level in levels.values())]
    ends = [(one.low, one.high) for one in kept] + [(one.low, one.high) for one in levels.values()]
    grid[0].set_ylim(*fitting(scores, [end for both in ends for end in both]))
    figure.tight_layout()
    return save(figure, path)


def _any_bounded(points: Sequence[LayerPoint], levels: Mapping[str, Level]) -> bool:
    return any(math.isfinite(low) for low in (*(one.low for one in points), *(one.low for one in levels.values())))


def _draw_levels(
    axes: Axes, grid: Iterable[Axes], levels: Mapping[str, Level], looks: Looks, control: str | None
) -> None:
    """Baselines beside the layers: a point with its interval each, and its level through all panels."""
    panel(axes, "")
    axes.tick_params(left=False, labelleft=False)
    for place, (name, level) in enumerate(levels.items()):
        look = looks[name]
        if level.bounded:
            axes.plot([place] * 2, [level.low, level.high], color=look.colour, linewidth=2.4, alpha=0.55)
        axes.plot(
            [place],
            [level.score],
            look.marker,
            markersize=7,
            color=look.colour,
            markerfacecolor=look.face,
            label=f"{look.named(name)} {level.score:.3g}",
        )
        for each in grid:
            each.axhline(level.score, color=look.colour, linewidth=0.9, linestyle=":", alpha=0.7, zorder=1)
            if name == control and level.bounded:
                each.axhspan(level.low, level.high, color=SOFT, alpha=0.15, linewidth=0)
    axes.set_xticks([])
    axes.set_xlim(-0.6, len(levels) - 0.4)
    legend(axes, loc="center left", bbox_to_anchor=(1.02, 0.5))


# ------------------------------------------------------------------------------------------------ gains


@dataclass(frozen=True)
class GainPoint:
    """A difference to the control at a place on the scale, with its interval; ``equal``: both reach the KL level."""

    place: Number
    gain: Number
    low: Number = math.nan
    high: Number = math.nan
    equal: bool = True


GAINS = "bars: 95 % intervals; hollow: not at equal KL; above 0: better"


def gains(
    panels: Mapping[str, Mapping[str, Sequence[GainPoint]]],
    path: Path | str,
    *,
    xlabel: str,
    ylabel: str = "difference",
    title: str = "",
    looks: Looks | None = None,
) -> Path:
    """Draws differences to a control over a scale, a panel per title, a line per arm; returns the PNG's path.

    Panels share both axes. Arms stand a little beside each other at every place, their intervals as bars; points that
    are not at an equal KL are hollow, and those that are not finite left out. ``looks``: those of the study's arms.
    """
    seen = looks or looks_of(name for lines in panels.values() for name in lines)
    figure = new_figure(2.0 + 3.2 * max(1, len(panels)), 4.2)
    figure.suptitle(title, fontsize=12, color=INK, x=0.012, ha="left", parse_math=False)
    drawn: list[Axes] = []
    for number, (name, lines) in enumerate(panels.items(), 1):
        beside = drawn[0] if drawn else None
        axes = figure.add_subplot(1, len(panels), number, sharex=beside, sharey=beside)
        panel(axes, name, xlabel, "" if drawn else ylabel)
        _draw_gains(axes, lines, seen)
        drawn.append(axes)
    for last in drawn[-1:]:
        legend(last, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.text(0.012, 0.02, GAINS, fontsize=9, color=INK, ha="left")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return save(figure, path)


def _draw_gains(axes: Axes, lines: Mapping[str, Sequence[GainPoint]], looks: Looks) -> None:
    kept = {name: [one for one in line if math.isfinite(one.gain)] for name, line in lines.items()}
    places = sorted({float(one.place) for line in kept.values() for one in line})
    gap = min((after - before for before, after in itertools.pairwise(places)), default=1.0)
    axes.axhline(0.0, color=INK, linewidth=0.9, linestyle=":")
    for number, (name, line) in enumerate(kept.items()):
        look = looks[name]
        colour, marker = look.colour, look.marker
        aside = gap * 0.06 * (number - (len(kept) - 1) / 2)
        at = [one.place + aside for one in line]
        axes.plot(
            at,
            [one.gain for one in line],
            color=colour,
            linewidth=1.3,
            linestyle=look.style,
            marker=marker,
            markersize=6,
            label=look.named(name),
        )
        for place, one in zip(at, line, strict=True):
            if math.isfinite(one.low) and math.isfinite(one.high):
                axes.plot([place, place], [one.low, one.high], color=colour, linewidth=1.6, alpha=0.4)
            if not one.equal:
                axes.plot([place], [one.gain], marker, markersize=6, color=colour, markerfacecolor=PAPER)
    axes.set_xticks(places)
