"""Three spreads of a figure: over questions, over rounds of generation, and from grading the same answers again."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import stdev

import numpy as np

from attnpo.evaluation.base import BenchmarkScore, Graded, ModelAnswer, Replies
from attnpo.evaluation.intervals import t_quantile

DRAWS = 2000
"""Resamples of the questions."""
EXCHANGES = 24
"""Ways of exchanging first grades for second ones, where a figure is no weighted mean of its questions' values."""
LEVEL = 0.95
NORMAL = 1.96


def half_widths(rounds: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the 95 % half widths of a mean over n rounds: 1.96 s / sqrt(n), the paper's, and Student's t.

    s is taken with n - 1. None for a single round, which has no spread.
    """
    if len(rounds) < 2:
        return None, None
    error = stdev(rounds) / math.sqrt(len(rounds))
    return NORMAL * error, t_quantile(0.975, len(rounds) - 1) * error


def grading_noise(one: float, other: float) -> float:
    """Returns 1.96 sqrt(a^2 + b^2), below which grading again may explain the difference of two figures.

    a and b are the standard deviations of grading each of the two again (``grading_spread``).
    """
    return NORMAL * math.hypot(one, other)


def score_of(name: str, rounds: Sequence[Graded], grading: float | None, seed: int = 0) -> BenchmarkScore:
    """Returns a figure over the rounds of generation.

    ``questions`` counts those with a value in any round; all of them where the figure has no values of its own.
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


def question_interval(name: str, rounds: Sequence[Graded], seed: int = 0) -> tuple[float, float] | None:
    """Returns the 95 % interval over questions of a figure's mean over rounds.

    None where nothing says how it varies over questions.

    Percentiles of a bootstrap in which a drawn question brings its values of every round (arena-hard-auto resamples
    rows, which is too narrow where a question has several). Where the library that defines the figure states its
    standard error instead (``Graded.errors``), 1.96 times the mean of the rounds' errors: rounds share their questions.
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
    means = means[np.isfinite(means)]  # a resample may hold no question with a value
    if not means.size:
        return None
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def grading_spread(
    name: str,
    first: Graded,
    again: Graded,
    exchange: Callable[[frozenset[str]], Graded] | None = None,
    seed: int = 0,
) -> float | None:
    """Returns the standard deviation that one grading gives a figure, from questions that were graded twice.

    ``first`` holds all questions, ``again`` the second grades of some. For a weighted mean f = sum(w v) / sum(w)
    a question's part in f moves by e = w2 (v2 - f) - w1 (v1 - f), so that the variance of f over N questions is
    N mean(e^2) / (2 sum(w)^2). For any other figure ``exchange`` grades anew with the second replies of the given
    questions: over random halves of the M that have two the figure's variance is a quarter of sum(d^2), which gives
    2 N / M times it. None with fewer than two such questions.
    """
    twice = [place for place, question in enumerate(first.questions) if question in set(again.questions)]
    if len(twice) < 2:
        return None
    if name in first.values and name in again.values:
        return _of_mean(name, first, again, twice)
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


def _of_mean(name: str, first: Graded, again: Graded, twice: Sequence[int]) -> float | None:
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
    grade: Callable[[Mapping[str, ModelAnswer], Replies], Graded],
) -> Callable[[frozenset[str]], Graded]:
    """Returns a function that grades with the second replies of given questions and the first ones of all others."""
    second = {(call.item, call.part): reply for call, reply in again.items()}

    def regrade(questions: frozenset[str]) -> Graded:
        return grade(
            answers,
            {
                call: second.get((call.item, call.part), reply) if call.item in questions else reply
                for call, reply in first.items()
            },
        )

    return regrade
