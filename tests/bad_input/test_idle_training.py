"""Training that cannot train, or that leaves no usable model: refused before it starts, else warned of by name."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.run.worlds import World

COLUMN = ("weights=pair_column", "weights.column=trust")
SPANS = ("weights=column", "weights.form=spans")
REWARD = (
    *("model=reward", "objective=cpo", "objective.beta=1", "objective.sft_coef=0"),
    *("truth=null", "drift.pairs=0", "callbacks.samples=0"),
)
NOTHING = {"trust": 0, "chosen_weights": [], "rejected_weights": []}
SOMETHING = {"trust": 1, "chosen_weights": [[0, 4, 1.0]], "rejected_weights": [[0, 4, 1.0]]}


def weighing(attempts: Attempts, given: Mapping[str, Mapping[str, Any]]) -> World:
    """Gives the world columns of weights, those of ``given`` in each row of a file."""
    world = attempts.with_rows([{**row, **given["train"]} for row in deepcopy(attempts.rows)])
    path = world.data / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, **given["test"]}) + "\n" for row in rows))
    return world


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("weights", [COLUMN, SPANS, (*COLUMN, *REWARD)], ids=["pairs", "tokens", "reward"])
def test_a_split_of_weight_0(attempts: Attempts, record: Record, split: str, weights: tuple[str, ...]) -> None:
    """A mean over nothing is 0, the best loss there is, and best/ was chosen by it."""
    files = {"train": NOTHING, "test": SOMETHING} if split == "train" else {"train": SOMETHING, "test": NOTHING}
    message = attempts.fit(*weights, world=weighing(attempts, files)).refused()
    assert message.startswith(f"{split}: all ") and "pairs have weight 0" in message
    record(f"weights of 0 in all of {split}", message, "run not started")


IDLE, LOST = "training did not change any weight", "training destroyed the model: its weights grew 1e+"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (IDLE, ("optimizer.lr=1e-30", "layout=padded")),
        (IDLE, ("optimizer.lr=1e-30", *REWARD)),
        (LOST, ("optimizer.lr=1e30", "layout=packed")),
        (LOST, ("optimizer.lr=1e6", *REWARD)),
    ],
)
def test_a_rate_that_moves_nothing_or_destroys(attempts: Attempts, words: str, given: tuple[str, ...]) -> None:
    """By luck the loss of such a model may be lower than before."""
    answer = attempts.fit("weights=uniform", *given)
    assert words in answer.noted("result: ") and words in answer.noted(f"warning: {words}")


def test_a_likelihood_that_collapsed(attempts: Attempts) -> None:
    answer = attempts.fit("weights=uniform", "optimizer.lr=1")
    assert "training destroyed the model: log-prob of chosen responses" in answer.noted("result: ")


def test_weights_that_come_with_each_step_and_are_0(attempts: Attempts) -> None:
    """The weight decay moves the weights all the same."""
    given = ("weights=mwpo", "weights.gamma=1e6", "objective=dpo", "callbacks=default")
    answer = attempts.fit(*given, "optimizer.weight_decay=1", "optimizer.lr=1e-3", "callbacks.samples=0")
    assert "no step had a nonzero gradient" in answer.noted("result: ")
    assert "is not saved" in answer.noted("all validation pairs have weight 0")
    (run,) = attempts.folder.glob("out*/run")
    assert {path.name for path in Path(run).iterdir()} & {"best", "last"} == {"last"}
