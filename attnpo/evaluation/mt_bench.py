"""MT-Bench: 80 questions of two turns, each turn rated from 1 to 10 by a judge (Zheng et al. 2023).

The protocol is that of FastChat 0e6d3e4, fastchat/llm_judge: single-answer grading, with reference answers for math,
reasoning and coding. Questions, judge prompts and references are read from a checkout of it.

Differs from FastChat: references are found by file, not by the judge's name; a call is judged once, where a resumed
run of FastChat may append a second judgment and counts both; a rating written "07" is 7, where FastChat breaks off.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from attnpo.evaluation.base import Graded, ModelAnswer, Question, Replies, match_answers, select_answered, weighted_mean
from attnpo.evaluation.chat import GradingCall
from attnpo.evaluation.checkout import NAME, Checkout, grader_messages
from attnpo.schema import Message, Sampling, UserError, check_at_least

RULES = 1
"""Version of how calls are made and replies are read; moves when either changes."""
TURNS = ("turn_1", "turn_2")
LOWEST, HIGHEST = 1, 10
SOURCE = "Get it with `git clone https://github.com/lm-sys/FastChat` and give benchmark.path=FastChat"
FOLDERS = ("fastchat/llm_judge/data", "data", ".")  # below the repository, below llm_judge, or the folder itself
QUESTIONS = "mt_bench/question.jsonl"
PROMPTS = "judge_prompts.jsonl"
REFERENCES = "mt_bench/reference_answer"
# A judge prompt's name by whether it shows references, then by turn.
PROMPT_NAMES = {
    False: ("single-v1", "single-v1-multi-turn"),
    True: ("single-math-v1", "single-math-v1-multi-turn"),
}
PLACES = (("question", "answer"), ("question_1", "answer_1", "question_2", "answer_2"))
REFERENCE_PLACES = (("ref_answer_1",), ("ref_answer_1", "ref_answer_2"))
_RATINGS = (re.compile(r"\[\[([0-9]+\.?[0-9]*)\]\]"), re.compile(r"\[([0-9]+\.?[0-9]*)\]"))

NO_REPLY = "turns without a judgment"
NO_RATING = "judgments without a rating, left out"
OUTSIDE = f"ratings outside {LOWEST} to {HIGHEST}, counted as they are"
CUT = "judgments cut at the judge's most tokens"


def rating(text: str) -> float | None:
    """Returns the first number in double brackets, else the first in single ones; None where there is neither."""
    for pattern in _RATINGS:
        found = pattern.search(text)
        if found is not None:
            value = float(found[1])
            return value if np.isfinite(value) else None
    return None


@dataclass(frozen=True)
class MTBenchFiles:
    """Contents of an MT-Bench checkout.

    ``prompts``: system text and template by (with references, turn); ``references``: turns by question.
    """

    questions: tuple[Question, ...]
    prompts: Mapping[tuple[bool, int], tuple[str, str]]
    references: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class MTBench:
    """MT-Bench on a checkout of FastChat.

    ``references``: a file of the checkout's reference_answer folder, or a path. ``temperatures`` by category replace
    that of ``sampling``; the categories are scores too. ``with_reference``: categories judged beside a reference.
    ``judge_temperature`` and ``judge_max_tokens`` are those of the judge's replies.
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
            raise UserError(f"benchmark.with_reference: {unknown[0]} is no category of benchmark.temperatures")
        check_at_least("benchmark", 1, judge_max_tokens=self.judge_max_tokens)
        check_at_least("benchmark", 0, judge_temperature=self.judge_temperature)
        check_at_least("benchmark.temperatures", 0, **self.temperatures)

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the mean rating of both turns, that of each turn, that of each category."""
        return ("score", *TURNS, *self.temperatures)

    @cached_property
    def _files(self) -> MTBenchFiles:
        return _read(self)

    def questions(self) -> Sequence[Question]:
        """Returns the questions in the file's order."""
        return self._files.questions

    def versions(self) -> dict[str, object]:
        """Digests of the files, and all options that decide a call or a score."""
        return {
            "rules": RULES,
            "files": dict(self._files.digests),
            "with_reference": list(self.with_reference),
            "judge_temperature": self.judge_temperature,
            "judge_max_tokens": self.judge_max_tokens,
        }

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two calls per question: its first turn alone, then both turns with the second to be rated."""
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
        return grader_messages(*self._files.prompts[question.category in self.with_reference, turn], values)

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns means over every valid judgment in ``replies``, not means of means.

        A question counts as often as it has any.

        ``questions`` are those that ``answers`` has. All repeats among the replies count.
        """
        return grade_ratings(select_answered(self.questions(), answers), tuple(self.temperatures), replies)


def grade_ratings(questions: Sequence[Question], categories: Sequence[str], replies: Replies) -> Graded:
    """Returns the scores of ``questions``: of all, by turn, by category."""
    place = {question.id: index for index, question in enumerate(questions)}
    total, number, judged = np.zeros((3, len(TURNS), len(questions)))
    counts: Counter[str] = Counter()
    for call, reply in replies.items():
        if call.item not in place:
            continue  # a question that is not graded here
        at = (TURNS.index(call.part), place[call.item])
        judged[at] = 1
        counts[CUT] += reply.finish_reason == "length"
        value = rating(reply.text)
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
    return Graded(
        questions=tuple(place),
        scores={name: weighted_mean(values[name], weights[name]) for name in values},
        values=values,
        weights=weights,
        counts={reason: count for reason, count in counts.items() if count},
    )


# --------------------------------------------------------------------------------------------- the checkout's files


def _read(benchmark: MTBench) -> MTBenchFiles:
    given = Path(benchmark.path).expanduser()
    folder = next((given / below for below in FOLDERS if (given / below / QUESTIONS).is_file()), given / FOLDERS[0])
    checkout = Checkout(folder, "benchmark.path", benchmark.path, SOURCE)
    rows = checkout.rows_by("question_id", QUESTIONS, {"category": str, "turns": [str]})
    for name, row in rows.items():
        if row["category"] not in benchmark.temperatures:
            known = ", ".join(benchmark.temperatures)
            told = f"has question {name} of category {row['category']}; benchmark.temperatures has {known}"
            checkout.refuse(QUESTIONS, told)
        if len(row["turns"]) != len(TURNS):
            checkout.refuse(QUESTIONS, f"has {len(row['turns'])} turns of question {name}, expected {len(TURNS)}")
    questions = tuple(
        Question(name, tuple(row["turns"]), None, row["category"], benchmark.temperatures[row["category"]])
        for name, row in rows.items()
    )
    prompts = _prompts(checkout)
    asked = [question.id for question in questions if question.category in benchmark.with_reference]
    references = _references(checkout, benchmark.references, asked) if asked else {}
    return MTBenchFiles(questions, prompts, references, checkout.digests)


def _prompts(checkout: Checkout) -> dict[tuple[bool, int], tuple[str, str]]:
    form = dict.fromkeys(("output_format", "system_prompt", "prompt_template"), str)
    rows = checkout.rows_by("name", PROMPTS, form)
    prompts = {}
    for (referenced, names), turn in product(PROMPT_NAMES.items(), range(len(TURNS))):
        where, row = f"{PROMPTS}, {names[turn]},", rows.get(names[turn])
        if row is None:
            checkout.refuse(PROMPTS, f"has no prompt {names[turn]}")
        if row["output_format"] != "[[rating]]":
            checkout.refuse(where, f"asks for {row['output_format']}, expected [[rating]]")
        places = (*PLACES[turn], *(REFERENCE_PLACES[turn] if referenced else ()))
        checkout.require_template(where, row["prompt_template"], places)
        prompts[referenced, turn] = row["system_prompt"], row["prompt_template"]
    return prompts


def _references(checkout: Checkout, name: str, asked: Sequence[str]) -> dict[str, Sequence[str]]:
    own, inside = Path(name).expanduser(), checkout.folder / REFERENCES
    folder = inside if (inside / name).is_file() or not own.is_file() else own.parent
    file = name if folder == inside else own.name
    beside = ", ".join(sorted(path.name for path in inside.glob("*.jsonl"))) or "none"
    source = f"benchmark.references={name} has to be a path or a file of {REFERENCES} (there: {beside}). {SOURCE}"
    references = Checkout(folder, checkout.key, checkout.given, source)
    rows = references.rows(file, {"question_id": NAME, "choices": [{"turns": [str]}]})
    turns = {str(row["question_id"]): row["choices"][0]["turns"] for row in rows}  # FastChat takes the last one too
    for name in asked:
        if len(turns.get(name, ())) < len(TURNS):
            has = "one turn only of the" if name in turns else "no"
            references.refuse(file, f"has {has} reference answer to question {name}")
    checkout.digests["references"] = references.digests[file]
    return turns
