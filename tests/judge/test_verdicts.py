"""Statistics of a judge worked out by hand: its verdicts, and the probability of its labels."""

import math

import pytest
import torch

from attnpo.judge.base import JudgeReading
from attnpo.judge.verdicts import (
    JudgeStatistics,
    LabelMass,
    average_label_mass,
    describe_texts,
    judge_statistics,
    judge_warning,
    wilson_interval,
)
from attnpo.schema import JudgeRound, PairWeights, TokenWeights

A, B, OTHER = 5, 6, 7
EMPTY = TokenWeights(torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long), torch.zeros(1, 0))


def pair(
    name: str, first: tuple[float, float], second: tuple[float, float], tokens: tuple[int, int] = (A, B)
) -> PairWeights:
    """Label logits (A, B) with the chosen response as A, then as B."""
    return PairWeights(name, (
        JudgeRound(True, EMPTY, EMPTY, torch.tensor(first), tokens[0]),
        JudgeRound(False, EMPTY, EMPTY, torch.tensor(second), tokens[1]),
    ))  # fmt: skip


def test_shares_by_hand() -> None:
    captured = [
        pair("right twice", (2.0, 1.0), (0.0, 3.0)),
        pair("always A, right on average", (5.0, 1.0), (2.0, 1.0), (A, A)),
        pair("wrong twice", (0.0, 1.0), (1.0, 0.0), (B, OTHER)),
        pair("a tie, then wrong", (1.0, 1.0), (2.0, 0.0), (A, A)),
    ]
    found = judge_statistics(captured, (A, B))
    # Rounds that pick the chosen one: 1 1 | 1 0 | 0 0 | half 0.
    assert found.agreement == pytest.approx(3.5 / 8)
    # Mean margins: +2, (4 - 1)/2, -1, -1.
    assert found.pair_accuracy == pytest.approx(2 / 4)
    assert found.consistency == pytest.approx(2 / 4)
    assert found.other_tokens == pytest.approx(1 / 8)
    assert found.pairs == 4


def test_pairs_without_verdicts_are_left_out() -> None:
    silent = PairWeights("silent", (JudgeRound(True, EMPTY, EMPTY), JudgeRound(False, EMPTY, EMPTY)))
    assert judge_statistics([silent, pair("p", (1.0, 0.0), (0.0, 1.0))], (A, B)).pairs == 1
    nothing = judge_statistics([silent], (A, B))
    assert nothing.pairs == 0
    assert all(math.isnan(value) for value in (nothing.agreement, nothing.pair_accuracy, nothing.consistency))


def told(accuracy: float, pairs: int, other: float = 0.0, consistency: float = 0.5) -> str | None:
    return judge_warning(JudgeStatistics(accuracy, accuracy, consistency, other, pairs))


def test_the_interval_is_wilsons() -> None:
    """Newcombe (1998), table I: 81 of 263, 15 of 148 and 0 of 20 by method 3."""
    for right, count, expected in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))):
        assert wilson_interval(right / count, count) == pytest.approx(expected, abs=5e-5)


def test_a_judge_that_a_coin_might_be_is_warned_of() -> None:
    """Of 400 verdicts of a coin, 95 % are right in 181 to 219: one half and 1.96 half-standard errors, 9.8 each."""
    assert told(0.51, 400) == (
        "the judge does not know which answer is better (right in 51 % of 400 pairs, 95 % interval 46 to 56): its "
        "weights say nothing about preference; choose another judge or wording (judge=...)"
    )
    assert "100 % of its verdicts name no label): its weights" in str(told(0.51, 400, other=1.0))
    assert told(219.5 / 400, 400) is not None and told(220 / 400, 400) is None
    assert told(180.5 / 400, 400) is not None and told(180 / 400, 400) is None, "wrong on purpose is knowing too"


def test_few_pairs_tell_nothing_of_accuracy() -> None:
    assert told(0.5, 19) is None and told(0.5, 20) is not None and told(0.93, 20) is None


def test_most_verdicts_without_a_label_are_told_whatever_the_accuracy() -> None:
    assert told(0.9, 400, other=0.5) is None
    for pairs in (5, 400):
        assert told(0.9, pairs, other=0.51) == (
            "the judge does not answer in the requested form: 51 % of its verdicts name no label; choose another "
            "judge or wording (judge=...)"
        )


def test_a_judge_drawn_to_one_place_may_know() -> None:
    """Right where it is not: the orders agree in half of the pairs, and both together are right in most."""
    assert told(0.8, 400, consistency=0.5) is None


def test_nothing_is_said_of_a_judge_without_verdicts() -> None:
    assert judge_warning(judge_statistics([], (A, B))) is None


# ---------------------------------------------------------------------------------------- labels


TEXTS = {A: " A", B: " B", OTHER: "<think>"}


def reading(first: float, second: float, token: int) -> JudgeReading:
    """Returns a judge's reading with these probabilities of its labels and ``token`` as its most likely token."""
    logps = torch.tensor([first, second, max(first, second, 0.5)]).log()
    return JudgeReading(torch.zeros(0, 3), None, logps[:2], token, logps)


def test_mass_and_texts_by_hand() -> None:
    readings = [reading(0.5, 0.25, A), reading(0.125, 0.0, OTHER), reading(0.0625, 0.0625, OTHER)]
    mass = average_label_mass(readings, TEXTS.__getitem__)
    assert mass.share == pytest.approx((0.75 + 0.125 + 0.125) / 3) and mass.prompts == 3
    assert mass.written == (("<think>", 2), (" A", 1))
    assert (
        "33.3 % of the probability" in mass.describe_share()
        and "'<think>' (2 of 3), ' A' (1 of 3)" in mass.describe_share()
    )


def test_a_problem_begins_below_the_minimum() -> None:
    mass = LabelMass(0.5, 4, (("<think>", 4),))
    assert mass.describe_shortfall(0.5) is None
    told = mass.describe_shortfall(math.nextafter(0.5, 1))
    assert told is not None and "'<think>' (4 of 4)" in told and "judge.prefill" in told and "judge.labels" in told


def test_what_is_not_known() -> None:
    with pytest.raises(ValueError, match="verdicts"):
        average_label_mass([JudgeReading(torch.zeros(0, 3))], TEXTS.__getitem__)
    assert describe_texts((), 4) == "unknown tokens"
