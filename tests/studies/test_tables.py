"""Which point stands for an arm, and what the table says, on results made by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from attnpo.studies.grid import Arm, Grid, Point, Study
from attnpo.studies.intervals import Interval
from attnpo.studies.runner import Outcome
from attnpo.studies.tables import (
    Spot,
    against,
    all_points,
    best_by_arm,
    best_point,
    footnotes,
    gather,
    interval_text,
    metric_table,
    truth_table,
)

UNIFORM, ATTENTION = Arm("uniform", ("weights=uniform",)), Arm("attention", ("weights=attention",))
LOW, HIGH = ("optimizer.lr=5e-05", "objective.beta=0.1"), ("optimizer.lr=0.0001", "objective.beta=0.1")
STUDY = Study("s", {"uniform": [], "attention": []}, grid=Grid(lr=(5e-5, 1e-4), beta=(0.1,)), kl_limit=2.0)


def scores(reward: float, kl: float, rewards: list[float]) -> dict[str, Any]:
    return {
        "reward": reward,
        "kl": kl,
        "rewards": rewards,
        "win_rate": 0.75,
        "length": 20.0,
        "broken": 0.25,
        "base_reward": -0.5,
        "base_length": 18.0,
        "base_broken": 0.125,
    }


def result(
    validation: float = 0.0, kl: float = 1.0, test: list[float] | None = None, accuracy: float = 0.5
) -> dict[str, Any]:
    """A result with a known truth; ``test`` are the rewards of the test prompts."""
    test = test or [0.0, 0.0]
    return {
        "metrics": {"val/loss": 0.5, "val/rewards/accuracies": accuracy, "val/rewards/margins": 0.25},
        "inputs": {"train": {"effective_share": 0.5, "coverage": 1.0}},
        "seconds": {"all": 10.0},
        "truth": {
            "scores": {
                "validation": scores(validation, kl, [validation]),
                "test": scores(sum(test) / len(test), 0.75, test),
            }
        },
    }


def make_outcome(points: list[tuple[Point, dict[str, Any]]], failed: list[tuple[Point, str]] | None = None) -> Outcome:
    return Outcome(STUDY, [UNIFORM, ATTENTION], points, failed or [], {"grid": "g"}, Path("out"), 12.0)


def spot(values: tuple[str, ...], *results: dict[str, Any]) -> Spot:
    return Spot(ATTENTION, values, tuple(range(len(results))), results)


# ------------------------------------------------------------------------------------------------ the choice


def test_the_point_is_chosen_on_validation_prompts_alone() -> None:
    """The other point is far better on the test prompts and must not be taken for that."""
    plain = spot(LOW, result(validation=0.4, test=[0.1, 0.1]))
    lucky = spot(HIGH, result(validation=0.3, test=[0.9, 0.9]))
    assert best_point([plain, lucky], 2.0) is plain
    assert best_point([lucky, plain], 2.0) is plain


def test_points_beyond_the_kl_limit_are_left_out() -> None:
    near, far = spot(LOW, result(validation=0.2, kl=2.0)), spot(HIGH, result(validation=0.9, kl=2.01))
    assert best_point([near, far], 2.0) is near
    assert best_point([near, far], 3.0) is far
    assert best_point([near, far], 1.0) is near, "none within: the smallest KL"


def test_a_point_that_lacks_seeds_does_not_win() -> None:
    whole = spot(LOW, result(validation=0.1), result(validation=0.2))
    part = spot(HIGH, result(validation=0.9))
    assert best_point([whole, part], 2.0) is whole


def test_seeds_are_averaged_before_choosing() -> None:
    steady = spot(LOW, result(validation=0.5), result(validation=0.5))
    wild = spot(HIGH, result(validation=0.9), result(validation=0.0))
    assert best_point([wild, steady], 2.0) is steady


def test_without_a_truth_the_accuracy_decides() -> None:
    made = [{**result(accuracy=accuracy), "truth": None} for accuracy in (0.6, 0.7)]
    assert best_point([spot(LOW, made[0]), spot(HIGH, made[1])], 2.0).values == HIGH


def test_results_are_gathered_by_arm_and_point_in_rising_seeds() -> None:
    points = [
        (Point(ATTENTION, LOW, 1), result(validation=0.25)),
        (Point(UNIFORM, LOW, 0), result(validation=0.5)),
        (Point(ATTENTION, LOW, 0), result(validation=0.75)),
    ]
    spots = gather(points)
    assert [(found.arm.name, found.seeds) for found in spots] == [("attention", (0, 1)), ("uniform", (0,))]
    assert [row["truth"]["scores"]["validation"]["reward"] for row in spots[0].results] == [0.75, 0.25]
    assert spots[0].truth("validation", "reward") == 0.5
    assert spots[0].label == "lr 5e-05 beta 0.1"
    assert list(best_by_arm(make_outcome(points))) == ["uniform", "attention"]


# ------------------------------------------------------------------------------------------------ the table


POINTS = [
    (Point(UNIFORM, LOW, 0), result(0.5, 1.0, [0.0, 0.25])),
    (Point(UNIFORM, LOW, 1), result(0.5, 1.0, [0.25, 0.5])),
    (Point(ATTENTION, LOW, 0), result(0.5, 1.0, [0.5, 0.75])),
    (Point(ATTENTION, LOW, 1), result(0.5, 1.0, [0.75, 1.0])),
]


def test_rows_are_the_base_and_every_arm_at_its_best_point() -> None:
    columns, rows = truth_table(make_outcome(POINTS))
    assert [row["arm"] for row in rows] == ["base", "uniform", "attention"]
    assert (rows[0]["reward"], rows[0]["win rate"], rows[0]["KL"], rows[0]["broken"]) == (-0.5, 0.5, 0.0, 0.125)
    assert rows[1]["reward"] == 0.25 and rows[2]["reward"] == 0.75
    assert rows[1]["minus uniform"] == ""
    # Every prompt of every seed is exactly 0.5 better, so the interval of the difference has no width.
    assert rows[2]["minus uniform"] == "+0.500 [0.500, 0.500]"
    assert (rows[2]["KL"], rows[2]["length"], rows[2]["eff. weights/n"], rows[2]["s/run"]) == (0.75, 20.0, 0.5, 10.0)
    assert set(rows[0]) <= set(columns) and columns[0] == "arm"


def test_arms_are_compared_on_the_seeds_they_share() -> None:
    one = Spot(ATTENTION, LOW, (0, 2), (result(test=[0.5, 0.5]), result(test=[1.0, 1.0])))
    other = Spot(UNIFORM, LOW, (1, 2), (result(test=[0.75, 0.75]), result(test=[0.25, 0.5])))
    found = against(one, other)
    assert found is not None and found.mean == pytest.approx((0.75 + 0.5) / 2)
    assert against(one, Spot(UNIFORM, LOW, (1,), (result(),))) is None


def test_without_a_truth_the_table_holds_validation_metrics() -> None:
    points = [(point, {**made, "truth": None}) for point, made in POINTS]
    _, rows = metric_table(make_outcome(points))
    assert [row["arm"] for row in rows] == ["uniform", "attention"]
    assert (rows[0]["val loss"], rows[0]["val accuracy"], rows[0]["val margin"]) == (0.5, 0.5, 0.25)


def test_a_metric_that_was_not_logged_is_no_number() -> None:
    assert math.isnan(spot(LOW, result()).metric("val/nothing"))


def test_footnotes_say_what_a_reader_must_know() -> None:
    failed = [(Point(ATTENTION, HIGH, 1), "Traceback\nRuntimeError: out of luck")]
    outcome = make_outcome(POINTS, failed)
    text = "\n".join(footnotes(outcome))
    assert f"digest of world, grid and arms, fixed before the runs: {outcome.digest}" in text
    assert "seeds 0, 1; 4 runs" in text
    assert "lr [5e-05, 0.0001], beta [0.1]" in text
    assert "FAILED attention optimizer.lr=0.0001 objective.beta=0.1 seed=1: RuntimeError: out of luck" in text
    assert "one seed" not in text
    assert "one seed" in "\n".join(footnotes(make_outcome(POINTS[::2])))


def test_every_run_is_a_row_of_the_file() -> None:
    lines = all_points(gather(POINTS)).splitlines()
    assert len(lines) == 5
    assert lines[0].split(",")[:4] == ["arm", "seed", "optimizer.lr", "objective.beta"]
    assert "test/reward" in lines[0] and "test/rewards" not in lines[0].split(",")
    assert lines[1].startswith("uniform,0,5e-05,0.1,")


def test_an_interval_that_does_not_exist_says_so() -> None:
    rest = {"level": 0.95, "method": "by hand", "seeds": 1, "prompts": 1}
    assert interval_text(Interval(0.5, math.nan, math.nan, **rest)) == "[no interval]"
    assert interval_text(Interval(0.5, 0.25, 0.75, **rest)) == "[0.250, 0.750]"
