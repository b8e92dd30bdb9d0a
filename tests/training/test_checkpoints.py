"""Checkpoint folders: what is in them, which step they are, and that a run goes on from them."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from attnpo.data.rules import BatchPlan
from attnpo.schema import UserError
from attnpo.testbed.grammar import Grammar
from attnpo.testbed.tokenizer import build_tokenizer
from attnpo.training.callbacks import FolderCheckpoint
from attnpo.training.export import Exporter
from tests.training.tiny import make_data, make_examples, make_module

Fit = Callable[..., list[dict[str, float]]]
Weights = dict[str, torch.Tensor]
PLAN = BatchPlan(8, 4)
LOUD = 1.0  # a learning rate that makes the validation loss go up and down


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(Grammar())


class Remember(L.Callback):
    """The policy's weights at every validation, by optimiser step."""

    def __init__(self) -> None:
        self.weights: dict[int, Weights] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model = pl_module.policy.model
        self.weights[trainer.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


def folders(place: Path, tokenizer: PreTrainedTokenizerFast, mode: str = "min") -> tuple[L.Callback, L.Callback]:
    return FolderCheckpoint(place / "best", Exporter(tokenizer), "val/loss", mode), FolderCheckpoint(
        place / "last", Exporter(tokenizer)
    )


def by_step(rows: list[dict[str, float]], name: str) -> dict[int, float]:
    return {int(row["step"]): row[name] for row in rows if name in row}


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_is_the_best_and_last_the_last(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, mode: str
) -> None:
    """Each folder loads without attnpo and holds exactly the policy of its step."""
    seen = Remember()
    callbacks = (seen, *folders(tmp_path, tokenizer, mode))
    data = make_data(make_examples(40), PLAN)
    rows = fit(make_module(5, lr=LOUD), data, steps=5, epochs=1, validate_every=1, callbacks=callbacks)
    losses = by_step(rows[1:], "val/loss")
    pick = min if mode == "min" else max
    best = pick(losses, key=lambda step: losses[step])
    assert sorted(losses) == [1, 2, 3, 4, 5]
    for name, step in (("best", best), ("last", 5)):
        folder = tmp_path / name
        state = torch.load(folder / "state.ckpt", weights_only=True)
        assert state["global_step"] == step
        assert same(AutoModelForCausalLM.from_pretrained(folder).state_dict(), seen.weights[step])
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert not same(seen.weights[1], seen.weights[5])


def test_the_lowest_loss_is_kept_although_later_ones_diverge(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    data = make_data(make_examples(40), PLAN)
    rows = fit(
        make_module(5, lr=LOUD), data, steps=5, epochs=1, validate_every=1, callbacks=folders(tmp_path, tokenizer)
    )
    losses = [row["val/loss"] for row in rows[1:] if "val/loss" in row]
    assert losses.index(min(losses)) < 4, f"this learning rate must make the last step worse: {losses}"
    state = torch.load(tmp_path / "best" / "state.ckpt", weights_only=True)
    assert state["global_step"] == losses.index(min(losses)) + 1
    assert state["callbacks"]["FolderCheckpoint[best]"]["best_model_score"] == pytest.approx(min(losses))


def test_the_state_holds_the_policy_alone(fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    module = make_module(3)
    fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=folders(tmp_path, tokenizer))
    state = torch.load(tmp_path / "last" / "state.ckpt", weights_only=True)
    assert module.reference is not None
    assert set(state["state_dict"]) == {f"policy.model.{name}" for name in module.policy.model.state_dict()}
    size = sum(value.numel() * value.element_size() for value in module.policy.model.state_dict().values())
    # The policy and AdamW's two moments are three times the policy; a reference would make it four.
    assert 3 * size < (tmp_path / "last" / "state.ckpt").stat().st_size < 3.7 * size


def test_a_monitor_that_is_not_logged_is_refused(fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    callback = FolderCheckpoint(tmp_path / "best", Exporter(tokenizer), "val/acuracy")
    with pytest.raises(UserError, match=r"callbacks\.monitor=val/acuracy .* val/loss, .*val/rewards/accuracies"):
        fit(make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=(callback,))


def test_a_run_goes_on_from_its_last_folder(fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Three of six steps, then the rest from ``last/``: the losses and the final weights of an unbroken run."""
    whole, resumed = make_module(6), make_module(6)
    data = make_examples(24)
    expected = fit(whole, make_data(data, PLAN), steps=6, epochs=2, validate_every=3)
    fit(
        make_module(6),
        make_data(data, PLAN),
        steps=3,
        epochs=2,
        validate_every=3,
        callbacks=folders(tmp_path, tokenizer),
    )
    assert torch.load(tmp_path / "last" / "state.ckpt", weights_only=True)["global_step"] == 3
    rows = fit(
        resumed,
        make_data(data, PLAN),
        steps=6,
        epochs=2,
        validate_every=3,
        callbacks=folders(tmp_path, tokenizer),
        resume=tmp_path / "last" / "state.ckpt",
    )
    after = {step: loss for step, loss in by_step(expected, "train/loss").items() if step >= 3}
    assert len(after) == 3
    assert by_step(rows, "train/loss") == pytest.approx(after, rel=1e-6)
    assert same(resumed.policy.model.state_dict(), whole.policy.model.state_dict())
    state = torch.load(tmp_path / "last" / "state.ckpt", weights_only=True)
    assert state["global_step"] == 6
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "last").state_dict(), resumed.policy.model.state_dict())


@pytest.mark.parametrize("micro", [1, 8])
def test_short_steps_do_not_move_validation_into_a_step(fit: Fit, micro: int) -> None:
    """20 pairs are steps of 8, 8 and 4: at one pair a time, 8, 8 and 4 micro-batches."""
    rows = fit(make_module(6), make_data(make_examples(20), BatchPlan(8, micro)), steps=6, epochs=2, validate_every=2)
    assert list(by_step(rows, "val/loss")) == [0, 2, 4, 6]
