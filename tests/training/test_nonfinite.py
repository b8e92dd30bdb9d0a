"""Losses that are no numbers: training stops before they reach the weights, says which pairs, and keeps the step."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from attnpo.data.collate import collate
from attnpo.data.rules import BatchPlan
from attnpo.models.layouts import padded_layout
from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats, UserError, join_names
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.nonfinite import SHOWN, MicroBatchRecord, save_nonfinite_step, suggest_settings
from attnpo.training.pair_values import pair_values, tokens_per_pair
from tests.training.stored import epoch_order, spoil, stored_data, stored_reference
from tests.training.tiny import Fit, make_data, make_examples, make_module

PLAN = BatchPlan(8, 2)
NAN, INF = float("nan"), float("inf")


def in_step(number: int) -> list[int]:
    """The pairs of an optimiser step (from 1) of 20 pairs under PLAN."""
    return epoch_order(20, PLAN)[8 * (number - 1) : 8 * number]


@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_bad_pair_stops_training_before_its_step(
    fit: Fit, tmp_path: Path, value: float, record_property: Callable[[str, object], None]
) -> None:
    examples = stored_reference(make_examples(20))
    bad = in_step(2)[5]
    spoiled = [spoil(example, value) if i == bad else example for i, example in enumerate(examples)]
    module, good = make_module(3, live=False), make_module(3, live=False)
    with pytest.raises(UserError) as error:
        fit(module, stored_data(spoiled, PLAN), steps=3, epochs=1, folder=tmp_path / "bad")
    fit(good, stored_data(examples, PLAN), steps=3, epochs=1, max_steps=1)
    before, after = good.policy.state_dict(), module.policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "with the weights of step 1"
    text = str(error.value)
    path = tmp_path / "bad" / "nonfinite-step-2.pt"
    assert text.startswith(
        f"the loss of optimiser step 2 is not finite for 1 of 8 pairs: pair{bad} (not finite there: "
        "reference log-probs). Training stopped before this step, with the weights of step 1; "
    )
    assert str(path) in text and "optimizer.lr (now 0.01)" in text and "objective.beta" in text and "\n" not in text
    record_property("bad input", (f"a loss of {value}", text, "nothing: stopped before the step, its batch saved"))


def test_the_file_has_the_whole_step(fit: Fit, tmp_path: Path) -> None:
    examples = stored_reference(make_examples(20))
    bad = in_step(1)[2]
    examples[bad] = spoil(examples[bad], NAN)
    with pytest.raises(UserError):
        fit(make_module(3, live=False), stored_data(examples, PLAN), steps=3, epochs=1, folder=tmp_path)
    saved = torch.load(tmp_path / "nonfinite-step-1.pt", weights_only=True)
    assert saved["step"] == 1 and saved["pairs"] == [f"pair{bad}"] and saved["inputs"] == ["reference log-probs"]
    (batches,) = saved["processes"]
    assert [name for batch in batches for name in batch["pair_ids"]] == [f"pair{i}" for i in in_step(1)]
    losses = torch.cat([batch["losses"] for batch in batches])
    assert losses.isfinite().tolist() == [i != bad for i in in_step(1)]
    names = {name.removeprefix("policy.") for name, _ in make_module(1).policy.named_parameters()}
    assert saved["gradients"] == [sorted(names, key=saved["gradients"][0].index)], "NaN reaches every weight"
    first = batches[0]
    expected = collate([examples[i] for i in in_step(1)[:2]], padded_layout, 0, 8)
    rows = first["batch"]["groups"]["main"]
    assert torch.equal(rows["inputs"]["input_ids"], expected.main.inputs.input_ids)  # type: ignore[union-attr]
    assert torch.equal(rows["token_weights"]["reward"], expected.main.token_weights["reward"])
    assert torch.equal(first["reference"]["logps"], expected.main.reference_logps)  # type: ignore[arg-type]
    policy = make_module(1).policy(expected.main.inputs, expected.main.response_ids, expected.main.response_mask)
    assert torch.allclose(first["policy"]["logps"], policy.logps, atol=1e-6)


def test_weights_that_blew_up_are_told_from_bad_pairs(fit: Fit) -> None:
    """A learning rate that throws the weights out of range: from the next step on every policy log-prob is NaN."""
    with pytest.raises(
        UserError, match=r"step 2 is not finite for 8 of 8 pairs: .* there: policy log-probs\)"
    ) as error:
        fit(make_module(3, lr=1e30), make_data(make_examples(20), PLAN), steps=3, epochs=1)
    assert "reference" not in str(error.value)


@dataclass(frozen=True)
class Steep(DPO):
    """DPO plus a root whose slope at 0 is infinite: a finite loss with a gradient that is not."""

    def __call__(self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch) -> ObjectiveOutput:
        out = super().__call__(policy, reference, batch)
        return replace(out, losses=out.losses + torch.sqrt(0 * policy.logps.sum(-1)[: batch.pairs].abs()))


def test_a_gradient_that_is_no_number_stops_training_too(fit: Fit, tmp_path: Path) -> None:
    module = make_module(3, Steep())
    start = {name: value.clone() for name, value in module.policy.state_dict().items()}
    with pytest.raises(
        UserError, match=r"gradient norm of optimiser step 1 is nan, though its loss is finite"
    ) as error:
        fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1, folder=tmp_path)
    assert ", ".join(f"pair{i}" for i in in_step(1)) in str(error.value)
    assert torch.load(tmp_path / "nonfinite-step-1.pt", weights_only=True)["pairs"] == []
    assert all(torch.equal(start[name], value) for name, value in module.policy.state_dict().items())


class Infinities(L.Callback):
    """Puts infinities wherever nothing is to be read: after the responses."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: PreferenceBatch, batch_idx: int
    ) -> None:
        rows = batch.main
        assert rows.reference_logps is not None
        assert not rows.response_mask.all() or rows.response_mask.shape[1] == 1
        rows.token_weights["reward"][~rows.response_mask] = INF
        rows.reference_logps[~rows.response_mask] = -INF


def test_infinities_off_the_response_are_no_trouble(fit: Fit) -> None:
    data = stored_reference(make_examples(24))
    plan = BatchPlan(8, 4)
    plain = fit(make_module(3, live=False), stored_data(data, plan), steps=3, epochs=1)
    rows = fit(make_module(3, live=False), stored_data(data, plan), steps=3, epochs=1, callbacks=(Infinities(),))
    names = sorted({name for row in plain for name in row if not name.endswith("_per_s")})
    assert "val/nonfinite_pairs" not in names
    assert "train/weights/max" in names and "train/grad_norm" in names
    for before, after in zip(plain, rows, strict=True):
        assert {name: after.get(name) for name in names} == {name: before.get(name) for name in names}


class Spoil(L.Callback):
    """Spoils two validation pairs once training has begun."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches = trainer.datamodule.val_batches  # type: ignore[attr-defined]
        batches.examples = [spoil(e, NAN) if i in (1, 3) else e for i, e in enumerate(batches.examples)]


def test_bad_validation_pairs_are_warned_of_once_counted_and_refused_at_the_end(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = stored_data(stored_reference(make_examples(20)), PLAN)
    data.val_batches.examples = stored_reference(make_examples(5))
    module = make_module(3, live=False)
    with (
        caplog.at_level(logging.WARNING, logger="attnpo"),
        pytest.raises(UserError, match=r"validation metrics after optimiser step 3 are not finite \(val/loss nan"),
    ):
        fit(module, data, steps=3, epochs=1, validate_every=1, callbacks=(Spoil(),), folder=tmp_path)
    rows = merge_metrics(tmp_path)
    validated = [row for row in rows if "val/nonfinite_pairs" in row]
    assert [row["val/nonfinite_pairs"] for row in validated] == [2.0] * 3
    assert all(math.isnan(row["val/loss"]) for row in validated)
    assert sum("train/loss" in row for row in rows) == 3, "training goes on"
    (told,) = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert "of 2 pairs (pair1, pair3)" in told


def make_record(count: int, bad: tuple[int, ...], spoil_with: str = "policy") -> MicroBatchRecord:
    batch = collate(make_examples(count), padded_layout, 0, count)
    losses = torch.ones(count)
    logps = torch.where(batch.main.response_mask, -1.0, 0.0)
    weights = batch.main.token_weights["reward"].clone()
    for i in bad:
        losses[i] = NAN
        (logps if spoil_with == "policy" else weights)[i, 0] = NAN
    rows = replace(batch.main, token_weights={"reward": weights})
    batch = replace(batch, groups={"main": rows})
    return MicroBatchRecord(batch, TokenStats(logps), None, losses)


def test_eight_pairs_are_named_and_the_others_counted(tmp_path: Path) -> None:
    text = save_nonfinite_step(
        [make_record(12, tuple(range(10)), "weights")], {}, tmp_path / "step.pt", 5, 1, leads=True
    )
    assert "10 of 12 pairs: pair0, pair1, pair2, pair3, pair4, pair5, pair6, pair7 and 2 more (" in text
    assert "(not finite there: token weights)" in text
    assert "trainer.precision=32-true (now bf16-mixed)" in suggest_settings(
        1e-6, "another objective.beta", "bf16-mixed"
    )
    assert torch.load(tmp_path / "step.pt", weights_only=True)["pairs"] == [f"pair{i}" for i in range(10)]
    assert join_names(["a", "b"], SHOWN) == "a, b"


def test_a_step_that_cannot_be_saved_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = save_nonfinite_step([make_record(3, (1,))], {}, tmp_path / "file" / "step.pt", 2, 1, leads=True)
    assert "1 of 3 pairs: pair1 (not finite there: policy log-probs)" in text and "could not be saved" in text


def test_nothing_is_looked_at_before_the_optimiser_steps() -> None:
    """On the meta device there is nothing to look at: a look, which would wait for a GPU, is an error there."""
    batch = collate(stored_reference(make_examples(4)), padded_layout, 0, 4).to("meta")
    logps = torch.zeros(batch.main.response_mask.shape, device="meta", requires_grad=True)
    assert batch.main.reference_logps is not None
    stats, reference = TokenStats(logps), TokenStats(batch.main.reference_logps)
    output = TwDPO(0.5)(stats, reference, batch)
    kept = MicroBatchRecord.from_output(batch, stats, reference, output)
    values: dict[str, Tensor] = {**pair_values(stats, output, batch), "tokens": tokens_per_pair(batch)}
    assert kept.losses.is_meta and all(value.is_meta for value in values.values())
    assert not kept.losses.requires_grad and not kept.policy.logps.requires_grad, "no graph is kept"
