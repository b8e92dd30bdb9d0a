"""Validation that shares pairs or prompts with training: counted, said beside its figures, refused where it is all."""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnpo.data.rules import LengthRules
from attnpo.evaluation.base import Question
from attnpo.evaluation.evaluating import evaluate
from attnpo.evaluation.implicit_reward import ImplicitReward, UnseenPairs
from attnpo.evaluation.result import read_result as read_evaluation
from attnpo.lab.results import run_warnings
from attnpo.models.spec import ModelSpec
from attnpo.run.input_summary import example_statistics
from attnpo.run.messages import outcome_text
from attnpo.run.result import RunResult
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.weigh import fill_store
from tests.evaluation.test_evaluating import Marks, config, mark
from tests.evaluation.test_implicit_reward import subject_of
from tests.run.made import make_inputs
from tests.run.worlds import TRAIN, VAL, World

Rows = list[dict[str, Any]]
LEAK = f"3 of {VAL} validation pairs and 4 of {VAL} validation prompts are also in the training data"


def rows_of(world: World, split: str) -> Rows:
    return [json.loads(line) for line in (world.data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def with_data(world: World, folder: Path, **splits: Sequence[Mapping[str, Any]]) -> World:
    """Returns the world's model on other pairs; a split that is not given is copied."""
    data = folder / "data"
    shutil.copytree(world.data, data)
    for split, rows in splits.items():
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return World(world.model, data, folder / "store")


@pytest.fixture(scope="module")
def leaky(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three validation pairs are training pairs, one only by its tokens; a fourth has a training prompt alone."""
    train, val = rows_of(world, "train"), rows_of(world, "test")
    spaced = {**train[2], "chosen": [train[2]["chosen"][0], {"role": "assistant", "content": said(train[2]) + " "}]}
    other = {**train[3], "chosen": [train[3]["chosen"][0], val[3]["chosen"][1]]}
    return with_data(world, tmp_path_factory.mktemp("leaky"), test=[train[0], train[1], spaced, other, *val[4:]])


def said(row: Mapping[str, Any]) -> str:
    return str(row["chosen"][-1]["content"])


@pytest.fixture(scope="module")
def ran(leaky: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("ran") / "run"
    result = run(leaky.config("weights=uniform", "callbacks.samples=0"), folder)
    assert result is not None
    return folder, result


def test_what_is_shared_stands_beside_every_figure_of_validation(ran: tuple[Path, RunResult]) -> None:
    folder, result = ran
    assert LEAK in outcome_text(result)
    assert LEAK in (folder / "result.json").read_text(encoding="utf-8")
    assert LEAK in (folder / "report.html").read_text(encoding="utf-8")
    for name in ("best", "last"):
        assert LEAK in (folder / name / "README.md").read_text(encoding="utf-8").partition("## Validation")[2]
    assert any(LEAK in line for line in run_warnings(folder))
    assert result.inputs["val"]["trained_on"]["trained_pairs"] == 3  # type: ignore[index,call-overload]


def test_it_is_logged_before_anything_is_trained(
    leaky: World, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for made, level, words in (
        (leaky, "WARNING", f"val: {LEAK}"),
        (
            world,
            "INFO",
            f"val: 0 of {VAL} validation pairs and 0 of {VAL} validation prompts are also in the training data",
        ),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="attnpo"):
            run(made.config("weights=uniform", "trainer.max_steps=1", "callbacks=none"), tmp_path / level)
        lines = [one.message for one in caplog.records]
        assert (level, words) in [(one.levelname, one.message) for one in caplog.records]
        assert lines.index(words) < next(place for place, line in enumerate(lines) if line.startswith("training "))


def test_a_world_that_shares_nothing_warns_of_nothing(world: World) -> None:
    found = example_statistics(make_inputs(world.config("weights=uniform")))["val"].get("trained_on")
    assert found == {"pairs": VAL, "prompts": VAL, "trained_pairs": 0, "trained_prompts": 0}


@pytest.mark.parametrize(
    "chosen",
    [
        ["data.val_split=train"],
        ["data.val_split=train", "data.train_rows=0:5", "data.val_rows='5'"],
        ["data.path={data}/train.jsonl", "data.val_rows=0:100%"],
    ],
)
def test_one_split_is_not_both(world: World, chosen: list[str]) -> None:
    overrides = [one.format(data=world.data) for one in chosen]
    with pytest.raises(UserError, match=r"training and validation use the same (12|5) rows.*data\.val_share=0\.1"):
        fill_store(world.config("weights=uniform", *overrides))


def test_rows_that_overlap_in_part_are_warned_of_and_counted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs(world.config("weights=uniform", "data.val_split=train", "data.val_rows='4'"))
    assert "data.train_rows overlap" in caplog.text
    assert example_statistics(inputs)["val"].get("trained_on", {}).get("trained_pairs") == 4


# ------------------------------------------------------------------------------------------------ evaluations


SEEN = "prompts that the model was trained on"


def test_an_evaluation_of_pairs_counts_prompts_of_its_training(ran: tuple[Path, RunResult], world: World) -> None:
    folder, _ = ran
    for split, counted in (("train", TRAIN), ("test", 0)):
        measure = ImplicitReward(
            UnseenPairs(str(world.data), split=split), str(world.model), lengths=LengthRules(256, 128)
        )
        assert measure.measure(subject_of(folder / "last", folder)).counts.get(SEEN, 0) == counted


@dataclass(frozen=True)
class Asks(Marks):
    """Marks for answers to prompts of one's own."""

    prompts: tuple[str, ...] = ()

    def questions(self) -> list[Question]:
        return [Question(f"q{number}", (text,)) for number, text in enumerate(self.prompts)]


def test_a_benchmark_counts_prompts_of_the_training(
    ran: tuple[Path, RunResult], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = tuple(row["prompt"] for row in [*rows_of(world, "train")[:3], *rows_of(world, "test")[4:]])
    for model, counted in ((ran[0] / "best", 3), (world.model, 0)):
        out = tmp_path / model.name
        with caplog.at_level(logging.INFO, logger="attnpo"):
            assert evaluate(config(out, mark, Asks(prompts=asked), model=ModelSpec(str(model)))) == 0
        found = read_evaluation(out)
        assert found is not None and found.counts.get(SEEN, 0) == counted
    assert f"3 of {len(asked)} distinct prompts are in the training data" in caplog.text
    assert f"{world.model} has no training_prompts.txt next to it" in caplog.text
