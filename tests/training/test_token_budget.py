"""Micro-batches under a budget of tokens: the same steps as pairs counted out, in training, validation and resuming."""

from functools import cache
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.trial import select_layout
from attnpo.training.module import PreferenceModule
from attnpo.training.resume_state import ExactResume
from tests.training.test_step_objective import Gradients, assert_same, kto_module
from tests.training.tiny import Copies, Rows, make_examples, make_module, train

PAIRS = 20  # steps of 8, 8 and 4
NAMES = ("train/loss", "train/grad_norm", "train/rewards/margins", "train/rewards/accuracies", "train/lr")


def make(
    module: PreferenceModule,
    plan: BatchPlan,
    name: str = "padded",
    ahead: tuple[str, ...] = (),
    epochs: int = 2,
    auto: bool = False,
) -> PreferenceDataModule:
    assert module.reference is not None
    layout = select_layout(name, [module.policy, module.reference])
    assert layout.__name__ == f"{name}_layout"
    val = make_examples(5, seed=99)
    return PreferenceDataModule.from_examples(
        make_examples(PAIRS), val, layout, 0, plan, 0, ahead=ahead, epochs=epochs, auto=auto
    )


def trained(
    module: PreferenceModule, data: PreferenceDataModule, place: Path, *callbacks: L.Callback, **more: Path
) -> Rows:
    """Returns the rows of metrics.csv of all epochs, a validation after each step."""
    return train(module, data, place, ExactResume(), *callbacks, max_epochs=data.epochs, validate_every=1, **more)


def close(found: Rows, expected: Rows, names: tuple[str, ...], begin: int) -> None:
    for name in names:
        ours = {row["step"]: row[name] for row in found if name in row}
        theirs = {row["step"]: row[name] for row in expected if name in row and row["step"] >= begin}
        assert theirs and ours == pytest.approx(theirs, rel=2e-5, abs=1e-5), name


def gradients(plan: BatchPlan, name: str, world: int) -> list[list[Tensor]]:
    """Loss and gradients of each step of the first epoch, those of all ranks added up, in double precision."""
    module = make_module(3).double()
    assert module.reference is not None
    module.reference.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    data = make(module, plan, name)
    found: list[list[Tensor]] = []
    for rank in range(world):
        for planned in data._make_sampler(rank, world):
            if planned.step == len(found):
                found.append([torch.zeros((), dtype=torch.float64)])
            module.policy.zero_grad()
            output = module.score(data.train_batches[planned])[3]
            loss = output.losses.sum() / planned.step_pairs
            loss.backward()
            here = [loss.detach(), *(p.grad.clone() for p in module.policy.parameters() if p.grad is not None)]
            before = found[planned.step]
            found[planned.step] = here if len(before) == 1 else [a + b for a, b in zip(before, here, strict=True)]
    return found


@cache
def whole(name: str, micro: int = 8) -> list[list[Tensor]]:
    """Returns steps of one micro-batch, or of so many pairs at a time."""
    return gradients(BatchPlan(8, micro), name, 1)


@pytest.mark.parametrize(
    ("tokens", "name", "world"),
    [(32, "padded", 1), (64, "padded", 3), (999, "padded", 1), (32, "packed", 2), (29, "shared_prefix", 1),
     (64, "shared_prefix", 4)],
)  # fmt: skip
def test_a_budget_changes_neither_loss_nor_gradient(tokens: int, name: str, world: int) -> None:
    """Whatever the budget, the layout it counts in and the number of ranks; nor do single pairs."""
    assert len(whole(name)) == 3
    for found in (gradients(BatchPlan(8, tokens=tokens), name, world), whole(name, 1)):
        assert all(step[0] > 0 for step in found)
        torch.testing.assert_close(found, whole(name), rtol=1e-9, atol=1e-12)


def test_a_run_with_a_budget_is_the_run_of_single_pairs(tmp_path: Path) -> None:
    """Two epochs of full and short steps, validated after each."""
    module = make_module(6)
    expected = trained(module, make(module, BatchPlan(8, 1)), tmp_path / "pairs")
    for name in ("padded", "shared_prefix"):
        module = make_module(6)
        data = make(module, BatchPlan(8, tokens=40, eval_tokens=40), name)
        assert 1 < data.accumulation_steps(1) < 8
        close(trained(module, data, tmp_path / name), expected, (*NAMES, "val/loss"), 0)


def test_rows_ahead_of_a_step_are_summed_alike(tmp_path: Path) -> None:
    """KTO's z, which is of rows with lengths of their own."""
    found = []
    for plan in (BatchPlan(8, 8), BatchPlan(8, tokens=32), BatchPlan(8, tokens=100)):
        module, kept = kto_module(3, double=True, lr=1e-30), Gradients()
        trained(module, make(module, plan, ahead=("mismatched",), epochs=1), tmp_path / str(plan.tokens), kept)
        found.append(kept.found)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert all(step["z"] > 0 for step in found[0])


class Inside(L.Callback):
    """A checkpoint after the first micro-batch of the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == 1 and not self.path.exists() and trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path, weights_only=False)


def test_a_run_saved_inside_a_step_goes_on_with_the_budget_that_was_chosen(tmp_path: Path) -> None:
    """Also with more room: as many micro-batches of the step are left as there were."""
    module = make_module(6)
    data = make(module, BatchPlan(8, tokens=40), auto=True)
    trained(module, data, tmp_path / "whole", Inside(tmp_path / "inside.ckpt"))
    module = make_module(6)
    again = make(module, BatchPlan(8, tokens=80), auto=True)
    assert again.accumulation_steps(1) < data.accumulation_steps(1)
    rows = trained(module, again, tmp_path / "again", resume=tmp_path / "inside.ckpt")
    assert again.token_budgets == data.token_budgets and again.accumulation_steps(1) == data.accumulation_steps(1)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("before", "after"),
    [(BatchPlan(8, tokens=40), BatchPlan(8, tokens=32)), (BatchPlan(8, 2), BatchPlan(8, tokens=40))],
)
def test_a_run_goes_on_after_any_step_under_another_budget(tmp_path: Path, before: BatchPlan, after: BatchPlan) -> None:
    module = make_module(6)
    expected = trained(module, make(module, before), tmp_path / "whole", Copies(tmp_path))
    for stop in (2, 3):  # mid-epoch, an epoch's last
        module = make_module(6)
        found = trained(module, make(module, after), tmp_path / f"from{stop}", resume=tmp_path / f"{stop}.ckpt")
        close(found, expected, NAMES, stop)
        close(found, expected, ("val/loss",), stop + 1)
