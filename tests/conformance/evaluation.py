"""Records of an evaluation folder: known scores, recomputed from stored judgments by the benchmarks' own rules.

A folder has a CSV per judged model and ``expected.json``. Judgments become replies as a judge would have written them
and go through ``grade`` of the benchmark that its configuration builds.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from attnpo.config.compose import CONFIG_DIR, instantiate
from attnpo.evaluation.arena_hard import AGREE, GAME, GAMES, LAST, QUESTION, ArenaHard
from attnpo.evaluation.base import Question, Replies, RoundScores
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.evaluation.mt_bench import TURNS, MTBench, grade_ratings
from attnpo.schema import UserError
from attnpo.system.files import parse_json
from tests.conformance import alpaca_eval
from tests.conformance.fields import Fields
from tests.conformance.records import Absent, Check, Comparison, Item

ATOL = 1e-6
INVALID = -1.0  # FastChat's score of a judgment without a rating
# As the release's own configuration has them; the judgments are written to fit.
PATTERNS = (re.compile(r"\[\[([AB<>=]+)\]\]"), re.compile(r"\[([AB<>=]+)\]"))

SomeBenchmark = TypeVar("SomeBenchmark")
Judged = Callable[[Fields, Sequence[Mapping[str, str]], Comparison], None]


def is_folder(path: Path) -> bool:
    """Whether ``path`` holds known scores of a benchmark."""
    return (path / "expected.json").is_file()


def items(path: Path) -> Iterator[Item]:
    """The records of a benchmark's folder, which is named as its config option; one per model."""
    benchmarks: dict[str, Callable[[Path], Iterator[Item]]] = {
        "alpaca_eval": alpaca_eval.records,
        "arena_hard": partial(_models, arena_hard),
        "mt_bench": partial(_models, mt_bench),
    }
    yield from benchmarks.get(path.name, _absent)(path)


def _absent(path: Path) -> Iterator[Item]:
    yield Absent(path.name, "expected.json", "benchmark", path.name)


def _models(compare: Judged, path: Path) -> Iterator[Item]:
    file = path / "expected.json"
    try:
        expected = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot read known scores ({error}); expected a JSON file") from error
    if not isinstance(expected, dict) or not expected:
        raise UserError(f"{file}: expected an object with known scores by model, got something else")
    for model in expected:
        known = Fields(expected[model])
        yield Check(path.name, model, partial(_compare, compare, known, path / f"{model}.csv"))


def _compare(compare: Judged, known: Fields, file: Path, comparison: Comparison) -> None:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot read judgments ({error})") from error
    compare(known, rows, comparison)


def arena_hard(known: Fields, rows: Sequence[Mapping[str, str]], comparison: Comparison) -> None:
    """The weighted mean in percent, and the battles that each question's verdicts count as.

    The leaderboard was made by the code of 2024. Where no verdict is missing that of 2025 must give the same.
    """
    configured = _configured("arena_hard", ArenaHard)
    name = configured.scores[0]
    questions = [Question(row["question_id"], ("",), category=configured.figures[name]) for row in rows]
    replies = {
        _call("arena_hard", row["question_id"], part): GradingReply(f"My final verdict is: [[{row[column]}]]")
        for row in rows
        for part, column in zip(GAMES, ("game1", "game2"), strict=True)
    }
    by_rules = {
        rules: replace(configured, verdicts=verdicts, missing=missing).grade_games(questions, PATTERNS, replies)
        for rules, verdicts, missing in (("2024", AGREE, GAME), ("2025", LAST, QUESTION))
    }
    graded, published = by_rules["2024"], known["leaderboard_score"]
    for rules, found in by_rules.items() if not graded.counts else [("2024", graded)]:
        expected = known["exact_weighted_mean_percent"]
        comparison.numbers(f"score by the rules of {rules}", found.scores[name], expected, atol=ATOL)
    rounds = abs(graded.scores[name] - published) <= 0.005 + ATOL
    comparison.require(rounds, f"score: {graded.scores[name]:.6f} is not the leaderboard's {published} in two decimals")
    comparison.same("questions", len(graded.questions), known["n_questions"])
    comparison.numbers("battles", float(graded.weights[name].sum()), known["n_weighted_battles"])

    counts = [[float(row[key]) for key in ("model_wins", "ties", "baseline_wins")] for row in rows]
    comparison.numbers("battles of a question", graded.weights[name].tolist(), [sum(each) for each in counts])
    fought = [place for place, each in enumerate(counts) if sum(each)]
    shares = [100 * (counts[place][0] + counts[place][1] / 2) / sum(counts[place]) for place in fought]
    comparison.numbers("rate of a question", [float(graded.values[name][i]) for i in fought], shares, atol=ATOL)


def mt_bench(known: Fields, rows: Sequence[Mapping[str, str]], comparison: Comparison) -> None:
    """FastChat's average, in which repeated rows count again, and the average of the last row per question and turn."""
    benchmark = _configured("mt_bench", MTBench)
    categories = tuple(benchmark.temperatures)
    asked = {row["question_id"]: row["category"] for row in rows}
    questions = [Question(name, ("", ""), category=category) for name, category in asked.items()]
    last: dict[tuple[str, str], GradingReply] = {}
    every: dict[GradingCall, GradingReply] = {}
    for repeat, row in enumerate(rows):
        score = float(row["score"])
        reply = GradingReply("I cannot rate this." if score == INVALID else f"Rating: [[{score}]]")
        place = (row["question_id"], TURNS[int(row["turn"]) - 1])
        every[_call("mt_bench", *place, repeat)] = last[place] = reply

    def grade_replies(replies: Replies) -> RoundScores:
        return grade_ratings(questions, categories, replies)

    as_there, once = (
        grade_replies(every),
        grade_replies({_call("mt_bench", *place): reply for place, reply in last.items()}),
    )
    kept = known.at("dedup_keep_last")
    expected = {
        "FastChat's average": (as_there, "score", known["fastchat_average"]),
        "FastChat's turn 1": (as_there, TURNS[0], known["fastchat_turn1"]),
        "FastChat's turn 2": (as_there, TURNS[1], known["fastchat_turn2"]),
        "average": (once, "score", kept["average"]),
        "turn 1": (once, TURNS[0], kept["turn1"]),
        "turn 2": (once, TURNS[1], kept["turn2"]),
    }
    by_category = kept.at("by_category")
    expected |= {name: (once, name, by_category[name]) for name in by_category}
    for what, (found, name, value) in expected.items():
        comparison.numbers(what, found.scores[name], value, atol=ATOL)
    comparison.same("rows", len(rows), known["n_rows"])
    valid = known["n_rows"] - known["n_invalid"]
    comparison.numbers("valid rows", float(as_there.weights["score"].sum()), float(valid))
    comparison.numbers("valid rows, repeats dropped", float(once.weights["score"].sum()), kept["n_valid"])


def _configured(option: str, kind: type[SomeBenchmark]) -> SomeBenchmark:
    """The benchmark that ``benchmark=option`` builds, its checkout's path apart: no file of it is read here."""
    node = OmegaConf.load(CONFIG_DIR / "benchmark" / f"{option}.yaml")
    node.path = "a checkout"
    benchmark = instantiate(DictConfig({"benchmark": node}).benchmark)
    if not isinstance(benchmark, kind):
        raise TypeError(f"configs/benchmark/{option}.yaml builds a {type(benchmark).__name__}, not a {kind.__name__}")
    return benchmark


def _call(benchmark: str, item: str, part: str, repeat: int = 0) -> GradingCall:
    return GradingCall(benchmark, item, part, 0, (), 1, repeat=repeat)
