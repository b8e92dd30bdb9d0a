"""Evaluates a study's models on benchmarks: the base, each arm at its best point, and published models.

Evaluations are saved to ``benchmarks/BENCHMARK/ROW`` in the study's folder; running the command again resumes them.
Grid points save no checkpoints, so the best point is rerun to save its model; if an arm has only one point, its first
run already saves the model.
"""

import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnpo.evaluation.base import Benchmark
from attnpo.evaluation.chat import Grader
from attnpo.evaluation.evaluating import Grading, estimate_grading, run_evaluation
from attnpo.evaluation.jsonl_store import GRADES, ReplyStore
from attnpo.evaluation.result import EvaluationResult
from attnpo.evaluation.session import GradingLimits
from attnpo.lab.studies.arms import ComposedConfig, point_config, point_folder
from attnpo.lab.studies.benchmark_settings import OF_BASE, EvaluationConfigs, prepared_grammar
from attnpo.lab.studies.outcome import Outcome, RowScore
from attnpo.lab.studies.scorers import MODEL, has_intact_model, strip_training_state, with_checkpoint
from attnpo.lab.studies.shared_inputs import SharedInputs
from attnpo.lab.studies.study import BASE_ROW, Arm, Point, WorldSeed, error_text, last_line
from attnpo.lab.studies.workers import WorkerSettings, needs_gpu, run_jobs
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.identity import make_identity
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, safe_filename
from attnpo.system.locks import folder_lock

log = logging.getLogger(__name__)

BENCHMARKS = "benchmarks"
EXPORTS = "exports"
CLOSE = 1e-6  # relative tolerance, since GPU kernels may sum in any order


@dataclass(frozen=True)
class BenchmarkTarget:
    """Model to evaluate for the table row ``name`` of a world.

    ``label``: the model's name in evaluation reports. ``folder``: name of the evaluation folder. ``base``: path of the
    base for the model's world and seed. ``lost``: why the model is missing; empty if it exists.
    """

    world: str
    name: str
    label: str
    folder: str
    model: ModelSpec
    base: str
    lost: str = ""


# ------------------------------------------------------------------------------------------------ before training


def log_grading_cost(
    evaluations: EvaluationConfigs, arms: Sequence[Arm], bases: Mapping[WorldSeed, SharedInputs], folder: Path
) -> None:
    """Logs the maximum number of grading calls in the whole study, and their token counts and cost."""
    study = evaluations.study
    model = next(basis.model for basis in bases.values() if basis.model is not None)
    points = sum(arm.world == world for arm in arms for world, _ in bases)
    rows = points + len({_base_folder(basis) for basis in bases.values()}) + len(study.published)
    for name in study.benchmarks:
        made = evaluations.compose_config(name, model, model.path, evaluations.grammar)
        if not isinstance(made.benchmark, Benchmark):
            log.info("study %s, benchmark %s: %d models, no grader needed", study.name, name, rows)
            continue
        one = estimate_grading(
            made.benchmark, Grading(made.grader, made.grading, made.limits), folder / BENCHMARKS / name
        )
        counted = ("calls", "input_tokens", "most_output_tokens", "dollars")
        numbers: dict[str, Any] = {field: getattr(one, field) for field in counted}
        numbers = {field: None if of is None else rows * of for field, of in numbers.items()}
        every = replace(one, **numbers)
        log.info(
            "study %s, benchmark %s: %d models with %d grading calls each, %d calls in total: %s; this assumes answers "
            "of maximum length; calls with a stored reply are not repeated",
            *(study.name, name, rows, one.calls, every.calls, every.describe_cost()),
        )


# ------------------------------------------------------------------------------------------------ after training


def measure_benchmarks(
    evaluations: EvaluationConfigs,
    outcome: Outcome,
    own: Mapping[tuple[str, str], ComposedConfig],
    bases: Mapping[WorldSeed, SharedInputs],
    workers: WorkerSettings,
) -> Outcome:
    """Evaluates all rows on ``study.benchmarks`` and returns the outcome with the scores added.

    ``workers`` rerun the best points that have not saved a model. If one row fails, the failure is reported and the
    other rows continue.
    """
    exports, lost, said = export_best_models(outcome, own, bases, workers)
    several = len({seed for _, seed in bases}) > 1
    wanted = [*_base_targets(bases)]
    for export in exports:
        arm, seed = export.point.arm, export.point.seed
        label, model = f"{arm.label}, seed {seed}" if several else arm.label, ModelSpec(str(export.model_folder))
        wanted.append(
            BenchmarkTarget(arm.world, arm.name, label, export.run.name, model, _base_path(bases[arm.world, seed]))
        )
    for point, why in lost.items():
        wanted.append(BenchmarkTarget(point.arm.world, point.arm.name, point.label, "", ModelSpec(""), "", why))
    wanted += _published_targets(outcome, bases)
    grammars = {world: prepared_grammar(found.config.values.get("prepare")) for (world, _), found in own.items()}
    done: dict[tuple[str, str], EvaluationResult | str] = {}
    failures: list[str] = []
    rows: dict[tuple[str, str], dict[str, None]] = {}
    for one in wanted:
        rows.setdefault((one.world, one.name), {})[one.folder or one.label] = None
        for name in outcome.study.benchmarks:
            if one.lost:
                done[name, one.label] = one.lost
            elif (name, one.folder) not in done:
                folder = outcome.folder / BENCHMARKS / name / one.folder
                done[name, one.folder] = _evaluate_target(evaluations, name, one, grammars.get(one.world, {}), folder)
            found = done[name, one.folder or one.label]
            if isinstance(found, str):
                failures.append(f"FAILED benchmark {name}, {one.label}: {found}")
    return replace(
        outcome,
        benchmarks={
            name: {row: combine_seed_scores([done[name, place] for place in places]) for row, places in rows.items()}
            for name in outcome.study.benchmarks
        },
        unmeasured=[*outcome.unmeasured, *dict.fromkeys(failures)],
        warnings=[*outcome.warnings, *said],
    )


def _base_targets(bases: Mapping[WorldSeed, SharedInputs]) -> Iterator[BenchmarkTarget]:
    """Yields the base model of each world and seed; a base that several of them share is evaluated only once."""
    folders = {place: _base_folder(basis) for place, basis in bases.items()}
    for (world, seed), basis in bases.items():
        if basis.model is not None:
            label = BASE_ROW if len(set(folders.values())) == 1 else f"{BASE_ROW}, {basis.label}"
            yield BenchmarkTarget(world, BASE_ROW, label, folders[world, seed], basis.model, basis.model.path)


def _base_folder(basis: SharedInputs) -> str:
    return f"{BASE_ROW}-{digest([basis.facts.get('model'), basis.facts.get('chat')])[:8]}"


def _base_path(basis: SharedInputs) -> str:
    return OF_BASE if basis.model is None else basis.model.path


def _published_targets(outcome: Outcome, bases: Mapping[WorldSeed, SharedInputs]) -> Iterator[BenchmarkTarget]:
    for world in outcome.worlds:
        base = next((_base_path(basis) for (of, _), basis in bases.items() if of == world), OF_BASE)
        for path in outcome.study.published:
            folder = lost = ""
            try:
                folder = f"{safe_filename(path)}-{digest(weights_fingerprint(path))[:8]}"
            except UserError as problem:
                lost = str(problem)
            yield BenchmarkTarget(world, path, path, folder, ModelSpec(path), base, lost)


def _evaluate_target(
    evaluations: EvaluationConfigs, benchmark: str, one: BenchmarkTarget, grammar: Mapping[str, Json], folder: Path
) -> EvaluationResult | str:
    """Evaluates one model on one benchmark and saves to ``folder``; returns the result, or an error message."""
    log.info("benchmark %s: evaluating %s", benchmark, one.label)
    try:
        made = evaluations.compose_config(benchmark, one.model, one.base, grammar, label=one.label, output=str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, made.lock_timeout):
            for key, left in remaining_limits(made.limits, made.grader, folder).items():
                made = made.with_value(key, left)
            result = run_evaluation(made, folder)
    except Exception as error:  # noqa: BLE001  the other rows go on
        log.error("benchmark %s, %s failed: %s", benchmark, one.label, error_text(error))
        return last_line(error_text(error))
    if result is None:
        return "some grading calls received no reply; run the same command again to retry them"
    score = result.score(result.main)
    if score is None or not math.isfinite(score.mean):
        return f"the score {result.main} is not a finite number; see {folder}"
    return result


def remaining_limits(limits: GradingLimits, grader: Grader, folder: Path) -> dict[str, float]:
    """Returns how much of ``limits.max_cost`` and ``limits.max_calls`` other evaluations have left, by key.

    Outside a study, these limits apply to a single evaluation. In a study, they apply to the total over all sibling
    folders.
    """
    if limits.max_cost is None and limits.max_calls is None:
        return {}
    others = [path.parent for path in folder.parent.glob(f"*/{GRADES}") if path.parent != folder]
    calls, cost, identity, price = limits.max_calls, limits.max_cost, grader.identity(), grader.price
    replies = [reply for other in others for reply in ReplyStore(other).replies(identity)]
    spent = (price.cost(reply.input_tokens, reply.output_tokens) for reply in replies)
    return {
        **({} if calls is None else {"limits.max_calls": max(0, calls - len(replies))}),
        **({} if cost is None else {"limits.max_cost": max(0.0, cost - math.fsum(spent))}),
    }


def combine_seed_scores(found: Sequence[EvaluationResult | str]) -> RowScore:
    """Combines a row's evaluations, one per seed, into one score; failed evaluations are passed as error messages."""
    results = [each for each in found if not isinstance(each, str)]
    scores = [score for each in results if (score := each.score(each.main)) is not None]
    if not scores:
        return RowScore(seeds=len(found))
    spreads = [score.grading for score in scores if score.grading is not None]
    return RowScore(
        name=scores[0].name,
        values=tuple(score.mean for score in scores),
        seeds=len(found),
        interval=scores[0].interval if len(scores) == 1 else None,
        # Evaluations are graded independently of each other.
        grading=math.sqrt(sum(spread**2 for spread in spreads)) / len(spreads) if spreads else None,
        rounds=max(len(score.rounds) for score in scores),
        questions=scores[0].questions,
        counts=sum((Counter(result.counts) for result in results), Counter[str]()),
        higher_is_better=scores[0].higher_is_better,
    )


# ------------------------------------------------------------------------------------------------ model folders


@dataclass(frozen=True)
class ModelExport:
    """Best point and the run folder with its model. ``wanted``: whether the user asked for all checkpoints."""

    point: Point
    result: RunResult
    made: ComposedConfig
    run: Path
    wanted: bool

    @property
    def model_folder(self) -> Path:
        """Returns the model folder."""
        return self.run / MODEL


def export_best_models(
    outcome: Outcome,
    own: Mapping[tuple[str, str], ComposedConfig],
    bases: Mapping[WorldSeed, SharedInputs],
    workers: WorkerSettings,
) -> tuple[list[ModelExport], dict[Point, str], list[str]]:
    """Saves the models of all best points; returns the exports, error messages by point, and warnings.

    A saved model is reused if its settings and inputs are unchanged; the folder name contains a digest of both.
    """
    study, folder = outcome.study, outcome.folder
    chosen: list[ModelExport] = []
    for world in outcome.worlds:
        for best in outcome.best_points(world).values():
            for seed, result in zip(best.seeds, best.results, strict=True):
                point, basis = Point(best.arm, best.values, seed), bases[world, seed]
                plain = point_config(own[world, best.arm.name], point, basis.scorers.model_paths)
                made = with_checkpoint(plain)
                at = point_folder(
                    folder, point, make_identity(made.config).result, basis.arm_fingerprint(study, best.arm)
                )
                run = at if has_intact_model(at) else folder / EXPORTS / at.name
                chosen.append(ModelExport(point, result, made, run, bool(plain.raw.callbacks.checkpoints)))
    lost = _rerun_points(study.name, [export for export in chosen if not has_intact_model(export.run)], workers)
    there = [export for export in chosen if export.point not in lost]
    for export in there:
        if not export.wanted or export.run.parent.name == EXPORTS:
            strip_training_state(export.run)
    return there, lost, [line for export in there if (line := _score_change_warning(export)) is not None]


def _rerun_points(study: str, exports: list[ModelExport], workers: WorkerSettings) -> dict[Point, str]:
    lost: dict[Point, str] = {}
    if exports:
        log.info("study %s: rerunning %d selected points to save their models", study, len(exports))
    for export in exports:
        if read_result(export.run)[0] is not None:
            log.warning("%s: the model is missing or damaged; rerunning the point", export.run)
            shutil.rmtree(export.run)
    jobs = [(export.made.overrides, export.run) for export in exports]
    alone = needs_gpu(export.made.config.trainer.accelerator for export in exports)
    for place, result, error in run_jobs(jobs, workers, alone):
        if result is None:
            point = exports[place].point
            lost[point] = f"the rerun to save the model failed: {last_line(error or '')}"
            log.error("%s: %s", point.label, lost[point])
    return lost


def _score_change_warning(export: ModelExport) -> str | None:
    """Returns a warning if the scores of the run that saved the model differ from those of the point's original run."""
    again = read_result(export.run)[0]
    pairs = (
        {}
        if again is None
        else {name: (_comparison_score(export.result, name), _comparison_score(again, name)) for name in COMPARED}
    )
    for name, (was, now) in pairs.items():
        if not (math.isclose(was, now, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(was) and math.isnan(now))):
            return (
                f"WARNING {export.point.label}: when the point was rerun to save its model, {name} was {now:.6g} "
                f"instead of {was:.6g}; benchmark scores are from the new model, but the other "
                f"columns are from the original run"
            )
    return None


COMPARED = ("validation reward", "val/loss")


def _comparison_score(result: RunResult, name: str) -> float:
    if name in result.metrics or result.truth is None:
        return result.metrics.get(name, math.nan)
    return result.truth["validation"].numbers["reward"] if name == COMPARED[0] else math.nan
