"""Arena-Hard's verdicts: read from a judge's text, weighted, and averaged.

Two versions of the protocol are known (lmarena/arena-hard-auto). That of 2025 (196f6b8) takes the last verdict of a
text in capitals and drops a question when one of its two games has none. That of 2024 (5840936) takes the text as it
stands, double brackets only, refuses texts whose verdicts differ, and drops that game alone.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnpo.evaluation.answers.questions import ModelAnswer, Question
from attnpo.evaluation.base import Graded, Replies
from attnpo.evaluation.matching import weighted_mean

GAMES = ("game_1", "game_2")
"""The baseline is answer A in the first one, the model in the second one."""
LAST, AGREE = VERDICTS = ("last", "agree")
QUESTION, GAME = MISSING = ("question", "game")
_A_WINS, _TIE, _B_WINS = 1.0, 0.5, 0.0
# Each label with what it gives answer A, and whether it is a strong verdict.
LABELS = {
    "A>>B": (_A_WINS, True),
    "A>B": (_A_WINS, False),
    "A=B": (_TIE, False),
    "B>A": (_B_WINS, False),
    "B>>A": (_B_WINS, True),
}
# The same the other way round, which the protocol of 2025 takes too.
TURNED = {
    "B<<A": (_A_WINS, True),
    "B<A": (_A_WINS, False),
    "B=A": (_TIE, False),
    "A<B": (_B_WINS, False),
    "A<<B": (_B_WINS, True),
}

NO_REPLY = "games without a judgment"
NO_VERDICT = "judgments without a verdict"
UNKNOWN = "judgments with a verdict that is no label"
CONTRADICTORY = "judgments with verdicts that differ, without a verdict so"
LAST_TAKEN = "judgments with verdicts that differ, the last one taken"
DROPPED = "questions left out because a game has no verdict"
CUT = "judgments cut at the judge's most tokens"


@dataclass(frozen=True)
class VerdictRules:
    """How verdicts are found, what one that is missing costs, and how often a strong one counts.

    ``patterns`` are tried in their order; the first one that finds anything decides.
    """

    patterns: tuple[re.Pattern[str], ...]
    verdicts: str = LAST
    missing: str = QUESTION
    strong_weight: int = 3

    def read(self, text: str, counts: Counter[str]) -> tuple[float, float] | None:
        """Returns what answer A gets and the verdict's weight; None, counted by reason, where there is no verdict."""
        agree = self.verdicts == AGREE
        patterns = self.patterns[:1] if agree else self.patterns
        found: Sequence[str] = ()
        for pattern in patterns:
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


def grade_games(
    questions: Sequence[Question],
    figures: Mapping[str, str],
    rules: VerdictRules,
    answers: Mapping[str, ModelAnswer],
    replies: Replies,
) -> Graded:
    """Per figure the weighted mean, in percent, of what the model got in the games of a category's questions.

    ``figures`` names each figure's category. Repeats of a question's games are pairs of games of their own.
    """
    place = {question.id: index for index, question in enumerate(questions)}
    won, mass = np.zeros(len(questions)), np.zeros(len(questions))
    counts: Counter[str] = Counter()
    played: dict[tuple[str, int], dict[str, tuple[float, float] | None]] = {}
    for call, reply in replies.items():
        if call.item not in place:
            continue  # a question outside ``answers``
        counts[CUT] += reply.finish_reason == "length"
        verdict = rules.read(reply.text, counts)
        if verdict is not None and call.part == GAMES[0]:
            verdict = (1.0 - verdict[0], verdict[1])  # the baseline is answer A
        played.setdefault((call.item, call.repeat), {})[call.part] = verdict
    for (item, _), games in played.items():
        counted = [verdict for verdict in games.values() if verdict is not None]
        if rules.missing == QUESTION and len(counted) < len(GAMES):
            counts[DROPPED] += 1
            continue
        won[place[item]] += sum(score * weight for score, weight in counted)
        mass[place[item]] += sum(weight for _, weight in counted)
    seen = {(item, part) for (item, _), games in played.items() for part in games}
    counts[NO_REPLY] = len(GAMES) * len(questions) - len(seen)

    rates = np.divide(100.0 * won, mass, out=np.full(len(questions), np.nan), where=mass > 0)
    values, weights = {}, {}
    for figure, category in figures.items():
        inside = np.array([question.category == category for question in questions], dtype=bool)
        values[figure] = np.where(inside, rates, np.nan)
        weights[figure] = np.where(inside, mass, 0.0)
    return Graded(
        questions=tuple(place),
        scores={figure: weighted_mean(values[figure], weights[figure]) for figure in figures},
        values=values,
        weights=weights,
        counts={reason: count for reason, count in counts.items() if count},
    )
