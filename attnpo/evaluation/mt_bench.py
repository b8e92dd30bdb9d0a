"""MT-Bench: 80 two-turn questions, with each turn rated from 1 to 10 by a judge (Zheng et al. 2023).

The protocol follows FastChat 0e6d3e4, fastchat/llm_judge: single-answer grading, with reference answers for math,
reasoning and coding. Questions, judge prompts and references are read from a checkout.

Differences from FastChat: references are selected by file, not by the judge's name; each call is judged once, whereas a
resumed FastChat run may append a second judgment and count both; a rating written as "07" is read as 7, whereas
FastChat crashes.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from attnpo.evaluation.base import (
    ModelAnswer,
    Question,
    Replies,
    RoundScores,
    match_answers,
    select_answered_questions,
    weighted_mean,
)
from attnpo.evaluation.chat import GradingCall
from attnpo.evaluation.checkout import NAME, Checkout, build_grader_messages
from attnpo.schema import Message, Sampling, UserError, check_at_least

RULES = 1
"""Version of the rules for building calls and parsing replies; increase when either changes."""
TURNS = ("turn_1", "turn_2")
LOWEST, HIGHEST = 1, 10
SOURCE = "Get it with `git clone https://github.com/lm-sys/FastChat` and set benchmark.path=FastChat"
FOLDERS = ("fastchat/llm_judge/data", "data", ".")  # in the repository, in llm_judge, or the folder itself
QUESTIONS = "mt_bench/question.jsonl"
PROMPTS = "judge_prompts.jsonl"
REFERENCES = "mt_bench/reference_answer"
# Names of the judge prompts, by whether they include references and then by turn.
PROMPT_NAMES = {
    False: ("single-v1", "single-v1-multi-turn"),
    True: ("single-math-v1", "single-math-v1-multi-turn"),
}
PLACES = (("question", "answer"), ("question_1", "answer_1", "question_2", "answer_2"))
REFERENCE_PLACES = (("ref_answer_1",), ("ref_answer_1", "ref_answer_2"))
_RATINGS = (re.compile(r"\[\[([0-9]+\.?[0-9]*)\]\]"), re.compile(r"\[([0-9]+\.?[0-9]*)\]"))

NO_REPLY = "turns without a judgment"
NO_RATING = "judgments without a rating, left out"
OUTSIDE = f"ratings outside {LOWEST} to {HIGHEST}, used unchanged"
CUT = "judgments cut at the judge's token limit"


def parse_rating(text: str) -> float | None:
    """Returns the first number in double brackets, or else the first in single brackets; None if neither occurs."""
    for pattern in _RATINGS:
        found = pattern.search(text)
        if found is not None:
            value = float(found[1])
            return value if np.isfinite(value) else None
    return None


@dataclass(frozen=True)
class MTBenchFiles:
    """Contents of an MT-Bench checkout.

    ``prompts``: system prompt and template by (has references, turn); ``references``: reference turns by question.
    """

    questions: tuple[Question, ...]
    prompts: Mapping[tuple[bool, int], tuple[str, str]]
    references: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class MTBench:
    """MT-Bench from a checkout of FastChat.

    ``references``: file in the checkout's reference_answer folder, or a path. ``temperatures``: sampling temperature by
    category, overriding ``sampling``; each category also gets its own score. ``with_reference``: categories judged with
    a reference answer. ``judge_temperature`` and ``judge_max_tokens``: temperature and maximum length of the judge's
    replies.
    """

    path: str
    sampling: Sampling
    temperatures: dict[str, float]
    with_reference: tuple[str, ...] = ("math", "reasoning", "coding")
    references: str = "gpt-4.jsonl"
    judge_temperature: float = 0.0
    judge_max_tokens: int = 2048
    name: str = "mt_bench"

    def __post_init__(self) -> None:
        unknown = [category for category in self.with_reference if category not in self.temperatures]
        if unknown:
            raise UserError(f"benchmark.with_reference: {unknown[0]} is not a category in benchmark.temperatures")
        check_at_least("benchmark", 1, judge_max_tokens=self.judge_max_tokens)
        check_at_least("benchmark", 0, judge_temperature=self.judge_temperature)
        check_at_least("benchmark.temperatures", 0, **self.temperatures)

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the mean ratings: overall, per turn and per category."""
        return ("score", *TURNS, *self.temperatures)

    @cached_property
    def _files(self) -> MTBenchFiles:
        return _read_checkout(self)

    def questions(self) -> Sequence[Question]:
        """Returns the questions in file order."""
        return self._files.questions

    def fingerprint(self) -> dict[str, object]:
        """Returns file digests and all options that affect calls or scores."""
        return {
            "rules": RULES,
            "files": dict(self._files.digests),
            "with_reference": list(self.with_reference),
            "judge_temperature": self.judge_temperature,
            "judge_max_tokens": self.judge_max_tokens,
        }

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two calls per question: one rates the first turn, and one rates the second given the first."""
        files = self._files
        return [
            GradingCall(
                benchmark=self.name,
                item=question.id,
                part=part,
                round=round_,
                messages=self._messages(question, answer, turn),
                max_tokens=self.judge_max_tokens,
                temperature=self.judge_temperature,
            )
            for question, answer in zip(
                files.questions, match_answers(self.name, files.questions, answers), strict=True
            )
            for turn, part in enumerate(TURNS)
        ]

    def _messages(self, question: Question, answer: ModelAnswer, turn: int) -> tuple[Message, ...]:
        values = {"question": question.turns[0], "answer": answer.turns[0]}
        references = self._files.references.get(question.id, ())
        texts = {"question": question.turns, "answer": answer.turns, "ref_answer": references}
        for name, turns in texts.items():
            values |= {f"{name}_{number}": text for number, text in enumerate(turns, 1)}
        return build_grader_messages(*self._files.prompts[question.category in self.with_reference, turn], values)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        """Returns mean ratings over all valid judgments, for the questions that have an answer.

        Judgments are averaged directly, without averaging per question first; repeated gradings are included.
        """
        return grade_ratings(select_answered_questions(self.questions(), answers), tuple(self.temperatures), replies)


def grade_ratings(questions: Sequence[Question], categories: Sequence[str], replies: Replies) -> RoundScores:
    """Returns the mean ratings of ``questions``: overall, per turn and per category."""
    place = {question.id: index for index, question in enumerate(questions)}
    total, number, judged = np.zeros((3, len(TURNS), len(questions)))
    counts: Counter[str] = Counter()
    for call, reply in replies.items():
        if call.item not in place:
            continue  # a question that is not scored here
        at = (TURNS.index(call.part), place[call.item])
        judged[at] = 1
        counts[CUT] += reply.finish_reason == "length"
        value = parse_rating(reply.text)
        if value is None:
            counts[NO_RATING] += 1
            continue
        counts[OUTSIDE] += not LOWEST <= value <= HIGHEST
        total[at] += value
        number[at] += 1
    counts[NO_REPLY] = int((judged == 0).sum())

    weights = {"score": number.sum(axis=0), **dict(zip(TURNS, number, strict=True))}
    totals = {"score": total.sum(axis=0), **dict(zip(TURNS, total, strict=True))}
    for category in categories:
        inside = np.array([question.category == category for question in questions], dtype=bool)
        weights[category], totals[category] = np.where(inside, weights["score"], 0.0), totals["score"]
    values = {
        name: np.divide(totals[name], weight, out=np.full(len(questions), np.nan), where=weight > 0)
        for name, weight in weights.items()
    }
    return RoundScores(
        questions=tuple(place),
        scores={name: weighted_mean(values[name], weights[name]) for name in values},
        values=values,
        weights=weights,
        counts={reason: count for reason, count in counts.items() if count},
    )


# --------------------------------------------------------------------------------------------- the checkout's files


def _read_checkout(benchmark: MTBench) -> MTBenchFiles:
    given = Path(benchmark.path).expanduser()
    folder = next((given / below for below in FOLDERS if (given / below / QUESTIONS).is_file()), given / FOLDERS[0])
    checkout = Checkout(folder, "benchmark.path", benchmark.path, SOURCE)
    rows = checkout.read_rows_by("question_id", QUESTIONS, {"category": str, "turns": [str]})
    for name, row in rows.items():
        if row["category"] not in benchmark.temperatures:
            known = ", ".join(benchmark.temperatures)
            problem = f"has question {name} in category {row['category']}; benchmark.temperatures only has {known}"
            checkout.fail(QUESTIONS, problem)
        if len(row["turns"]) != len(TURNS):
            checkout.fail(QUESTIONS, f"has {len(row['turns'])} turns for question {name}, expected {len(TURNS)}")
    questions = tuple(
        Question(name, tuple(row["turns"]), None, row["category"], benchmark.temperatures[row["category"]])
        for name, row in rows.items()
    )
    prompts = _read_prompts(checkout)
    asked = [question.id for question in questions if question.category in benchmark.with_reference]
    references = _read_references(checkout, benchmark.references, asked) if asked else {}
    return MTBenchFiles(questions, prompts, references, checkout.digests)


def _read_prompts(checkout: Checkout) -> dict[tuple[bool, int], tuple[str, str]]:
    form = dict.fromkeys(("output_format", "system_prompt", "prompt_template"), str)
    rows = checkout.read_rows_by("name", PROMPTS, form)
    prompts = {}
    for (referenced, names), turn in product(PROMPT_NAMES.items(), range(len(TURNS))):
        where, row = f"{PROMPTS}, {names[turn]},", rows.get(names[turn])
        if row is None:
            checkout.fail(PROMPTS, f"has no prompt called {names[turn]}")
        if row["output_format"] != "[[rating]]":
            checkout.fail(where, f"asks for the format {row['output_format']}, expected [[rating]]")
        places = (*PLACES[turn], *(REFERENCE_PLACES[turn] if referenced else ()))
        checkout.check_template(where, row["prompt_template"], places)
        prompts[referenced, turn] = row["system_prompt"], row["prompt_template"]
    return prompts


def _read_references(checkout: Checkout, name: str, asked: Sequence[str]) -> dict[str, Sequence[str]]:
    own, inside = Path(name).expanduser(), checkout.folder / REFERENCES
    folder = inside if (inside / name).is_file() or not own.is_file() else own.parent
    file = name if folder == inside else own.name
    beside = ", ".join(sorted(path.name for path in inside.glob("*.jsonl"))) or "none"
    source = f"benchmark.references={name} must be a path or a file in {REFERENCES} (found there: {beside}). {SOURCE}"
    references = Checkout(folder, checkout.key, checkout.given, source)
    rows = references.read_rows(file, {"question_id": NAME, "choices": [{"turns": [str]}]})
    turns = {str(row["question_id"]): row["choices"][0]["turns"] for row in rows}  # the last counts, as in FastChat
    for name in asked:
        if len(turns.get(name, ())) < len(TURNS):
            has = "only one turn of the" if name in turns else "no"
            references.fail(file, f"has {has} reference answer to question {name}")
    checkout.digests["references"] = references.digests[file]
    return turns
