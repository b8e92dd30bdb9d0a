"""Rewards at a KL, read off an arm's path: numbers derived by hand."""

import math

import numpy as np
import pytest

from attnpo.lab.studies.outcome import CHORD, ENDS, PointResults, reward_difference, reward_kl_path, rewards_at_kl
from attnpo.lab.studies.study import Arm
from attnpo.run.result import RunResult, TruthScores

ARM = Arm("attention", ())
BASE = [-1.0, 0.0]  # rewards of the base on two test prompts


def result(kl: float, validation: float, rewards: list[float], base: list[float] | None = BASE) -> RunResult:
    scores = {
        "validation": TruthScores(
            {"reward": validation, "kl": 9.0}, []
        ),  # another KL than on test prompts, not looked at
        "test": TruthScores({"reward": float(np.mean(rewards)), "kl": kl}, rewards, base),
    }
    return RunResult(0, 1, {}, {}, {}, {}, scores)


def at_point(
    name: str, kl: float, validation: float, rewards: list[float], seeds: tuple[int, ...] = (0,)
) -> PointResults:
    return PointResults(ARM, (name,), seeds, tuple(result(kl, validation, rewards) for _ in seeds))


def test_between_two_points_the_reward_is_linear_in_the_root_of_kl() -> None:
    found = rewards_at_kl([at_point("a", 1.0, 0.1, [0.0, 0.2]), at_point("b", 4.0, 0.2, [1.0, 0.6])], 2.25)
    assert found is not None and (found.kl, found.mark) == (2.25, "")
    assert found.rewards == pytest.approx(np.array([[0.5, 0.4]])), "roots 1, 1.5, 2: half way, prompt by prompt"


def test_below_the_first_point_the_path_starts_at_the_base() -> None:
    found = rewards_at_kl([at_point("a", 1.0, 0.1, [0.0, 1.0])], 0.25)
    assert found is not None and found.rewards == pytest.approx(np.array([[-0.5, 0.5]]))


@pytest.mark.parametrize(("kl", "mark"), [(1.0, ""), (1.001, CHORD)])
def test_a_level_far_below_the_first_point_is_no_comparison(kl: float, mark: str) -> None:
    """Of an arm whose nearest policy is a collapsed one, nothing is known at a small KL; between its points it is."""
    near = rewards_at_kl([at_point("a", kl, 0.1, [0.0, 1.0]), at_point("b", 9.0, 0.2, [1.0, 1.0])], 0.5)
    assert near is not None and near.mark == mark
    between = rewards_at_kl([at_point("a", 0.01, 0.1, [0.0, 1.0]), at_point("b", 9.0, 0.2, [1.0, 1.0])], 0.5)
    assert between is not None and not between.mark


def test_without_the_bases_rewards_there_is_nothing_below_the_first_point() -> None:
    lone = PointResults(ARM, ("a",), (0,), (result(1.0, 0.1, [0.0, 1.0], base=None),))
    assert rewards_at_kl([lone], 0.25) is None
    found = rewards_at_kl([lone], 1.0)
    assert found is not None and not found.mark and found.mean_reward == 0.5


def test_a_point_that_validation_likes_less_than_one_nearer_is_not_on_the_path() -> None:
    """It is the best on the test prompts, which must not choose."""
    near, worse, far = (
        at_point("a", 1.0, 0.5, [0.2, 0.2]),
        at_point("b", 2.0, 0.4, [9.0, 9.0]),
        at_point("c", 4.0, 0.6, [0.4, 0.4]),
    )
    assert [mark.kl for mark in reward_kl_path([far, worse, near], 0)] == [0.0, 1.0, 4.0]
    end = rewards_at_kl([near, worse], 2.0)
    assert end is not None and (end.mean_reward, end.kl, end.mark) == (pytest.approx(0.2), 1.0, "")


def test_a_path_that_ends_before_the_level_says_so() -> None:
    found = rewards_at_kl([at_point("a", 0.7, 0.5, [0.2, 0.4])], 2.0)
    assert found is not None and (found.kl, found.mark) == (0.7, ENDS)


def test_a_point_below_the_base_stays_on_the_path() -> None:
    """An arm that harms must not be shown as the untrained model."""
    found = rewards_at_kl([at_point("a", 1.0, -5.0, [-2.0, -2.0])], 1.0)
    assert found is not None and found.mean_reward == -2.0


def test_arms_are_compared_on_the_seeds_they_share() -> None:
    """Seed 1 of the first arm alone is far better; it has no partner."""
    lucky = PointResults(ARM, ("a",), (0, 1), (result(1.0, 0.1, [0.5, 0.5]), result(1.0, 0.1, [9.0, 9.0])))
    one, other = rewards_at_kl([lucky], 1.0), rewards_at_kl([at_point("a", 1.0, 0.1, [0.25, 0.25])], 1.0)
    assert one is not None and other is not None
    found = reward_difference(one, other)
    assert found is not None and found.mean == 0.25 and found.seeds == 1
    apart = rewards_at_kl([at_point("a", 1.0, 0.1, [0.25, 0.25], seeds=(7,))], 1.0)
    assert apart is not None and reward_difference(one, apart) is None


def test_every_seed_has_a_path_of_its_own() -> None:
    """At one beta seed 0 has hardly moved and seed 1 is far away: their mean is at no KL of either."""
    tight = PointResults(ARM, ("a",), (0, 1), (result(0.25, 0.1, [0.5, 0.5]), result(1.0, 0.1, [0.25, 0.25])))
    loose = PointResults(ARM, ("b",), (0, 1), (result(1.0, 0.2, [1.0, 1.0]), result(9.0, -0.5, [-1.0, -1.0])))
    found = rewards_at_kl([tight, loose], 1.0)
    assert found is not None and (found.seeds, found.kl, found.mark) == ((0, 1), 1.0, "")
    assert found.rewards.tolist() == [[1.0, 1.0], [0.25, 0.25]]


def test_seeds_without_anything_at_the_level_are_left_out_while_others_have_it() -> None:
    """A grid point that seed 1 lacks does not take it as far as seed 0."""
    whole, part = at_point("a", 1.0, 0.1, [0.0, 0.0], seeds=(0, 1)), at_point("b", 2.25, 0.9, [1.0, 1.0])
    assert [[mark.kl for mark in reward_kl_path([whole, part], seed)] for seed in (0, 1)] == [
        [0.0, 1.0, 2.25],
        [0.0, 1.0],
    ]
    found = rewards_at_kl([whole, part], 1.5625)
    assert found is not None and (found.seeds, found.mean_reward, found.mark) == ((0,), 0.5, "")
    ended = rewards_at_kl([whole], 1.5625)
    assert ended is not None and (ended.seeds, ended.kl, ended.mark) == ((0, 1), 1.0, ENDS)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_point_without_a_finite_kl_is_nowhere_on_the_path(kl: float) -> None:
    """It must not pass for the base's neighbour at KL 0, nor as one that reaches every level."""
    near, astray = at_point("a", 1.0, 0.1, [0.0, 0.0]), at_point("b", kl, 0.9, [1.0, 1.0])
    assert [mark.kl for mark in reward_kl_path([astray, near], 0)] == [0.0, 1.0]
    found = rewards_at_kl([astray, near], 2.0)
    assert found is not None and (found.kl, found.mark) == (1.0, ENDS)
