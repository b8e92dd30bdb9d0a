"""Figures of a run: training curves, and KL to the base by token weight and position."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from pandas import Series

from attnpo.display.look import (
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    Number,
    add_legend,
    label_axes,
    new_figure,
    save_figure,
    styled,
)

_SMOOTH_FROM = 40  # minimum number of points for drawing a running mean


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


def _train_and_val_panel(title: str, name: str, level: float | None = None) -> _Panel:
    return _Panel(
        title,
        (_Curve(f"train/{name}", "train", COLOURS[0]), _Curve(f"val/{name}", "validation", COLOURS[1])),
        level,
    )


PANELS = (
    _train_and_val_panel("loss", "loss", math.log(2)),
    _train_and_val_panel("rewards/margins", "rewards/margins", 0.0),
    _train_and_val_panel("rewards/accuracies", "rewards/accuracies", 0.5),
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


@styled
def training_curves(csv_rows: Sequence[Mapping[str, Number]], path: Path | str, title: str = "") -> Path:
    """Plots loss, margins, accuracies, rewards, learning rate and gradient norm over steps; returns the PNG's path.

    ``csv_rows``: one mapping per step with the values logged at that step ("step", "train/loss", "val/loss", ...);
    columns may be missing in some or all rows. Non-finite values are skipped and counted in the panel's title. Dotted
    lines mark ln 2 for the loss (the DPO loss before the first step), 0 for rewards and 0.5 for accuracy (chance).
    """
    figure = new_figure(12, 6.6, title)
    for axes, shown in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw_panel(axes, shown, csv_rows)
    return save_figure(figure, path, rect=(0, 0, 1, 0.97 if title else 1), h_pad=1.6, w_pad=1.6)


def _draw_panel(axes: Axes, shown: _Panel, rows: Sequence[Mapping[str, Number]]) -> None:
    dropped = drawn = 0
    for curve in shown.curves:
        steps, values, bad = _column_series(rows, curve.column)
        dropped += bad
        drawn += bool(len(values))
        line: dict[str, Any] = {"color": curve.colour, "linewidth": 1.4, "label": curve.label}
        if not len(values):
            continue
        if curve.column.startswith("val/"):
            axes.plot(steps, values, "--o", markersize=3.5, **line)
        elif len(values) < _SMOOTH_FROM or not shown.smooth:
            axes.plot(steps, values, ".-" if len(values) < 5 else "-", **line)
        else:
            axes.plot(steps, values, color=curve.colour, linewidth=0.8, alpha=0.3)
            window = 2 * max(2, len(values) // 30) + 1  # about a fifteenth of the curve, less at its ends
            mean = Series(values).rolling(window, center=True, min_periods=1).mean()
            axes.plot(steps, mean, **{**line, "linewidth": 1.6})
    label_axes(axes, shown.title + (f" ({dropped} not finite)" if dropped else ""), "optimiser step")
    if not drawn:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=SOFT)
        axes.set(xticks=[], yticks=[])
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    if shown.level is not None:
        axes.axhline(shown.level, color=INK, linewidth=0.9, linestyle=":")
    add_legend(axes)


def _column_series(
    rows: Sequence[Mapping[str, Number]], column: str
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"], int]:
    """Returns a column's steps and values sorted by step, and the number of non-finite values."""
    logged = [(float(row.get("step", number)), float(row[column])) for number, row in enumerate(rows) if column in row]
    kept = sorted(pair for pair in logged if math.isfinite(pair[0]) and math.isfinite(pair[1]))
    table = np.array(kept, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1], len(logged) - len(kept)


# ------------------------------------------------------------------------------------------------ drift

Lines = Mapping[str, Mapping[str, Number]]
"""Values by group index, for each named line."""


@styled
def drift_figure(deciles: Lines, places: Lines, path: Path | str) -> Path:
    """Plots KL to the base by weight decile and by position, omitting empty panels; returns the PNG's path."""
    panels = [
        (title, label, lines)
        for title, label, lines in (
            ("KL to the base by token weight", "weight decile, 1 is the lowest", deciles),
            ("KL to the base by position", "tenth of the response", places),
        )
        if lines
    ]
    figure = new_figure(5.6 * max(1, len(panels)), 3.4)
    for place, (title, label, lines) in enumerate(panels, 1):
        axes = label_axes(figure.add_subplot(1, len(panels), place), title, label, "nats per token")
        for (name, values), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
            groups = [int(group) for group in values]
            axes.plot(groups, [*values.values()], color=colour, marker=marker, markersize=5, label=name)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(1, 11))
        add_legend(axes)
    return save_figure(figure, path, w_pad=2.0)
