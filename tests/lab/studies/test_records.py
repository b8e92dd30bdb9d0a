"""Records of studies, pooled studies, and points that are added between others."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnpo import report
from attnpo.cli.entry import run_entry
from attnpo.evaluation.intervals import MeanSquares, correct_by_holm, mean_interval
from attnpo.lab.studies.outcome import Outcome, PointResults, points_between
from attnpo.lab.studies.records import pool_records, read_study_record, rliable_scores, study_record
from attnpo.lab.studies.study import Arm, Grid, Point, Study
from attnpo.run.result import RunResult, TruthScores
from attnpo.schema import UserError
from tests.lab.studied import STUDY, finish

PROMPTS = 40


def make_rewards(seed: int, arm: int) -> np.ndarray:
    """Returns a seed's rewards, one more for the second arm, with an effect of each prompt that all seeds share."""
    of_prompt = np.random.default_rng(99).normal(size=PROMPTS) * 0.2 * arm
    noise = np.random.default_rng([seed, arm]).normal(size=PROMPTS) * 0.3
    return np.round(arm + of_prompt + noise, 6)


def make_outcome(seeds: list[int], folder: Path, name: str = "plain") -> Outcome:
    """Returns a study of two arms at one grid point with KL 0.5, made by hand."""
    grid, arms = Grid((1.0,), (1.0, 2.0)), {"uniform": [], name: []}
    study = Study("s", arms, grid=grid, kl_levels=(0.5,), seeds=len(seeds))
    points = []
    for number, arm in enumerate(arms):
        for place, beta in enumerate(("1.0", "2.0")):
            for seed in seeds:
                rewards = (make_rewards(seed, number) + place).tolist()
                numbers = {"kl": 0.5 + place, "reward": float(np.mean(rewards)), "base_reward": 0.0}
                truth = {split: TruthScores(numbers, rewards, [0.0] * PROMPTS) for split in ("validation", "test")}
                result = RunResult(seed, 1, {}, {}, {}, {}, truth)
                points.append(
                    (Point(Arm(arm, (), None, "", grid), ("optimizer.lr=1.0", f"objective.beta={beta}"), seed), result)
                )
    record: dict[str, Any] = {"world": "w", "arms": {arm: {"weights": arm} for arm in arms}}
    return Outcome(study, [Arm(arm, (), None, "", grid) for arm in arms], points, [], record, folder, 1.0)


def write_record(seeds: list[int], folder: Path, name: str = "plain") -> Path:
    folder.mkdir()
    (folder / "records.json").write_text(json.dumps(study_record(make_outcome(seeds, folder, name))))
    return folder


def pool(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return pool_records([read_study_record(path) for path in paths])


def test_a_record_has_a_number_for_every_seed(tmp_path: Path) -> None:
    record = read_study_record(write_record([0, 1, 2], tmp_path / "a"))
    row = next(row for row in record["rows"] if row["arm"] == "plain")
    gains = np.array([make_rewards(seed, 1) - make_rewards(seed, 0) for seed in (0, 1, 2)])
    assert [*row["differences"]] == ["0", "1", "2"] and row["prompts"] == PROMPTS and not row["mark"]
    assert [*row["differences"].values()] == pytest.approx(gains.mean(axis=1).tolist(), abs=1e-6)
    squares = MeanSquares.from_scores(gains)
    assert row["squares"] == pytest.approx([squares.seed, squares.prompt, squares.residual])


def test_pooled_studies_are_one_study_with_all_their_seeds(tmp_path: Path) -> None:
    first, second = write_record([0, 1, 2], tmp_path / "a"), write_record([3, 4, 5, 6], tmp_path / "b")
    (row,) = pool([first, second / "records.json"])
    whole = mean_interval(np.array([make_rewards(seed, 1) - make_rewards(seed, 0) for seed in range(7)]))
    low, high = (float(end) for end in str(row["difference"]).split("[")[1].rstrip("]").split(", "))
    assert row["seeds"] == 7 and str(row["difference"]).startswith(f"{whole.mean:+.3f}")
    assert (high - low) / (whole.high - whole.low) == pytest.approx(1.0, abs=0.15)
    one = pool([first])[0]
    alone = mean_interval(np.array([make_rewards(seed, 1) - make_rewards(seed, 0) for seed in range(3)]))
    assert one["difference"] == f"{alone.mean:+.3f} [{alone.low:.3f}, {alone.high:.3f}]"


def test_the_command_pools_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_record(seeds, tmp_path / name)) for seeds, name in (([0, 1, 2], "a"), ([3, 4], "b"))]
    words = ["pool", *folders, f"output={tmp_path}", "name=pooled"]
    assert run_entry(report.main, "report", words, "", "", positional="what") == 0
    printed, folder = capsys.readouterr().out, tmp_path / "pooled"
    assert "Differences from uniform at equal KL, 2 studies pooled" in printed and "<0.0001" in printed
    (row,) = csv.DictReader((folder / "pooled.csv").read_text().splitlines())
    assert (row["arm"], row["seeds"], row["p"]) == ("plain", "5", "<0.0001")
    assert np.shape(json.loads((folder / "rliable.json").read_text())["plain"]) == (5, 1)
    assert (folder / "pooled.tex").is_file() and (folder / "report.html").is_file()
    assert run_entry(report.main, "report", ["pool", str(tmp_path)], "", "", positional="what") == 2


def test_settings_tell_arms_and_controls_apart_in_every_world(tmp_path: Path) -> None:
    plain = make_outcome([0, 1], tmp_path)

    def settings(world: str, changed: str = "") -> list[str]:
        arms = {name: {"weights": name + "x" * (name == changed)} for name in ("uniform", "plain")}
        named = {f"{world}: {name}" if world else name: value for name, value in arms.items()}
        moved = [(replace(point, arm=replace(point.arm, world=world)), result) for point, result in plain.points]
        there = replace(plain, arms=[replace(arm, world=world) for arm in plain.arms], points=moved)
        return [row["settings"] for row in study_record(replace(there, record={"world": "w", "arms": named}))["rows"]]

    for world in ("", "noisy"):
        assert len(set(settings(world))) == 2
        assert settings(world, "uniform")[1] != settings(world)[1], "another control is another difference"


def test_studies_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    first = write_record([0, 1], tmp_path / "a")
    with pytest.raises(UserError, match="several studies have seed 1"):
        pool([first, write_record([1, 2], tmp_path / "b")])
    with pytest.raises(UserError, match="expected a study's records"):
        pool([tmp_path / "none"])
    other = write_record([2, 3], tmp_path / "c")
    record = json.loads((other / "records.json").read_text())
    for change, words in (
        ({"world": "v"}, "differ in their world"),
        ({"rows": [{**row, "settings": "x"} for row in record["rows"]]}, "differ in this arm's settings or prompts"),
    ):
        (other / "records.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(UserError, match=words):
            pool([first, other])


def test_p_values_agree_with_intervals_and_holm_corrects_them() -> None:
    scores = np.random.default_rng(3).normal(size=(4, 30)) * 0.3
    squares = MeanSquares.from_scores(scores)
    assert squares.p_value(squares.half_width()) == pytest.approx(0.05, abs=1e-9)
    assert squares.p_value(0.0) == pytest.approx(1.0) and MeanSquares(0, 0, 0, 2, 2).p_value(1.0) == 0.0
    # By hand: 0.01 times 3, 0.02 times 2, then 0.03, which may not be below the one before.
    assert correct_by_holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert correct_by_holm([0.9, 0.8]) == [1.0, 1.0] and correct_by_holm([]) == []


def test_scores_are_exported_in_the_shape_of_rliable(tmp_path: Path) -> None:
    record = read_study_record(write_record([0, 1, 2], tmp_path / "a"))
    scores, incomplete = rliable_scores([record])
    assert not incomplete and np.shape(scores["plain"]) == np.shape(scores["uniform"]) == (3, 1)
    assert scores["plain"][2][0] == pytest.approx(make_rewards(2, 1).mean(), abs=1e-6)
    for row in record["rows"]:
        if row["arm"] == "plain":
            row["mark"] = "<"
    assert rliable_scores([record])[1] == ["plain"]


def test_points_are_added_where_a_level_lies_between_points_far_apart(tmp_path: Path) -> None:
    # KL 0.5 at beta 1 and 1.5 at beta 2: 1 lies between, three times apart; the mean of the betas is sqrt(2).
    results = make_outcome([0, 1], tmp_path).results
    found = points_between(results, (1.0,), 1)
    assert [(point.arm.name, point.values, point.seed) for point in found] == [
        (name, ("optimizer.lr=1.0", "objective.beta=1.41"), 1) for name in ("uniform", "plain")
    ]
    assert points_between(results, (2.0,), 1) == points_between(results, (0.1,), 1) == []
    mixed = [
        replace(point, values=(point.values[0], f"objective.kind={place}x")) for place, point in enumerate(results)
    ]
    assert points_between(mixed, (1.0,), 1) == [], "no number lies between two words"
    known = replace(results[0], values=found[0].values)
    assert [point.arm.name for point in points_between([*results, known], (1.0,), 1)] == ["plain"]


def test_a_study_trains_the_points_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def between(results: Sequence[PointResults], levels: Sequence[float], seed: int) -> list[Point]:
        asked.append((len(results), seed))
        return [Point(results[0].arm, ("optimizer.lr=0.002", "objective.beta=0.3"), seed)] if len(asked) == 1 else []

    monkeypatch.setattr("attnpo.lab.studies.runner.points_between", between)
    study = STUDY.replace("  broken: [weights=uniform, data.val_split=nowhere]\n", "").replace(
        "seeds: 1", "seeds: 1\nbisect: 2"
    )
    done = finish(tmp_path, study, "+truth=known")
    assert asked == [(2, 0), (3, 0)]
    mine = [point.label for point in done.outcome.results if point.arm.name == "uniform"]
    assert mine == ["lr 0.001 beta 0.2", "lr 0.002 beta 0.3"]
    assert json.loads((done.folder / "study.json").read_text())["bisect"] == 2
