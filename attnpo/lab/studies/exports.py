"""The chosen points of a study as model folders: points leave no checkpoint, so that a chosen one is run once more.

A point that is sure to be chosen, since its arm has no other, leaves its model when it is run.
"""

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.lab.studies.arms import Composed, point_config, point_folder
from attnpo.lab.studies.left_models import MODEL, is_whole, keep_model, with_model
from attnpo.lab.studies.outcome import best_by_arm
from attnpo.lab.studies.study import Outcome, Point, Study, WorldSeed, last_line
from attnpo.lab.studies.workers import Workers, execute, on_gpu
from attnpo.run.identity import identity_of
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result

if TYPE_CHECKING:
    from attnpo.lab.studies.bases import Basis


log = logging.getLogger(__name__)


EXPORTS = "exports"
CLOSE = 1e-6  # relative: kernels of a GPU may sum in another order


@dataclass(frozen=True)
class Export:
    """A chosen point and the run that left its model; ``wanted``: the user asked for checkpoints of every point."""

    point: Point
    result: RunResult
    made: Composed
    run: Path
    wanted: bool

    @property
    def model(self) -> Path:
        """Returns the model folder."""
        return self.run / MODEL


def exporting(study: Study, point: Point, made: Composed) -> Composed:
    """Returns the config of a point, which leaves its model where it is sure to be needed: its arm has
    no other point.
    """
    return with_model(made) if study.benchmarks and len((point.arm.grid or study.grid).overrides()) == 1 else made


def export_chosen(
    outcome: Outcome, own: Mapping[tuple[str, str], Composed], bases: "Mapping[WorldSeed, Basis]", workers: Workers
) -> tuple[list[Export], dict[Point, str], list[str]]:
    """Returns the chosen point of every arm, world and seed with its model, those that could not be had by their
    errors, and warnings.

    A model is reused while nothing has changed of what made it: its folder's name holds the digest of that.
    """
    study, folder = outcome.study, outcome.folder
    chosen: list[Export] = []
    for world in outcome.worlds:
        for best in best_by_arm(outcome, world).values():
            for seed, result in zip(best.seeds, best.results, strict=True):
                point, basis = Point(best.arm, best.values, seed), bases[world, seed]
                plain = point_config(own[world, best.arm.name], point, basis.scorers.paths)
                made = with_model(plain)
                at = point_folder(folder, point, identity_of(made.config).result, basis.facts_of(study, best.arm))
                run = at if is_whole(at) else folder / EXPORTS / at.name
                chosen.append(Export(point, result, made, run, bool(plain.raw.callbacks.checkpoints)))
    lost = _run_again(study.name, [export for export in chosen if not is_whole(export.run)], workers)
    there = [export for export in chosen if export.point not in lost]
    for export in there:
        if not export.wanted or export.run.parent.name == EXPORTS:
            keep_model(export.run)
    return there, lost, [line for export in there if (line := _differs(export)) is not None]


def _run_again(study: str, exports: list[Export], workers: Workers) -> dict[Point, str]:
    """Runs points once more, leaving their models; the errors of those that fail."""
    lost: dict[Point, str] = {}
    if exports:
        log.info("study %s: %d chosen points are run once more, to leave their models", study, len(exports))
    for export in exports:
        if read_result(export.run)[0] is not None:
            log.warning("%s: its model is missing or damaged; it is made anew", export.run)
            shutil.rmtree(export.run)
    jobs = [(export.made.overrides, export.run) for export in exports]
    alone = on_gpu(export.made.config.trainer.accelerator for export in exports)
    for place, result, error in execute(jobs, workers, alone):
        if result is None:
            point = exports[place].point
            lost[point] = f"the model of its chosen point could not be made: {last_line(error or '')}"
            log.error("%s: %s", point.label, lost[point])
    return lost


def _differs(export: Export) -> str | None:
    """Returns a warning where the run that left the model had other scores than the point that was chosen."""
    again = read_result(export.run)[0]
    pairs = {} if again is None else {name: (_number(export.result, name), _number(again, name)) for name in COMPARED}
    for name, (was, now) in pairs.items():
        if not (math.isclose(was, now, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(was) and math.isnan(now))):
            return (
                f"WARNING {export.point.label}: run once more for its model, its {name} is {now:.6g} instead of "
                f"{was:.6g}: benchmarks measure that model, the other columns the first run"
            )
    return None


COMPARED = ("validation reward", "val/loss")


def _number(result: RunResult, name: str) -> float:
    if name in result.metrics or result.truth is None:
        return result.metrics.get(name, math.nan)
    return result.truth["validation"].numbers["reward"] if name == COMPARED[0] else math.nan
