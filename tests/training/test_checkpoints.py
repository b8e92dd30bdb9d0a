"""Checkpoint folders: what is in them, which step they are, and that a run goes on from them."""

import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from attnpo.data.rules import BatchPlan
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import UserError
from attnpo.training import checkpoints
from attnpo.training.checkpoint_folders import STATE, read_account, replaced, tidy, whole
from attnpo.training.checkpoints import BestCheckpoint, LastCheckpoint
from attnpo.training.export import Exporter
from attnpo.training.resume_state import KEY, Continuation
from attnpo.training.settings import CallbackSettings, TrainerSettings
from attnpo.training.trainer import make_callbacks
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


def folders(place: Path, tokenizer: PreTrainedTokenizerFast, mode: str = "min") -> tuple[L.Callback, ...]:
    exporter = Exporter(tokenizer)
    best = BestCheckpoint(place / "best", exporter, "val/loss", mode)
    return Continuation(), LastCheckpoint(place / "last", exporter), best


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
    assert read_account(tmp_path / "best") == {"step": state["global_step"], "val/loss": pytest.approx(min(losses))}


def test_the_state_holds_the_policy_alone(fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    module = make_module(3)
    fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=folders(tmp_path, tokenizer))
    state = torch.load(tmp_path / "last" / "state.ckpt", weights_only=True)
    assert module.reference is not None
    assert set(state["state_dict"]) == {f"policy.model.{name}" for name in module.policy.model.state_dict()}
    size = sum(value.numel() * value.element_size() for value in module.policy.model.state_dict().values())
    # The policy and AdamW's two moments are three times the policy; a reference would make it four.
    assert 3 * size < (tmp_path / "last" / "state.ckpt").stat().st_size < 3.7 * size


class Steps(L.Callback):
    """How many optimiser steps were begun."""

    begun = 0

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        self.begun = trainer.global_step + 1


UNKNOWN = r"callbacks\.monitor=val/acuracy is not .* val/loss, .*val/rewards/accuracies"


def test_a_monitor_that_is_not_logged_is_refused_before_the_first_step(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    best, steps = BestCheckpoint(tmp_path / "best", Exporter(tokenizer), "val/acuracy"), Steps()
    with pytest.raises(UserError, match=UNKNOWN):
        fit(make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=(best, steps))
    assert steps.begun == 0


@pytest.mark.parametrize("validate_every", [1, 100], ids=["validated", "never validated"])
def test_a_monitor_that_a_resumed_run_never_logged_is_refused_before_its_first_step(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, validate_every: int
) -> None:
    """Names come from the last validation, or from the one before training."""
    data, past, steps = make_examples(20), Continuation(), Steps()
    past.first = {} if validate_every == 1 else {"val/loss": 0.7, "val/rewards/accuracies": 0.5}
    last = LastCheckpoint(tmp_path / "last", Exporter(tokenizer), every=1)
    keep = Keep(tmp_path / "last" / STATE, tmp_path / "2.ckpt", 2)
    arguments: dict[str, object] = {"epochs": 1, "validate_every": validate_every}
    fit(make_module(3), make_data(data, PLAN), steps=3, callbacks=(past, last, keep), **arguments)
    best = BestCheckpoint(tmp_path / "best", Exporter(tokenizer), "val/acuracy")
    callbacks = (Continuation(), best, steps)
    with pytest.raises(UserError, match=UNKNOWN):
        fit(
            make_module(3),
            make_data(data, PLAN),
            steps=3,
            callbacks=callbacks,
            resume=tmp_path / "2.ckpt",
            **arguments,
        )
    assert steps.begun == 0


class Keep(L.Callback):
    """Copies the state that lies there when step ``step`` is over."""

    def __init__(self, state: Path, to: Path, step: int) -> None:
        self.state, self.to, self.step = state, to, step

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == self.step:
            shutil.copy(self.state, self.to)


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


# ------------------------------------------------------------------------------------------------ what is saved when


class Spy(L.Callback):
    """What lies in ``last/`` at the start of each later optimiser step: its step, and whether it is exported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, tuple[int, bool]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if (self.folder / STATE).is_file():
            step = torch.load(self.folder / STATE, weights_only=True)["global_step"]
            assert read_account(self.folder)["step"] == step
            self.seen.setdefault(trainer.global_step, (step, (self.folder / "model.safetensors").is_file()))


def test_last_is_saved_every_so_many_steps_and_exported_at_the_end(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Validation after step 3 of 6, a save every 2 steps; two micro-batches a step, never a save between them."""
    last = LastCheckpoint(tmp_path / "last", Exporter(tokenizer), every=2)
    spy = Spy(tmp_path / "last")
    data = make_data(make_examples(24), PLAN)
    fit(make_module(6), data, steps=6, epochs=2, validate_every=3, callbacks=(Continuation(), last, spy))
    assert spy.seen == {2: (2, False), 3: (3, False), 4: (4, False), 5: (4, False)}
    assert torch.load(tmp_path / "last" / STATE, weights_only=True)["global_step"] == 6
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "last").config.vocab_size == 40
    assert sorted(path.name for path in tmp_path.glob("last*")) == ["last"]


def test_validation_once_an_epoch_is_when_folders_are_saved(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Two epochs of three steps: saved after the third and the sixth, with a value of the monitor each."""
    spy = Spy(tmp_path / "last")
    callbacks = (*folders(tmp_path, tokenizer), spy)
    data = make_data(make_examples(24), PLAN)
    rows = fit(make_module(6), data, steps=6, epochs=2, validate_every="epoch", callbacks=callbacks)
    assert spy.seen == {3: (3, False), 4: (3, False), 5: (3, False)}
    losses = by_step(rows[1:], "val/loss")
    assert sorted(losses) == [3, 6]
    assert read_account(tmp_path / "best")["val/loss"] == pytest.approx(min(losses.values()))


def test_a_resumed_run_keeps_a_better_best(fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The best step lies before the one that is resumed from; the steps after it are worse and leave it alone."""
    data = make_examples(40)
    arguments: dict[str, object] = {"epochs": 1, "validate_every": 1}
    fit(make_module(5, lr=LOUD), make_data(data, PLAN), steps=3, callbacks=folders(tmp_path, tokenizer), **arguments)
    before = read_account(tmp_path / "best")
    rows = fit(
        make_module(5, lr=LOUD),
        make_data(data, PLAN),
        steps=5,
        callbacks=folders(tmp_path, tokenizer),
        resume=tmp_path / "last" / STATE,
        **arguments,
    )
    losses = by_step(rows, "val/loss")
    assert sorted(losses) == [4, 5] and min(losses.values()) > before["val/loss"], (losses, before)
    assert read_account(tmp_path / "best") == before
    assert torch.load(tmp_path / "best" / STATE, weights_only=True)["global_step"] == before["step"]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A disk that is full within any file beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Full(Exporter):
    """The disk is full from the first weights it writes."""

    def export(self, *arguments: Any, **named: Any) -> None:
        with files_up_to(10_000):
            super().export(*arguments, **named)


class FullAt(L.Callback):
    """The disk is full while the states of a step are written."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.now, save = step, -1, torch.save

        def limited(*arguments: Any, **named: Any) -> None:
            with files_up_to(10_000) if self.now == self.step else nullcontext():
                save(*arguments, **named)

        monkeypatch.setattr(torch, "save", limited)

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        self.now = trainer.global_step


def test_an_export_that_fails_leaves_the_save_before(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """At the end of training: one line that names path, free space and what there is to go on from."""
    last = LastCheckpoint(tmp_path / "last", Full(tokenizer), every=1)
    with pytest.raises(UserError) as refused:
        fit(make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=(Continuation(), last))
    said = str(refused.value)
    assert "\n" not in said and said.startswith(f"cannot save optimiser step 3 to {tmp_path / 'last'} (")
    assert f"saved last is step 2, in {tmp_path / 'last'}: make room, then go on with resume=auto" in said
    assert int(said.partition(" bytes (")[0].rpartition(" ")[2]) > 0 and "too large" in said
    assert torch.load(tmp_path / "last" / STATE, weights_only=True)["global_step"] == 2
    assert [path.name for path in tmp_path.glob("last*")] == ["last"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_state_that_cannot_be_written_is_told(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """torch says so with a RuntimeError of many lines."""
    callbacks = (FullAt(step, monkeypatch), *folders(tmp_path, tokenizer))
    stands = "nothing is saved yet: " if step == 1 else f"saved last is step 1, in {tmp_path / 'last'}: "
    with pytest.raises(UserError, match=re.escape(stands)) as refused:
        fit(
            make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, validate_every=1, callbacks=callbacks
        )
    assert isinstance(refused.value.__cause__, RuntimeError) and "\n" not in str(refused.value)
    assert not list(tmp_path.glob("*.new")) and (tmp_path / "last").exists() == (step == 2)


@pytest.mark.parametrize("step", [2, 5], ids=["mid-run", "last step"])
def test_a_best_that_could_not_be_saved_is_made_up_for(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, step: int
) -> None:
    """No room for ``best/`` after a step that ``last/`` has already: the resumed run ends like an unbroken one."""
    examples, arguments = make_examples(40), {"steps": 5, "epochs": 1, "validate_every": 1}

    class FullBest(Exporter):
        def export(self, *given: Any, **named: Any) -> None:
            with files_up_to(10_000) if named["step"] == step else nullcontext():
                super().export(*given, **named)

    def run(place: Path, exporter: Exporter, resume: Path | None = None) -> None:
        best = BestCheckpoint(place / "best", exporter)
        last = LastCheckpoint(place / "last", Exporter(tokenizer))
        data = make_data(examples, PLAN)
        module = make_module(5, lr=1e-3)  # every step is better than those before
        fit(module, data, callbacks=(Continuation(), last, best), resume=resume, **arguments)

    run(tmp_path / "all", Exporter(tokenizer))
    with pytest.raises(UserError, match=f"cannot save optimiser step {step} to .*saved last is step {step}, in .*last"):
        run(tmp_path / "part", FullBest(tokenizer))
    stand = torch.load(tmp_path / "part" / "last" / STATE, weights_only=True)
    assert stand["global_step"] == step
    before = read_account(tmp_path / "part" / "best")["step"]
    assert before < step and not (tmp_path / "part" / "best.new").exists()
    run(tmp_path / "part", Exporter(tokenizer), tmp_path / "part" / "last" / STATE)
    for name in ("best", "last"):
        mine, theirs = (tmp_path / place / name for place in ("part", "all"))
        assert read_account(mine) == read_account(theirs) and read_account(mine)["step"] >= step
        assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        states = [torch.load(folder / STATE, weights_only=True) for folder in (mine, theirs)]
        assert states[0]["PreferenceDataModule"] == states[1]["PreferenceDataModule"]
        assert states[0][KEY]["metrics"].keys() == states[1][KEY]["metrics"].keys()


def test_a_state_is_saved_before_its_policy_is_compared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    made = make_callbacks(CallbackSettings(), TrainerSettings(progress=False), tmp_path, Exporter(tokenizer))
    kinds = [type(callback) for callback in made]
    assert kinds.index(LastCheckpoint) < kinds.index(BestCheckpoint)


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    fit: Fit, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 1000

    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: Disk)
    with pytest.raises(UserError, match=r"checkpoints of 0\.0 GiB each .*callbacks\.checkpoints=false"):
        fit(
            make_module(3),
            make_data(make_examples(20), PLAN),
            steps=3,
            epochs=1,
            callbacks=folders(tmp_path, tokenizer),
        )


def test_an_interval_that_never_comes_is_refused() -> None:
    with pytest.raises(UserError, match=r"callbacks\.save_every must be null or at least 1 optimiser step, got 0"):
        CallbackSettings(save_every=0)


# ------------------------------------------------------------------------------------------------ folders on disk


def put(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / STATE).write_text(text)


# What a kill leaves: contents of last, last.new and last.old (None: not there), and which of them is the newest whole.
LEFT = {
    "while writing the first": (None, "part", None, None),
    "before the first rename": ("before", "new", None, "before"),
    "while writing a later one": ("before", "part", None, "before"),
    "between the renames": (None, "new", "before", "new"),
    "before the old one is removed": ("new", None, "before", "new"),
}


@pytest.mark.parametrize("moment", LEFT)
def test_a_kill_leaves_a_whole_folder(tmp_path: Path, moment: str) -> None:
    *contents, newest = LEFT[moment]
    for name, text in zip(("last", "last.new", "last.old"), contents, strict=True):
        if text is not None:
            put(tmp_path / name, text)
    found = whole(tmp_path / "last") / STATE
    assert (found.read_text() if found.is_file() else None) == newest
    with pytest.raises(InterruptedError), replaced(tmp_path / "last") as new:  # a later save is cut short as well
        (new / STATE).write_text("half")
        raise InterruptedError
    found = whole(tmp_path / "last") / STATE
    assert (found.read_text() if found.is_file() else None) == newest
    with replaced(tmp_path / "last") as new:
        assert list(new.iterdir()) == []
        (new / STATE).write_text("later")
    assert (tmp_path / "last" / STATE).read_text() == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("moment", LEFT)
def test_what_a_kill_leaves_is_tidied(tmp_path: Path, moment: str) -> None:
    *contents, newest = LEFT[moment]
    for name, text in zip(("last", "last.new", "last.old"), contents, strict=True):
        if text is not None:
            put(tmp_path / name, text)
    tidy(tmp_path / "last")
    assert {path.name: (path / STATE).read_text() for path in tmp_path.iterdir()} == (
        {} if newest is None else {"last": newest}
    )
