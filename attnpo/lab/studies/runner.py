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
from attnpo.cli.terminal import mark_training_started
from attnpo.lab.studies.arms import Composed, arm_identity, check_distinct, point_config, point_folder
from attnpo.lab.studies.bases import Basis, keep_costs, make_basis
from attnpo.lab.studies.benchmark_settings import check_benchmarks
from attnpo.lab.studies.benchmarks import measure_benchmarks, tell_costs
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome, label_of
from attnpo.lab.studies.plan import Pace, StudyPlan, plan_study, watching
from attnpo.lab.studies.predictions import check_predicted, fix
from attnpo.lab.studies.scorers import with_model
from attnpo.lab.studies.study import (
    ONLY,
    Arm,
    Point,
    WorldSeed,
    error_text,
    expand_arms,
    grid_record,
    last_line,
    make_points,
    of_world,
    scorers_of,
)
from attnpo.lab.studies.workers import execute, on_gpu
from attnpo.run.combinations import LAYER
from attnpo.run.folders import make_folder
from attnpo.run.identity import identity_of
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result
from attnpo.schema import UserError, digest

log = logging.getLogger(__name__)


Arms = tuple[list[Arm], dict[tuple[str, str], Composed]]  # of all worlds, with the config of each by world and name
Show = Callable[[Outcome], None]


@dataclass
class StudyProgress:
    """Study at work in its folder: bases and lost worlds of the seeds so far, results and errors of their points."""

    plan: StudyPlan
    folder: Path
    pace: Pace
    bases: dict[WorldSeed, Basis] = field(default_factory=dict)
    missing: dict[WorldSeed, Exception] = field(default_factory=dict)
    done: list[tuple[Point, RunResult]] = field(default_factory=list)
    failed: list[tuple[Point, str]] = field(default_factory=list)
    folders: dict[Point, Path] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def worlds(self) -> list[str]:
        """Returns the names of the study's worlds."""
        return [*(self.plan.study.worlds or [ONLY])]

    def prepare(self, seed: int) -> bool:
        """Adds what the points of a seed stand on, or why it cannot be had; returns whether any world has a base."""
        before = time.perf_counter()
        found: dict[WorldSeed, Basis] = {}
        for world in self.worlds:
            label = Basis(world, seed).label
            try:
                with phase(f"{label}: base, pairs and judge pass"):
                    found[world, seed] = make_basis(self.plan, seed, world, self.folder)
            except Exception as error:  # noqa: BLE001  the other worlds and seeds go on
                self.missing[world, seed] = error
                log.error("%s cannot be prepared: %s", label, last_line(error_text(error)))
        if found:
            keep_costs(self.folder, found)
        self.pace.count_base(time.perf_counter() - before)
        every = self.bases | found
        self.bases = {at: every[at] for at in itertools.product(self.worlds, self.plan.seeds) if at in every}
        return bool(found)

    def arms(self) -> Arms:
        """Returns the arms as deep as their judges are found to be. UserError for two that would be the same runs."""
        study, truth = self.plan.study, self.plan.composer.truth
        arms: list[Arm] = []
        for world in self.worlds:  # one without any base is taken to be as deep as the others
            found = [basis.depth for basis in self.bases.values() if basis.world == world]
            depth = max(found or [basis.depth for basis in self.bases.values()])
            arms += expand_arms(study, depth, truth=truth, world=world)
        known = {
            (world, name): depth for (world, _), basis in self.bases.items() for name, depth in basis.depths.items()
        }
        own: dict[tuple[str, str], Composed] = {}
        depths: dict[tuple[str, str], int] = {}
        for arm in arms:
            at, source = (arm.world, arm.name), (arm.world, arm.name if arm.layer is None else study.layer_arm)
            layer = {} if arm.layer is None else {LAYER: arm.layer}
            made = self.plan.composed[source]
            own[at] = made.with_values(layer, [f"{LAYER}={arm.layer}"]) if layer else made
            depths |= {at: known[source]} if source in known else {}
        check_distinct(study, arms, own, depths)
        return arms, own

    def record(self, own: Mapping[tuple[str, str], Composed]) -> dict[str, Any]:
        """Returns what is fixed before the points run."""
        study = self.plan.study
        worlds: dict[str, Any] = {}
        for (world, _), basis in self.bases.items():
            worlds.setdefault(world, basis.facts["world"])
        record = grid_record(study, _settings(own), worlds if study.worlds else worlds[ONLY])
        if not self.plan.scorers:
            return record
        scored = {of_world(*at): keys for at, made in own.items() if (keys := scorers_of(made.overrides))}
        return {**record, "scorers": _settings(self.plan.scorers), "scored": scored}

    def outcome(self) -> Outcome:
        """Returns what the study has come to, as a finished one is told."""
        (arms, own), bases = self.arms(), self.bases
        return Outcome(
            self.plan.study,
            arms,
            [*self.done],
            [*self.failed],
            self.record(own),
            self.folder,
            time.perf_counter() - self.began,
            measured={
                name: {at: basis.measured[name] for at, basis in bases.items() if name in basis.measured}
                for name in self.plan.study.analyses
            },
            unmeasured=[
                f"FAILED analysis {name}, {basis.label}: {last_line(error)}"
                for basis in bases.values()
                for name, error in basis.unmeasured.items()
            ],
            costs={at: basis.cost for at, basis in bases.items()},
            warnings=[*self.said, *(line for basis in bases.values() for line in basis.warnings)],
            reads={(*at, arm): reads for at, basis in bases.items() for arm, reads in basis.reads.items()},
            scorers={at: basis.scorers.runs for at, basis in bases.items() if basis.scorers.runs},
            lost_scorers=[
                f"FAILED scorer {name}, {basis.label}: {last_line(error)}"
                for basis in bases.values()
                for name, error in basis.scorers.lost.items()
            ],
            folders=self.folders,
        )

    def run_points(self, points: Sequence[Point], own: Mapping[tuple[str, str], Composed]) -> None:
        """Adds results and errors of the points in their order; those without a base or weights are not run.

        A signal leaves what has ended until then.
        """
        study, pace = self.plan.study, self.pace
        done: dict[int, RunResult] = {}
        errors: dict[int, str] = {}
        jobs: dict[int, tuple[list[str], Path]] = {}
        accelerators: list[str] = []
        for i, point in enumerate(points):
            where, name = (point.arm.world, point.seed), point.arm.name
            if where in self.missing:
                errors[i] = f"not run: {error_text(self.missing[where])}"
                continue
            basis = self.bases[where]
            lost = basis.lost.get(name if point.arm.layer is None else study.layer_arm)
            if lost is not None:
                errors[i] = f"not run: {lost}"
                continue
            made = point_config(own[point.arm.world, point.arm.name], point, basis.scorers.paths)
            if study.benchmarks and len((point.arm.grid or study.grid).overrides()) == 1:
                made = with_model(made)  # sure to be chosen: its arm has no other point
            at = point_folder(self.folder, point, identity_of(made.config).result, basis.facts_of(study, point.arm))
            self.folders[point] = at
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
            mark_training_started()
            with watching(labels, [at for _, at in jobs.values()], pace) as ended:
                for job, result, error in execute(list(jobs.values()), self.plan.workers, on_gpu(accelerators)):
                    i = places[job]
                    ended(job)
                    count = f"point {pace.over}/{pace.points} {points[i].label}"
                    if result is not None:
                        done[i] = result
                        log.info("%s: %s; %s", count, headline(result), pace.time_left())
                    else:
                        errors[i] = error or ""
                        log.error("%s failed: %s", count, last_line(errors[i]))
        finally:
            self.done += [(points[i], done[i]) for i in sorted(done)]
            self.failed += [(points[i], errors[i]) for i in sorted(errors)]


def _settings(composed: Mapping[tuple[str, str], Composed]) -> dict[str, dict[str, object]]:
    return {of_world(*at): arm_identity(identity_of(made.config).result) for at, made in composed.items()}


def run_study(
    cfg: FitConfig, folder: Path, show: Show = lambda outcome: None, plan: StudyPlan | None = None
) -> Outcome:
    """Returns all points of ``cfg.study``; results stay in ``folder``, where a repeated command finds them.

    Seed after seed, base and points: ``show`` gets what there is after each seed but the last, and when a signal ends
    the study. A point, an arm, a seed, a world or an analysis that fails is named in the outcome and stops nothing
    else.

    Raises:
        UserError: as ``plan_study``, or every point failed.
    """
    plan = plan_study(cfg) if plan is None else plan
    study, seeds = plan.study, plan.seeds
    make_folder(folder)
    so_far = StudyProgress(plan, folder, plan.pace())
    begun = False
    try:
        for place, seed in enumerate(seeds):
            if not so_far.prepare(seed):
                if seed == seeds[-1] and not so_far.bases:
                    raise next(iter(so_far.missing.values()))
                continue
            arms, own = so_far.arms()
            if not begun:
                begun = True
                check_predicted(study, arms)
                so_far.said += fix(study, folder)
                log.info("study %s: grid, arms and world fixed, digest %s", study.name, digest(so_far.record(own))[:16])
                if study.benchmarks:
                    check_benchmarks(plan.evaluations, next(basis.model for basis in so_far.bases.values()))
                    tell_costs(plan.evaluations, arms, so_far.bases, folder)
            points = make_points(study, arms, [seed])
            so_far.pace.points = so_far.pace.over + len(points) * (len(seeds) - place)
            so_far.run_points(points, own)
            if so_far.done and seed != seeds[-1]:
                show(so_far.outcome())
    except KeyboardInterrupt:
        if so_far.done:
            show(so_far.outcome())
        raise
    arms, own = so_far.arms()
    every = make_points(study, arms, seeds)
    so_far.failed += [
        (point, f"not run: {error_text(so_far.missing[point.arm.world, point.seed])}")
        for point in every
        if all((world, point.seed) in so_far.missing for world in so_far.worlds)
    ]
    order = {point.label: i for i, point in enumerate(every)}
    so_far.failed.sort(key=lambda item: order.get(item[0].label, len(order)))
    if not so_far.done:
        raise UserError(f"study {study.name}: all {len(order)} points failed; the first with: {so_far.failed[0][1]}")
    outcome = so_far.outcome()
    if not study.benchmarks:
        return outcome
    measured = measure_benchmarks(plan.evaluations, outcome, own, so_far.bases, plan.workers)
    return replace(measured, seconds=time.perf_counter() - so_far.began)


def headline(result: RunResult) -> str:
    """Returns the numbers of a point's log line."""
    seconds = f"({result.seconds['all']:.0f} s)"
    if result.truth is not None:
        scores = result.truth["validation"].numbers
        return f"validation reward {scores['reward']:.3f}, KL {scores['kl']:.2f} {seconds}"
    return f"val/loss {result.metrics.get('val/loss', math.nan):.4f} {seconds}"
