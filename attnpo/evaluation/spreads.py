"""Three kinds of spread of a score: over questions, over rounds of generation, and from regrading the same answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import stdev

import numpy as np

from attnpo.evaluation.base import BenchmarkScore, ModelAnswer, Replies, RoundScores
from attnpo.evaluation.intervals import t_quantile

DRAWS = 2000
"""Number of bootstrap resamples of the questions."""
EXCHANGES = 24
"""Number of random swaps of first and second grades, for scores that are not weighted means over questions."""
LEVEL = 0.95
NORMAL = 1.96


def half_widths(rounds: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns two 95 % half widths of a mean over n rounds: 1.96 s / sqrt(n), and the one based on Student's t.

    The AttentionPO paper uses the first. s is the sample standard deviation (n - 1). Both are None for a single round.
    """
    if len(rounds) < 2:
        return None, None
    error = stdev(rounds) / math.sqrt(len(rounds))
    return NORMAL * error, t_quantile(0.975, len(rounds) - 1) * error


def grading_noise(one: float, other: float) -> float:
    """Returns 1.96 sqrt(a^2 + b^2), the largest difference between two scores that grading noise can explain.

    a and b are the standard deviations of the two scores from regrading (``grading_spread``).
    """
    return NORMAL * math.hypot(one, other)


def summarize_rounds(name: str, rounds: Sequence[RoundScores], grading: float | None, seed: int = 0) -> BenchmarkScore:
    """Combines a score over the rounds of generation.

    ``questions``: number of questions with a value in any round, or of all questions if the score has no per-question
    values.
    """
    figures = tuple(float(graded.scores[name]) for graded in rounds)
    questions = len(rounds[0].questions)
    if all(name in graded.values for graded in rounds):
        found = [np.isfinite(graded.values[name]) & (graded.weights[name] > 0) for graded in rounds]
        questions = int(np.logical_or.reduce(found).sum())
    return BenchmarkScore(
        name=name,
        mean=float(np.mean(figures)),
        rounds=figures,
        interval=question_interval(name, rounds, seed),
        grading=grading,
        questions=questions,
    )


def question_interval(name: str, rounds: Sequence[RoundScores], seed: int = 0) -> tuple[float, float] | None:
    """Returns the 95 % interval over questions of a score's mean over rounds; None if its variation is unknown.

    Uses bootstrap percentiles, resampling questions together with their values from all rounds (arena-hard-auto
    resamples rows, which makes the interval too narrow if a question has several). If the library that defines the
    score reports a standard error instead (``RoundScores.errors``), the half width is 1.96 times the mean error, since
    rounds share their questions.
    """
    if any(name not in graded.values for graded in rounds):
        errors = [graded.errors[name] for graded in rounds if name in graded.errors]
        if len(errors) < len(rounds):
            return None
        centre, half = np.mean([graded.scores[name] for graded in rounds]), NORMAL * np.mean(errors)
        return float(centre - half), float(centre + half)
    values = np.stack([np.nan_to_num(graded.values[name]) for graded in rounds])
    weights = np.stack([graded.weights[name] for graded in rounds])
    count = values.shape[1]
    if count < 2:
        return None
    drawn = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    times = np.stack([np.bincount(row, minlength=count) for row in drawn]).astype(float)
    mass = times @ weights.T
    with np.errstate(invalid="ignore"):
        means = (times @ (values * weights).T / mass).mean(axis=1)
    means = means[np.isfinite(means)]  # a resample may contain no question with a value
    if not means.size:
        return None
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def grading_spread(
    name: str,
    first: RoundScores,
    again: RoundScores,
    exchange: Callable[[frozenset[str]], RoundScores] | None = None,
    seed: int = 0,
) -> float | None:
    """Estimates a score's standard deviation from grading noise, using questions that were graded twice.

    ``first`` covers all questions; ``again`` contains the second grades of some of them. For a weighted mean
    f = sum(w v) / sum(w), a second grading changes a question's contribution by e = w2 (v2 - f) - w1 (v1 - f), so the
    variance of f over N questions is N mean(e^2) / (2 sum(w)^2). For any other score, ``exchange`` computes the score
    with the second replies of the given questions. Over random halves of the M questions graded twice, the score's
    variance is a quarter of sum(d^2), where d is the change caused by one question; the variance is therefore scaled by
    2 N / M. Returns None if M < 2.
    """
    twice = [place for place, question in enumerate(first.questions) if question in set(again.questions)]
    if len(twice) < 2:
        return None
    if name in first.values and name in again.values:
        return _weighted_mean_spread(name, first, again, twice)
    if exchange is None:
        return None
    draws = np.random.default_rng(seed)
    names = [first.questions[place] for place in twice]
    figures = []
    for _ in range(EXCHANGES // 2):
        one = draws.permutation(len(names)) < len(names) // 2
        for chosen in (one, ~one):
            picked = frozenset(name for name, taken in zip(names, chosen, strict=True) if taken)
            figures.append(float(exchange(picked).scores[name]))
    return float(np.sqrt(2 * len(first.questions) / len(names) * np.var(figures, ddof=1)))


def _weighted_mean_spread(name: str, first: RoundScores, again: RoundScores, twice: Sequence[int]) -> float | None:
    value, weight = np.nan_to_num(first.values[name]), first.weights[name]
    mass = float(weight.sum())
    if mass <= 0:
        return None
    figure = float((value * weight).sum() / mass)
    place = {question: index for index, question in enumerate(again.questions)}
    other = np.array([place[first.questions[index]] for index in twice])
    second, second_weight = np.nan_to_num(again.values[name])[other], again.weights[name][other]
    moved = second_weight * (second - figure) - weight[twice] * (value[twice] - figure)
    counted = int(((weight > 0) & np.isfinite(first.values[name])).sum())
    return float(np.sqrt(counted * float((moved**2).mean()) / 2) / mass)


def make_regrader(
    answers: Mapping[str, ModelAnswer],
    first: Replies,
    again: Replies,
    grade: Callable[[Mapping[str, ModelAnswer], Replies], RoundScores],
) -> Callable[[frozenset[str]], RoundScores]:
    """Builds a function that grades the given questions by their second replies, and all others by their first."""
    second = {(call.item, call.part): reply for call, reply in again.items()}

    def regrade(questions: frozenset[str]) -> RoundScores:
        return grade(
            answers,
            {
                call: second.get((call.item, call.part), reply) if call.item in questions else reply
                for call, reply in first.items()
            },
        )

    return regrade
