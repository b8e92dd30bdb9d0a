"""What ``auto`` becomes by the memory estimate: the quickest choice that fits, said once, the same on every process."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from attnpo.models.loading import load_config
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.runs import memory_check, memory_choice, startup, training
from attnpo.runs.context import RunContext, make_context
from attnpo.runs.identity import numbers_of
from attnpo.runs.memory_check import log_memory, training_estimate
from attnpo.runs.memory_choice import KEYS, decision, fit_memory, least_capacity
from attnpo.runs.models import load_policy
from attnpo.runs.run import run
from attnpo.schema import UserError
from attnpo.training import gather
from attnpo.training.gather import SameEverywhere
from attnpo.training.memory import FREE_SHARE, MemoryEstimate
from tests.runs.worlds import World, build_world

AUTO = tuple(f"model.{key}=auto" for key in KEYS)
# Whether blocks are computed again, tokens at once through the head: from the quickest to the least.
ORDER = [(False, 1024), (False, 256), (True, 1024), (True, 256)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def context(world: World) -> RunContext:
    return make_context(world.config("weights=uniform", "batch.eval_micro=1", *AUTO))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_said", set())


def made(model: ModelSpec) -> tuple[object, object]:
    return model.gradient_checkpointing, model.logps_chunk


def estimates(context: RunContext) -> list[MemoryEstimate]:
    """Those of the choices in their order, each computed from the configuration that sets the choice by hand."""
    config, found = load_config(context.model.path), []
    for again, chunk in ORDER:
        model = replace(context.cfg.model, gradient_checkpointing=again, logps_chunk=chunk)
        found.append(training_estimate(replace(context.cfg, model=model), config))
    return found


def test_the_choices_are_those_of_the_keys_that_are_auto() -> None:
    spec = ModelSpec("nowhere", gradient_checkpointing="auto", checkpoint_every=2, logps_chunk="auto")
    assert [made(choice) for choice in spec.choices()] == ORDER
    assert [choice.checkpoint_every for choice in spec.choices()] == [1, 1, 2, 2]
    assert [made(choice) for choice in replace(spec, logps_chunk=64).choices()] == [(False, 64), (True, 64)]
    fixed = ModelSpec("nowhere", gradient_checkpointing=True)
    assert fixed.choices() == [fixed] and (fixed.recomputes, fixed.chunk) == (True, 1024)
    assert (spec.recomputes, spec.chunk) == ORDER[-1], "undecided, it is what needs least"


@pytest.mark.parametrize("place", range(4))
def test_the_quickest_that_fits_is_taken_and_said_once(
    place: int, context: RunContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The estimates of this model are made to differ in the order of the choices: 4, 3, 2 and 1 MiB."""
    found = [
        MemoryEstimate("training", (replace(one.rows[0], size=(4 - i) << 20),))
        for i, one in enumerate(estimates(context))
    ]
    by_choice = dict(zip(ORDER, found, strict=True))
    monkeypatch.setattr(memory_choice, "training_estimate", lambda cfg, config, model, batch: by_choice[made(model)])
    capacity = int(found[place].total / (1 - FREE_SHARE)) + 1
    monkeypatch.setattr(memory_choice, "capacity_of", lambda cfg: capacity)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert made(fit_memory(context).model) == ORDER[place]
    lines = [line for line in caplog.messages if "auto" in line or "estimated" in line]
    assert len(lines) == 5 and "the quickest that fits the device's 0.0 GiB" in lines[0]
    assert lines[0].startswith("model.gradient_checkpointing=auto and model.logps_chunk=auto: activations ")
    assert [line.split()[0] for line in lines[1:]] == ["4.00", "3.00", "2.00", "1.00"]


def test_the_estimates_are_those_of_the_choices_and_fall_where_memory_is_what_differs(context: RunContext) -> None:
    totals = [one.total for one in estimates(context)]
    config = load_config(context.model.path)
    assert totals == [training_estimate(context.cfg, config, choice).total for choice in context.model.choices()]
    assert totals[0] > totals[2] and min(totals) == totals[-1]
    assert training_estimate(context.cfg, config).total == totals[-1], "of a configuration that is undecided"


def test_least_is_taken_where_none_fits_or_memory_is_not_known(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert made(fit_memory(context).model) == ORDER[-1]
    assert "of least memory: there is no GPU whose memory could be read" in caplog.text
    monkeypatch.setattr(memory_choice, "capacity_of", lambda cfg: 1)
    assert made(fit_memory(context).model) == ORDER[-1]
    assert "of least memory: none fits" in caplog.text

    def broken(*given: object, **named: object) -> None:
        raise TypeError("a list")

    monkeypatch.setattr(memory_choice, "training_estimate", broken)
    assert made(fit_memory(context).model) == ORDER[-1]
    assert "of least memory: there is no estimate" in caplog.text


def test_what_is_set_stays_and_nothing_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context(world.config("weights=uniform", "model.logps_chunk=64"))
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert fit_memory(context) is context and not caplog.messages
    assert load_policy(context).chunk == 64


def test_the_estimate_of_the_log_is_that_of_the_choice(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for room in (memory_check, memory_choice):
        monkeypatch.setattr(room, "capacity_of", lambda cfg: 1 << 40)
    caplog.set_level(logging.INFO)
    log_memory(fit_memory(context))
    total = f"{estimates(context)[0].total / (1 << 20):8.2f}  at its peak"
    assert any(total in line for line in caplog.messages)


def test_a_run_with_auto_trains_what_was_chosen_and_keeps_auto(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: blocks computed again, 256 tokens at once. The chunk is no part of what makes a run the run it is."""
    loaded = []

    def load(context: RunContext) -> ScoredLM:
        loaded.append((load_policy(context), made(context.model)))
        return loaded[-1][0]

    monkeypatch.setattr(training, "load_policy", load)
    words = ("weights=uniform", "reference=live", "callbacks=none", "trainer.max_steps=1")
    result = run(world.config(*words, *AUTO), tmp_path / "auto")
    assert result is not None and result.steps == 1
    ((policy, choice),) = loaded
    assert choice == ORDER[-1] and policy.chunk == 256 and policy.model.is_activation_checkpointing
    saved = (tmp_path / "auto" / "config.yaml").read_text(encoding="utf-8")
    assert "gradient_checkpointing: auto" in saved and "logps_chunk: auto" in saved
    plain, auto = (numbers_of(world.config(*words, *more)) for more in ((), AUTO))
    assert {key for key in plain if plain[key] != auto[key]} == {"model.gradient_checkpointing"}


# ------------------------------------------------------------------------------------------------ several processes


def test_the_smallest_gpu_of_a_node_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [80, 40, 80]
    monkeypatch.setattr(memory_choice, "capacity_of", lambda cfg: 80)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(total_memory=sizes[place]))
    alone, several = world.config(), world.config("trainer.devices=3")
    assert (least_capacity(alone), least_capacity(several)) == (80, 40)


def test_processes_that_decide_otherwise_are_refused(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = context.model.choices()
    callback = SameEverywhere(*decision(context.cfg.model, choices[0]))
    begin = partial(callback.setup, L.Trainer(accelerator="cpu", logger=False), L.LightningModule(), "fit")
    for other, refused in ((choices[0], False), (choices[2], True)):
        values = [decision(context.cfg.model, choice)[1] for choice in (choices[0], choices[0], other)]
        monkeypatch.setattr(gather, "from_all_ranks", lambda value, processes, values=values: values)
        if not refused:
            begin()
            continue
        with pytest.raises(UserError) as caught:
            begin()
        said = str(caught.value)
        assert "process 0: activations kept, 1024 tokens" in said and "process 2: activations computed again" in said
        assert "set model.gradient_checkpointing=true model.logps_chunk=256 for all processes" in said
