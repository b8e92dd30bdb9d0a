"""Runs a study: prepares each world and seed once, runs all points not yet finished, and collects the results."""

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
from attnpo.lab.studies.arms import ComposedConfig, arm_identity, check_distinct_arms, point_config, point_folder
from attnpo.lab.studies.benchmark_settings import check_benchmarks
from attnpo.lab.studies.benchmarks import log_grading_cost, measure_benchmarks
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome, group_by_point, points_between, values_label
from attnpo.lab.studies.plan import StudyPlan, TimeEstimate, plan_study, show_points_progress
from attnpo.lab.studies.predictions import check_prediction_arms, register_predictions
from attnpo.lab.studies.scorers import with_checkpoint
from attnpo.lab.studies.shared_inputs import SharedInputs, prepare_shared_inputs, save_costs
from attnpo.lab.studies.study import (
    ONLY,
    Arm,
    Point,
    WorldSeed,
    error_text,
    expand_arms,
    last_line,
    make_points,
    name_in_world,
    scorer_names_by_key,
    settings_record,
)
from attnpo.lab.studies.workers import needs_gpu, run_jobs
from attnpo.lab.testbed.scoring import TruthScorer
from attnpo.run.combinations import LAYER
from attnpo.run.folders import make_folder
from attnpo.run.identity import make_identity
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result
from attnpo.schema import UserError, digest

log = logging.getLogger(__name__)


# Arms of all worlds, and their configs by world and name.
Arms = tuple[list[Arm], dict[tuple[str, str], ComposedConfig]]
Show = Callable[[Outcome], None]


@dataclass
class StudyProgress:
    """State of a running study: prepared worlds and seeds, and the points' results and errors so far.

    ``missing``: errors of worlds and seeds that could not be prepared. ``said``: warnings to show in the report.
    """

    plan: StudyPlan
    folder: Path
    pace: TimeEstimate
    bases: dict[WorldSeed, SharedInputs] = field(default_factory=dict)
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

    def prepare_seed(self, seed: int) -> bool:
        """Prepares a seed's shared inputs in each world; returns whether this succeeded for any of them."""
        before = time.perf_counter()
        found: dict[WorldSeed, SharedInputs] = {}
        for world in self.worlds:
            label = SharedInputs(world, seed).label
            try:
                with phase(f"{label}: base, pairs and judge pass"):
                    found[world, seed] = prepare_shared_inputs(self.plan, seed, world, self.folder)
            except Exception as error:  # noqa: BLE001  the other worlds and seeds go on
                self.missing[world, seed] = error
                log.error("%s could not be prepared: %s", label, last_line(error_text(error)))
        if found:
            save_costs(self.folder, found)
        self.pace.add_preparation_time(time.perf_counter() - before)
        every = self.bases | found
        self.bases = {at: every[at] for at in itertools.product(self.worlds, self.plan.seeds) if at in every}
        return bool(found)

    def expand_arms(self) -> Arms:
        """Returns all arms and their configs, with the layer arm split into one arm per layer of its judge.

        Raises:
            UserError: two arms would train identical runs.
        """
        study, truth = self.plan.study, self.plan.composer.truth
        arms: list[Arm] = []
        for world in self.worlds:  # a world without a base takes the depth of the others
            found = [basis.depth for basis in self.bases.values() if basis.world == world]
            depth = max(found or [basis.depth for basis in self.bases.values()])
            arms += expand_arms(study, depth, truth=truth, world=world)
        known = {
            (world, name): depth for (world, _), basis in self.bases.items() for name, depth in basis.depths.items()
        }
        own: dict[tuple[str, str], ComposedConfig] = {}
        depths: dict[tuple[str, str], int] = {}
        for arm in arms:
            at, source = (arm.world, arm.name), (arm.world, arm.name if arm.layer is None else study.layer_arm)
            layer = {} if arm.layer is None else {LAYER: arm.layer}
            made = self.plan.composed[source]
            own[at] = made.with_values(layer, [f"{LAYER}={arm.layer}"]) if layer else made
            depths |= {at: known[source]} if source in known else {}
        check_distinct_arms(study, arms, own, depths)
        return arms, own

    def study_record(self, own: Mapping[tuple[str, str], ComposedConfig]) -> dict[str, Any]:
        """Returns the settings fixed before any point runs, for the study's digest."""
        study = self.plan.study
        worlds: dict[str, Any] = {}
        for (world, _), basis in self.bases.items():
            worlds.setdefault(world, basis.facts["world"])
        record = settings_record(study, _arm_settings(own), worlds if study.worlds else worlds[ONLY])
        if not self.plan.scorers:
            return record
        scored = {name_in_world(*at): keys for at, made in own.items() if (keys := scorer_names_by_key(made.overrides))}
        return {**record, "scorers": _arm_settings(self.plan.scorers), "scored": scored}

    def make_outcome(self) -> Outcome:
        """Returns the results so far as if the study had finished."""
        (arms, own), bases = self.expand_arms(), self.bases
        return Outcome(
            self.plan.study,
            arms,
            [*self.done],
            [*self.failed],
            self.study_record(own),
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

    def run_points(self, points: Sequence[Point], own: Mapping[tuple[str, str], ComposedConfig]) -> None:
        """Runs points and appends their results and errors, in the given order.

        Points without a base or weights count as failed. If interrupted, still appends the results obtained so far.
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
            made = point_config(own[point.arm.world, point.arm.name], point, basis.scorers.model_paths)
            if study.benchmarks and len((point.arm.grid or study.grid).point_overrides()) == 1:
                made = with_checkpoint(made)  # certain to be chosen, as the arm's only point
            at = point_folder(
                self.folder, point, make_identity(made.config).result, basis.arm_fingerprint(study, point.arm)
            )
            self.folders[point] = at
            before, problem = read_result(at)
            if problem is not None:
                log.warning("%s: %s; treating the point as unfinished and rerunning it", at, problem)
            if before is not None:
                done[i] = before
            else:
                jobs[i] = (made.overrides, at)
                accelerators.append(made.config.trainer.accelerator)
        if done:
            log.info("reusing the results of %d finished points (%d in total)", len(done), len(points))
        pace.over += len(points) - len(jobs)
        places = list(jobs)
        at_work = [points[i] for i in places]
        labels = [f"{point.arm.label} {values_label(point.values)} seed {point.seed}" for point in at_work]
        try:
            mark_training_started()
            with show_points_progress(labels, [at for _, at in jobs.values()], pace) as ended:
                for job, result, error in run_jobs(list(jobs.values()), self.plan.workers, needs_gpu(accelerators)):
                    i = places[job]
                    ended(job)
                    count = f"point {pace.over}/{pace.points} {points[i].label}"
                    if result is not None:
                        done[i] = result
                        log.info("%s: %s; %s", count, result_headline(result), pace.time_left())
                    else:
                        errors[i] = error or ""
                        log.error("%s failed: %s", count, last_line(errors[i]))
        finally:
            self.done += [(points[i], done[i]) for i in sorted(done)]
            self.failed += [(points[i], errors[i]) for i in sorted(errors)]


def _arm_settings(composed: Mapping[tuple[str, str], ComposedConfig]) -> dict[str, dict[str, object]]:
    return {name_in_world(*at): arm_identity(make_identity(made.config).result) for at, made in composed.items()}


def run_study(
    cfg: FitConfig, folder: Path, show: Show = lambda outcome: None, plan: StudyPlan | None = None
) -> Outcome:
    """Runs all points of ``cfg.study``, seed by seed, reusing results already saved in ``folder``.

    ``show`` is called with the results so far after each seed except the last, and on an interrupt. If a point, arm,
    seed, world or analysis fails, the failure is recorded in the outcome and the others continue.

    Raises:
        UserError: as in ``plan_study``, or if all points failed.
    """
    plan = plan_study(cfg) if plan is None else plan
    study, seeds = plan.study, plan.seeds
    make_folder(folder)
    so_far = StudyProgress(plan, folder, plan.time_estimate())
    begun = False
    try:
        for place, seed in enumerate(seeds):
            if not so_far.prepare_seed(seed):
                if seed == seeds[-1] and not so_far.bases:
                    raise next(iter(so_far.missing.values()))
                continue
            arms, own = so_far.expand_arms()
            if not begun:
                begun = True
                check_prediction_arms(study, arms)
                so_far.said += register_predictions(study, folder)
                log.info(
                    "study %s: grid, arms and worlds are now fixed; digest %s",
                    study.name,
                    digest(so_far.study_record(own))[:16],
                )
                truth = next(iter(plan.composed.values())).config.truth
                if isinstance(truth, TruthScorer) and len(seeds) > 1 and truth.prompts > 1:
                    log.info(
                        "%d seeds, %d prompts, responses per prompt: %d; at equal KL, 80 %% of such studies detect a "
                        "true difference of %.3f; smaller differences look like ties",
                        *(len(seeds), truth.prompts, truth.samples_per_prompt, truth.smallest_effect(len(seeds))),
                    )
                if study.benchmarks:
                    check_benchmarks(plan.evaluations, next(basis.model for basis in so_far.bases.values()))
                    log_grading_cost(plan.evaluations, arms, so_far.bases, folder)
            points = make_points(study, arms, [seed])
            so_far.pace.points = so_far.pace.over + len(points) * (len(seeds) - place)
            so_far.run_points(points, own)
            for _ in range(study.bisect if plan.composer.truth else 0):
                between = points_between(group_by_point(so_far.done), study.kl_levels, seed)
                so_far.pace.points += len(between)
                so_far.run_points(between, own)
            if so_far.done and seed != seeds[-1]:
                show(so_far.make_outcome())
    except KeyboardInterrupt:
        if so_far.done:
            show(so_far.make_outcome())
        raise
    arms, own = so_far.expand_arms()
    every = make_points(study, arms, seeds)
    so_far.failed += [
        (point, f"not run: {error_text(so_far.missing[point.arm.world, point.seed])}")
        for point in every
        if all((world, point.seed) in so_far.missing for world in so_far.worlds)
    ]
    order = {point.label: i for i, point in enumerate(every)}
    so_far.failed.sort(key=lambda item: order.get(item[0].label, len(order)))
    if not so_far.done:
        raise UserError(f"study {study.name}: all {len(order)} points failed; first error: {so_far.failed[0][1]}")
    outcome = so_far.make_outcome()
    if not study.benchmarks:
        return outcome
    measured = measure_benchmarks(plan.evaluations, outcome, own, so_far.bases, plan.workers)
    return replace(measured, seconds=time.perf_counter() - so_far.began)


def result_headline(result: RunResult) -> str:
    """Formats a finished point's main scores and time, for a log line."""
    seconds = f"({result.seconds['all']:.0f} s)"
    if result.truth is not None:
        scores = result.truth["validation"].numbers
        return f"validation reward {scores['reward']:.3f}, KL {scores['kl']:.2f} {seconds}"
    return f"val/loss {result.metrics.get('val/loss', math.nan):.4f} {seconds}"
