"""Runs a study: every base judged once, points run (two at a time on a laptop), finished ones reused, all collected."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnpo.cli.progress import phase
from attnpo.cli.terminal import training_began
from attnpo.lab.studies.arms import (
    Composed,
    Composer,
    check_distinct,
    counted,
    point_config,
    point_folder,
)
from attnpo.lab.studies.bases import Basis, keep_costs, make_basis
from attnpo.lab.studies.benchmark_settings import check_benchmarks
from attnpo.lab.studies.benchmarks import measure_benchmarks, tell_costs
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.exports import exporting
from attnpo.lab.studies.outcome import Outcome, label_of
from attnpo.lab.studies.plan import Pace, Plan, plan_study, watching
from attnpo.lab.studies.predictions import check_predicted, fix
from attnpo.lab.studies.study import (
    ONLY,
    Arm,
    Point,
    Study,
    WorldSeed,
    error_text,
    expand_arms,
    grid_record,
    last_line,
    make_points,
    scorers_of,
)
from attnpo.lab.studies.workers import Workers, execute, on_gpu
from attnpo.run.combinations import LAYER
from attnpo.run.folders import make_folder
from attnpo.run.identity import identity_of
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result
from attnpo.schema import UserError, digest

log = logging.getLogger(__name__)


@dataclass
class _Progress:
    """What a study has come to: bases and lost worlds of the seeds so far, results and errors of their points."""

    bases: dict[WorldSeed, Basis] = field(default_factory=dict)
    missing: dict[WorldSeed, Exception] = field(default_factory=dict)
    done: list[tuple[Point, RunResult]] = field(default_factory=list)
    failed: list[tuple[Point, str]] = field(default_factory=list)
    folders: dict[Point, Path] = field(default_factory=dict)


Show = Callable[[Outcome], None]


def run_study(cfg: FitConfig, folder: Path, show: Show = lambda outcome: None, plan: Plan | None = None) -> Outcome:
    """Returns all points of ``cfg.study``; results stay in ``folder``, so that a repeated command runs only what is
    missing.

    Seed after seed, base and points: ``show`` gets what there is after each seed but the last, and when a signal ends
    the study. A point, an arm, a seed, a world or an analysis that fails is named in the outcome and stops nothing
    else.

    Raises:
        UserError: as ``plan_study``, or every point failed.
    """
    plan = plan_study(cfg) if plan is None else plan
    study, began = plan.study, time.perf_counter()
    make_folder(folder)
    so_far, pace = _Progress(), plan.pace()
    said: list[str] = []
    outcome: Outcome | None = None

    def arms_now() -> tuple[list[Arm], dict[tuple[str, str], Composed]]:
        arms = [arm for world in study.worlds or [ONLY] for arm in _arms(plan.composer, so_far.bases, world)]
        own = {(arm.world, arm.name): _composed(study, arm, plan.composed) for arm in arms}
        check_distinct(study, arms, own, _depths(study, arms, so_far.bases))
        return arms, own

    def outcome_now() -> Outcome:
        arms, own = arms_now()
        record = _record(study, own, so_far.bases, plan.scorers)
        return _outcome(study, arms, so_far, record, folder, time.perf_counter() - began, said)

    try:
        for place, seed in enumerate(plan.seeds):
            before = time.perf_counter()
            bases, missing = make_bases(plan, seed, folder)
            pace.prepared(time.perf_counter() - before)
            found = so_far.bases | bases
            so_far.bases = {
                at: found[at] for at in itertools.product(study.worlds or [ONLY], plan.seeds) if at in found
            }
            so_far.missing |= missing
            if not bases:
                if place == len(plan.seeds) - 1 and not so_far.bases:
                    raise next(iter(so_far.missing.values()))
                continue
            arms, own = arms_now()
            if outcome is None:
                check_predicted(study, arms)
                said += fix(study, folder)
                record = _record(study, own, so_far.bases, plan.scorers)
                log.info("study %s: grid, arms and world fixed, digest %s", study.name, digest(record)[:16])
                if study.benchmarks:
                    check_benchmarks(plan.evaluations, next(basis.model for basis in so_far.bases.values()))
                    tell_costs(plan.evaluations, arms, so_far.bases, folder)
            points = make_points(study, arms, [seed])
            pace.points = pace.over + len(points) * (len(plan.seeds) - place)
            _run_points(plan.workers, study, points, own, so_far, folder, pace)
            outcome = outcome_now()
            if so_far.done and place < len(plan.seeds) - 1:
                show(outcome)
    except KeyboardInterrupt:
        if so_far.done:
            show(outcome_now())
        raise
    arms, own = arms_now()
    so_far.failed += [
        (point, f"not run: {error_text(so_far.missing[point.arm.world, point.seed])}")
        for point in make_points(study, arms, plan.seeds)
        if all((world, point.seed) in so_far.missing for world in study.worlds or [ONLY])
    ]
    order = {point.label: i for i, point in enumerate(make_points(study, arms, plan.seeds))}
    so_far.failed.sort(key=lambda item: order.get(item[0].label, len(order)))
    if not so_far.done:
        raise UserError(f"study {study.name}: all {len(order)} points failed; the first with: {so_far.failed[0][1]}")
    outcome = outcome_now()
    if not study.benchmarks:
        return outcome
    measured = measure_benchmarks(plan.evaluations, outcome, own, so_far.bases, plan.workers)
    return replace(measured, seconds=time.perf_counter() - began)


def _outcome(
    study: Study,
    arms: list[Arm],
    so_far: _Progress,
    record: dict[str, object],
    folder: Path,
    seconds: float,
    said: Sequence[str],
) -> Outcome:
    """Returns what a study has come to, as a finished one is told."""
    bases = so_far.bases
    return Outcome(
        study,
        arms,
        [*so_far.done],
        [*so_far.failed],
        record,
        folder,
        seconds,
        {
            name: {place: basis.measured[name] for place, basis in bases.items() if name in basis.measured}
            for name in study.analyses
        },
        [
            f"FAILED analysis {name}, {basis.label}: {last_line(error)}"
            for basis in bases.values()
            for name, error in basis.unmeasured.items()
        ],
        {place: basis.cost for place, basis in bases.items()},
        [*said, *(line for basis in bases.values() for line in basis.warnings)],
        reads={(basis.world, basis.seed, arm): reads for basis in bases.values() for arm, reads in basis.reads.items()},
        scorers={place: basis.scorers.runs for place, basis in bases.items() if basis.scorers.runs},
        lost_scorers=[
            f"FAILED scorer {name}, {basis.label}: {last_line(error)}"
            for basis in bases.values()
            for name, error in basis.scorers.lost.items()
        ],
        folders=so_far.folders,
    )


def make_bases(plan: Plan, seed: int, folder: Path) -> tuple[dict[WorldSeed, Basis], dict[WorldSeed, Exception]]:
    """Returns what the points of a seed stand on in every world, and the errors of those that cannot be had."""
    bases: dict[WorldSeed, Basis] = {}
    errors: dict[WorldSeed, Exception] = {}
    for world in plan.study.worlds or [ONLY]:
        label = Basis(world, seed).label
        try:
            with phase(f"{label}: base, pairs and judge pass"):
                bases[world, seed] = make_basis(plan, seed, world, folder)
        except Exception as error:  # noqa: BLE001  the other worlds and seeds go on
            errors[world, seed] = error
            log.error("%s cannot be prepared: %s", label, last_line(error_text(error)))
    if bases:
        keep_costs(folder, bases)
    return bases, errors


def _arms(composer: Composer, bases: Mapping[WorldSeed, Basis], world: str) -> list[Arm]:
    """Returns the arms of a world; one without any base is taken to be as deep as the others."""
    found = [basis.depth for basis in bases.values() if basis.world == world]
    depth = max(found or [basis.depth for basis in bases.values()])
    return expand_arms(composer.study, depth, truth=composer.truth, world=world)


def _depths(study: Study, arms: Sequence[Arm], bases: Mapping[WorldSeed, Basis]) -> dict[tuple[str, str], int]:
    """Layers of the judge of every arm that has one, by world and arm."""
    known = {(world, name): depth for (world, _), basis in bases.items() for name, depth in basis.depths.items()}
    source = {(arm.world, arm.name): arm.name if arm.layer is None else study.layer_arm for arm in arms}
    return {place: known[place[0], name] for place, name in source.items() if (place[0], name) in known}


def _composed(study: Study, arm: Arm, composed: Mapping[tuple[str, str], Composed]) -> Composed:
    """Returns the config of an arm, which only a layer makes another than that of the study's arm."""
    if arm.layer is None:
        return composed[arm.world, arm.name]
    return composed[arm.world, study.layer_arm].changed({LAYER: arm.layer}, [f"{LAYER}={arm.layer}"])


def _record(
    study: Study,
    own: Mapping[tuple[str, str], Composed],
    bases: Mapping[WorldSeed, Basis],
    scorers: Mapping[tuple[str, str], Composed],
) -> dict[str, Any]:
    """Returns what is fixed before the points run."""
    worlds: dict[str, Any] = {}
    for (world, _), basis in bases.items():
        worlds.setdefault(world, basis.facts["world"])

    def by_label(every: Mapping[tuple[str, str], Composed]) -> dict[str, Composed]:
        return {f"{world}: {name}" if world else name: made for (world, name), made in every.items()}

    arms = {name: counted(identity_of(made.config).result) for name, made in by_label(own).items()}
    record = grid_record(study, arms, worlds if study.worlds else worlds[ONLY])
    if not scorers:
        return record
    return {
        **record,
        "scorers": {name: counted(identity_of(made.config).result) for name, made in by_label(scorers).items()},
        "scored": {name: keys for name, made in by_label(own).items() if (keys := scorers_of(made.overrides))},
    }


def _run_points(
    workers: Workers,
    study: Study,
    points: Sequence[Point],
    own: Mapping[tuple[str, str], Composed],
    so_far: _Progress,
    folder: Path,
    pace: "Pace",
) -> None:
    """Adds results and errors of the points in their order; those without a base or weights are not run.

    A signal leaves what has ended until then.
    """
    bases = so_far.bases
    done: dict[int, RunResult] = {}
    errors: dict[int, str] = {}
    jobs: dict[int, tuple[list[str], Path]] = {}
    accelerators: list[str] = []
    for i, point in enumerate(points):
        place = (point.arm.world, point.seed)
        lost = _lost(study, point, bases, so_far.missing)
        if lost is not None:
            errors[i] = f"not run: {lost}"
            continue
        made = point_config(own[point.arm.world, point.arm.name], point, bases[place].scorers.paths)
        made = exporting(study, point, made)
        at = point_folder(folder, point, identity_of(made.config).result, bases[place].facts_of(study, point.arm))
        so_far.folders[point] = at
        before, problem = read_result(at)
        if problem is not None:
            log.warning("%s: %s; the point counts as not finished and is run", at, problem)
        if before is not None:
            done[i] = before
        else:
            jobs[i] = (made.overrides, at)
            accelerators.append(made.config.trainer.accelerator)
    if done:
        log.info("%d of %d points are finished already and reused", len(done), len(points))
    pace.over += len(points) - len(jobs)
    places = list(jobs)
    at_work = [points[i] for i in places]
    labels = [f"{point.arm.label} {label_of(point.values)} seed {point.seed}" for point in at_work]
    try:
        training_began()
        with watching(labels, [at for _, at in jobs.values()], pace) as ended:
            for job, result, error in execute(list(jobs.values()), workers, on_gpu(accelerators)):
                i = places[job]
                ended(job)
                count = f"point {pace.over}/{pace.points} {points[i].label}"
                if result is not None:
                    done[i] = result
                    log.info("%s: %s; %s", count, headline(result), pace.left())
                else:
                    errors[i] = error or ""
                    log.error("%s failed: %s", count, last_line(errors[i]))
    finally:
        so_far.done += [(points[i], done[i]) for i in sorted(done)]
        so_far.failed += [(points[i], errors[i]) for i in sorted(errors)]


def _lost(
    study: Study, point: Point, bases: Mapping[WorldSeed, Basis], missing: Mapping[WorldSeed, Exception]
) -> str | None:
    """Why a point cannot be run, if it cannot."""
    place = (point.arm.world, point.seed)
    if place in missing:
        return error_text(missing[place])
    return bases[place].lost.get(point.arm.name if point.arm.layer is None else study.layer_arm)


def headline(result: RunResult) -> str:
    """Returns the numbers of a point's log line."""
    seconds = f"({result.seconds['all']:.0f} s)"
    if result.truth is not None:
        scores = result.truth["validation"].numbers
        return f"validation reward {scores['reward']:.3f}, KL {scores['kl']:.2f} {seconds}"
    return f"val/loss {result.metrics.get('val/loss', math.nan):.4f} {seconds}"
