"""An objective with a number over the whole optimiser step, KTO, through the Lightning module."""

import math
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.layouts import padded_layout
from attnpo.objectives.base import Reduction, reduce
from attnpo.objectives.kto import KTO
from attnpo.schema import PreferenceBatch, UserError
from attnpo.training.module import PreferenceModule
from tests.training.processes import in_two_processes
from tests.training.tiny import Copies, Fit, Rows, column, make_data, make_examples, make_module, train


def kto_data(train: list[TrainingExample], plan: BatchPlan) -> PreferenceDataModule:
    return PreferenceDataModule.from_examples(
        train, make_examples(5, seed=99), padded_layout, 0, plan, 0, ahead=("mismatched",)
    )


def kto_module(steps: int, double: bool = False, lr: float = 1e-2) -> PreferenceModule:
    """A policy that has moved away from its reference, so that z and the losses say something."""
    module = make_module(steps, KTO(0.5, 1.0, 1.5), lr=lr)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    if double:
        module.double()
        assert module.reference is not None
        module.reference.double()
    return module


class Gradients(L.Callback):
    """Keeps loss, z and gradients of every optimiser step, and how often a step's sums were made."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        grads = {name: p.grad.clone() for name, p in pl_module.policy.named_parameters() if p.grad is not None}
        means = pl_module.window.compute()
        self.found.append({"loss": means["loss"], "z": means["rewards/kl"], **grads})


def steps_of(plan: BatchPlan, place: Path, processes: int = 1) -> list[dict[str, Tensor]]:
    """What every step of an epoch over 20 pairs (steps of 8, 8 and 4) gives in double precision."""
    kept, data = Gradients(), kto_data(make_examples(20), plan)
    strategy = "ddp" if processes > 1 else "auto"
    train(
        kto_module(3, double=True, lr=1e-30), data, place, kept, max_epochs=1, devices=str(processes), strategy=strategy
    )
    return kept.found


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(
                value, other[name], rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Steps of one micro-batch."""
    return steps_of(BatchPlan(8, 8), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("micro", [1, 4])
def test_how_a_step_is_cut_changes_neither_loss_nor_gradient(
    whole: list[dict[str, Tensor]], tmp_path: Path, micro: int
) -> None:
    assert_same(steps_of(BatchPlan(8, micro), tmp_path), whole)
    assert len({step["z"].item() for step in whole}) == 3 and all(step["z"] > 0 for step in whole)


def test_two_processes_give_the_step_of_one(whole: list[dict[str, Tensor]], tmp_path: Path) -> None:
    """z is that of both processes; one of them alone has another."""
    codes, output = in_two_processes([__file__, str(tmp_path)], tmp_path)
    assert codes == [0, 0], output[-8000:]
    assert_same(torch.load(tmp_path / "steps.pt", weights_only=True), whole)


def test_z_is_the_mean_over_the_mismatched_rows_of_the_step(whole: list[dict[str, Tensor]]) -> None:
    """Computed here from the rows and the two models alone."""
    module, data = kto_module(3, double=True), kto_data(make_examples(20), BatchPlan(8, 8))
    for step, batch in zip(whole, data.train_dataloader(), strict=True):
        (rows,) = batch.ahead["mismatched"]
        with torch.no_grad():
            stats = [
                model(rows.inputs, rows.response_ids, rows.response_mask) for model in (module.policy, module.reference)
            ]
        ratios = reduce(stats[0].logps - stats[1].logps, None, rows.response_mask, Reduction.SUM)
        assert step["z"].item() == pytest.approx(max(0.0, ratios.mean().item()), rel=1e-9)


def test_rows_are_scored_once_a_step_and_without_gradient(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 pairs in steps of 8, 8 and 4, two at a time: 4 + 4 + 2 groups; a validation of 5 pairs is one group.

    z is a metric of training and validation, and the rows are not counted in the speed.
    """
    seen: list[tuple[int, bool]] = []
    original = KTO.step_sums

    def sums(self: KTO, *arguments: object) -> dict[str, Tensor]:
        seen.append((len(arguments[2].response_ids), torch.is_grad_enabled()))  # type: ignore[attr-defined]
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(KTO, "step_sums", sums)
    logged = fit(kto_module(3), kto_data(make_examples(20), BatchPlan(8, 2)), steps=3, epochs=1)
    assert [rows for rows, _ in seen] == [10, *[4] * 10, 10]
    assert not any(grad for _, grad in seen)
    for name, count in (("train/rewards/kl", 3), ("val/rewards/kl", 2)):
        values = column(logged, name)
        assert len(values) == count and all(math.isfinite(value) and value >= 0 for value in values), name
    speeds = column(logged, "train/tokens_per_s")
    assert len(speeds) == 3 and min(speeds) > 0


def test_validation_in_its_own_cuts_gives_the_same(fit: Fit) -> None:
    """Five validation pairs one at a time and all at once: z is of all of them."""
    found = []
    for micro in (1, 8):
        data = kto_data(make_examples(20), BatchPlan(8, 8, eval_micro=micro))
        rows = fit(kto_module(3), data, steps=3, epochs=1)
        found.append([row[name] for row in rows for name in ("val/loss", "val/rewards/kl") if name in row])
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(found[0]) == 4


def test_a_resumed_run_gives_the_losses_of_an_unbroken_one(fit: Fit, tmp_path: Path) -> None:
    """A validation comes after every step, so a step's z must be made anew after it."""

    def run(**more: object) -> Rows:
        data = kto_data(make_examples(20), BatchPlan(8, 2))
        return fit(kto_module(6), data, steps=6, epochs=2, validate_every=1, **more)

    whole = run(callbacks=(Copies(tmp_path),))
    for stop in (2, 3):  # mid-epoch, an epoch's last
        resumed = run(resume=tmp_path / f"{stop}.ckpt")
        for name in ("train/loss", "train/rewards/kl", "train/grad_norm"):
            before, after = column(whole, name), column(resumed, name)
            assert len(before) == 6 and after == pytest.approx(before[stop:], rel=1e-5, abs=1e-7), name


def test_a_step_that_is_not_finite_is_saved_with_its_state(fit: Fit, tmp_path: Path) -> None:
    """The file loads as ever, has z's sums and leaves out the rows ahead."""
    module = kto_module(3)
    original = type(module)._sum_rows_ahead

    def broken(batch: PreferenceBatch) -> dict[str, Tensor]:
        training = module.trainer.state.fn == "fit"  # the validation before it must be finite
        return {name: value * (math.nan if training else 1) for name, value in original(module, batch).items()}

    data = kto_data(make_examples(20), BatchPlan(8, 4))
    module._sum_rows_ahead = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match="step 1 is not finite for 8 of 8 pairs"):
        fit(module, data, steps=3, epochs=1, folder=tmp_path)
    saved = torch.load(tmp_path / "nonfinite-step-1.pt", weights_only=True)
    for batch in saved["processes"][0]:
        assert batch["batch"]["ahead"] == {} and batch["batch"]["state"]["kl_sum"].isnan()


def test_rows_ahead_are_needed(fit: Fit) -> None:
    """A data module that was not told what the objective asks for."""
    with pytest.raises(ValueError, match="sums over the step's mismatched rows"):
        fit(kto_module(3), make_data(make_examples(20), BatchPlan(8, 4)), steps=3, epochs=1)


if __name__ == "__main__":  # as one of two processes
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    made = steps_of(BatchPlan(8, 2), folder, processes=2)
    if torch.distributed.get_rank() == 0:
        torch.save(made, folder / "steps.pt")
    torch.distributed.destroy_process_group()
