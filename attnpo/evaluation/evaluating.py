"""Implements ``attnpo.evaluate``: generates, grades and scores one model's answers on one benchmark.

The folder contains one file of answers per round (``answers-round0.jsonl``, ...), ``grades.jsonl`` with all replies
and, once the evaluation is complete, ``evaluation.json`` with the scores and the settings that produced them. Rerunning
the command resumes an unfinished evaluation.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from attnpo.config.fields import to_config
from attnpo.data.overlap import count_seen_prompts
from attnpo.display.output import make_console, print_sections, to_markdown
from attnpo.display.page import report_page
from attnpo.evaluation.answers import answer_questions
from attnpo.evaluation.base import (
    Benchmark,
    BenchmarkScore,
    EvaluatedModel,
    ModelAnswer,
    Replies,
    RoundScores,
    UngradedBenchmark,
    first_turn,
)
from attnpo.evaluation.chat import AnsweringBackend, Grader, GradingCall
from attnpo.evaluation.evaluate_config import EvaluateConfig, GradingRules
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.local_chat import describe_model
from attnpo.evaluation.result import RESULT, AnswerLengths, EvaluationResult, read_result, result_sections
from attnpo.evaluation.session import CostEstimate, GradingLimits, ask_all, estimate_cost
from attnpo.evaluation.spreads import grading_spread, make_regrader, summarize_rounds
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.run.identity import flatten_with_classes
from attnpo.schema import UserError, digest
from attnpo.system.credentials import identify
from attnpo.system.files import find_differences, write_atomically
from attnpo.system.locks import folder_lock
from attnpo.system.machine import inference_device
from attnpo.system.processes import world_size

log = logging.getLogger(__name__)

UNANSWERED = "calls without a reply"
EMPTY = "empty answers"
PAGES = ("evaluation.md", "report.html")
LEFT_OUT = "questions left out by limits.max_items"


@dataclass(frozen=True)
class LabelledModel:
    """Model to evaluate, with its name in tables and its device."""

    model: ModelSpec
    label: str
    device: torch.device


@dataclass(frozen=True)
class Grading:
    """Grader with its rules (rounds, regrading) and limits (calls, cost)."""

    grader: Grader
    rules: GradingRules
    limits: GradingLimits


def evaluate(cfg: EvaluateConfig) -> int:
    """Runs an evaluation and prints its scores; returns the exit status, which is 1 if some calls have no reply.

    The scores are also written to the evaluation's folder. If the evaluation is already finished, its scores
    are only printed.

    Raises:
        UserError: data, answers or replies are invalid, or another process is using the folder.
    """
    if world_size() > 1:
        raise UserError(
            f"evaluate was started with {world_size()} processes but needs exactly one: start it without torchrun, and "
            "use a server to generate answers on several devices (answering=openai answering.base_url=URL)"
        )
    folder = cfg.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder, cfg.lock_timeout):
        result = run_evaluation(cfg, folder)
    if result is None:
        return 0 if cfg.limits.dry_run else 1
    print_sections(make_console(), result_sections(result))
    main = result.score(result.main)
    if main is not None and math.isnan(main.mean):
        log.warning(
            "no reply from %s contains a verdict, so %s has no score: check the replies in %s "
            "or use a different grader",
            *(result.grader, result.benchmark, folder),
        )
    log.info("result: %s", folder / RESULT)
    return 0


def run_evaluation(cfg: EvaluateConfig, folder: Path) -> EvaluationResult | None:
    """Computes the result, or reads it if it exists; returns None after a dry run or if replies are missing."""
    before = read_result(folder)
    there = [name for name in PAGES if (folder / name).exists()]
    if before is None and len(there) == 1:  # an evaluation writes both, after its result
        raise UserError(
            f"output={folder} contains {there[0]}, which was not written by an evaluation: move it "
            "elsewhere or choose a different output folder"
        )
    candidate = LabelledModel(cfg.model, cfg.model_label(), inference_device(cfg.trainer.get("accelerator", "auto")))
    if isinstance(cfg.benchmark, Benchmark):
        grading = Grading(cfg.grader, cfg.grading, cfg.limits)
        result = _evaluate_graded(cfg.benchmark, candidate, cfg.answering, grading, folder, before)
    else:
        result = _evaluate_ungraded(cfg.benchmark, candidate, folder, before)
    if result is not None and result is not before:
        result.write(folder)
        sections = result_sections(result)
        title = f"{result.label} on {result.benchmark}"
        for name, text in zip(PAGES, (to_markdown(sections, title), report_page(title, sections)), strict=True):
            write_atomically(folder / name, text)
    return result


def _is_up_to_date(before: EvaluationResult | None, key: Mapping[str, object], folder: Path) -> bool:
    """Returns whether a folder's result has the current key; otherwise logs the first difference."""
    if before is None:
        return False
    for name, was, now in find_differences(flatten_with_classes(identify(before.key)), flatten_with_classes(key)):
        log.warning(
            "%s was computed with %s %s, but the current value is %s: recomputing", folder / RESULT, name, was, now
        )
        return False
    log.info("%s is already finished: keeping its result", folder)
    return True


# ------------------------------------------------------------------------------------------------ without a grader


def _evaluate_ungraded(
    benchmark: UngradedBenchmark, candidate: LabelledModel, folder: Path, before: EvaluationResult | None
) -> EvaluationResult:
    spec, chat = describe_model(candidate.model)
    model = EvaluatedModel(spec, chat, candidate.device, folder)
    weights = weights_fingerprint(spec.path, spec.revision)
    of_model = {"weights": weights, "dtype": spec.dtype, "chat": chat.fingerprint()}
    key = identify({"benchmark": _benchmark_fingerprint(benchmark), "model": of_model})
    if before is not None and _is_up_to_date(before, key, folder):
        return before
    began = time.perf_counter()
    found = benchmark.measure(model)
    if not found.scores:
        raise UserError(f"benchmark {benchmark.name} returned no score: check its settings with --cfg benchmark")
    return EvaluationResult(
        label=candidate.label,
        model=candidate.model.path,
        benchmark=benchmark.name,
        grader=None,
        main=found.scores[0].name,
        scores=found.scores,
        key=key,
        counts=found.counts,
        cost={"seconds": round(time.perf_counter() - began, 1)},
        table=found.table,
    )


def _benchmark_fingerprint(benchmark: Benchmark | UngradedBenchmark) -> dict[str, object]:
    return {"name": benchmark.name, "settings": to_config(benchmark), **benchmark.fingerprint()}


# ------------------------------------------------------------------------------------------------ with a grader


@dataclass(frozen=True)
class RoundCalls:
    """Answers of a round and the calls that grade them; calls with ``repeat=1`` grade some answers a second time."""

    answers: Mapping[str, ModelAnswer]
    calls: tuple[GradingCall, ...]


def _evaluate_graded(
    benchmark: Benchmark,
    candidate: LabelledModel,
    answering: AnsweringBackend,
    grading: Grading,
    folder: Path,
    before: EvaluationResult | None,
) -> EvaluationResult | None:
    grader, rules, limits = grading.grader, grading.rules, grading.limits
    questions = benchmark.questions()
    chosen = questions[: limits.max_items]
    began = time.perf_counter()
    if limits.dry_run:
        log.info(
            "%s, %d rounds of %d questions: %s; every answer is assumed to have the maximum length, %d tokens per turn",
            *(benchmark.name, rules.rounds, len(chosen), estimate_grading(benchmark, grading, folder)),
            benchmark.sampling.max_new_tokens,
        )
        return None
    grader.check_ready()  # before generating answers, which may take hours
    limits.check_price(grader)
    chat_model = answering.open(candidate.model, candidate.device)
    answered = [answer_questions(chosen, benchmark.sampling, chat_model, folder, at) for at in range(rules.rounds)]
    of_model = chat_model.key()
    del chat_model  # frees its weights: a local grader may need the memory
    key = identify(
        {
            "benchmark": _benchmark_fingerprint(benchmark),
            "model": of_model,
            "grader": grader.identity(),
            "grading": asdict(rules),
            "answers": [digest([asdict(answer) for answer in each.answers.values()])[:16] for each in answered],
        }
    )
    if before is not None and _is_up_to_date(before, key, folder):
        return before
    rounds = [_plan_round(benchmark, each.answers, rules, number) for number, each in enumerate(answered)]
    calls = [call for each in rounds for call in each.calls]
    asked = ask_all(calls, grader, ReplyStore(folder), limits)
    missing = len(calls) - len(asked.replies)
    if missing > rules.missing:
        if asked.stopped is None:
            log.warning(
                "%d of %d calls have no reply: run the command again to retry them, or set grading.missing=%d to "
                "count them as missing verdicts",
                *(missing, len(calls), missing),
            )
        return None
    scores, counts = score_rounds(benchmark, rounds, asked.replies)
    counts[UNANSWERED] += missing
    for each in answered:
        counts[EMPTY] += each.statistics.empty
        counts.update({f"answers that could not be generated: {why}": n for why, n in each.statistics.refused.items()})
    counts[LEFT_OUT] += len(questions) - len(chosen)
    counts.update(count_seen_prompts(candidate.model.path, map(first_turn, chosen)))
    return EvaluationResult(
        label=candidate.label,
        model=candidate.model.path,
        benchmark=benchmark.name,
        grader=str(grader.identity().get("model") or grader.identity().get("grader") or type(grader).__name__),
        main=benchmark.scores[0],
        scores=scores,
        key=key,
        lengths=AnswerLengths(
            tokens=sum(each.statistics.tokens for each in answered) / len(answered),
            characters=sum(each.statistics.characters for each in answered) / len(answered),
            cut=sum(each.statistics.cut for each in answered) / len(answered),
            tokenizer=answered[0].statistics.counted_by,
        ),
        counts=dict(+counts),
        cost={**asked.cost(grader.price), "seconds": round(time.perf_counter() - began, 1)},
    )


def estimate_grading(benchmark: Benchmark, grading: Grading, folder: Path) -> CostEstimate:
    """Estimates the cost of grading without generating answers; every answer is assumed to have the maximum length."""
    longest = "word " * benchmark.sampling.max_new_tokens
    questions = benchmark.questions()[: grading.limits.max_items]
    answers = {question.id: ModelAnswer(question.id, (longest,) * len(question.turns)) for question in questions}
    rounds = (_plan_round(benchmark, answers, grading.rules, number) for number in range(grading.rules.rounds))
    return estimate_cost((call for each in rounds for call in each.calls), grading.grader, ReplyStore(folder))


def _plan_round(
    benchmark: Benchmark, answers: Mapping[str, ModelAnswer], rules: GradingRules, number: int
) -> RoundCalls:
    """Builds a round's grading calls for ``answers``, which may cover only some questions (``limits.max_items``)."""
    # Benchmarks need an answer to every question, since positions are keys: the others get empty ones and no call.
    every = {question.id: ModelAnswer(question.id, ("",) * len(question.turns)) for question in benchmark.questions()}
    calls = tuple(call for call in benchmark.grading_calls({**every, **answers}, number) if call.item in answers)
    regraded = select_questions_to_regrade(list(answers), rules.regrade_count(len(answers)), number)
    return RoundCalls(answers, calls + tuple(replace(call, repeat=1) for call in calls if call.item in regraded))


def select_questions_to_regrade(questions: Sequence[str], count: int, round_: int) -> frozenset[str]:
    """Selects the questions whose answers are graded twice; the selection differs between rounds."""
    return frozenset(sorted(questions, key=lambda name: digest(["graded twice", round_, name]))[:count])


def score_rounds(
    benchmark: Benchmark, rounds: Sequence[RoundCalls], replies: Replies
) -> tuple[tuple[BenchmarkScore, ...], Counter[str]]:
    """Returns the benchmark's scores with their spreads, and counts of missing or replaced verdicts over all rounds.

    Repeated grades are only used to estimate the spread from grading and never change a score. Gradings of different
    rounds are independent, so the spread of the mean over rounds follows from the spread of each round.
    """
    first: list[RoundScores] = []
    spreads: dict[str, list[float | None]] = {}
    counts: Counter[str] = Counter()
    for each in rounds:
        found = {call: replies[call] for call in each.calls if call in replies}
        one = {call: reply for call, reply in found.items() if not call.repeat}
        two = {call: reply for call, reply in found.items() if call.repeat}
        graded = benchmark.grade(each.answers, one)
        first.append(graded)
        counts.update(graded.counts)
        if not each.calls:  # no grader is involved, so grading again changes nothing
            spreads |= {name: [*spreads.get(name, []), 0.0] for name in graded.scores}
        names = {call.item for call in two}
        if not two:
            continue
        again = benchmark.grade({name: answer for name, answer in each.answers.items() if name in names}, two)
        exchange = make_regrader(each.answers, one, two, benchmark.grade)
        for name in graded.scores:
            spreads.setdefault(name, []).append(grading_spread(name, graded, again, exchange))
    scores = []
    for name in first[0].scores:
        known = [spread for spread in spreads.get(name, []) if spread is not None]
        spread = (sum(each**2 for each in known) / len(known) / len(rounds)) ** 0.5 if known else None
        scores.append(summarize_rounds(name, first, spread))
    order = [*benchmark.scores, *(score.name for score in scores if score.name not in benchmark.scores)]
    return tuple(sorted(scores, key=lambda score: order.index(score.name))), counts
