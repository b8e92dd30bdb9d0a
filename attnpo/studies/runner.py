"""Runs a study: every base judged once, points run (two at a time on a laptop), finished ones reused, all collected."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnpo.runs.folders import make_folder
from attnpo.runs.result import RunResult
from attnpo.runs.resume import read_result
from attnpo.schema import UserError, digest
from attnpo.studies.arms import (
    Composed,
    arm_config,
    check_distinct,
    check_user,
    counted,
    point_config,
    point_folder,
)
from attnpo.studies.bases import Basis, compose_arms, keep_costs, make_basis
from attnpo.studies.benchmarks import check_benchmarks, measure_benchmarks, tell_costs
from attnpo.studies.exports import exporting
from attnpo.studies.fit_config import FitConfig, require_one_process
from attnpo.studies.predictions import check_predicted, fix
from attnpo.studies.scorer_names import scorers_of
from attnpo.studies.scorers import compose_scorers
from attnpo.studies.study import (
    ONLY,
    Arm,
    Outcome,
    Point,
    Study,
    WorldSeed,
    error_text,
    expand_arms,
    grid_record,
    last_line,
    make_points,
)
from attnpo.studies.workers import execute, on_gpu

log = logging.getLogger(__name__)


def run_study(cfg: FitConfig, folder: Path) -> Outcome:
    """All points of ``cfg.study``; results stay in ``folder``, so that a repeated command runs only what is missing.

    A point, an arm, a seed, a world or an analysis that fails is named in the outcome and stops nothing else.

    Raises:
        UserError: started under several processes, an override that spoils the study, or every point failed.
    """
    require_one_process(cfg)
    study = cfg.study
    if study is None:
        raise UserError("there is no study to run (experiment=none)")
    check_user(cfg, study)
    if cfg.resume is not None:
        raise UserError(
            f"study {study.name}: resume={cfg.resume} is for single runs; finished points are reused anyway"
        )
    check_benchmarks(cfg)
    began = time.perf_counter()
    make_folder(folder)
    seeds = [cfg.seed + i for i in range(cfg.seed_count())]
    composed = compose_arms(cfg, study)
    for place, arm in composed.items():
        _check(study, place, arm)
    whole = [place for place in composed if not study.layers or place[1] != study.layer_arm]
    named = [Arm(name, (), None, world, study.grid_of(name)) for world, name in whole]
    check_distinct(study, named, {place: composed[place].config for place in whole})
    scorers = compose_scorers(cfg, study)
    bases, missing = make_bases(cfg, study, seeds, composed, folder, scorers)
    arms = [arm for world in study.worlds or [ONLY] for arm in _arms(cfg, study, bases, world)]
    own = {(arm.world, arm.name): _composed(cfg, study, arm, composed) for arm in arms}
    check_distinct(study, arms, {place: made.config for place, made in own.items()}, _depths(study, arms, bases))
    record = _record(study, own, bases, scorers)
    check_predicted(study, arms)
    said = fix(study, folder)
    log.info("study %s: grid, arms and world fixed, digest %s", study.name, digest(record)[:16])
    if study.benchmarks:
        check_benchmarks(cfg, next(basis.model for basis in bases.values()))
        tell_costs(cfg, study, arms, bases, folder)
    points = make_points(study, arms, seeds)
    folders: dict[Point, Path] = {}
    done, errors = _run_points(cfg, study, points, own, bases, missing, folder, folders)
    if not done:
        raise UserError(
            f"study {study.name}: all {len(points)} points failed; the first with: {next(iter(errors.values()))}"
        )
    outcome = Outcome(
        study,
        arms,
        [(points[i], done[i]) for i in sorted(done)],
        [(points[i], errors[i]) for i in sorted(errors)],
        record,
        folder,
        time.perf_counter() - began,
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
        folders=folders,
    )
    if not study.benchmarks:
        return outcome
    return replace(measure_benchmarks(cfg, outcome, own, bases), seconds=time.perf_counter() - began)


def make_bases(
    cfg: FitConfig,
    study: Study,
    seeds: Sequence[int],
    composed: Mapping[tuple[str, str], Composed],
    folder: Path,
    scorers: Mapping[tuple[str, str], Composed],
) -> tuple[dict[WorldSeed, Basis], dict[WorldSeed, str]]:
    """What the points of every world and seed stand on, and the errors of those that cannot be had.

    Raises the first of these errors when there is none that can.
    """
    bases: dict[WorldSeed, Basis] = {}
    errors: dict[WorldSeed, Exception] = {}
    for world in study.worlds or [ONLY]:
        for seed in seeds:
            try:
                bases[world, seed] = make_basis(cfg, study, seed, world, composed, folder, scorers)
            except Exception as error:  # noqa: BLE001  the other worlds and seeds go on
                errors[world, seed] = error
                log.error("%s cannot be prepared: %s", Basis(world, seed).label, last_line(error_text(error)))
    if not bases:
        raise next(iter(errors.values()))
    keep_costs(folder, bases)
    return bases, {place: error_text(error) for place, error in errors.items()}


def _arms(cfg: FitConfig, study: Study, bases: Mapping[WorldSeed, Basis], world: str) -> list[Arm]:
    """The arms of a world; one without any base is taken to be as deep as the others."""
    found = [basis.depth for basis in bases.values() if basis.world == world]
    depth = max(found or [basis.depth for basis in bases.values()])
    return expand_arms(study, depth, truth=cfg.truth is not None, world=world)


def _depths(study: Study, arms: Sequence[Arm], bases: Mapping[WorldSeed, Basis]) -> dict[tuple[str, str], int]:
    """Layers of the judge of every arm that has one, by world and arm."""
    known = {(world, name): depth for (world, _), basis in bases.items() for name, depth in basis.depths.items()}
    source = {(arm.world, arm.name): arm.name if arm.layer is None else study.layer_arm for arm in arms}
    return {place: known[place[0], name] for place, name in source.items() if (place[0], name) in known}


def _composed(cfg: FitConfig, study: Study, arm: Arm, composed: Mapping[tuple[str, str], Composed]) -> Composed:
    """The config of an arm, which only a layer makes another than that of the study's arm."""
    if arm.layer is None:
        return composed[arm.world, arm.name]
    made = arm_config(cfg, study, arm.overrides, arm.world)
    _check(study, (arm.world, arm.name), made)
    return made


def _check(study: Study, arm: tuple[str, str], made: Composed) -> None:
    """Raises UserError naming the arm whose config cannot be built."""
    try:
        _ = made.config
    except UserError as error:
        raise UserError(f"study {study.name}, arm {': '.join(filter(None, arm))}: {error}") from error


def _record(
    study: Study,
    own: Mapping[tuple[str, str], Composed],
    bases: Mapping[WorldSeed, Basis],
    scorers: Mapping[tuple[str, str], Composed],
) -> dict[str, Any]:
    """What is fixed before the points run."""
    worlds: dict[str, Any] = {}
    for (world, _), basis in bases.items():
        worlds.setdefault(world, basis.facts["world"])

    def by_label(every: Mapping[tuple[str, str], Composed]) -> dict[str, Composed]:
        return {f"{world}: {name}" if world else name: made for (world, name), made in every.items()}

    arms = {name: counted(made.config) for name, made in by_label(own).items()}
    record = grid_record(study, arms, worlds if study.worlds else worlds[ONLY])
    if not scorers:
        return record
    named = {name: scorers_of(made.overrides) for name, made in by_label(own).items()}
    return {
        **record,
        "scorers": {name: counted(made.config) for name, made in by_label(scorers).items()},
        "scored": {name: keys for name, keys in named.items() if keys},
    }


def _run_points(
    cfg: FitConfig,
    study: Study,
    points: Sequence[Point],
    own: Mapping[tuple[str, str], Composed],
    bases: Mapping[WorldSeed, Basis],
    missing: Mapping[WorldSeed, str],
    folder: Path,
    folders: dict[Point, Path],
) -> tuple[dict[int, RunResult], dict[int, str]]:
    """Results and errors of the points by their place among them; those without a base or weights are not run.

    ``folders`` gets where each lies.
    """
    done: dict[int, RunResult] = {}
    errors: dict[int, str] = {}
    jobs: dict[int, tuple[list[str], Path]] = {}
    configs: list[FitConfig] = []
    for i, point in enumerate(points):
        place = (point.arm.world, point.seed)
        lost = _lost(study, point, bases, missing)
        if lost is not None:
            errors[i] = f"not run: {lost}"
            continue
        arm = own[point.arm.world, point.arm.name]
        made = exporting(study, point, point_config(arm, point, bases[place].scorer_paths))
        at = point_folder(folder, point, made.config, bases[place].facts_of(study, point.arm))
        folders[point] = at
        before = finished(at)
        if before is not None:
            done[i] = before
        else:
            jobs[i] = (made.overrides, at)
            configs.append(made.config)
    if done:
        log.info("%d of %d points are finished already and reused", len(done), len(points))
    places = list(jobs)
    alone = on_gpu(configs)
    for job, result, error in execute(list(jobs.values()), study.workers, cfg.composed.config_dir, cfg.store, alone):
        i = places[job]
        count = len(done) + len(errors) + 1
        if result is not None:
            done[i] = result
            log.info("point %d/%d %s: %s", count, len(points), points[i].label, headline(result))
        else:
            errors[i] = error or ""
            log.error("point %d/%d %s failed: %s", count, len(points), points[i].label, last_line(errors[i]))
    return done, errors


def _lost(study: Study, point: Point, bases: Mapping[WorldSeed, Basis], missing: Mapping[WorldSeed, str]) -> str | None:
    """Why a point cannot be run, if it cannot."""
    place = (point.arm.world, point.seed)
    if place in missing:
        return missing[place]
    name = point.arm.name if point.arm.layer is None else study.layer_arm
    return bases[place].lost.get(name)


def finished(folder: Path) -> RunResult | None:
    """The result in a point's folder, or None when there is none; one that is damaged is said to be, and made anew."""
    result, problem = read_result(folder)
    if problem is not None:
        log.warning("%s: %s; the point counts as not finished and is run", folder, problem)
    return result


def headline(result: RunResult) -> str:
    """The numbers of a point's log line."""
    seconds = f"({result.seconds['all']:.0f} s)"
    if result.truth is not None:
        scores = result.truth["validation"].numbers
        return f"validation reward {scores['reward']:.3f}, KL {scores['kl']:.2f} {seconds}"
    return f"val/loss {result.metrics.get('val/loss', math.nan):.4f} {seconds}"
