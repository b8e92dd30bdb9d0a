"""The tables of where policies moved, and their columns in results.csv, on results made by hand."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attnpo.display.output import print_sections
from attnpo.display.page import TableBlock
from attnpo.lab.studies.outcome import Outcome, group_by_point
from attnpo.lab.studies.page import points_csv
from attnpo.lab.studies.study import Arm, Point, Study
from attnpo.lab.studies.tables import drift_sections
from attnpo.run.result import RunResult

ARMS = [Arm("uniform (DPO)", ()), Arm("attention, shuffled", ())]
LOW, HIGH = ("objective.beta=0.1",), ("objective.beta=1.0",)


def of_classes(below: float) -> dict[str, Any]:
    shares = {"end_of_turn": 0.05, "no_weight": 0.1, "below_uniform": below, "weighted": 0.85 - below}
    return {name: {"tokens": 0.25, "kl": kl, "kl_per_token": 0.5} for name, kl in shares.items()}


def drift(kl: float, below: float = 0.25, flipped: float | None = 0.75) -> dict[str, Any]:
    part = {
        "kl": kl,
        "classes": of_classes(below),
        "truth": {
            "decisive": {"tokens": 0.125, "kl": 0.5, "kl_per_token": 4.0},
            "other": {"tokens": 0.875, "kl": 0.5, "kl_per_token": 0.25},
        },
        "deciles": {"weight": {"1": 0.0}, "kl": {"1": 0.5}},
    }
    return {
        "answers": part,
        "pairs": {**part, "kl": 9.0},
        "ranking_accuracy": {"train_clean": 1.0, "train_flipped": flipped, "validation": 0.5},
        "displacement": {"train_chosen": -1.0, "train_rejected": -4.0, "base_answers": -2.0},
        "effective_beta": {"p50": 0.25, "max": 8.0},
    }


def made(validation: float, moved: dict[str, Any], *, known: bool = True) -> RunResult:
    scores = {"reward": validation, "kl": 1.0, "polarity": 0.5, "broken": 0.125, "rewards": [0.0]}
    return RunResult.from_json(
        {
            "steps": 1,
            "metrics": {},
            "inputs": {"train": {"pairs": 8}},
            "seconds": {"all": 1.0},
            "truth": {"scores": {split: scores for split in ("validation", "test")}} if known else None,
            "drift": moved,
        }
    )


def outcome(*points: tuple[Point, RunResult], worlds: bool = False) -> Outcome:
    names: dict[str, list[str]] = {"calm": [], "noisy": []} if worlds else {}
    study = Study("s", {"uniform (DPO)": [], "attention, shuffled": []}, control="uniform (DPO)", worlds=names)
    arms = list(dict.fromkeys(point.arm for point, _ in points))
    return Outcome(study, arms, list(points), [], {}, Path("out"), 1.0)


def rows_of(found: Outcome) -> list[list[list[Any]]]:
    """The cells of each table, row by row, without the arms."""
    (section,) = drift_sections(found)
    blocks = [block for block in section.blocks if isinstance(block, TableBlock)]
    return [[[row.get(name) for name in block.columns if name != "arm"] for row in block.rows] for block in blocks]


def test_arms_are_shown_at_their_chosen_points_with_means_over_seeds() -> None:
    found = rows_of(
        outcome(
            (Point(ARMS[0], LOW, 0), made(0.5, drift(1.0))),
            (Point(ARMS[0], LOW, 1), made(0.5, drift(2.0, below=0.5))),
            (Point(ARMS[0], HIGH, 0), made(0.25, drift(64.0))),
            (Point(ARMS[0], HIGH, 1), made(0.25, drift(64.0))),
            (Point(ARMS[1], LOW, 0), made(0.5, drift(4.0, flipped=None))),
            (Point(ARMS[1], LOW, 1), made(0.5, {})),
        )
    )
    first = [rows[0] for rows in found]
    assert first == [
        [1.5, 0.5, 0.125, 0.05, pytest.approx(0.1 + 0.375)],  # KL, decisive, of tokens, end, below 1
        [4.0, 0.25, 0.5, 0.125],  # decisive, other, polarity, broken
        [1.0, 0.75, 0.5],  # clean, flipped, validation
        [-1.0, -4.0, -2.0, 0.25, 8.0],  # chosen, rejected, base's, p50, max
    ]
    assert found[0][1] == ["-"] * 5, "a seed that was run before there was any of it"


def test_what_no_run_measured_is_no_section() -> None:
    assert drift_sections(outcome((Point(ARMS[0], LOW, 0), made(0.5, {})))) == []


def test_without_answers_the_pairs_are_shown() -> None:
    moved = {name: part for name, part in drift(1.0).items() if name != "answers"}
    found = rows_of(outcome((Point(ARMS[0], LOW, 0), made(0.5, moved, known=False))))
    assert found[0][0][0] == 9.0 and found[1][0] == [4.0, 0.25]
    assert found[3][0][2] == -2.0


def test_it_is_readable_on_a_narrow_terminal() -> None:
    """No number is broken over two lines, with a column of worlds as well."""
    arms = [Arm(arm.name, (), None, world) for world in ("calm", "noisy") for arm in ARMS]
    found = outcome(*((Point(arm, LOW, 0), made(0.5, drift(1.5))) for arm in arms), worlds=True)
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    print_sections(console, drift_sections(found))
    lines = console.file.getvalue().splitlines()
    rows = [line.split()[3:] for line in lines if "noisy   attention, shuffled" in line]
    expected = ["1.50 0.500 0.125 0.050 0.350", "4.000 0.250 0.500 0.125", "1.000 0.750 0.500"]
    assert [" ".join(row) for row in rows] == [*expected, "-1.00 -4.00 -2.00 0.250 8.000"]
    assert max(map(len, lines)) <= 80


def test_every_number_is_a_column_of_the_file() -> None:
    points = [(Point(ARMS[0], LOW, 0), made(0.5, drift(1.5, flipped=None))), (Point(ARMS[1], LOW, 0), made(0.5, {}))]
    first, second = csv.DictReader(io.StringIO(points_csv(group_by_point(points))))
    assert first["drift/answers/kl"] == "1.5" and first["drift/pairs/classes/no_weight/kl"] == "0.1"
    assert first["drift/answers/deciles/kl/1"] == "0.5" and first["drift/effective_beta/max"] == "8.0"
    assert not any(math.isnan(float(value)) for name, value in first.items() if name.startswith("drift/"))
    assert "drift/ranking_accuracy/train_flipped" not in first
    assert second["drift/answers/kl"] == ""
