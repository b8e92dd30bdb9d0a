"""Report pages and figures of runs and studies, drawn from results already on disk or at hand."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from attnpo.analysis.figures import FrontierPoint, LayerPoint, frontier, layer_curve, training_curves
from attnpo.analysis.heat import HeatRow, heat_row
from attnpo.analysis.heatmap import heatmap_html
from attnpo.analysis.page import (
    Block,
    Fragment,
    Image,
    KeyValues,
    Paragraph,
    Preformatted,
    Section,
    TableBlock,
    report_page,
)
from attnpo.analysis.tables import Cell
from attnpo.config import plain
from attnpo.studies.account import row_lines
from attnpo.studies.inputs import Inputs
from attnpo.studies.intervals import hierarchical_bootstrap
from attnpo.studies.runner import Outcome
from attnpo.studies.tables import DIGITS, Spot, best_by_arm, has_truth
from attnpo.training.metrics_file import METRICS, read_metrics
from attnpo.training.settings import CallbackSettings

log = logging.getLogger(__name__)

CURVES, REPORT = "curves.png", "report.html"


def heat_rows(inputs: Inputs, count: int) -> list[HeatRow]:
    """The first ``count`` training pairs with their weights, and the judge's verdicts where it was asked."""
    pairs = {pair.pair_id: pair for pair in inputs.pairs["train"].pairs}
    tokenizer = inputs.ground.tokenizer
    rows = []
    for example in inputs.examples["train"].examples[:count]:
        captured = inputs.weighed.captured.get(example.pair_id)
        rows.append(
            heat_row(
                pairs[example.pair_id],
                example.sides,
                example.weights,
                lambda token: str(tokenizer.decode([token])),
                lengths=example.lengths,
                coverage=example.coverage,
                rounds=() if captured is None else captured.rounds,
            )
        )
    return rows


def write_run_report(inputs: Inputs, result: dict[str, Any], settings: CallbackSettings, folder: Path) -> None:
    """Nothing; writes ``curves.png`` and ``report.html`` of one run."""
    training_curves(read_metrics(folder / METRICS), folder / CURVES, folder.name)
    blocks: list[Section] = [
        Section("Training", [Image(folder / CURVES, "training and validation over optimiser steps")])
    ]
    if result["truth"]:
        scores = result["truth"]["scores"]
        names = [name for name in scores["test"] if name != "rewards"]
        table: list[list[Cell]] = [[split, *(values[name] for name in names)] for split, values in scores.items()]
        blocks.append(Section("Against the truth, on held-out prompts", [TableBlock(["prompts", *names], table)]))
    blocks.append(
        Section(
            "Inputs",
            [
                KeyValues(
                    {
                        f"{part}: {name}": value
                        for part, values in result["inputs"].items()
                        for name, value in _leaves(values)
                    }
                )
            ],
        )
    )
    if settings.heat_maps:
        shown = heat_rows(inputs, settings.heat_maps)
        blocks.append(Section("Token weights of the first pairs", [Fragment(heatmap_html(shown, page=False))]))
    example = next(iter(inputs.examples["train"].examples), None)
    if example is not None:
        blocks.append(Section("Row 0 as it is trained", [Preformatted("\n".join(row_lines(inputs, example)))]))
    blocks.append(
        Section(
            "Versions and configuration",
            [
                KeyValues(result["versions"]),
                Preformatted(OmegaConf.to_yaml(OmegaConf.create(plain(inputs.ground.cfg)))),
            ],
        )
    )
    (folder / REPORT).write_text(report_page(folder.name, blocks), encoding="utf-8")
    log.info("report: %s", folder / REPORT)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    """Dotted names and values below a mapping."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name} ")
        else:
            yield (
                f"{prefix}{name}",
                value if isinstance(value, str | float | int | bool) or value is None else str(value),
            )


def study_figures(outcome: Outcome, spots: Sequence[Spot]) -> list[Image]:
    """The study's figures, written to its folder: reward against KL, and over layers where arms are layers."""
    if not has_truth(spots):
        return []
    best = best_by_arm(outcome)
    points = []
    for spot in spots:
        interval = hierarchical_bootstrap(spot.rewards("test"))
        chosen = best[spot.arm.name].values == spot.values
        points.append(
            FrontierPoint(
                spot.arm.name, spot.truth("test", "kl"), interval.mean, spot.label, interval.low, interval.high, chosen
            )
        )
    base = next(iter(best.values())).truth("test", "base_reward")
    folder = outcome.folder
    frontier(
        points,
        folder / "frontier.png",
        limits=[outcome.study.kl_limit],
        base_reward=base,
        ylabel="true reward, test prompts",
        title=f"{outcome.study.name}: reward against KL",
    )
    images = [
        Image(
            folder / "frontier.png", "true reward on test prompts against KL to the base; ringed: chosen on validation"
        )
    ]
    layers = [(spot.arm.layer, spot) for spot in best.values() if spot.arm.layer is not None]
    if len(layers) > 1:
        curve = []
        for layer, spot in layers:
            interval = hierarchical_bootstrap(spot.rewards("test"))
            curve.append(LayerPoint(layer, interval.mean, interval.low, interval.high))
        lines = {name: spot.truth("test", "reward") for name, spot in best.items() if spot.arm.layer is None}
        layer_curve(
            curve,
            folder / "layers.png",
            baselines={**lines, "base": base},
            ylabel="true reward, test prompts",
            title=f"{outcome.study.name}: each arm at its best point",
        )
        images.append(Image(folder / "layers.png", "true reward by layer, each at its best grid point"))
    return images


def write_study_report(
    outcome: Outcome,
    spots: Sequence[Spot],
    columns: Sequence[str],
    rows: Sequence[dict[str, Cell]],
    notes: Sequence[str],
) -> None:
    """Nothing; draws the figures and writes the study's ``report.html``."""
    images = study_figures(outcome, spots)
    paragraphs: list[Block] = [Paragraph(line, warning=line.startswith("FAILED")) for line in notes]
    sections = [Section("Arms at their best points", [TableBlock(columns, rows, digits=DIGITS), *paragraphs])]
    sections += [Section("Figures", images)] if images else []
    runs = [[name, spot.label, ", ".join(map(str, spot.seeds))] for name, spot in best_by_arm(outcome).items()]
    sections.append(Section("Chosen points", [TableBlock(["arm", "point", "seeds"], runs)]))
    title = outcome.study.title or outcome.study.name
    (outcome.folder / REPORT).write_text(report_page(title, sections), encoding="utf-8")
