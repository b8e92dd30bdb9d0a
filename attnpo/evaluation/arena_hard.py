"""Arena-Hard: answers compared with a baseline's by a judge, in both orders (Li et al. 2024; v0.1 and v2.0).

The protocol is that of lmarena/arena-hard-auto: questions, baseline answers and judge prompts are read from a checkout
of it, the system prompts as constants of a Python file that is never run.

Differs from arena-hard-auto: the exact weighted mean is the score (there the mean of 100 resamples, or a Bradley-Terry
fit, which equals it where every model meets the baseline alone); style control is not built; a judge without a verdict
is not asked once more (2024). A verdict that is no label counts as missing, where the code of 2025 breaks off.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from attnpo.evaluation.answers.questions import ModelAnswer, Question
from attnpo.evaluation.arena_hard_files import ArenaHardFiles, read_files
from attnpo.evaluation.arena_hard_verdicts import GAMES, MISSING, VERDICTS, VerdictRules, grade_games
from attnpo.evaluation.base import Graded, Replies
from attnpo.evaluation.grading.base import GradingCall
from attnpo.evaluation.matching import answered, matched
from attnpo.schema import Sampling, UserError, check_choice, check_least

RULES = 1
"""Version of how calls are made and replies are read; moves when either changes."""


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
        check_least("benchmark", 1, strong_weight=self.strong_weight, judge_max_tokens=self.judge_max_tokens)
        check_least("benchmark", 0, judge_temperature=self.judge_temperature)
        if not self.figures:
            raise UserError("benchmark.figures: expected at least one score with its category, got none")

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the win rates, in percent."""
        return tuple(self.figures)

    @cached_property
    def _files(self) -> ArenaHardFiles:
        return read_files(self.path, self.release, tuple(dict.fromkeys(self.figures.values())))

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
        """Two calls per question: the baseline as answer A, then the model as answer A."""
        files, made = self._files, []
        for question, answer in zip(files.questions, matched(self.name, files.questions, answers), strict=True):
            baseline, model = files.baselines[question.id], answer.turns[0]
            for part, (first, second) in zip(GAMES, ((baseline, model), (model, baseline)), strict=True):
                values = {"QUESTION": question.turns[0], "ANSWER_A": first, "ANSWER_B": second}
                made.append(
                    GradingCall(
                        benchmark=self.name,
                        item=question.id,
                        part=part,
                        round=round_,
                        messages=files.prompts[question.category].messages(values),
                        max_tokens=self.judge_max_tokens,
                        temperature=self.judge_temperature,
                    )
                )
        return made

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Weighted means of the games in ``replies``; ``questions`` are those that ``answers`` has."""
        return self.graded(answered(self.questions(), answers), self._files.patterns, answers, replies)

    def graded(
        self,
        questions: Sequence[Question],
        patterns: Sequence[re.Pattern[str]],
        answers: Mapping[str, ModelAnswer],
        replies: Replies,
    ) -> Graded:
        """``grade`` by given ``questions`` and ``patterns`` of verdicts, without a checkout."""
        rules = VerdictRules(tuple(patterns), self.verdicts, self.missing, self.strong_weight)
        return grade_games(questions, self.figures, rules, answers, replies)
