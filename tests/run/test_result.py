"""A run's result as data: written and read back whole, refused where it is none."""

import json
import math
from dataclasses import replace

import pytest

from attnpo.run.result import RunResult, TruthScores

WHOLE = RunResult(
    seed=3,
    steps=12,
    seconds={"train": 1.5, "all": 2.5},
    metrics={"val/loss": 0.5},
    inputs={
        "train": {"pairs": 8, "tokens": {"chosen": {"p50": 21}}},
        "judge": {"agreement": 0.5, "warning": "it tells nothing"},
    },
    versions={"torch": "2"},
    truth={
        "test": TruthScores({"reward": 0.25, "kl": 1.5}, [0.0, 0.5], [-1.0, 0.0]),
        "validation": TruthScores({}, []),
    },
    drift={"answers": {"kl": 1.5, "classes": {"weighted": {"kl": None}}}, "seconds": 1},
)


def test_a_result_is_read_back_as_it_was_written() -> None:
    assert RunResult.read(json.dumps(WHOLE.to_json())) == WHOLE
    without = RunResult.read(json.dumps({**WHOLE.to_json(), "truth": None}))
    assert without.truth is None and without.to_json()["truth"] is None


def test_numbers_of_the_inputs_are_found_by_name() -> None:
    assert (WHOLE.input("train", "pairs"), WHOLE.input("train", "tokens.chosen.p50")) == (8, 21)
    assert math.isnan(WHOLE.input("train", "tokens.rejected.p50")) and math.isnan(WHOLE.input("test", "pairs"))
    assert WHOLE.judge_warning == "it tells nothing" and WHOLE.input("judge", "agreement") == 0.5


def test_where_the_policy_moved_is_found_by_path_and_older_results_do_not_say() -> None:
    assert (WHOLE.drift_value("answers/kl"), WHOLE.drift_value("seconds")) == (1.5, 1)
    assert math.isnan(WHOLE.drift_value("answers/classes/weighted/kl")) and math.isnan(WHOLE.drift_value("pairs/kl"))
    older = {name: value for name, value in WHOLE.to_json().items() if name != "drift"}
    assert RunResult.read(json.dumps(older)) == replace(WHOLE, drift={})


PARTS = {"steps": 1, "seconds": {}, "metrics": {}, "inputs": {}, "truth": None}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"steps": 3}'])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"result of a run|Expecting"):
        RunResult.read(text)


@pytest.mark.parametrize("wrong", [{"steps": None}, {"seconds": 2}, {"truth": {"scores": [1]}}, {"inputs": None}])
def test_a_part_of_another_kind_is_refused(wrong: dict[str, object]) -> None:
    assert RunResult.read(json.dumps(PARTS)).steps == 1
    with pytest.raises(ValueError, match="this is not the result of a run"):
        RunResult.read(json.dumps({**PARTS, **wrong}))
