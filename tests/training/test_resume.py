"""Exact resume: wherever a run was saved, however its steps are cut, with random numbers, and its table of metrics."""

from pathlib import Path

import lightning as L
import pytest
import torch

from attnpo.data.rules import BatchPlan
from attnpo.schema import UserError
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.module import PreferenceModule
from attnpo.training.resume_state import KEY, ExactResume, get_random_state, set_random_state
from tests.training.tiny import Copies, Fit, Rows, make_data, make_examples, make_module

PAIRS, EPOCHS, STEPS = 20, 2, 6  # steps of 8, 8 and 4 pairs


class Early(L.Callback):
    """Checkpoint after every optimiser step, before its validation."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step > self.step:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt", weights_only=False)


def shaky(steps: int = STEPS) -> PreferenceModule:
    """A module whose policy draws random numbers in every forward."""
    torch.manual_seed(5)
    module = make_module(steps)
    for layer in module.policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    torch.manual_seed(6)
    return module


def timeless(rows: Rows) -> Rows:
    return [{name: value for name, value in row.items() if not name.endswith("_per_s")} for row in rows]


def same_weights(left: PreferenceModule, right: PreferenceModule) -> bool:
    pairs = zip(left.policy.parameters(), right.policy.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize(
    ("copies", "validate_every", "limit"), [(Copies, 1, "max_epochs"), (Early, 2, "max_steps")], ids=["after", "before"]
)
def test_a_run_goes_on_bit_for_bit_after_every_step(
    fit: Fit, tmp_path: Path, copies: type[L.Callback], validate_every: int, limit: str
) -> None:
    """Mid-epoch, at an epoch's end, after a short step; saved before or after the validation; epochs or steps."""
    examples, plan = make_examples(PAIRS), BatchPlan(8, 2)
    arguments = {"steps": STEPS, "epochs": EPOCHS, "validate_every": validate_every}
    if limit == "max_steps":
        arguments["max_steps"] = STEPS
    unbroken = shaky()
    callbacks = (ExactResume(), copies(tmp_path))
    expected = timeless(fit(unbroken, make_data(examples, plan), callbacks=callbacks, **arguments))
    for stop in range(1, STEPS):
        if copies is Early and stop % validate_every == 0:
            continue  # saved before a validation that was due: what the run's own callbacks never do
        resumed = shaky()
        given: dict[str, object] = {"callbacks": (ExactResume(),), "resume": tmp_path / f"{stop}.ckpt", **arguments}
        rows = timeless(fit(resumed, make_data(examples, plan), **given))
        # The row of step N holds the training of step N and, where there was one, the validation before it.
        tail = [dict(row) for row in expected if row["step"] >= stop]
        tail[0] = {name: value for name, value in tail[0].items() if not name.startswith("val/")}
        assert rows == tail, stop
        assert same_weights(resumed, unbroken), stop


def test_random_states_are_at_work(fit: Fit, tmp_path: Path) -> None:
    """Without them the test above could not pass: the resumed run gives other losses."""
    examples, plan = make_examples(PAIRS), BatchPlan(8, 2)
    callbacks = (ExactResume(), Copies(tmp_path, 2))
    arguments = {"steps": STEPS, "epochs": EPOCHS, "validate_every": 1}
    fit(unbroken := shaky(), make_data(examples, plan), callbacks=callbacks, **arguments)
    state = torch.load(tmp_path / "2.ckpt", weights_only=True)
    state[KEY]["random"] = []
    torch.save(state, tmp_path / "without.ckpt")
    resumed = shaky()
    fit(resumed, make_data(examples, plan), callbacks=(ExactResume(),), resume=tmp_path / "without.ckpt", **arguments)
    assert not same_weights(resumed, unbroken)


def test_random_states_are_plain_and_come_back(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]

    draw()  # a Gaussian number is now kept by NumPy
    torch.save(get_random_state(), tmp_path / "state")
    first = draw()
    set_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert draw() == first


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
def test_steps_may_be_cut_otherwise_when_resumed(fit: Fit, tmp_path: Path, before: int, after: int) -> None:
    """The counters of micro-batches are those of the new cutting: as many steps, the same pairs in each."""
    examples = make_examples(PAIRS)
    arguments = {"steps": STEPS, "epochs": EPOCHS, "validate_every": 1}
    callbacks = (ExactResume(), Copies(tmp_path))
    expected = fit(make_module(STEPS), make_data(examples, BatchPlan(8, before)), callbacks=callbacks, **arguments)
    for stop in (2, 3):  # mid-epoch, an epoch's last
        given: dict[str, object] = {"callbacks": (ExactResume(),), "resume": tmp_path / f"{stop}.ckpt", **arguments}
        rows = fit(make_module(STEPS), make_data(examples, BatchPlan(8, after)), **given)
        for name in ("train/loss", "train/lr", "train/grad_norm"):
            found = {row["step"]: row[name] for row in rows if name in row}
            wanted = {row["step"]: row[name] for row in expected if name in row and row["step"] >= stop}
            assert found == pytest.approx(wanted, rel=2e-5, abs=2e-6), name
        assert [row["step"] for row in rows if "val/loss" in row] == list(range(stop + 1, STEPS + 1))


def test_the_last_steps_of_an_epoch_are_counted_as_the_sampler_makes_them() -> None:
    data = make_data(make_examples(17), BatchPlan(8, 1))
    assert [data.steps_per_epoch(processes) for processes in (1, 2, 4)] == [3, 2, 2]


def test_other_processes_that_leave_out_pairs_are_refused() -> None:
    """17 pairs in steps of 8: one pair is left, which two processes cannot share."""
    data = make_data(make_examples(17), BatchPlan(8, 1))
    state = data._make_sampler(0, 1).state_dict(8)
    two = data._make_sampler(0, 2)
    with pytest.raises(UserError, match=r"ends with 1 pairs, which 2 processes drop but 1 do not.* 1 processes"):
        two.load_state_dict(state)


# ------------------------------------------------------------------------------------------------ metrics


def session(folder: Path, number: int, text: str) -> None:
    place = folder / "logs" / f"version_{number}"
    place.mkdir(parents=True)
    (place / "metrics.csv").write_bytes(text.replace("\n", "\r\n").encode())


FIRST = "step,epoch,train/loss,val/loss\n0,0,,0.7\n0,0,0.6,\n1,0,0.5,\n2,0,,0.4\n2,0,0.3,\n"


def test_a_line_that_a_kill_cut_short_does_not_count(tmp_path: Path) -> None:
    """Its last number would be another one."""
    session(tmp_path, 0, FIRST + "3,0,0.1234")
    (tmp_path / "logs" / "version_0" / "metrics.csv").write_bytes((FIRST + "3,0,0.12").encode())
    assert [row["step"] for row in merge_metrics(tmp_path)] == [0, 1, 2]


def test_what_was_merged_survives_the_session_files(tmp_path: Path) -> None:
    session(tmp_path, 0, FIRST)
    merged = merge_metrics(tmp_path)
    (tmp_path / "logs" / "version_0" / "metrics.csv").write_text("")
    assert merge_metrics(tmp_path) == merged
