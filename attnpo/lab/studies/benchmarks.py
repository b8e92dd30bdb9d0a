"""Benchmarks as outcomes of a study: checked before anything is trained, then measured row by row.

The rows are the base, the chosen point of every arm, and published models. What is measured lies in
``benchmarks/BENCHMARK/ROW`` of the study's folder; a repeated command goes on with it.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnpo.evaluation.base import Benchmark
from attnpo.evaluation.chat import Grader
from attnpo.evaluation.evaluating import Grading, estimated, run_evaluation
from attnpo.evaluation.jsonl_store import GRADES, ReplyStore
from attnpo.evaluation.result import EvaluationResult
from attnpo.evaluation.session import GradingLimits
from attnpo.lab.studies.arms import Composed
from attnpo.lab.studies.bases import Basis
from attnpo.lab.studies.benchmark_settings import OF_BASE, Evaluations, grammar_of
from attnpo.lab.studies.exports import export_chosen
from attnpo.lab.studies.study import BASE_ROW, Arm, Outcome, RowScore, WorldSeed, error_text, last_line
from attnpo.lab.studies.workers import Workers
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, clean
from attnpo.system.locks import locked

log = logging.getLogger(__name__)

BENCHMARKS = "benchmarks"


@dataclass(frozen=True)
class Measurement:
    """A model that is measured for the row ``name`` of a world.

    ``folder`` names its files, ``label`` is what tables of its own call it, ``base`` the base of its world and seed.
    ``lost``: why there is no model.
    """

    world: str
    name: str
    label: str
    folder: str
    model: ModelSpec
    base: str
    lost: str = ""


# ------------------------------------------------------------------------------------------------ before training


def tell_costs(evaluations: Evaluations, arms: Sequence[Arm], bases: Mapping[WorldSeed, Basis], folder: Path) -> None:
    """Logs how many calls the grading of the whole study takes at most, and their tokens and dollars."""
    study = evaluations.study
    model = next(basis.model for basis in bases.values() if basis.model is not None)
    points = sum(arm.world == world for arm in arms for world, _ in bases)
    rows = points + len(dict.fromkeys(_base_folder(basis) for basis in bases.values())) + len(study.published)
    for name in study.benchmarks:
        made = evaluations.config(name, model, model.path, evaluations.grammar)
        if not isinstance(made.benchmark, Benchmark):
            log.info("study %s, benchmark %s: %d models, measured without a grader", study.name, name, rows)
            continue
        one = estimated(made.benchmark, Grading(made.grader, made.grading, made.limits), folder / BENCHMARKS / name)
        every = replace(
            one,
            calls=rows * one.calls,
            input_tokens=rows * one.input_tokens,
            most_output_tokens=rows * one.most_output_tokens,
            dollars=None if one.dollars is None else rows * one.dollars,
        )
        log.info(
            "study %s, benchmark %s: %d models with %d grading calls each, %d calls in all: %s; answers are counted at "
            "their longest, and what is stored already is not asked again",
            *(study.name, name, rows, one.calls, every.calls, every.rest),
        )


# ------------------------------------------------------------------------------------------------ after training


def measure_benchmarks(
    evaluations: Evaluations,
    outcome: Outcome,
    own: Mapping[tuple[str, str], Composed],
    bases: Mapping[WorldSeed, Basis],
    workers: Workers,
) -> Outcome:
    """Returns the outcome with the scores of its rows on ``study.benchmarks``.

    ``workers`` run chosen points again that left no model. What fails of one row is named and stops nothing else.
    """
    exports, lost, said = export_chosen(outcome, own, bases, workers)
    several = len({seed for _, seed in bases}) > 1
    wanted = [*_of_bases(bases)]
    for export in exports:
        point = export.point
        base = _path(bases[point.arm.world, point.seed])
        label = f"{point.arm.label}, seed {point.seed}" if several else point.arm.label
        model = ModelSpec(str(export.model))
        wanted.append(Measurement(point.arm.world, point.arm.name, label, export.run.name, model, base))
    wanted += [
        Measurement(point.arm.world, point.arm.name, point.label, "", ModelSpec(""), "", why)
        for point, why in lost.items()
    ]
    wanted += _of_published(outcome, bases)
    grammars = {world: grammar_of(found.config.values.get("prepare")) for (world, _), found in own.items()}
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
                done[name, one.folder] = _measure(evaluations, name, one, grammars.get(one.world, {}), folder)
            found = done[name, one.folder or one.label]
            if isinstance(found, str):
                failures.append(f"FAILED benchmark {name}, {one.label}: {found}")
    return replace(
        outcome,
        benchmarks={
            name: {row: row_score([done[name, place] for place in places]) for row, places in rows.items()}
            for name in outcome.study.benchmarks
        },
        unmeasured=[*outcome.unmeasured, *dict.fromkeys(failures)],
        warnings=[*outcome.warnings, *said],
    )


def _of_bases(bases: Mapping[WorldSeed, Basis]) -> Iterator[Measurement]:
    """Yields the base of every world and seed; one that several share is measured once."""
    folders = {place: _base_folder(basis) for place, basis in bases.items()}
    for (world, seed), basis in bases.items():
        if basis.model is not None:
            label = BASE_ROW if len(set(folders.values())) == 1 else f"{BASE_ROW}, {basis.label}"
            yield Measurement(world, BASE_ROW, label, folders[world, seed], basis.model, basis.model.path)


def _base_folder(basis: Basis) -> str:
    return f"{BASE_ROW}-{digest([basis.facts.get('model'), basis.facts.get('chat')])[:8]}"


def _path(basis: Basis) -> str:
    return OF_BASE if basis.model is None else basis.model.path


def _of_published(outcome: Outcome, bases: Mapping[WorldSeed, Basis]) -> Iterator[Measurement]:
    for world in outcome.worlds:
        base = next((_path(basis) for (of, _), basis in bases.items() if of == world), OF_BASE)
        for path in outcome.study.published:
            try:
                weights = digest(weights_fingerprint(path))[:8]
            except UserError as problem:
                yield Measurement(world, path, path, "", ModelSpec(path), base, str(problem))
                continue
            yield Measurement(world, path, path, f"{clean(path)}-{weights}", ModelSpec(path), base)


def _measure(
    evaluations: Evaluations, benchmark: str, one: Measurement, grammar: Mapping[str, Json], folder: Path
) -> EvaluationResult | str:
    """Returns the result of one model on one benchmark, which is kept in ``folder``, or why there is none."""
    log.info("benchmark %s: %s", benchmark, one.label)
    try:
        made = evaluations.config(benchmark, one.model, one.base, grammar, label=one.label, output=str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, made.lock_timeout):
            for key, left in bounds_left(made.limits, made.grader, folder).items():
                made = made.with_value(key, left)
            result = run_evaluation(made, folder)
    except Exception as error:  # noqa: BLE001  the other rows go on
        log.error("benchmark %s, %s: %s", benchmark, one.label, error_text(error))
        return last_line(error_text(error))
    if result is None:
        return "grading calls are left without a reply; the same command asks them again"
    score = result.score(result.main)
    if score is None or not math.isfinite(score.mean):
        return f"its {result.main} is no number; see {folder}"
    return result


def bounds_left(limits: GradingLimits, grader: Grader, folder: Path) -> dict[str, float]:
    """Returns what the study's other evaluations have left of ``limits.max_cost`` and ``limits.max_calls``, by key.

    Of one evaluation they bound all replies in its folder; in a study all in the folders beside it, too.
    """
    if limits.max_cost is None and limits.max_calls is None:
        return {}
    others = [path.parent for path in folder.parent.glob(f"*/{GRADES}") if path.parent != folder]
    calls, cost, identity, price = limits.max_calls, limits.max_cost, grader.identity(), grader.price
    replies = [reply for other in others for reply in ReplyStore(other).replies(identity)]
    spent = (price.of(reply.input_tokens, reply.output_tokens) for reply in replies)
    return {
        **({} if calls is None else {"limits.max_calls": max(0, calls - len(replies))}),
        **({} if cost is None else {"limits.max_cost": max(0.0, cost - math.fsum(spent))}),
    }


def row_score(found: Sequence[EvaluationResult | str]) -> RowScore:
    """Returns a row's score from its evaluations, one per seed, those that failed as texts."""
    results = [each for each in found if not isinstance(each, str)]
    scores = [score for each in results if (score := each.score(each.main)) is not None]
    if not scores:
        return RowScore(seeds=len(found))
    spreads = [score.grading for score in scores if score.grading is not None]
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.counts)
    return RowScore(
        name=scores[0].name,
        values=tuple(score.mean for score in scores),
        seeds=len(found),
        interval=scores[0].interval if len(scores) == 1 else None,
        # Evaluations are graded independently of each other.
        grading=math.sqrt(sum(spread**2 for spread in spreads)) / len(spreads) if spreads else None,
        rounds=max(len(score.rounds) for score in scores),
        questions=scores[0].questions,
        counts=dict(counts),
        higher_is_better=scores[0].higher_is_better,
    )
