"""The training loop: exact normalisation, validation, resume, the reference's place."""

import math
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch

from attnpo.data.collate import collate
from attnpo.data.rules import BatchPlan
from attnpo.models.layouts import padded_layout
from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import UserError
from attnpo.training.callbacks import LARGE, _sum_in_float64
from attnpo.training.nonfinite import max_magnitude
from attnpo.training.resume_state import ExactResume
from attnpo.training.settings import TrainerSettings
from tests.objectives.inputs import objective_of
from tests.training.stored import epoch_order, stored_data, stored_reference
from tests.training.tiny import Fit, column, make_data, make_examples, make_module


def test_how_a_step_is_cut_changes_nothing(fit: Fit) -> None:
    """20 pairs in steps of 8: the last step of each epoch is short (4 pairs), and is weighted right too."""
    rows, whole = (
        fit(make_module(6), make_data(make_examples(20), BatchPlan(8, micro)), steps=6, epochs=2) for micro in (1, 4)
    )
    assert len(column(rows)) == 6
    for name in ("train/loss", "train/grad_norm", "train/rewards/margins", "train/rewards/accuracies", "val/loss"):
        assert column(rows, name) == pytest.approx(column(whole, name), rel=2e-5, abs=1e-5), name


def test_how_a_step_is_cut_changes_no_mean_over_its_tokens(fit: Fit) -> None:
    """12 pairs in steps of 8, without a reference: the second has four, and token means are those of its own tokens."""
    objective = objective_of("orpo", ("sft", "batch"))
    assert "reference" not in objective.requires
    rows = [
        fit(make_module(2, objective, live=False), make_data(make_examples(12), BatchPlan(8, micro)), steps=2, epochs=1)
        for micro in (1, 8)
    ]
    # AdamW's first step is lr times a sign where a gradient is near 0, so rounding shows in the second step's, and in
    # a margin, a difference of sums near each other: 3.6e-6 on one processor.
    for name, rel, near in (
        ("train/loss", 2e-5, 2e-6), ("train/grad_norm", 1e-4, 2e-6), ("train/rewards/margins", 2e-5, 1e-5),
    ):  # fmt: skip
        cut, whole = (column(run, name) for run in rows)
        assert len(whole) == 2 and cut == pytest.approx(whole, rel=rel, abs=near), name


@pytest.mark.parametrize("micro", [1, 8])
def test_a_short_step_is_the_mean_over_its_own_pairs(fit: Fit, micro: int) -> None:
    """20 pairs in steps of 8: every step's gradient is that of the plain mean over its pairs, the last step's four too.

    The learning rate is so small that the weights stay where they are.
    """
    examples, plan = make_examples(20), BatchPlan(8, micro)
    rows = fit(make_module(3, lr=1e-12), make_data(examples, plan), steps=3, epochs=1)
    order = epoch_order(20, plan)
    for step, count in enumerate((8, 8, 4)):
        alone = make_module(3)
        pairs = [examples[i] for i in order[8 * step : 8 * step + count]]
        assert len(pairs) == count
        alone.score(collate(pairs, padded_layout, 0, count))[3].losses.mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in alone.policy.parameters() if p.grad is not None])
        assert column(rows, "train/grad_norm")[step] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("micro", [1, 8])
def test_validation_comes_every_n_steps_and_at_the_end(fit: Fit, micro: int) -> None:
    """20 pairs are steps of 8, 8 and 4: at one pair a time, 8, 8 and 4 micro-batches, and no validation in a step."""
    rows = fit(make_module(6), make_data(make_examples(20), BatchPlan(8, micro)), steps=6, epochs=2, validate_every=4)
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 4, 6]


@pytest.mark.parametrize("micro", [1, 8])
def test_validation_once_an_epoch_comes_after_its_last_step(fit: Fit, tmp_path: Path, micro: int) -> None:
    """20 pairs are steps of 8, 8 and 4, three an epoch; a resumed run keeps to the epochs' ends."""
    plan, path = BatchPlan(8, micro), tmp_path / "state.ckpt"

    class Save(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
            if trainer.global_step == 4 and not path.is_file():
                trainer.save_checkpoint(path)

    arguments: dict[str, object] = {"steps": 9, "epochs": 3, "validate_every": "epoch"}
    data = make_examples(20)
    rows = fit(make_module(9), make_data(data, plan), callbacks=(ExactResume(), Save()), **arguments)
    assert [int(row["step"]) for row in rows if "val/loss" in row] == [0, 3, 6, 9]
    more = fit(make_module(9), make_data(data, plan), callbacks=(ExactResume(),), resume=path, **arguments)
    assert [int(row["step"]) for row in more if "val/loss" in row] == [6, 9]
    assert more[-1]["val/loss"] == pytest.approx(rows[-1]["val/loss"], rel=1e-6)


@pytest.mark.parametrize("value", ["epochs", "500", "", 0, -3])
def test_an_interval_of_validation_that_is_none_is_refused(value: int | str) -> None:
    with pytest.raises(UserError, match=r"^trainer\.validate_every must be at least 1 optimiser step, or epoch, got "):
        TrainerSettings(validate_every=value)


def test_live_and_cached_reference_give_the_same_losses_and_stay_as_they_are(fit: Fit) -> None:
    """Before the first step the loss is ln 2; the reference is no part of the module."""
    examples, module = make_examples(20), make_module(3)
    assert module.reference is not None
    before = [parameter.clone() for parameter in module.reference.parameters()]
    live = fit(module, make_data(examples, BatchPlan(8, 4)), steps=3, epochs=1)
    data = stored_data(stored_reference(examples), BatchPlan(8, 4))
    stored = fit(make_module(3, live=False), data, steps=3, epochs=1)
    assert column(stored) == pytest.approx(column(live), rel=1e-5)
    assert live[0]["step"] == 0
    assert [live[0]["val/loss"], column(live)[0]] == pytest.approx([math.log(2)] * 2, abs=1e-6)
    assert not any("reference" in name for name in module.state_dict())
    assert not module.reference.training and module.policy.training
    assert all(torch.equal(a, b) for a, b in zip(before, module.reference.parameters(), strict=True))


def test_uniform_weights_train_like_dpo(fit: Fit) -> None:
    examples = []
    for example in make_examples(20):
        rows = tuple(torch.full((len(s.response_ids),), 1 / len(s.response_ids)) for s in example.sides)
        examples.append(replace(example, weights=rows))
    plan = BatchPlan(8, 4)
    weighted = fit(make_module(3, TwDPO(0.5)), make_data(examples, plan), steps=3, epochs=1)
    plain = fit(make_module(3, DPO(0.5)), make_data(examples, plan), steps=3, epochs=1)
    assert column(weighted) == pytest.approx(column(plain), rel=1e-5)
    assert column(weighted, "train/weights/effective_share") == pytest.approx([1.0] * 3, rel=1e-5)


def test_steps_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(UserError, match=r"batch\.pairs=10 .* batch\.micro=4 .* 8 and 12"):
        BatchPlan(10, 4).accumulation_steps(1)


def test_no_training_pair_is_refused() -> None:
    with pytest.raises(UserError, match="no training pair"):
        make_data([], BatchPlan(8, 4))


@pytest.mark.parametrize(("epochs", "steps"), [(0, 3), (-2, 3), (0, -1), (-1, -1)])
def test_a_run_needs_an_epoch_or_a_number_of_steps(epochs: int, steps: int) -> None:
    with pytest.raises(UserError, match=rf"trainer\.max_epochs must be at least 1, or -1.*max_steps.*got {epochs}"):
        TrainerSettings(max_epochs=epochs, max_steps=steps)
    assert TrainerSettings(max_epochs=-1, max_steps=3).max_steps == 3


def test_after_the_only_fit_weights_stay_and_nothing_else_is_held(fit: Fit) -> None:
    """Lightning moves all of it to the CPU, and after the validation before the first step as well."""
    module = make_module(3)
    module.one_fit = True
    fit(module, make_data(make_examples(8), BatchPlan(8, 4)), steps=1, epochs=1)
    optimizer = module.trainer.optimizers[0]
    assert optimizer.param_groups[0]["params"] and not optimizer.state
    assert all(parameter.grad is None for parameter in module.parameters())
    module.to("meta").cpu()
    assert {parameter.device.type for parameter in module.policy.parameters()} == {"meta"}


def test_a_module_of_ones_own_keeps_its_moments_after_training_and_goes_where_it_is_told(fit: Fit) -> None:
    module = make_module(3)
    fit(module, make_data(make_examples(8), BatchPlan(8, 4)), steps=1, epochs=1)
    assert module.trainer.optimizers[0].state  # for trainer.save_checkpoint
    assert {parameter.device.type for parameter in module.cpu().policy.parameters()} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_read_as_norms_and_sums_are(dtype: torch.dtype) -> None:
    """Also where a matrix is so large that its rows are summed first: one rounding step in each hundredth weight."""
    before = torch.randn(300, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert before.numel() > LARGE
    assert float(max_magnitude(before)) == float(torch.linalg.vector_norm(before, float("inf")))
    assert float(_sum_in_float64(before)) == pytest.approx(float(before.double().sum()), rel=1e-5)
    moved = before.clone()
    moved.view(-1)[::100] = torch.nextafter(before.view(-1)[::100], torch.full((1,), 9, dtype=dtype))
    assert float(_sum_in_float64(moved)) != float(_sum_in_float64(before))
    for bad in (float("nan"), float("inf"), float("-inf")):
        moved[7, 5] = bad
        assert not max_magnitude(moved).isfinite()
