"""Arena-Hard: answers compared with a baseline's by a judge, in both orders (Li et al. 2024; v0.1 and v2.0).

The protocol is that of lmarena/arena-hard-auto: questions, baseline answers and judge prompts are read from a checkout
of it, the system prompts as constants of a Python file that is never run.

Differs from arena-hard-auto: the exact weighted mean is the score (there the mean of 100 resamples, or a Bradley-Terry
fit, which equals it where every model meets the baseline alone); style control is not built; a judge without a verdict
is not asked once more (2024). A verdict that is no label counts as missing, where the code of 2025 breaks off.

Two versions of the protocol are known. That of 2025 (196f6b8) takes the last verdict of a text in capitals and drops a
question when one of its two games has none. That of 2024 (5840936) takes the text as it stands, double brackets only,
refuses texts whose verdicts differ, and drops that game alone.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml

from attnpo.evaluation.base import Graded, ModelAnswer, Question, Replies, match_answers, select_answered, weighted_mean
from attnpo.evaluation.chat import GradingCall
from attnpo.evaluation.checkout import NAME, Checkout, grader_messages, read_constant
from attnpo.schema import Sampling, UserError, check_at_least, check_choice

log = logging.getLogger(__name__)

RULES = 1
"""Version of how calls are made and replies are read; moves when either changes."""
SOURCE = (
    "Get it with `git clone https://github.com/lmarena/arena-hard-auto` (files laid out as in commit 196f6b8; those of "
    "2024 are not read) and give benchmark.path=arena-hard-auto"
)
JUDGES = "utils/judge_utils.py"
SETTINGS = "JUDGE_SETTINGS"
PLACES = ("QUESTION", "ANSWER_A", "ANSWER_B")
GAMES = ("game_1", "game_2")
"""Baseline as answer A in the first one, the model in the second one."""
LAST, AGREE = VERDICTS = ("last", "agree")
QUESTION, GAME = MISSING = ("question", "game")
# Each label with what it gives answer A, and whether it is a strong verdict.
LABELS = {"A>>B": (1.0, True), "A>B": (1.0, False), "A=B": (0.5, False), "B>A": (0.0, False), "B>>A": (0.0, True)}
# The same the other way round, which the protocol of 2025 takes too.
TURNED = {"B<<A": (1.0, True), "B<A": (1.0, False), "B=A": (0.5, False), "A<B": (0.0, False), "A<<B": (0.0, True)}

NO_REPLY = "games without a judgment"
NO_VERDICT = "judgments without a verdict"
UNKNOWN = "judgments with a verdict that is no label"
CONTRADICTORY = "judgments with verdicts that differ, without a verdict so"
LAST_TAKEN = "judgments with verdicts that differ, the last one taken"
DROPPED = "questions left out because a game has no verdict"
CUT = "judgments cut at the judge's most tokens"


@dataclass(frozen=True)
class ArenaHardFiles:
    """Contents of an Arena-Hard checkout.

    ``baselines``: answers by question; ``systems``: the judge's system text by category; ``patterns`` of verdicts are
    tried in their order, the first one that finds anything decides.
    """

    questions: tuple[Question, ...]
    baselines: Mapping[str, str]
    systems: Mapping[str, str]
    template: str
    patterns: tuple[re.Pattern[str], ...]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class ArenaHard:
    """Arena-Hard on a checkout of arena-hard-auto.

    ``release`` names the files of its data and config folders, ``figures`` the category of each score, the first one
    counting; questions of other categories are not asked. ``verdicts``: "last" (2025) or "agree" (2024) where a text
    has several. ``missing``: what a missing verdict costs, the "question" (2025) or its "game" (2024). A verdict ">>"
    counts ``strong_weight`` times.
    """

    path: str
    sampling: Sampling
    figures: dict[str, str]
    release: str
    name: str
    verdicts: str = "last"
    missing: str = "question"
    strong_weight: int = 3
    judge_temperature: float = 0.0
    judge_max_tokens: int = 16000

    def __post_init__(self) -> None:
        check_choice("benchmark.verdicts", self.verdicts, VERDICTS)
        check_choice("benchmark.missing", self.missing, MISSING)
        check_at_least("benchmark", 1, strong_weight=self.strong_weight, judge_max_tokens=self.judge_max_tokens)
        check_at_least("benchmark", 0, judge_temperature=self.judge_temperature)
        if not self.figures:
            raise UserError("benchmark.figures: expected at least one score with its category, got none")

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the win rates, in percent."""
        return tuple(self.figures)

    @cached_property
    def _files(self) -> ArenaHardFiles:
        return _read(self.path, self.release, list(dict.fromkeys(self.figures.values())))

    def questions(self) -> Sequence[Question]:
        """Returns the questions of the figures' categories, in the file's order."""
        return self._files.questions

    def versions(self) -> dict[str, object]:
        """Digests of the files, and all options that decide a call or a score."""
        return {
            "rules": RULES,
            "files": dict(self._files.digests),
            "figures": dict(self.figures),
            "verdicts": self.verdicts,
            "missing": self.missing,
            "strong_weight": self.strong_weight,
            "judge_temperature": self.judge_temperature,
            "judge_max_tokens": self.judge_max_tokens,
        }

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's answer to each question, by its id."""
        return self._files.baselines

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two calls per question: the baseline as answer A, then the model as answer A."""
        files, made = self._files, []
        for question, answer in zip(files.questions, match_answers(self.name, files.questions, answers), strict=True):
            baseline, model = files.baselines[question.id], answer.turns[0]
            for part, (first, second) in zip(GAMES, ((baseline, model), (model, baseline)), strict=True):
                values = {"QUESTION": question.turns[0], "ANSWER_A": first, "ANSWER_B": second}
                made.append(
                    GradingCall(
                        benchmark=self.name,
                        item=question.id,
                        part=part,
                        round=round_,
                        messages=grader_messages(files.systems[question.category], files.template, values),
                        max_tokens=self.judge_max_tokens,
                        temperature=self.judge_temperature,
                    )
                )
        return made

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the weighted means of the games in ``replies``; ``questions`` are those that ``answers`` has."""
        return self.grade_games(select_answered(self.questions(), answers), self._files.patterns, replies)

    def grade_games(
        self, questions: Sequence[Question], patterns: Sequence[re.Pattern[str]], replies: Replies
    ) -> Graded:
        """Returns per figure the weighted mean, in percent, of what the model got in the games of its questions.

        Repeats of a question's games are pairs of games of their own.
        """
        place = {question.id: index for index, question in enumerate(questions)}
        won, mass = np.zeros((2, len(questions)))
        counts: Counter[str] = Counter()
        played: dict[tuple[str, int], dict[str, tuple[float, float] | None]] = {}
        for call, reply in replies.items():
            if call.item not in place:
                continue  # a question that is not graded here
            counts[CUT] += reply.finish_reason == "length"
            verdict = self._verdict(reply.text, patterns, counts)
            if verdict is not None and call.part == GAMES[0]:
                verdict = (1.0 - verdict[0], verdict[1])  # the baseline is answer A
            played.setdefault((call.item, call.repeat), {})[call.part] = verdict
        for (item, _), games in played.items():
            counted = [verdict for verdict in games.values() if verdict is not None]
            if self.missing == QUESTION and len(counted) < len(GAMES):
                counts[DROPPED] += 1
                continue
            won[place[item]] += sum(score * weight for score, weight in counted)
            mass[place[item]] += sum(weight for _, weight in counted)
        seen = {(item, part) for (item, _), games in played.items() for part in games}
        counts[NO_REPLY] = len(GAMES) * len(questions) - len(seen)

        rates = np.divide(100.0 * won, mass, out=np.full(len(questions), np.nan), where=mass > 0)
        values, weights = {}, {}
        for figure, category in self.figures.items():
            inside = np.array([question.category == category for question in questions], dtype=bool)
            values[figure], weights[figure] = np.where(inside, rates, np.nan), np.where(inside, mass, 0.0)
        return Graded(
            questions=tuple(place),
            scores={figure: weighted_mean(values[figure], weights[figure]) for figure in self.figures},
            values=values,
            weights=weights,
            counts={reason: count for reason, count in counts.items() if count},
        )

    def _verdict(
        self, text: str, patterns: Sequence[re.Pattern[str]], counts: Counter[str]
    ) -> tuple[float, float] | None:
        """Returns what answer A gets and the verdict's weight; None, counted by reason, where there is no verdict."""
        agree = self.verdicts == AGREE
        found: Sequence[str] = ()
        for pattern in patterns[:1] if agree else patterns:
            found = [match for match in pattern.findall(text if agree else text.upper()) if match]
            if found:
                break
        if not found:
            counts[NO_VERDICT] += 1
            return None
        if len(set(found)) > 1:
            counts[CONTRADICTORY if agree else LAST_TAKEN] += 1
            if agree:
                return None
        label = found[-1].strip("\n")
        labels = LABELS if agree else LABELS | TURNED
        if label not in labels:
            counts[UNKNOWN] += 1
            return None
        score, strong = labels[label]
        return score, float(self.strong_weight if strong else 1)


# --------------------------------------------------------------------------------------------- the checkout's files


def _read(path: str, release: str, categories: Sequence[str]) -> ArenaHardFiles:
    """Reads the files of a ``release`` (arena-hard-v0.1) for the questions of some ``categories``.

    Raises:
        UserError: a file is missing, damaged or laid out otherwise, or lacks what the questions need.
    """
    checkout = Checkout(Path(path).expanduser(), "benchmark.path", path, SOURCE)
    file = f"data/{release}/question.jsonl"
    rows = checkout.rows_by("uid", file, {"category": str, "prompt": str})
    found = sorted({row["category"] for row in rows.values()})
    if absent := [category for category in categories if category not in found]:
        checkout.refuse(file, f"has no question of category {absent[0]}; benchmark.figures can have {found}")
    questions = tuple(
        Question(uid, (row["prompt"],), category=row["category"])
        for uid, row in rows.items()
        if row["category"] in categories
    )
    settings = _settings(checkout, categories)
    template, patterns = _template_and_patterns(checkout, f"config/{release}.yaml")
    baselines: dict[str, str] = {}
    for category in categories:
        asked = [question.id for question in questions if question.category == category]
        file = f"data/{release}/model_answer/{settings[category]['baseline']}.jsonl"
        baselines |= _answers(checkout, file, asked)
    systems = {category: settings[category]["system_prompt"] for category in categories}
    return ArenaHardFiles(questions, baselines, systems, template, patterns, checkout.digests)


def _settings(checkout: Checkout, categories: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns the baseline's name and the judge's system prompt by category."""
    try:
        settings: dict[str, dict[str, str]] = read_constant(checkout.text(JUDGES), SETTINGS)
    except ValueError as error:
        checkout.refuse(JUDGES, str(error))
    form = {"baseline": NAME, "system_prompt": NAME}
    checkout.require(f"{JUDGES}: {SETTINGS}", settings, dict.fromkeys(categories, form))
    return settings


def _template_and_patterns(checkout: Checkout, name: str) -> tuple[str, tuple[re.Pattern[str], ...]]:
    """Returns the template of the judge's user message, and the patterns of verdicts in their order."""
    try:
        values = yaml.safe_load(checkout.text(name))
    except (yaml.YAMLError, RecursionError) as error:
        checkout.refuse(name, f"is no YAML ({str(error).splitlines()[0]})")
    checkout.require(name, values, {"prompt_template": str, "regex_patterns": [str]})
    checkout.require_template(f"{name}: prompt_template", values["prompt_template"], PLACES)
    try:
        patterns = tuple(re.compile(pattern) for pattern in values["regex_patterns"])
    except re.error as error:
        checkout.refuse(f"{name}: regex_patterns", f"has a pattern that is none ({error})")
    if any(pattern.groups != 1 for pattern in patterns):
        checkout.refuse(f"{name}: regex_patterns", "has to have patterns of one group each, the verdict")
    return values["prompt_template"], patterns


def _answers(checkout: Checkout, name: str, asked: Sequence[str]) -> dict[str, str]:
    """Returns a baseline's answers to the questions ``asked``, the last one where a question has several (as there)."""
    rows = checkout.rows(name, {"uid": NAME, "messages": [..., {"content": {"answer": str}}]})
    found = {str(row["uid"]): row["messages"][-1]["content"]["answer"] for row in rows}
    if len(found) < len(rows):
        log.warning("%s: %d questions answered again, the last answer is taken", name, len(rows) - len(found))
    missing = [uid for uid in asked if uid not in found]
    if missing:
        checkout.refuse(name, f"has no baseline answer to {len(missing)} questions ({', '.join(missing[:5])})")
    return {uid: found[uid] for uid in asked}
