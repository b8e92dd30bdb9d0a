"""Which point stands for an arm, and what the table says, on results made by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnpo.display.figures import training_curves
from attnpo.display.page import Image, Paragraph, Section, TableBlock
from attnpo.evaluation.intervals import Interval
from attnpo.lab.studies import notes
from attnpo.lab.studies.figures import split_arms_into_figures
from attnpo.lab.studies.notes import NO_CONTROL, footnotes, study_warnings
from attnpo.lab.studies.outcome import Outcome, PointResults, best_point, group_by_point, interval_text, verdict
from attnpo.lab.studies.page import analysis_sections, points_csv, write_study_record, write_study_report
from attnpo.lab.studies.study import Arm, Grid, Point, Study
from attnpo.lab.studies.tables import equal_kl_sections, main_table
from attnpo.run.result import RunResult
from tests.run.probe import Probe

UNIFORM, ATTENTION = Arm("uniform", ("weights=uniform",)), Arm("attention", ("weights=attention",))
LOW, HIGH = ("optimizer.lr=5e-05", "objective.beta=0.1"), ("optimizer.lr=0.0001", "objective.beta=0.1")
STUDY = Study("s", {"uniform": [], "attention": []}, grid=Grid(lr=(5e-5, 1e-4), beta=(0.1,)), kl_limit=2.0)
TOKENS = {"chosen": {"p50": 21, "max": 40}, "rejected": {"p50": 19, "max": 41}}


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
        "steps": 48,
        "metrics": {"val/loss": 0.5, "val/rewards/accuracies": accuracy, "val/rewards/margins": 0.25},
        "inputs": {"train": {"pairs": 768, "effective_share": 0.5, "coverage": 1.0, "tokens": TOKENS}},
        "seconds": {"all": 10.0},
        "truth": {
            "scores": {
                "validation": scores(validation, kl, [validation]),
                "test": scores(sum(test) / len(test), 0.75, test),
            }
        },
    }


def typed(points: list[tuple[Point, dict[str, Any]]]) -> list[tuple[Point, RunResult]]:
    return [(point, RunResult.from_json(made)) for point, made in points]


def make_outcome(points: list[tuple[Point, dict[str, Any]]], failed: list[tuple[Point, str]] | None = None) -> Outcome:
    return Outcome(STUDY, [UNIFORM, ATTENTION], typed(points), failed or [], {"grid": "g"}, Path("out"), 12.0)


def at_point(values: tuple[str, ...], *results: dict[str, Any]) -> PointResults:
    return PointResults(ATTENTION, values, tuple(range(len(results))), tuple(map(RunResult.from_json, results)))


# ------------------------------------------------------------------------------------------------ the choice


def test_the_point_is_chosen_on_validation_prompts_alone() -> None:
    """The other point is far better on the test prompts and must not be taken for that."""
    plain = at_point(LOW, result(validation=0.4, test=[0.1, 0.1]))
    lucky = at_point(HIGH, result(validation=0.3, test=[0.9, 0.9]))
    assert best_point([plain, lucky], 2.0) is plain
    assert best_point([lucky, plain], 2.0) is plain


def test_points_beyond_the_kl_limit_are_left_out() -> None:
    near, far = at_point(LOW, result(validation=0.2, kl=2.0)), at_point(HIGH, result(validation=0.9, kl=2.01))
    assert best_point([near, far], 2.0) is near
    assert best_point([near, far], 3.0) is far
    assert best_point([near, far], 1.0) is near, "none within: the smallest KL"


def test_a_point_that_lacks_seeds_does_not_win() -> None:
    whole = at_point(LOW, result(validation=0.1), result(validation=0.2))
    part = at_point(HIGH, result(validation=0.9))
    assert best_point([whole, part], 2.0) is whole


def test_seeds_are_averaged_before_choosing() -> None:
    steady = at_point(LOW, result(validation=0.5), result(validation=0.5))
    wild = at_point(HIGH, result(validation=0.9), result(validation=0.0))
    assert best_point([wild, steady], 2.0) is steady


def test_without_a_truth_the_accuracy_decides() -> None:
    made = [{**result(accuracy=accuracy), "truth": None} for accuracy in (0.6, 0.7)]
    assert best_point([at_point(LOW, made[0]), at_point(HIGH, made[1])], 2.0).values == HIGH


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_run_without_a_number_is_never_the_best(order: tuple[int, ...]) -> None:
    """NaN has no order, so that what it is compared with first would win."""
    broken, low, high = (
        at_point((f"objective.beta={accuracy}",), {**result(accuracy=accuracy), "truth": None})
        for accuracy in (math.nan, 0.6, 0.7)
    )
    assert best_point([(broken, low, high)[place] for place in order], 2.0) is high
    beyond, astray, near = (at_point((f"objective.beta={kl}",), result(kl=kl)) for kl in (3.0, math.nan, 2.5))
    assert best_point([(astray, beyond, near)[place] for place in order], 2.0) is near
    assert best_point([broken], 2.0) is broken


def test_results_are_gathered_by_arm_and_point_in_rising_seeds() -> None:
    points = [
        (Point(ATTENTION, LOW, 1), result(validation=0.25)),
        (Point(UNIFORM, LOW, 0), result(validation=0.5)),
        (Point(ATTENTION, LOW, 0), result(validation=0.75)),
    ]
    by_point = group_by_point(typed(points))
    assert [(found.arm.name, found.seeds) for found in by_point] == [("attention", (0, 1)), ("uniform", (0,))]
    assert [row.truth["validation"].numbers["reward"] for row in by_point[0].results] == [0.75, 0.25]
    assert by_point[0].mean_truth_score("validation", "reward") == 0.5
    assert by_point[0].label == "lr 5e-05 beta 0.1"
    assert list(make_outcome(points).best_points("")) == ["uniform", "attention"]


# ------------------------------------------------------------------------------------------------ the table


POINTS = [
    (Point(UNIFORM, LOW, 0), result(0.5, 1.0, [0.0, 0.25])),
    (Point(UNIFORM, LOW, 1), result(0.5, 1.0, [0.25, 0.5])),
    (Point(ATTENTION, LOW, 0), result(0.5, 1.0, [0.5, 0.75])),
    (Point(ATTENTION, LOW, 1), result(0.5, 1.0, [0.75, 1.0])),
]


def test_rows_are_the_base_and_every_arm_at_its_best_point() -> None:
    columns, rows = main_table(make_outcome(POINTS))
    assert [row["arm"] for row in rows] == ["base", "uniform", "attention"]
    assert (rows[0]["reward"], rows[0]["win rate"], rows[0]["KL"], rows[0]["broken"]) == (-0.5, 0.5, 0.0, 0.125)
    assert rows[1]["reward"] == 0.25 and rows[2]["reward"] == 0.75
    assert rows[1]["minus uniform"] == ""
    # Every prompt of every seed is exactly 0.5 better, so the interval of the difference has no width.
    assert rows[2]["minus uniform"] == "+0.500 [0.500, 0.500]"
    assert (rows[2]["KL"], rows[2]["length"], rows[2]["eff. weights/n"], rows[2]["s/run"]) == (0.75, 20.0, 0.5, 10.0)
    assert set(rows[0]) <= set(columns) and columns[0] == "arm"


def test_without_a_truth_the_table_holds_validation_metrics() -> None:
    points = [(point, {**made, "truth": None}) for point, made in POINTS]
    _, rows = main_table(make_outcome(points))
    assert [row["arm"] for row in rows] == ["uniform", "attention"]
    assert (rows[0]["val loss"], rows[0]["val accuracy"], rows[0]["val margin"]) == (0.5, 0.5, 0.25)
    assert (rows[0]["chosen tokens"], rows[0]["rejected tokens"]) == (21.0, 19.0), "medians, not the longest"


def without_truth(points: list[tuple[Point, dict[str, Any]]]) -> list[tuple[Point, dict[str, Any]]]:
    return [(point, {**made, "truth": None}) for point, made in points]


@pytest.mark.parametrize("change", [without_truth, list])
def test_arms_that_train_on_other_pairs_or_longer_show_both(change: Any) -> None:
    """Nothing is shown where all are alike; else means over seeds, whole numbers as such."""
    assert not {"pairs", "steps"} & set(main_table(make_outcome(change(POINTS)))[0])
    points = [
        (
            point,
            made if point.arm is UNIFORM else {**made, "steps": 60, "inputs": {"train": {"pairs": 700 + point.seed}}},
        )
        for point, made in POINTS
    ]
    columns, rows = main_table(make_outcome(change(points)))
    assert [(row["pairs"], row["steps"]) for row in rows[-2:]] == [(768, 48), (700.5, 60)]
    assert columns.index("pairs") > columns.index("broken" if change is list else "rejected tokens")
    alike = [(point, {**made, "steps": 48}) for point, made in points]
    assert [name for name in main_table(make_outcome(change(alike)))[0] if name in ("pairs", "steps")] == ["pairs"]


def test_a_metric_that_was_not_logged_is_no_number() -> None:
    assert math.isnan(at_point(LOW, result()).mean_metric("val/nothing"))


def test_footnotes_say_what_a_reader_must_know() -> None:
    failed = [(Point(ATTENTION, HIGH, 1), "Traceback\nRuntimeError: out of luck")]
    outcome = make_outcome(POINTS, failed)
    text = "\n".join(footnotes(outcome))
    assert f"digest of world, grid and arms, fixed before the runs: {outcome.digest}" in text
    assert "seeds 0, 1; 4 runs" in text
    assert "lr [5e-05, 0.0001], beta [0.1]" in text
    assert "FAILED attention optimizer.lr=0.0001 objective.beta=0.1 seed=1: RuntimeError: out of luck" in text
    assert "one seed" not in text and "none for seed" not in text
    assert "one seed: the intervals only cover the choice of prompts" in "\n".join(footnotes(make_outcome(POINTS[::2])))
    alone = "\n".join(footnotes(make_outcome(without_truth(POINTS[::2]))))
    assert "one seed: nothing here measures the noise of training" in alone and "intervals" not in alone


def test_points_that_lack_seeds_are_named_with_those_they_have() -> None:
    """HIGH has one seed of attention and none of uniform: neither stands for its arm, whatever it scored."""
    points = [*POINTS, (Point(ATTENTION, HIGH, 0), result(9.0, 1.0, [9.0, 9.0]))]
    failed = [(Point(arm, HIGH, seed), "out of luck") for arm, seed in ((ATTENTION, 1), (UNIFORM, 0), (UNIFORM, 1))]
    outcome = make_outcome(points, failed)
    line = (
        "grid points that could not be selected, because some of their seeds are missing: "
        "uniform lr 0.0001 beta 0.1 (0 of 2 seeds), attention lr 0.0001 beta 0.1 (1 of 2 seeds)"
    )
    assert line in footnotes(outcome)
    assert [row["point"] for row in main_table(outcome)[1]] == ["", "lr 5e-05 beta 0.1", "lr 5e-05 beta 0.1"]
    assert not [line for line in footnotes(make_outcome(POINTS)) if "could not be selected" in line]


@pytest.mark.parametrize("change", [without_truth, list])
def test_an_arm_on_fewer_seeds_than_the_study_is_marked(change: Any) -> None:
    """A seed whose base is lost has no result at all and counts all the same."""
    points = [item for item in POINTS if item[0] != Point(ATTENTION, LOW, 1)]
    failed = [(Point(ATTENTION, LOW, 1), "out of luck"), (Point(ATTENTION, LOW, 2), "x"), (Point(UNIFORM, LOW, 2), "x")]
    outcome = make_outcome(change(points), failed)
    marks = [row["point"] for row in main_table(outcome)[1][-2:]]
    assert marks == ["lr 5e-05 beta 0.1 (2 of 3 seeds)", "lr 5e-05 beta 0.1 (1 of 3 seeds)"]
    assert "seeds 0, 1; 3 runs (none for seed 2), each scored after its last step" in footnotes(outcome)


VERDICTS = {"pair_accuracy": 0.9, "agreement": 0.8, "consistency": 0.7, "other_tokens": 0.0}


def judged(point: Point, made: dict[str, Any], accuracy: float) -> tuple[Point, dict[str, Any]]:
    return point, {**made, "inputs": {**made["inputs"], "judge": {**VERDICTS, "pair_accuracy": accuracy}}}


def test_every_judge_has_its_line() -> None:
    """With two, each says which arms it judged; the arm that nobody judged is in neither."""
    other = Arm("other judge L2", ("judge=other",))
    points = [
        *POINTS[:2],
        *(judged(point, made, 0.9) for point, made in POINTS[2:]),
        *(judged(Point(other, LOW, seed), result(), 0.6) for seed in (0, 1)),
    ]
    found = [line for line in footnotes(tuned(points)) if line.startswith("judge")]
    assert [line.partition(" agree")[0] for line in found] == [
        "judge of attention, seed 0, on the study's pairs: 90.0 % of verdicts",
        "judge of other judge L2, seed 0, on the study's pairs: 60.0 % of verdicts",
        "judge of attention, seed 1, on the study's pairs: 90.0 % of verdicts",
        "judge of other judge L2, seed 1, on the study's pairs: 60.0 % of verdicts",
    ]
    alone = [line for line in footnotes(tuned(points[:4])) if line.startswith("judge")]
    assert [line.partition(" on")[0] for line in alone] == ["judge, seed 0,", "judge, seed 1,"]


def test_a_judge_that_knows_nothing_is_a_warning_above_the_table() -> None:
    points = [judged(point, made, 0.9) for point, made in POINTS]
    for point, made in points:
        if point.seed == 1 and point.arm == ATTENTION:
            made["inputs"]["judge"]["warning"] = "the judge does not know"
    found = [line for line in study_warnings(tuned(points)) if "judge" in line]
    assert found == ["WARNING: judge of attention, seed 1: the judge does not know"]


def test_validation_that_is_trained_on_is_said_above_the_table() -> None:
    shared = {"val": {"trained_on": {"trained_pairs": 4, "warning": "4 of 4 validation pairs are trained on as well"}}}
    points = [(point, {**made, "inputs": {**made["inputs"], **shared}}) for point, made in without_truth(POINTS)]
    outcome = make_outcome(points)
    assert [line for line in study_warnings(outcome) if "trained on" in line] == [
        "WARNING: 4 of 4 validation pairs are trained on as well"
    ]
    (line,) = notes.describe_result(outcome, "")  # the warning stands below it
    assert line.startswith("validation pairs ranked as labelled")
    assert not any("trained on" in line for line in study_warnings(make_outcome(without_truth(POINTS))))


def test_weights_that_are_lost_are_columns_and_a_warning_above_the_table() -> None:
    """Shows means of the arm's runs that warn; an arm whose runs do not is not named."""
    kept = {0: (0.75, 0.6), 1: (0.85, 0.7)}
    points = [(point, json.loads(json.dumps(made))) for point, made in POINTS]
    for point, made in points:
        chosen, rejected = kept[point.seed] if point.arm == ATTENTION else (1.0, 1.0)
        found = {"source_coverage": 0.96, "kept_mass_chosen": chosen, "kept_mass_rejected": rejected}
        made["inputs"]["train"] |= {**found, **({"warning": "lost"} if chosen < 0.9 else {})}
    (line,) = [line for line in study_warnings(make_outcome(points)) if "weight was lost" in line]
    assert "responses: attention 0.800 and 0.650; the log" in line
    columns, rows = main_table(make_outcome(points))
    place = columns.index("coverage")
    assert columns[place + 1 : place + 4] == ["source coverage", "kept chosen", "kept rejected"]
    assert [row.get("kept chosen") for row in rows] == [None, 1.0, pytest.approx(0.8)]
    assert "kept chosen" not in main_table(make_outcome(POINTS))[0], "results of versions that did not measure it"


def test_every_run_is_a_row_of_the_file() -> None:
    lines = points_csv(group_by_point(typed(POINTS))).splitlines()
    assert len(lines) == 5
    assert lines[0].split(",")[:4] == ["arm", "seed", "optimizer.lr", "objective.beta"]
    assert "test/reward" in lines[0] and "test/rewards" not in lines[0].split(",")
    assert lines[1].startswith("uniform,0,5e-05,0.1,")


def test_an_interval_that_does_not_exist_says_so() -> None:
    rest = {"seeds": 1, "prompts": 1}
    assert interval_text(Interval(0.5, math.nan, math.nan, **rest)) == "[no interval]"
    assert interval_text(Interval(0.5, 0.25, 0.75, **rest)) == "[0.250, 0.750]"


# ------------------------------------------------------------------------------------------------ equal KL, worlds

TUNED = Study("s", {"uniform": [], "attention": []}, grid=Grid(beta=(0.1, 1.0)), kl_levels=(0.5, 2.0))
NEAR, FAR = ("objective.beta=1.0",), ("objective.beta=0.1",)


def run_of(arm: Arm, values: tuple[str, ...], validation: float, kl: float, test: float) -> list[tuple[Point, Any]]:
    """Two seeds of one point; both test prompts of a seed get the same reward."""
    return [(Point(arm, values, seed), result(validation, kl, [test + seed / 8, test + seed / 8])) for seed in (0, 1)]


def tuned(points: list[tuple[Point, dict[str, Any]]], study: Study = TUNED, **more: Any) -> Outcome:
    arms = list(dict.fromkeys(point.arm for point, _ in [*points, *more.get("failed", [])]))
    return Outcome(study, arms, typed(points), more.get("failed", []), {}, Path("out"), 1.0)


def test_at_equal_kl_each_arm_stands_on_its_own_path() -> None:
    """Points that are worse on validation than one with less KL are not on the path, whatever the test prompts say."""
    points = [
        *run_of(UNIFORM, NEAR, validation=0.1, kl=0.4, test=0.25),
        *run_of(UNIFORM, FAR, validation=0.5, kl=1.5, test=0.5),
        *run_of(ATTENTION, NEAR, validation=0.4, kl=1.0, test=0.75),
        *run_of(ATTENTION, FAR, validation=0.3, kl=2.0, test=4.0),
    ]
    section, *rest = equal_kl_sections(tuned(points))
    table = section.blocks[0]
    assert rest == [] and isinstance(table, TableBlock)
    uniform, attention = table.rows
    assert isinstance(uniform, dict) and isinstance(attention, dict)
    # result() gives every point a test KL of 0.75: the nearer mark stands first.
    assert uniform["KL 0.5"] == "-", "results without the base's rewards have no path below their first point"
    assert uniform["KL 2"] == "0.562< (0.75)", "no point goes as far"
    assert attention["KL 2"] == "0.812< (0.75)"
    assert attention["minus uniform, KL 0.5"] == "-"
    assert attention["minus uniform, KL 2"] == "+0.250 [0.250, 0.250]<"


def test_what_stands_on_fewer_seeds_than_the_study_is_marked_and_has_no_verdict() -> None:
    study = Study("s", TUNED.arms, grid=TUNED.grid, worlds={"calm": []}, kl_levels=(0.75,))
    arms = in_world(UNIFORM, "calm"), in_world(ATTENTION, "calm")
    points = [*run_of(arms[0], NEAR, 0.1, 0.4, 0.25), *run_of(arms[1], NEAR, 0.1, 0.4, 0.75)[:1]]
    table, summary = (section.blocks[0] for section in equal_kl_sections(tuned(points, study)))
    assert isinstance(table, TableBlock) and isinstance(summary, TableBlock)
    uniform, attention = table.rows
    assert isinstance(uniform, dict) and isinstance(attention, dict)
    assert attention["KL 0.75"] == "0.750 (1 of 2 seeds)" and "seeds" not in str(uniform["KL 0.75"])
    said = "+0.500 [0.500, 0.500] (1 of 2 seeds)"
    assert attention["minus uniform, KL 0.75"] == said and summary.rows[0]["calm"] == said  # type: ignore[call-overload,index]


def test_without_a_choice_or_a_truth_there_is_nothing_at_equal_kl() -> None:
    one = Study("s", TUNED.arms, grid=Grid(beta=(1.0,)))
    points = run_of(UNIFORM, NEAR, 0.1, 0.4, 0.25)
    assert equal_kl_sections(tuned(points, one)) == []
    assert equal_kl_sections(tuned([(point, {**made, "truth": None}) for point, made in points])) == []


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.01, 0.5, "helps"),
        (-0.5, -0.01, "harms"),
        (-0.01, 0.9, "no clear difference"),
        (math.nan, math.nan, "no clear difference"),
    ],
)
def test_the_word_follows_from_the_interval_alone(low: float, high: float, word: str) -> None:
    mean = 0.25 if math.isnan(low) else (low + high) / 2
    assert verdict(Interval(mean, low, high, 2, 2)) == word


def in_world(arm: Arm, world: str) -> Arm:
    return Arm(arm.name, arm.overrides, None, world)


def test_worlds_are_compared_within_themselves() -> None:
    """Attention is above the other world's uniform everywhere; it helps in one world and harms in the other."""
    study = Study("s", TUNED.arms, grid=TUNED.grid, worlds={"calm": [], "noisy": []}, kl_levels=(0.75, 9.0))
    points = [
        *run_of(in_world(UNIFORM, "calm"), NEAR, 0.1, 0.5, 0.0),
        *run_of(in_world(ATTENTION, "calm"), NEAR, 0.1, 0.5, 0.5),
        *run_of(in_world(UNIFORM, "noisy"), NEAR, 0.1, 0.5, 1.0),
        *run_of(in_world(ATTENTION, "noisy"), NEAR, 0.1, 0.5, 0.75),
    ]
    outcome = tuned(points, study)
    summary, beyond, _ = equal_kl_sections(outcome)[1].blocks
    assert isinstance(summary, TableBlock) and isinstance(beyond, TableBlock)
    assert (summary.caption, beyond.caption) == ("at KL 0.75", "at KL 9")
    assert summary.rows == [
        {
            "arm": "attention",
            "calm": "+0.500 [0.500, 0.500] helps",
            "noisy": "-0.250 [-0.250, -0.250] harms",
        }
    ]
    assert [row["calm"] for row in beyond.rows] == ["+0.500 [0.500, 0.500]< not at equal KL"]  # type: ignore[call-overload,index]
    columns, rows = main_table(outcome)
    assert columns[:2] == ["world", "arm"]
    assert [(row["world"], row["arm"]) for row in rows] == [
        (world, arm) for world in ("calm", "noisy") for arm in ("base", "uniform", "attention")
    ]
    assert [row.get("minus uniform") for row in rows[2::3]] == ["+0.500 [0.500, 0.500]", "-0.250 [-0.250, -0.250]"]
    assert points_csv(group_by_point(typed(points))).startswith("world,arm,seed")


# ------------------------------------------------------------------------------------------------ what is lost


def test_a_lost_control_is_shown_and_warned_of() -> None:
    failed = [(Point(UNIFORM, values, 0), "Traceback\nRuntimeError: out of luck") for values in (LOW, HIGH)]
    outcome = make_outcome(POINTS[2:], failed)
    _, rows = main_table(outcome)
    assert [(row["arm"], row["point"]) for row in rows][1] == ("uniform", "FAILED, all 2 points")
    assert rows[2]["arm"] == "attention" and rows[2]["minus uniform"] == ""
    assert study_warnings(outcome)[0] == "WARNING: the control uniform has no results, so no arm is compared"
    assert "FAILED seed 0, 2 points of uniform: RuntimeError: out of luck" in footnotes(outcome)
    assert study_warnings(make_outcome(POINTS)) == [NO_CONTROL]
    assert main_table(make_outcome(without_truth(POINTS[2:]), failed))[1][0] == {
        "arm": "uniform",
        "point": "FAILED, all 2 points",
    }


def test_a_single_arm_and_a_study_without_a_control_are_warned_of() -> None:
    alone = Study("s", {"uniform": []})
    assert study_warnings(tuned(run_of(UNIFORM, NEAR, 0.1, 0.4, 0.2), alone)) == [
        "WARNING: the study has a single arm, so there is nothing to compare it with"
    ]
    free = Study("s", TUNED.arms, grid=TUNED.grid, control=None)
    points = [*run_of(UNIFORM, NEAR, 0.1, 0.4, 0.2), *run_of(ATTENTION, NEAR, 0.1, 0.4, 0.2)]
    assert (
        study_warnings(tuned(points, free))[0]
        == "WARNING: there is no control arm (study.control=null), so no differences are shown"
    )
    columns, _ = main_table(tuned(points, free))
    assert not [name for name in columns if name.startswith("minus")]


def test_a_study_without_any_control_of_the_weights_is_warned_of() -> None:
    """A transform of the study's own control is none, nor is one without results; the truth as weights is one."""
    shuffled, truth = Arm("shuffled", ("weights=attention", "transform=shuffled")), Arm("truth", ("weights=t",))
    known = Study("s", {"uniform": [], "attention": [], "shuffled": []}, truth_arms={"truth": []}, grid=TUNED.grid)
    plain = [*run_of(UNIFORM, NEAR, 0.1, 0.4, 0.2), *run_of(ATTENTION, NEAR, 0.1, 0.4, 0.2)]
    assert study_warnings(tuned(plain, known)) == [NO_CONTROL] and "\n" not in NO_CONTROL
    for arm in (shuffled, truth):
        run = run_of(arm, NEAR, 0.1, 0.4, 0.2)
        assert study_warnings(tuned([*plain, *run], known)) == []
        assert study_warnings(tuned(plain, known, failed=[(run[0][0], "out of luck")])) == [NO_CONTROL]
    assert study_warnings(
        tuned([*plain, *run_of(shuffled, NEAR, 0.1, 0.4, 0.2)], replace(known, control="shuffled"))
    ) == [NO_CONTROL]
    unchanged = Arm("same", ("weights=attention", "transform=null"))
    assert study_warnings(tuned([*plain, *run_of(unchanged, NEAR, 0.1, 0.4, 0.2)], known)) == [NO_CONTROL]


def test_what_the_studys_checks_found_stands_above_the_table() -> None:
    """Behind the other warnings."""
    outcome = replace(make_outcome(POINTS), warnings=["WARNING: the pairs are few"])
    assert study_warnings(outcome) == [NO_CONTROL, "WARNING: the pairs are few"]


def test_figures_of_an_earlier_command_are_removed(tmp_path: Path) -> None:
    """What the record does not name was never the study's and stays, as does what lies elsewhere."""
    outcome = replace(make_outcome(POINTS), folder=tmp_path)
    for name in ("layers.png", "frontier.png", "mine.png"):
        (tmp_path / name).write_bytes(b"drawn earlier")
    write_study_record(outcome, ["layers.png", "frontier.png"])
    write_study_record(outcome, ["frontier.png"])
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["frontier.png", "mine.png"]
    kept = json.loads((tmp_path / "study.json").read_text())
    assert kept["figures"] == ["frontier.png"] and kept["digest"] == outcome.digest
    (tmp_path / "study.json").write_text('{"grid": ')
    write_study_record(outcome, [])
    assert (tmp_path / "frontier.png").is_file(), "a record that was cut short names nothing"


def test_a_studys_figures_are_those_of_its_page(tmp_path: Path) -> None:
    """Those of its tables too; a picture that lies elsewhere is no figure of the study."""
    outcome = replace(make_outcome(without_truth(POINTS)), folder=tmp_path)
    for path in (tmp_path / "probe.png", tmp_path / "points" / "curves.png"):
        training_curves([{"step": 0.0, "train/loss": 0.7}], path, "x")
    images = [Image(tmp_path / "probe.png"), Image(tmp_path / "points" / "curves.png")]
    assert write_study_report(outcome, [Section("probe", images)]) == ["probe.png", "probe.svg"]


def test_what_was_spent_once_for_all_arms_is_told() -> None:
    outcome = replace(make_outcome(POINTS), costs={("", 0): {"base": 90.0, "judge": 4.0}, ("", 1): {"base": 100.0}})
    assert (
        "spent once for all arms, not included in s/run: "
        "base 95.0 s (mean of 2), judge and verbalizer passes 4.0 s (mean of 1)" in footnotes(outcome)
    )


def test_an_analysis_that_cannot_be_shown_keeps_the_tables() -> None:
    """It reads a key that what was measured does not have."""
    study = Study("s", TUNED.arms, analyses={"probe": Probe()})
    outcome = replace(make_outcome(POINTS), study=study, measured={"probe": {("", 0): {"count": 3}}})
    (section,) = analysis_sections(outcome)
    assert section.blocks == [Paragraph("FAILED report of analysis probe: 'pairs'", warning=True)]
    (shown,) = analysis_sections(replace(outcome, measured={"probe": {("", 0): {"pairs": 3}}}))
    assert isinstance(shown.blocks[1], TableBlock) and shown.blocks[1].rows == [["", 0, 3]]
    assert analysis_sections(replace(outcome, measured={"probe": {}})) == []


def test_many_arms_are_drawn_in_several_figures_with_the_control_in_each() -> None:
    few = [f"a{place}" for place in range(16)]
    assert split_arms_into_figures(few, "a3") == [few]
    many = [f"a{place}" for place in range(34)]
    groups = split_arms_into_figures(many, "a3")
    assert [len(group) for group in groups] == [8, 8, 8, 8, 6] and all(group[0] == "a3" for group in groups)
    assert [arm for group in groups for arm in group[1:]] == [arm for arm in many if arm != "a3"]
    assert sum(map(len, split_arms_into_figures(many, None))) == 34
