"""Runs whose source weighs pairs, or is a function of the user's: from overrides to results, and resumed."""

import json
import sys
from pathlib import Path

import pytest

from attnpo.config.named_files import digest_named_functions
from attnpo.run.resume import digest_contents
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.training.metrics_file import read_metrics
from tests.run.made import Made, make, make_inputs
from tests.run.worlds import TRAIN, VAL, World, build_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return build_world(tmp_path)


def with_column(world: World, first: object = 0.0) -> None:
    """Gives every row a column ``trust``: ``first`` in the first training row, 2 in the others."""
    for name in ("train", "test"):
        path = world.data / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for place, row in enumerate(rows):
            row["trust"] = first if place == 0 and name == "train" else 2.0
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def contents(made: Made) -> dict[str, str]:
    """Digests of what the paths of a configuration hold."""
    return digest_contents(made.inputs, made.base, digest_named_functions(made.cfg.values))


def test_a_column_weighs_the_pairs_of_any_objective(world: World) -> None:
    with_column(world)
    asked = ("weights=pair_column", "weights.column=trust", "objective=dpo")
    made = make(world.config(*asked))
    inputs = made.inputs
    weights = [example.pair_weight for example in inputs.examples["train"].examples]
    assert weights == [0.0] + [2.0] * (TRAIN - 1)
    assert inputs.examples["train"].tally.counts["pair weight 0: no effect on training"] == 1
    assert "pair weight 0: no effect on training" not in inputs.examples["val"].tally.counts and VAL > 0
    with_column(world, 0.5)
    other = make(world.config(*asked, "seed=5", "lengths.max_prompt_length=390"))
    changed = {key for key, value in contents(other).items() if contents(made)[key] != value}
    assert changed == {"judge and weights"}, "the pairs' ids know nothing of the column, the weights' key does"


def test_a_column_that_is_missing_or_no_number_names_the_pair(world: World) -> None:
    with pytest.raises(UserError, match=r"weights\.column=trust: pair \w+ has no such column"):
        make_inputs(world.config("weights=pair_column", "weights.column=trust"))
    with_column(world, "high")
    with pytest.raises(UserError, match=r"weights\.column=trust: pair \w+: expected a finite number .*'high'"):
        make_inputs(world.config("weights=pair_column", "weights.column=trust", "lengths.max_prompt_length=390"))


def test_a_source_alone_may_read_the_reference(world: World, tmp_path: Path) -> None:
    """SimPO reads none; MWPO's margins need it. At the first step margins are 0, so sigmoid(0)^.6 times the lengths."""
    asked = ("weights=mwpo", "weights.gamma=0", "objective=simpo", "reference=cached")
    config = world.config(*asked)
    assert "reference" not in config.unused_keys()
    run(config, tmp_path / "run")
    told = [row for row in read_metrics(tmp_path / "run" / "metrics.csv") if "train/weights/pair" in row]
    assert told[0]["train/weights/pair"] == pytest.approx(0.5**0.6, abs=1e-5)
    assert all(row["train/weights/void"] == 0 for row in told)


def test_a_formula_trains_and_its_source_is_part_of_the_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rules.py").write_text("def early(tokens):\n    return [0.9 ** at for at in tokens.positions]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "tests,own_rules")
    asked = (
        "weights=formula",
        "weights.function=own_rules.early",
        "trainer.max_steps=1",
        "callbacks.checkpoints=false",
    )
    config = world.config(*asked)
    run(config, tmp_path / "run")
    assert any("train/loss" in row for row in read_metrics(tmp_path / "run" / "metrics.csv"))
    made = make(config)
    row = made.inputs.examples["train"].examples[0].weights[0].tolist()
    assert row == pytest.approx([0.9**at for at in range(len(row))])
    before = contents(made)
    (tmp_path / "own_rules.py").write_text("def early(tokens):\n    return [0.8 ** at for at in tokens.positions]\n")
    after = contents(made)
    assert {key for key in after if before[key] != after[key]} == {"weights.function (its module)"}
    sys.modules.pop("own_rules")
