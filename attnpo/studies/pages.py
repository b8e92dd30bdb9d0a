"""Report pages and figures of runs and studies, drawn from results already on disk or at hand."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from attnpo.analysis.figures import FrontierPoint, LayerPoint, frontier, layer_curve, training_curves
from attnpo.analysis.heat import HeatRow, heat_row
from attnpo.analysis.heatmap import heatmap_html
from attnpo.analysis.page import Fragment, Image, KeyValues, Paragraph, Preformatted, Section, TableBlock, report_page
from attnpo.analysis.tables import Cell
from attnpo.config import plain
from attnpo.studies.account import row_lines
from attnpo.studies.arms import clean
from attnpo.studies.inputs import Inputs
from attnpo.studies.runner import Outcome
from attnpo.studies.spots import best_by_arm, by_arm, gather, has_truth
from attnpo.training.metrics_file import METRICS, read_metrics
from attnpo.training.settings import CallbackSettings
from attnpo.weights.base import OnlineSource

log = logging.getLogger(__name__)

CURVES, REPORT = "curves.png", "report.html"


def heat_rows(inputs: Inputs, count: int) -> list[HeatRow]:
    """The first ``count`` training pairs with their weights, and the judge's verdicts where it was asked.

    None where training computes the weights.
    """
    if isinstance(inputs.weighed.source, OnlineSource):
        return []
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
    warning = result["inputs"].get("judge", {}).get("warning")
    blocks: list[Section] = [
        *([Section("Warning", [Paragraph(f"WARNING: {warning}", warning=True)])] if warning else []),
        Section("Training", [Image(folder / CURVES, "training and validation over optimiser steps")]),
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
    if settings.heat_maps and (shown := heat_rows(inputs, settings.heat_maps)):
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


def study_figures(outcome: Outcome) -> list[Image]:
    """The study's figures, written to its folder: reward against KL, and over layers where arms are layers.

    Of each world its own; none without a known truth.
    """
    if not has_truth(gather(outcome.points)):
        return []
    return [image for world in outcome.worlds for image in _world_figures(outcome, world)]


def _world_figures(outcome: Outcome, world: str) -> Iterator[Image]:
    best = best_by_arm(outcome, world)
    if not best:
        return
    name = f"{outcome.study.name}, {world}" if world else outcome.study.name
    of = f", world {world}" if world else ""
    stem = f"-{clean(world)}" if world else ""
    base = next(iter(best.values())).truth("test", "base_reward")
    points = [
        FrontierPoint(
            spot.arm.name,
            spot.truth("test", "kl"),
            spot.interval.mean,
            spot.label,
            spot.interval.low,
            spot.interval.high,
            best[spot.arm.name].values == spot.values,
        )
        for spots in by_arm(outcome, world).values()
        for spot in spots
    ]
    path = frontier(
        points,
        outcome.folder / f"frontier{stem}.png",
        limits=sorted({*outcome.study.kl_levels, outcome.study.kl_limit}),
        base_reward=base,
        ylabel="true reward, test prompts",
        title=f"{name}: reward against KL",
    )
    yield Image(path, f"true reward on test prompts against KL to the base{of}; ringed: chosen on validation")
    layers = [
        LayerPoint(spot.arm.layer, spot.interval.mean, spot.interval.low, spot.interval.high)
        for spot in best.values()
        if spot.arm.layer is not None
    ]
    if len(layers) > 1:
        levels = {name: spot.truth("test", "reward") for name, spot in best.items() if spot.arm.layer is None}
        path = layer_curve(
            layers,
            outcome.folder / f"layers{stem}.png",
            baselines={**levels, "base": base},
            ylabel="true reward, test prompts",
            title=f"{name}: each arm at its best point",
        )
        yield Image(path, f"true reward by layer{of}, each at its best grid point")


def write_study_report(outcome: Outcome, tables: Sequence[Section]) -> list[str]:
    """The names of the study's figures, those in ``tables`` included; draws its own and writes its ``report.html``.

    The page begins with ``tables``.
    """
    images = study_figures(outcome)
    runs: list[list[Cell]] = [
        [*([world] if world else []), name, spot.label, ", ".join(map(str, spot.seeds))]
        for world in outcome.worlds
        for name, spot in best_by_arm(outcome, world).items()
    ]
    heads = [*(["world"] if outcome.study.worlds else []), "arm", "point", "seeds"]
    sections = [
        *tables,
        *([Section("Figures", images)] if images else []),
        Section("Chosen points", [TableBlock(heads, runs)]),
    ]
    title = outcome.study.title or outcome.study.name
    (outcome.folder / REPORT).write_text(report_page(title, sections), encoding="utf-8")
    drawn = [block.source for section in sections for block in section.blocks if isinstance(block, Image)]
    return sorted({path.name for path in drawn if isinstance(path, Path) and path.parent == outcome.folder})
