"""Where a policy moved, on rows made by hand: classes, shares, deciles, ranking; and a policy that is its base."""

from dataclasses import replace

import numpy as np
import pytest

from attnpo.lab.drift import ResponseShift, mean_gain, quantiles, ranking_accuracy, summarize_kl, weight_classes
from experiments.theory.kl_by_weight import freedom

# no partner, below uniform, uniform up to rounding, above, end of the turn (with a weight of its own)
WEIGHTS = np.array([0.0, 0.25, 0.9999999, 2.75, 1.0])
ENDS = np.array([False, False, False, False, True])
ONE = ResponseShift(
    np.array([1.0, 2.0, 3.0, 8.0, 2.0]), 1.5, ENDS, WEIGHTS, np.array([False, False, False, True, False])
)


def test_every_token_has_one_class() -> None:
    found = weight_classes(WEIGHTS, ENDS)
    assert {name: flags.tolist() for name, flags in found.items()} == {
        "end_of_turn": [False, False, False, False, True],
        "no_weight": [True, False, False, False, False],
        "below_uniform": [False, True, False, False, False],
        "weighted": [False, False, True, True, False],
    }


def test_shares_and_means_by_hand() -> None:
    found = summarize_kl([ONE])
    assert (found["responses"], found["tokens"], found["kl"]) == (1, 5, 16.0)
    assert found["classes"] == {
        "end_of_turn": {"tokens": 0.2, "kl": 0.125, "kl_per_token": 2.0},
        "no_weight": {"tokens": 0.2, "kl": 0.0625, "kl_per_token": 1.0},
        "below_uniform": {"tokens": 0.2, "kl": 0.125, "kl_per_token": 2.0},
        "weighted": {"tokens": 0.4, "kl": 0.6875, "kl_per_token": 5.5},
    }
    assert found["truth"] == {
        "decisive": {"tokens": 0.2, "kl": 0.5, "kl_per_token": 8.0},
        "other": {"tokens": 0.8, "kl": 0.5, "kl_per_token": 2.0},
    }
    assert "deciles" not in found and "position" not in found, "five tokens have no tenths"


def rows(count: int, seed: int = 0) -> list[ResponseShift]:
    random, made = np.random.default_rng(seed), []
    for length in random.integers(5, 30, count):
        ends = np.arange(length) == length - 1
        made.append(
            ResponseShift(random.gamma(1.0, size=length), random.normal(), ends, random.gamma(1.0, size=length))
        )
    return made


def test_shares_sum_to_one_and_deciles_are_those_of_freedom() -> None:
    responses = rows(40)
    found = summarize_kl(responses)
    for name in ("tokens", "kl"):
        assert sum(one[name] for one in found["classes"].values()) == pytest.approx(1, abs=1e-5)
    weights, kl = [one.weights for one in responses], [one.kl for one in responses]
    expected = freedom(weights, {"policy": kl}, draws=10)
    means = expected.of("kl")["policy"]["mean"].tolist()
    assert list(found["deciles"]["kl"].values()) == pytest.approx(means, abs=1e-6)
    for (_, one), weight in zip(expected.groups.iterrows(), found["deciles"]["weight"].values(), strict=True):
        assert one["lowest"] < weight < one["highest"]
    assert found["kl"] == pytest.approx(sum(row.sum() for row in kl) / 40, abs=1e-6)
    assert "truth" not in found


def test_places_are_tenths_of_each_response() -> None:
    responses = [ResponseShift(np.arange(length) / length, 0.0, np.zeros(length, bool)) for length in (10, 20, 100)]
    found = summarize_kl(responses)["position"]["kl"]
    assert list(found) == [str(number) for number in range(1, 11)]
    assert list(found.values()) == pytest.approx(np.arange(10) / 10 + 0.04, abs=0.01)


def test_equal_weights_have_no_deciles_and_unknown_ones_no_classes() -> None:
    even = [replace(one, weights=np.full(one.kl.size, 1.0)) for one in rows(5)]
    found = summarize_kl(even)
    assert "deciles" not in found and found["classes"]["below_uniform"]["tokens"] == 0
    assert found["classes"]["below_uniform"]["kl_per_token"] is None
    unknown = summarize_kl([*even[:-1], replace(even[-1], weights=None)])
    assert set(unknown["classes"]) == {"end_of_turn", "other"} and "deciles" not in unknown


def test_a_policy_equal_to_its_base_has_not_moved() -> None:
    still = [replace(one, kl=np.zeros(one.kl.size), gain=0.0) for one in rows(5)]
    found = summarize_kl(still)
    assert found["kl"] == 0 and set(found["deciles"]["kl"].values()) == {0.0}
    assert all(one["kl"] is None for one in found["classes"].values()), "a share of nothing"
    assert ranking_accuracy(still, still) == 0.5 and mean_gain(still) == 0


def test_pairs_are_ranked_by_what_their_responses_gained() -> None:
    chosen, rejected = (
        [replace(ONE, gain=gain) for gain in gains] for gains in ((1.0, -2.0, 0.5, 3.0), (0.0, -1.0, 0.5, -9.0))
    )
    assert ranking_accuracy(chosen, rejected) == (1 + 0 + 0.5 + 1) / 4
    assert mean_gain(chosen) == 0.625
    assert ranking_accuracy([], []) is None and mean_gain([]) is None


def test_quantiles() -> None:
    assert quantiles(np.arange(101.0)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert quantiles(np.zeros(0)) == {}
