"""Arena-Hard: a judge compares each answer with a baseline's, in both orders (Li et al. 2024; v0.1 and v2.0).

The protocol follows lmarena/arena-hard-auto. Questions, baseline answers and judge prompts are read from a checkout;
system prompts are constants in a Python file, which is parsed but never run.

Differences from arena-hard-auto: the score is the exact weighted mean instead of the mean of 100 resamples or a
Bradley-Terry fit (a fit gives the same result if every model is only compared with the baseline); style control is not
implemented; a judge that returns no verdict is not asked again (the 2024 code asks again). Verdicts with an unknown
label count as missing (the 2025 code crashes).

There are two versions of the protocol. The 2025 one (196f6b8) upper-cases the judgment, uses the last verdict in it,
and drops a question if one of its two games has no verdict. The 2024 one (5840936) leaves the judgment unchanged,
accepts only double brackets, rejects contradictory verdicts, and drops only the affected game.
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
from attnpo.evaluation.checkout import NAME, Checkout, build_grader_messages, read_constant
from attnpo.schema import Sampling, UserError, check_at_least, check_choice

log = logging.getLogger(__name__)

RULES = 1
"""Version of the rules for building calls and parsing replies; increment when either changes."""
SOURCE = (
    "Get it with `git clone https://github.com/lmarena/arena-hard-auto` (file layout of commit 196f6b8; the layout of "
    "2024 is not supported) and set benchmark.path=arena-hard-auto"
)
JUDGES = "utils/judge_utils.py"
SETTINGS = "JUDGE_SETTINGS"
PLACES = ("QUESTION", "ANSWER_A", "ANSWER_B")
GAMES = ("game_1", "game_2")
"""In the first game, the baseline is answer A; in the second, the model is."""
LAST, AGREE = VERDICTS = ("last", "agree")
QUESTION, GAME = MISSING = ("question", "game")
# Maps each label to answer A's score and whether the verdict is strong.
LABELS = {"A>>B": (1.0, True), "A>B": (1.0, False), "A=B": (0.5, False), "B>A": (0.0, False), "B>>A": (0.0, True)}
# Reversed notation, also accepted by the 2025 protocol.
TURNED = {"B<<A": (1.0, True), "B<A": (1.0, False), "B=A": (0.5, False), "A<B": (0.0, False), "A<<B": (0.0, True)}

NO_REPLY = "games without a judgment"
NO_VERDICT = "judgments without a verdict"
UNKNOWN = "judgments with an unknown verdict label"
CONTRADICTORY = "judgments with contradictory verdicts, counted as no verdict"
LAST_TAKEN = "judgments with contradictory verdicts, last one used"
DROPPED = "questions left out because a game has no verdict"
CUT = "judgments cut at the judge's token limit"


@dataclass(frozen=True)
class ArenaHardFiles:
    """Contents of an Arena-Hard checkout.

    ``baselines``: baseline answers by question; ``systems``: the judge's system prompt by category; ``patterns``:
    regular expressions for verdicts, tried in order until one matches.
    """

    questions: tuple[Question, ...]
    baselines: Mapping[str, str]
    systems: Mapping[str, str]
    template: str
    patterns: tuple[re.Pattern[str], ...]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class ArenaHard:
    """Arena-Hard from a checkout of arena-hard-auto.

    ``release`` selects the files in the checkout's data and config folders. ``figures`` maps each score to a category,
    with the main score first; questions in other categories are skipped. ``verdicts``: rule for judgments with several
    verdicts, "last" (2025) or "agree" (2024). ``missing``: a missing verdict drops the "question" (2025) or only the
    "game" (2024). Strong verdicts (">>") have weight ``strong_weight``.
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
            raise UserError("benchmark.figures is empty: expected at least one score with its category")

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the win rates."""
        return tuple(self.figures)

    @cached_property
    def _files(self) -> ArenaHardFiles:
        return _read_checkout(self.path, self.release, list(dict.fromkeys(self.figures.values())))

    def questions(self) -> Sequence[Question]:
        """Returns the questions in the scored categories, in file order."""
        return self._files.questions

    def fingerprint(self) -> dict[str, object]:
        """Returns file digests and all options that affect calls or scores."""
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
        """Returns the baseline's answer to each question, by question id."""
        return self._files.baselines

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns two calls per question: first with the baseline as answer A, then with the model as answer A."""
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
                        messages=build_grader_messages(files.systems[question.category], files.template, values),
                        max_tokens=self.judge_max_tokens,
                        temperature=self.judge_temperature,
                    )
                )
        return made

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        """Returns the win rates over the games in ``replies``, for the questions that have an answer."""
        return self.grade_games(select_answered_questions(self.questions(), answers), self._files.patterns, replies)

    def grade_games(
        self, questions: Sequence[Question], patterns: Sequence[re.Pattern[str]], replies: Replies
    ) -> RoundScores:
        """Returns one score per category: the model's weighted mean over the category's games, in percent.

        Repeated gradings of a question count as separate pairs of games.
        """
        place = {question.id: index for index, question in enumerate(questions)}
        won, mass = np.zeros((2, len(questions)))
        counts: Counter[str] = Counter()
        played: dict[tuple[str, int], dict[str, tuple[float, float] | None]] = {}
        for call, reply in replies.items():
            if call.item not in place:
                continue  # a question that is not graded here
            counts[CUT] += reply.finish_reason == "length"
            verdict = self._parse_verdict(reply.text, patterns, counts)
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
        return RoundScores(
            questions=tuple(place),
            scores={figure: weighted_mean(values[figure], weights[figure]) for figure in self.figures},
            values=values,
            weights=weights,
            counts={reason: count for reason, count in counts.items() if count},
        )

    def _parse_verdict(
        self, text: str, patterns: Sequence[re.Pattern[str]], counts: Counter[str]
    ) -> tuple[float, float] | None:
        """Parses answer A's score and the verdict's weight.

        Counts invalid verdicts by reason and returns None for them.
        """
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


def _read_checkout(path: str, release: str, categories: Sequence[str]) -> ArenaHardFiles:
    """Reads the files of a ``release`` (e.g. arena-hard-v0.1) for the given question ``categories``.

    Raises:
        UserError: a file is missing, damaged, incomplete or has an unexpected layout.
    """
    checkout = Checkout(Path(path).expanduser(), "benchmark.path", path, SOURCE)
    file = f"data/{release}/question.jsonl"
    rows = checkout.read_rows_by("uid", file, {"category": str, "prompt": str})
    found = sorted({row["category"] for row in rows.values()})
    if absent := [category for category in categories if category not in found]:
        checkout.fail(file, f"has no questions in category {absent[0]}; benchmark.figures can select {found}")
    questions = tuple(
        Question(uid, (row["prompt"],), category=row["category"])
        for uid, row in rows.items()
        if row["category"] in categories
    )
    settings = _read_category_settings(checkout, categories)
    template, patterns = _read_judge_config(checkout, f"config/{release}.yaml")
    baselines: dict[str, str] = {}
    for category in categories:
        asked = [question.id for question in questions if question.category == category]
        file = f"data/{release}/model_answer/{settings[category]['baseline']}.jsonl"
        baselines |= _read_baseline_answers(checkout, file, asked)
    systems = {category: settings[category]["system_prompt"] for category in categories}
    return ArenaHardFiles(questions, baselines, systems, template, patterns, checkout.digests)


def _read_category_settings(checkout: Checkout, categories: Sequence[str]) -> dict[str, dict[str, str]]:
    """Reads the baseline's name and the judge's system prompt for each category."""
    try:
        settings: dict[str, dict[str, str]] = read_constant(checkout.read_text(JUDGES), SETTINGS)
    except ValueError as error:
        checkout.fail(JUDGES, str(error))
    form = {"baseline": NAME, "system_prompt": NAME}
    checkout.check_form(f"{JUDGES}: {SETTINGS}", settings, dict.fromkeys(categories, form))
    return settings


def _read_judge_config(checkout: Checkout, name: str) -> tuple[str, tuple[re.Pattern[str], ...]]:
    """Reads the template of the judge's user message and the verdict patterns, in the order they are tried."""
    try:
        values = yaml.safe_load(checkout.read_text(name))
    except (yaml.YAMLError, RecursionError) as error:
        checkout.fail(name, f"is not valid YAML ({str(error).splitlines()[0]})")
    checkout.check_form(name, values, {"prompt_template": str, "regex_patterns": [str]})
    checkout.check_template(f"{name}: prompt_template", values["prompt_template"], PLACES)
    try:
        patterns = tuple(re.compile(pattern) for pattern in values["regex_patterns"])
    except re.error as error:
        checkout.fail(f"{name}: regex_patterns", f"has an invalid regular expression ({error})")
    if any(pattern.groups != 1 for pattern in patterns):
        checkout.fail(f"{name}: regex_patterns", "must have exactly one group per pattern, which captures the verdict")
    return values["prompt_template"], patterns


def _read_baseline_answers(checkout: Checkout, name: str, asked: Sequence[str]) -> dict[str, str]:
    """Reads a baseline's answers to the questions ``asked``, using the last answer to each (as upstream does)."""
    rows = checkout.read_rows(name, {"uid": NAME, "messages": [..., {"content": {"answer": str}}]})
    found = {str(row["uid"]): row["messages"][-1]["content"]["answer"] for row in rows}
    if len(found) < len(rows):
        log.warning("%s: %d questions have several answers; the last one is used", name, len(rows) - len(found))
    missing = [uid for uid in asked if uid not in found]
    if missing:
        checkout.fail(name, f"has no baseline answers to {len(missing)} questions ({', '.join(missing[:5])})")
    return {uid: found[uid] for uid in asked}
