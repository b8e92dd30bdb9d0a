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
from typing import cast

from omegaconf import OmegaConf

from attnpo.config.compose import compose, groups, read
from attnpo.config.reader import did_you_mean
from attnpo.evaluation.base import Benchmark
from attnpo.evaluation.evaluate_config import EvaluateConfig
from attnpo.evaluation.evaluating import estimated, run_evaluation
from attnpo.evaluation.grading.store import GRADES, ReplyStore
from attnpo.evaluation.implicit_reward import ImplicitReward
from attnpo.evaluation.result import EvaluationResult
from attnpo.lab.studies.arms import Composed, word
from attnpo.lab.studies.bases import Basis
from attnpo.lab.studies.benchmark_scores import ALL, BASE_ROW, RowScore
from attnpo.lab.studies.exports import export_chosen
from attnpo.lab.studies.fit_config import FitConfig
from attnpo.lab.studies.study import Arm, Outcome, Study, WorldSeed, error_text, last_line
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.context import open_paths
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, clean
from attnpo.system.locks import locked

log = logging.getLogger(__name__)

BENCHMARKS = "benchmarks"
OF_BASE = "BASE"
"""As a value in ``study.evaluate``: the path of the base of the row's world and seed."""
GRAMMAR = "benchmark.grammar"


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


# ------------------------------------------------------------------------------------------------ settings


def evaluation_config(
    cfg: FitConfig,
    study: Study,
    benchmark: str,
    model: ModelSpec,
    base: str | None = None,
    grammar: Mapping[str, Json] | None = None,
    **named: str,
) -> EvaluateConfig:
    """Returns the config of ``attnpo.evaluate`` for one model; ``named`` are ``label`` and ``output``.

    ``grammar``: that of the model's world, for a benchmark with one, where the study does not say otherwise. UserError
    where it cannot be.
    """
    given = _given(study, benchmark)
    values = {key: base if value == OF_BASE and base is not None else value for key, value in given.items()}
    overrides = [f"benchmark={benchmark}", *(f"{key}={word(value)}" for key, value in values.items())]
    try:
        raw = compose("evaluate", overrides, cfg.composed.config_dir)
        found: dict[str, Json] = {"trainer.accelerator": cfg.trainer.accelerator}
        if grammar and OmegaConf.select(raw, GRAMMAR) is not None:
            found |= {f"{GRAMMAR}.{key}": value for key, value in grammar.items()}
        for key, value in {**found, "model.path": model.path, **named}.items():
            if key not in given:
                OmegaConf.update(raw, key, value)
        made: EvaluateConfig = read(raw, complete=True).of(EvaluateConfig)
    except UserError as problem:
        raise UserError(_told(study, benchmark, problem)) from problem
    template = model.chat_template or made.model.chat_template
    kwargs = {**(made.model.chat_template_kwargs or {}), **(model.chat_template_kwargs or {})}
    return (
        made.with_value("model.revision", model.revision or made.model.revision)
        .with_value("model.chat_template", template)
        .with_value("model.fallback_template", model.fallback_template or made.model.fallback_template)
        .with_value("model.chat_template_kwargs", cast(dict[str, Json], kwargs) or None)
        .with_value("model.fold_system", model.fold_system or made.model.fold_system)
    )


def _given(study: Study, benchmark: str) -> dict[str, object]:
    """Returns what the study sets of an evaluation's config, by key."""
    return {**(study.evaluate.get(ALL) or {}), **(study.evaluate.get(benchmark) or {})}


def _told(study: Study, benchmark: str, problem: Exception) -> str:
    return (
        f"study {study.name}, benchmark {benchmark}: {problem}; its keys are given as "
        f"'study.evaluate.{benchmark}={{KEY:VALUE}}', or study.evaluate.{ALL} for every benchmark"
    )


def _grammar(config: FitConfig) -> Mapping[str, Json]:
    """Returns the grammar of a config's world; empty where there is none."""
    prepare = config.values.get("prepare")
    grammar = prepare.get("grammar") if isinstance(prepare, dict) else None
    return grammar if isinstance(grammar, dict) else {}


# ------------------------------------------------------------------------------------------------ before training


def check_benchmarks(cfg: FitConfig, base: ModelSpec | None = None) -> None:
    """Refuses what can be known to fail before anything is trained.

    ``base``: the model that training starts from; None where it is still to be built, so that what names it is not
    looked at.

    Raises:
        UserError: an unknown benchmark or key, data that cannot be had, a grader without its key or package, a bound in
            dollars without a price, a published model that cannot be read.
    """
    study = cfg.study
    if study is None or not study.benchmarks:
        return
    if base is None and "model.path" not in open_paths(cfg):
        base = cfg.model
    known_names = groups(cfg.composed.config_dir)["benchmark"]
    for name in study.benchmarks:
        if name not in known_names:
            raise UserError(
                f"study.benchmarks has {name}, which is no option of the group benchmark"
                f"{did_you_mean(name, known_names)} There are: {', '.join(known_names)}"
            )
        unknown = [key for key, value in _given(study, name).items() if base is None and value == OF_BASE]
        known = base or ModelSpec(OF_BASE)
        made = evaluation_config(cfg, study, name, known, known.path, _grammar(cfg))
        try:
            _check(made, unknown)
        except (UserError, ImportError) as problem:
            raise UserError(_told(study, name, problem)) from problem
    for path in study.published:
        try:
            weights_fingerprint(path)
        except UserError as problem:
            raise UserError(f"study.published has {path}: {problem}") from problem


def _check(made: EvaluateConfig, unknown: Sequence[str]) -> None:
    """Asks benchmark and grader for all they say without a model's answers; ``unknown``: keys still without value."""
    benchmark = made.benchmark
    if isinstance(benchmark, Benchmark):
        if made.limits.dry_run:
            raise UserError(
                "limits.dry_run=true measures nothing; calls, tokens and cost are logged before a study trains anyway"
            )
        benchmark.questions()
        made.limits.check_price(made.grader)
        if not any(key.startswith("grader.") for key in unknown):
            made.grader.check_ready()
    if isinstance(benchmark, ImplicitReward):
        benchmark.require_paths()
    if not unknown:
        benchmark.versions()


def tell_costs(
    cfg: FitConfig, study: Study, arms: Sequence[Arm], bases: Mapping[WorldSeed, Basis], folder: Path
) -> None:
    """Logs how many calls the grading of the whole study takes at most, and their tokens and dollars."""
    base = next(basis for basis in bases.values() if basis.model is not None)
    points = sum(arm.world == world for arm in arms for world, _ in bases)
    rows = points + len(dict.fromkeys(_base_folder(basis) for basis in bases.values())) + len(study.published)
    for name in study.benchmarks:
        model = base.model or ModelSpec(OF_BASE)
        made = evaluation_config(cfg, study, name, model, model.path, _grammar(cfg))
        if not isinstance(made.benchmark, Benchmark):
            log.info("study %s, benchmark %s: %d models, measured without a grader", study.name, name, rows)
            continue
        one = estimated(made, made.benchmark, folder / BENCHMARKS / name)
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
    cfg: FitConfig, outcome: Outcome, own: Mapping[tuple[str, str], Composed], bases: Mapping[WorldSeed, Basis]
) -> Outcome:
    """Returns the outcome with the scores of its rows on ``study.benchmarks``.

    What fails of one row is named and stops nothing else.
    """
    exports, lost, said = export_chosen(cfg, outcome, own, bases)
    several = len({seed for _, seed in bases}) > 1
    wanted = [*_of_bases(bases)]
    for export in exports:
        point = export.point
        base = _path(bases[point.arm.world, point.seed])
        label = f"{point.arm.label}, seed {point.seed}" if several else point.arm.label
        spec = ModelSpec(str(export.model))
        wanted.append(Measurement(point.arm.world, point.arm.name, label, export.run.name, spec, base))
    for point, why in lost.items():
        wanted.append(Measurement(point.arm.world, point.arm.name, point.label, "", ModelSpec(""), "", why))
    wanted += _of_published(outcome, bases)
    grammars = {world: _grammar(found.config) for (world, _), found in own.items()}
    done: dict[tuple[str, str], EvaluationResult | str] = {}
    scores: dict[str, dict[tuple[str, str], RowScore]] = {name: {} for name in outcome.study.benchmarks}
    failures: list[str] = []
    for one in wanted:
        for name in outcome.study.benchmarks:
            if one.lost:
                done[name, one.label] = one.lost
            elif (name, one.folder) not in done:
                done[name, one.folder] = _measure(cfg, outcome, name, one, grammars.get(one.world, {}))
            found = done[name, one.folder or one.label]
            if isinstance(found, str):
                failures.append(f"FAILED benchmark {name}, {one.label}: {found}")
    for name in outcome.study.benchmarks:
        for row in dict.fromkeys((one.world, one.name) for one in wanted):
            mine = [one for one in wanted if (one.world, one.name) == row]
            places = dict.fromkeys(one.folder or one.label for one in mine)
            scores[name][row] = row_score([done[name, place] for place in places])
    return replace(
        outcome,
        benchmarks=scores,
        unmeasured=[*outcome.unmeasured, *dict.fromkeys(failures)],
        warnings=[*outcome.warnings, *said],
    )


def _of_bases(bases: Mapping[WorldSeed, Basis]) -> Iterator[Measurement]:
    """Yields the base of every world and seed; one that several share is measured once."""
    folders = {place: _base_folder(basis) for place, basis in bases.items()}
    for (world, seed), basis in bases.items():
        if basis.model is None:
            continue
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
    cfg: FitConfig, outcome: Outcome, benchmark: str, one: Measurement, grammar: Mapping[str, Json]
) -> EvaluationResult | str:
    """Returns the result of one model on one benchmark, or why there is none."""
    folder = outcome.folder / BENCHMARKS / benchmark / one.folder
    log.info("benchmark %s: %s", benchmark, one.label)
    try:
        made = evaluation_config(
            cfg, outcome.study, benchmark, one.model, one.base, grammar, label=one.label, output=str(folder)
        )
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, made.lock_timeout):
            result = run_evaluation(bounded(made, folder), folder)
    except Exception as error:  # noqa: BLE001  the other rows go on
        log.error("benchmark %s, %s: %s", benchmark, one.label, error_text(error))
        return last_line(error_text(error))
    if result is None:
        return "grading calls are left without a reply; the same command asks them again"
    score = result.score(result.main)
    if score is None or not math.isfinite(score.mean):
        return f"its {result.main} is no number; see {folder}"
    return result


def bounded(made: EvaluateConfig, folder: Path) -> EvaluateConfig:
    """Returns the config with what the study's other evaluations have left of ``limits.max_cost`` and
    ``limits.max_calls``.

    Of one evaluation they bound all replies in its folder; in a study all in the folders beside it, too.
    """
    limits = made.limits
    if limits.max_cost is None and limits.max_calls is None:
        return made
    identity, price = made.grader.identity(), made.grader.price
    others = [path.parent for path in folder.parent.glob(f"*/{GRADES}") if path.parent != folder]
    replies = [reply for other in others for reply in ReplyStore(other).replies(identity)]
    if limits.max_calls is not None:
        made = made.with_value("limits.max_calls", max(0, limits.max_calls - len(replies)))
    if limits.max_cost is not None:
        spent = math.fsum(price.of(reply.input_tokens, reply.output_tokens) for reply in replies)
        made = made.with_value("limits.max_cost", max(0.0, limits.max_cost - spent))
    return made


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
