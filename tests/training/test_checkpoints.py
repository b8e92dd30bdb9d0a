"""Checkpoint folders: what is in them, which step they are, and that a run goes on from them."""

import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Tokenizer

from attnpo.data.rules import BatchPlan
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import UserError
from attnpo.training import checkpoints
from attnpo.training.checkpoint_folders import (
    STATE,
    complete_folder,
    finish_replacement,
    read_checkpoint_info,
    replace_folder,
)
from attnpo.training.checkpoints import BestCheckpoint, LastCheckpoint
from attnpo.training.export import Exporter
from attnpo.training.resume_state import KEY, ExactResume
from attnpo.training.settings import CallbackSettings, TrainerSettings
from attnpo.training.trainer import make_callbacks
from tests.training.tiny import Fit, Rows, make_data, make_examples, make_module

Weights = dict[str, torch.Tensor]
PLAN = BatchPlan(8, 4)
LOUD = 1.0  # a learning rate that makes the validation loss go up and down


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(Grammar())


class Remember(L.Callback):
    """The policy's weights at every validation, by optimiser step."""

    def __init__(self) -> None:
        self.weights: dict[int, Weights] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model = pl_module.policy.model
        self.weights[trainer.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


def folders(place: Path, tokenizer: Tokenizer, mode: str = "min") -> tuple[L.Callback, ...]:
    exporter = Exporter(tokenizer)
    best = BestCheckpoint(place / "best", exporter, "val/loss", mode)
    return ExactResume(), LastCheckpoint(place / "last", exporter), best


def by_step(rows: Rows, name: str) -> dict[int, float]:
    return {int(row["step"]): row[name] for row in rows if name in row}


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def state_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
    return found


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_is_the_best_and_last_the_last(fit: Fit, tmp_path: Path, tokenizer: Tokenizer, mode: str) -> None:
    """Each folder loads without attnpo and holds exactly the policy of its step; the lowest loss is not the last."""
    seen, module = Remember(), make_module(5, lr=LOUD)
    callbacks = (seen, *folders(tmp_path, tokenizer, mode))
    rows = fit(module, make_data(make_examples(40), PLAN), steps=5, epochs=1, validate_every=1, callbacks=callbacks)
    losses = by_step(rows[1:], "val/loss")
    best = (min if mode == "min" else max)(losses, key=lambda step: losses[step])
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert mode == "max" or best < 5, f"this learning rate must make the last step worse: {losses}"
    for name, step in (("best", best), ("last", 5)):
        folder = tmp_path / name
        assert state_in(folder)["global_step"] == step
        assert same(AutoModelForCausalLM.from_pretrained(folder).state_dict(), seen.weights[step])
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert not same(seen.weights[1], seen.weights[5])
    assert read_checkpoint_info(tmp_path / "best") == {"step": best, "val/loss": pytest.approx(losses[best])}
    held = module.policy.model.state_dict()
    assert set(state_in(tmp_path / "last")["state_dict"]) == {f"policy.model.{name}" for name in held}
    size = sum(value.numel() * value.element_size() for value in held.values())
    # The policy and AdamW's two moments are three times the policy; a reference would make it four.
    assert 3 * size < (tmp_path / "last" / STATE).stat().st_size < 3.7 * size


class Steps(L.Callback):
    """Count of the optimiser steps that were begun."""

    begun = 0

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        self.begun = trainer.global_step + 1


UNKNOWN = r"callbacks\.monitor=val/acuracy is not .* val/loss, .*val/rewards/accuracies"


def test_a_monitor_that_is_not_logged_is_refused_before_the_first_step(
    fit: Fit, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    best, steps = BestCheckpoint(tmp_path / "best", Exporter(tokenizer), "val/acuracy"), Steps()
    with pytest.raises(UserError, match=UNKNOWN):
        fit(make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=(best, steps))
    assert steps.begun == 0


@pytest.mark.parametrize("validate_every", [1, 100], ids=["validated", "never validated"])
def test_a_monitor_that_a_resumed_run_never_logged_is_refused_before_its_first_step(
    fit: Fit, tmp_path: Path, tokenizer: Tokenizer, validate_every: int
) -> None:
    """Names come from the last validation, or from the one before training."""
    data, past, steps = make_examples(20), ExactResume(), Steps()
    past.first = {} if validate_every == 1 else {"val/loss": 0.7, "val/rewards/accuracies": 0.5}
    last = LastCheckpoint(tmp_path / "last", Exporter(tokenizer), every=1)
    keep = Keep(tmp_path / "last" / STATE, tmp_path / "2.ckpt", 2)
    arguments: dict[str, object] = {"epochs": 1, "validate_every": validate_every}
    fit(make_module(3), make_data(data, PLAN), steps=3, callbacks=(past, last, keep), **arguments)
    best = BestCheckpoint(tmp_path / "best", Exporter(tokenizer), "val/acuracy")
    callbacks = (ExactResume(), best, steps)
    with pytest.raises(UserError, match=UNKNOWN):
        more: dict[str, object] = {"callbacks": callbacks, "resume": tmp_path / "2.ckpt", **arguments}
        fit(make_module(3), make_data(data, PLAN), steps=3, **more)
    assert steps.begun == 0


class Keep(L.Callback):
    """Copies the state that lies there when step ``step`` is over."""

    def __init__(self, state: Path, to: Path, step: int) -> None:
        self.state, self.to, self.step = state, to, step

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if trainer.global_step == self.step:
            shutil.copy(self.state, self.to)


# ------------------------------------------------------------------------------------------------ what is saved when


class Spy(L.Callback):
    """What lies in ``last/`` at the start of each later optimiser step: its step, and whether it is exported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, tuple[int, bool]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        if (self.folder / STATE).is_file():
            step = state_in(self.folder)["global_step"]
            assert read_checkpoint_info(self.folder)["step"] == step
            self.seen.setdefault(trainer.global_step, (step, (self.folder / "model.safetensors").is_file()))


def test_last_is_saved_every_so_many_steps_and_exported_at_the_end(
    fit: Fit, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Validation after step 3 of 6, a save every 2 steps; two micro-batches a step, never a save between them."""
    last = LastCheckpoint(tmp_path / "last", Exporter(tokenizer), every=2)
    spy = Spy(tmp_path / "last")
    data = make_data(make_examples(24), PLAN)
    fit(make_module(6), data, steps=6, epochs=2, validate_every=3, callbacks=(ExactResume(), last, spy))
    assert spy.seen == {2: (2, False), 3: (3, False), 4: (4, False), 5: (4, False)}
    assert state_in(tmp_path / "last")["global_step"] == 6
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "last").config.vocab_size == 40
    assert sorted(path.name for path in tmp_path.glob("last*")) == ["last"]


def test_validation_once_an_epoch_is_when_folders_are_saved(fit: Fit, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Two epochs of three steps: saved after the third and the sixth, with a value of the monitor each."""
    spy = Spy(tmp_path / "last")
    callbacks = (*folders(tmp_path, tokenizer), spy)
    data = make_data(make_examples(24), PLAN)
    rows = fit(make_module(6), data, steps=6, epochs=2, validate_every="epoch", callbacks=callbacks)
    assert spy.seen == {3: (3, False), 4: (3, False), 5: (3, False)}
    losses = by_step(rows[1:], "val/loss")
    assert sorted(losses) == [3, 6]
    assert read_checkpoint_info(tmp_path / "best")["val/loss"] == pytest.approx(min(losses.values()))


def test_a_resumed_run_keeps_a_better_best(fit: Fit, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The best step lies before the one that is resumed from; the steps after it are worse and leave it alone."""
    data = make_examples(40)
    arguments: dict[str, object] = {"epochs": 1, "validate_every": 1}
    fit(make_module(5, lr=LOUD), make_data(data, PLAN), steps=3, callbacks=folders(tmp_path, tokenizer), **arguments)
    before = read_checkpoint_info(tmp_path / "best")
    arguments |= {"callbacks": folders(tmp_path, tokenizer), "resume": tmp_path / "last" / STATE}
    rows = fit(make_module(5, lr=LOUD), make_data(data, PLAN), steps=5, **arguments)
    losses = by_step(rows, "val/loss")
    assert sorted(losses) == [4, 5] and min(losses.values()) > before["val/loss"], (losses, before)
    assert read_checkpoint_info(tmp_path / "best") == before
    assert state_in(tmp_path / "best")["global_step"] == before["step"]


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


def test_an_export_that_fails_leaves_the_save_before(fit: Fit, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """At the end of training: one line that names path, free space and what there is to go on from."""
    last = LastCheckpoint(tmp_path / "last", Full(tokenizer), every=1)
    with pytest.raises(UserError) as refused:
        fit(make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, callbacks=(ExactResume(), last))
    said = str(refused.value)
    assert "\n" not in said and said.startswith(f"cannot save optimiser step 3 to {tmp_path / 'last'} (")
    assert (
        f"the last saved step is 2, in {tmp_path / 'last'}: free some disk space, then continue with resume=auto"
        in said
    )
    assert int(said.partition(" bytes (")[0].rpartition(" ")[2]) > 0 and "too large" in said
    assert state_in(tmp_path / "last")["global_step"] == 2
    assert [path.name for path in tmp_path.glob("last*")] == ["last"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_state_that_cannot_be_written_is_told(
    fit: Fit, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """torch says so with a RuntimeError of many lines."""
    callbacks = (FullAt(step, monkeypatch), *folders(tmp_path, tokenizer))
    stands = "nothing was saved before: " if step == 1 else f"the last saved step is 1, in {tmp_path / 'last'}: "
    with pytest.raises(UserError, match=re.escape(stands)) as refused:
        fit(
            make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, validate_every=1, callbacks=callbacks
        )
    assert isinstance(refused.value.__cause__, RuntimeError) and "\n" not in str(refused.value)
    assert not list(tmp_path.glob("*.new")) and (tmp_path / "last").exists() == (step == 2)


def test_a_best_that_could_not_be_saved_is_made_up_for(fit: Fit, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """No room for ``best/`` after a step that ``last/`` has already: the resumed run ends like an unbroken one."""
    examples, arguments = make_examples(40), {"steps": 5, "epochs": 1, "validate_every": 1}

    class FullBest(Exporter):
        def export(self, *given: Any, **named: Any) -> None:
            with files_up_to(10_000) if named["step"] == step else nullcontext():
                super().export(*given, **named)

    def run(place: Path, exporter: Exporter, resume: Path | None = None) -> None:
        best = BestCheckpoint(place / "best", exporter)
        last = LastCheckpoint(place / "last", Exporter(tokenizer))
        module = make_module(5, lr=1e-3)  # every step is better than those before
        callbacks = (ExactResume(), last, best)
        fit(module, make_data(examples, PLAN), callbacks=callbacks, resume=resume, **arguments)

    run(tmp_path / "all", Exporter(tokenizer))
    for step in (2, 5):  # mid-run, the last one
        part, said = (
            tmp_path / f"part{step}",
            f"cannot save optimiser step {step} to .*the last saved step is {step}, in ",
        )
        with pytest.raises(UserError, match=said + ".*last"):
            run(part, FullBest(tokenizer))
        assert state_in(part / "last")["global_step"] == step
        assert read_checkpoint_info(part / "best")["step"] < step and not (part / "best.new").exists()
        run(part, Exporter(tokenizer), part / "last" / STATE)
        for name in ("best", "last"):
            mine, theirs = part / name, tmp_path / "all" / name
            assert (
                read_checkpoint_info(mine) == read_checkpoint_info(theirs)
                and read_checkpoint_info(mine)["step"] >= step
            )
            assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
            states = state_in(mine), state_in(theirs)
            assert states[0]["PreferenceDataModule"] == states[1]["PreferenceDataModule"]
            assert states[0][KEY]["metrics"].keys() == states[1][KEY]["metrics"].keys()


def test_a_state_is_saved_before_its_policy_is_compared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = make_callbacks(CallbackSettings(), TrainerSettings(progress=False), tmp_path, Exporter(tokenizer))
    kinds = [type(callback) for callback in made]
    assert kinds.index(LastCheckpoint) < kinds.index(BestCheckpoint)


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    fit: Fit, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 1000

    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: Disk)
    with pytest.raises(UserError, match=r"checkpoints of 0\.0 GiB each .*callbacks\.checkpoints=false"):
        data = make_data(make_examples(20), PLAN)
        fit(make_module(3), data, steps=3, epochs=1, callbacks=folders(tmp_path, tokenizer))


def test_an_interval_that_never_comes_and_a_wrong_number_format_are_refused() -> None:
    with pytest.raises(UserError, match=r"callbacks\.save_every must be at least 1, got 0"):
        CallbackSettings(save_every=0)
    with pytest.raises(UserError, match=r"callbacks\.export_dtype must be one of float64, float32.*'bf16'"):
        CallbackSettings(export_dtype="bf16")


# ------------------------------------------------------------------------------------------------ folders on disk


# What a kill leaves: contents of last, last.new and last.old (None: not there), and which of them is the newest whole.
LEFT = {
    "while writing the first": (None, "part", None, None),
    "before the first rename": ("before", "new", None, "before"),
    "while writing a later one": ("before", "part", None, "before"),
    "between the renames": (None, "new", "before", "new"),
    "before the old one is removed": ("new", None, "before", "new"),
}


@pytest.mark.parametrize("moment", LEFT)
def test_a_kill_leaves_a_whole_folder_that_is_tidied(tmp_path: Path, moment: str) -> None:
    *contents, newest = LEFT[moment]
    for place in (tmp_path / "saved", tmp_path / "tidied"):
        for name, text in zip(("last", "last.new", "last.old"), contents, strict=True):
            if text is not None:
                (place / name).mkdir(parents=True)
                (place / name / STATE).write_text(text)
    finish_replacement(tmp_path / "tidied" / "last")
    stands = {path.name: (path / STATE).read_text() for path in (tmp_path / "tidied").iterdir()}
    assert stands == ({} if newest is None else {"last": newest})
    last = tmp_path / "saved" / "last"

    def found() -> str | None:
        state = complete_folder(last) / STATE
        return state.read_text() if state.is_file() else None

    assert found() == newest
    with pytest.raises(InterruptedError), replace_folder(last) as new:  # a later save is cut short as well
        (new / STATE).write_text("half")
        raise InterruptedError
    assert found() == newest
    with replace_folder(last) as new:
        assert list(new.iterdir()) == []
        (new / STATE).write_text("later")
    assert (last / STATE).read_text() == "later"
    assert [path.name for path in last.parent.iterdir()] == ["last"]
