"""``attnpo.evaluate``: answers, grades and scores of one model on one benchmark; a repeated command goes on.

The folder holds ``answers-round0.jsonl`` and so on, ``grades.jsonl`` with every reply, and, once all is there,
``evaluation.json`` with the scores and all that made them.
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
from attnpo.evaluation.base import Benchmark, BenchmarkScore, Graded, Measure, ModelAnswer, Replies, Subject, first_turn
from attnpo.evaluation.chat import AnsweringBackend, Grader, GradingCall
from attnpo.evaluation.evaluate_config import EvaluateConfig, GradingRules
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.local_chat import describe_model
from attnpo.evaluation.result import RESULT, AnswerLengths, EvaluationResult, read_result, result_sections
from attnpo.evaluation.session import CostEstimate, GradingLimits, ask_all, estimate
from attnpo.evaluation.spreads import grading_spread, make_regrader, score_of
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
class Entrant:
    """Model that enters a benchmark: ``label`` is what tables call it, ``device`` where it runs."""

    model: ModelSpec
    label: str
    device: torch.device


@dataclass(frozen=True)
class Grading:
    """Who grades, how often, and within which bounds."""

    grader: Grader
    rules: GradingRules
    limits: GradingLimits


def evaluate(cfg: EvaluateConfig) -> int:
    """Returns the exit status of the command: 0, or 1 where calls are left that got no reply.

    Prints the scores and writes them into the evaluation's folder; what is finished already is printed again.

    Raises:
        UserError: data, answers or replies are not as they must be, or another process works in the folder.
    """
    if world_size() > 1:
        raise UserError(
            f"evaluate was started with {world_size()} processes; it works alone: start it without torchrun, and let a "
            "server write the answers on several devices (answering=openai answering.base_url=URL)"
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
            "no reply of %s held a verdict, so %s has no score: look at the replies in %s and take another grader",
            *(result.grader, result.benchmark, folder),
        )
    log.info("%s", folder / RESULT)
    return 0


def run_evaluation(cfg: EvaluateConfig, folder: Path) -> EvaluationResult | None:
    """Returns the result, computed unless the folder has it; None after a dry run and where replies are lacking."""
    before = read_result(folder)
    there = [name for name in PAGES if (folder / name).exists()]
    if before is None and len(there) == 1:  # an evaluation leaves both, after its result
        raise UserError(f"output={folder}: {there[0]} there is of no evaluation; move it away, or give another folder")
    entrant = Entrant(cfg.model, cfg.model_label(), inference_device(cfg.trainer.get("accelerator", "auto")))
    if isinstance(cfg.benchmark, Benchmark):
        grading = Grading(cfg.grader, cfg.grading, cfg.limits)
        result = _grade(cfg.benchmark, entrant, cfg.answering, grading, folder, before)
    else:
        result = _measure(cfg.benchmark, entrant, folder, before)
    if result is not None and result is not before:
        result.write(folder)
        sections = result_sections(result)
        title = f"{result.label} on {result.benchmark}"
        for name, text in zip(PAGES, (to_markdown(sections, title), report_page(title, sections)), strict=True):
            write_atomically(folder / name, text)
    return result


def _same(before: EvaluationResult | None, key: Mapping[str, object], folder: Path) -> bool:
    """Returns whether a folder's result stands; a key that differs is named, and the result is made anew."""
    if before is None:
        return False
    for name, was, now in find_differences(flatten_with_classes(identify(before.key)), flatten_with_classes(key)):
        log.warning("%s stands on %s %s, this command has %s: it is made anew", folder / RESULT, name, was, now)
        return False
    log.info("%s is finished: its result stands", folder)
    return True


# ------------------------------------------------------------------------------------------------ without a grader


def _measure(measure: Measure, entrant: Entrant, folder: Path, before: EvaluationResult | None) -> EvaluationResult:
    spec, chat = describe_model(entrant.model)
    subject = Subject(spec, chat, entrant.device, folder)
    weights = weights_fingerprint(spec.path, spec.revision)
    of_model = {"weights": weights, "dtype": spec.dtype, "chat": chat.fingerprint()}
    key = identify({"benchmark": _versions(measure), "model": of_model})
    if before is not None and _same(before, key, folder):
        return before
    began = time.perf_counter()
    found = measure.measure(subject)
    if not found.scores:
        raise UserError(f"benchmark {measure.name} gave no score; look at its settings with --cfg benchmark")
    return EvaluationResult(
        label=entrant.label,
        model=entrant.model.path,
        benchmark=measure.name,
        grader=None,
        main=found.scores[0].name,
        scores=found.scores,
        key=key,
        counts=found.counts,
        cost={"seconds": round(time.perf_counter() - began, 1)},
        table=found.table,
    )


def _versions(benchmark: Benchmark | Measure) -> dict[str, object]:
    return {"name": benchmark.name, "settings": to_config(benchmark), **benchmark.versions()}


# ------------------------------------------------------------------------------------------------ with a grader


@dataclass(frozen=True)
class RoundGrades:
    """Answers of a round and the calls that grade them; those with a ``repeat`` grade some a second time."""

    answers: Mapping[str, ModelAnswer]
    calls: tuple[GradingCall, ...]


def _grade(
    benchmark: Benchmark,
    entrant: Entrant,
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
            "%s, %d rounds of %d questions: %s; answers are counted at their longest, %d tokens a turn",
            *(benchmark.name, rules.rounds, len(chosen), estimate_grading(benchmark, grading, folder)),
            benchmark.sampling.max_new_tokens,
        )
        return None
    grader.check_ready()  # before answers are made, which may take hours
    limits.check_price(grader)
    answerer = answering.open(entrant.model, entrant.device)
    answered = [answer_questions(chosen, benchmark.sampling, answerer, folder, at) for at in range(rules.rounds)]
    of_model = answerer.key()
    del answerer  # its weights: a local grader may need the room
    key = identify(
        {
            "benchmark": _versions(benchmark),
            "model": of_model,
            "grader": grader.identity(),
            "grading": asdict(rules),
            "answers": [digest([asdict(answer) for answer in each.answers.values()])[:16] for each in answered],
        }
    )
    if before is not None and _same(before, key, folder):
        return before
    rounds = [_round(benchmark, each.answers, rules, number) for number, each in enumerate(answered)]
    calls = [call for each in rounds for call in each.calls]
    asked = ask_all(calls, grader, ReplyStore(folder), limits)
    missing = len(calls) - len(asked.replies)
    if missing > rules.missing:
        if asked.stopped is None:
            log.warning(
                "%d of %d calls have no reply: give the command again to ask them once more, or grading.missing=%d to "
                "do without them, counted as missing verdicts",
                *(missing, len(calls), missing),
            )
        return None
    scores, counts = scores_of(benchmark, rounds, asked.replies)
    counts[UNANSWERED] += missing
    for each in answered:
        counts[EMPTY] += each.statistics.empty
        counts.update({f"answers that could not be made: {why}": n for why, n in each.statistics.refused.items()})
    counts[LEFT_OUT] += len(questions) - len(chosen)
    counts.update(count_seen_prompts(entrant.model.path, map(first_turn, chosen)))
    return EvaluationResult(
        label=entrant.label,
        model=entrant.model.path,
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
    """Returns what grading would take. Answers are not made for it: each counts as long as it may be."""
    longest = "word " * benchmark.sampling.max_new_tokens
    questions = benchmark.questions()[: grading.limits.max_items]
    answers = {question.id: ModelAnswer(question.id, (longest,) * len(question.turns)) for question in questions}
    rounds = (_round(benchmark, answers, grading.rules, number) for number in range(grading.rules.rounds))
    return estimate((call for each in rounds for call in each.calls), grading.grader, ReplyStore(folder))


def _round(benchmark: Benchmark, answers: Mapping[str, ModelAnswer], rules: GradingRules, number: int) -> RoundGrades:
    """Returns a round's calls about ``answers``, which may be to the first questions alone (``limits.max_items``)."""
    # A benchmark asks for an answer to each of its questions, since places are keys: nothing is asked about the others.
    every = {question.id: ModelAnswer(question.id, ("",) * len(question.turns)) for question in benchmark.questions()}
    calls = tuple(call for call in benchmark.calls({**every, **answers}, number) if call.item in answers)
    twice = graded_twice(list(answers), rules.twice(len(answers)), number)
    return RoundGrades(answers, calls + tuple(replace(call, repeat=1) for call in calls if call.item in twice))


def graded_twice(questions: Sequence[str], count: int, round_: int) -> frozenset[str]:
    """Returns the questions whose answers are graded a second time: drawn by a digest, others in every round."""
    return frozenset(sorted(questions, key=lambda name: digest(["graded twice", round_, name]))[:count])


def scores_of(
    benchmark: Benchmark, rounds: Sequence[RoundGrades], replies: Replies
) -> tuple[tuple[BenchmarkScore, ...], Counter[str]]:
    """Returns the benchmark's figures with their spreads, and what was missing or replaced over all rounds.

    Second grades serve the spread of grading alone: they move no figure. That of a mean over rounds comes from the
    spread of each, since their gradings are independent.
    """
    first: list[Graded] = []
    spreads: dict[str, list[float | None]] = {}
    counts: Counter[str] = Counter()
    for each in rounds:
        found = {call: replies[call] for call in each.calls if call in replies}
        one = {call: reply for call, reply in found.items() if not call.repeat}
        two = {call: reply for call, reply in found.items() if call.repeat}
        graded = benchmark.grade(each.answers, one)
        first.append(graded)
        counts.update(graded.counts)
        if not each.calls:  # no grader is asked, so that grading again moves nothing
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
        scores.append(score_of(name, first, spread))
    order = [*benchmark.scores, *(score.name for score in scores if score.name not in benchmark.scores)]
    return tuple(sorted(scores, key=lambda score: order.index(score.name))), counts
