"""What a run says of memory before a model is loaded, the hardware that would hold it, and what ``auto`` becomes.

That is the quickest choice that fits, said once, the same on every process.
"""

import logging
from collections.abc import Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from attnpo.judge import judge as judges
from attnpo.judge.settings import TOKEN_BUDGET
from attnpo.models.loading import load_config
from attnpo.models.memory import FREE_SHARE, MOST, ROUND, MemoryEstimate
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.run import memory, messages, training
from attnpo.run.identity import make_identity
from attnpo.run.memory import (
    KEYS,
    MemoryPlan,
    describe_decision,
    estimate_hardware_options,
    fit_memory,
    log_judge_memory,
    log_training_memory,
    make_memory_plan,
)
from attnpo.run.models import load_policy
from attnpo.run.resolve import BaseModel, resolve
from attnpo.run.run import run
from attnpo.run.run_config import RunConfig
from attnpo.schema import PreferenceBatch, UserError
from attnpo.training import gather
from attnpo.training.checkpoint_folders import STATE
from attnpo.training.gather import RankConsistencyCheck
from attnpo.training.module import PreferenceModule
from tests.run.worlds import World

AUTO = tuple(f"model.{key}=auto" for key in KEYS)
# Whether blocks are computed again, tokens at once through the head: from the quickest to the least.
ORDER = [(False, 1024), (False, 256), (True, 1024), (True, 256)]


def make_plan(cfg: RunConfig) -> MemoryPlan:
    """Makes the plan that a run's memory is estimated by, with the model as it is described."""
    cfg, base, *_ = resolve(cfg)
    return replace(make_memory_plan(cfg), model=base.spec)


@pytest.fixture(scope="module")
def cfg(world: World) -> RunConfig:
    return world.config("weights=uniform", "batch.eval_micro=1", *AUTO)


@pytest.fixture(scope="module")
def plan(cfg: RunConfig) -> MemoryPlan:
    return make_plan(cfg)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_said", set())


def made(model: ModelSpec) -> tuple[object, object]:
    return model.gradient_checkpointing, model.logps_chunk


def estimate_plan(plan: MemoryPlan) -> MemoryEstimate:
    """What a plan needs with its own model, and a batch that is the least it may be."""
    return plan.estimate(load_config(plan.model.path), plan.model, plan.smallest_batch)


def estimates(cfg: RunConfig) -> list[MemoryEstimate]:
    """Those of the choices in their order, each computed from the configuration that sets the choice by hand."""
    choices = (replace(cfg.model, gradient_checkpointing=again, logps_chunk=chunk) for again, chunk in ORDER)
    return [estimate_plan(make_memory_plan(replace(cfg, model=model))) for model in choices]


# ------------------------------------------------------------------------------------------------ other hardware

ALONE = ("hardware=1x141gb", "hardware=1x24gb", "hardware=1x80gb")


def others_of(cfg: RunConfig, config: PretrainedConfig) -> dict[str, MemoryEstimate]:
    """The estimates of the same command under every option of hardware, by option."""
    return dict(estimate_hardware_options(config, cfg.composed.overrides, cfg.composed.config_dir))


def test_the_estimates_of_other_hardware_are_those_of_the_same_command_there(world: World) -> None:
    """Two GPUs are left out: there is one device here at most. An option that was given is not added to."""
    config = load_config(str(world.model))
    for given in ([], ["hardware=2x80gb"]):
        others = others_of(world.config("weights=uniform", *given), config)
        assert tuple(others) == ALONE
        for option in ALONE[:2]:
            assert others[option] == estimate_plan(make_memory_plan(world.config("weights=uniform", option)))
        # The third takes 8-bit moments, whose package need not be there for the estimate.
        assert others[ALONE[2]].total < others[ALONE[0]].total


def test_hardware_that_would_hold_the_run_is_named_where_this_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = world.config("weights=uniform")
    plan = make_plan(cfg)
    totals = {option: estimate.total for option, estimate in others_of(cfg, load_config(str(world.model))).items()}
    room = sorted({*totals.values(), estimate_plan(make_memory_plan(cfg)).total})[1] * 1.1  # the two least fit
    monkeypatch.setattr(memory, "device_memory", lambda device: int(room))
    caplog.set_level(logging.INFO)
    log_training_memory(plan, plan.model, plan.smallest_batch, cfg.composed.overrides, cfg.composed.config_dir)
    fitting = [option for option, total in totals.items() if total * 1.06 < room]
    assert len(fitting) == 2
    assert any("does not fit" in line and f"these would: {', '.join(fitting)}" in line for line in caplog.messages)


def test_hardware_that_cannot_be_read_is_none(world: World, tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    for name, key in {
        "unknown": "model: {nowhere: 1}",
        "absent": "optimizer: {_target_: attnpo.nowhere.Optimizer}",
    }.items():
        (tmp_path / "hardware" / f"{name}.yaml").write_text(f"# @package _global_\n{key}\n")
    cfg = world.config("weights=uniform", config_dir=tmp_path)
    assert tuple(others_of(cfg, load_config(str(world.model)))) == ALONE


# ------------------------------------------------------------------------------------------------ what auto becomes


def test_the_choices_are_those_of_the_keys_that_are_auto() -> None:
    spec = ModelSpec("nowhere", gradient_checkpointing="auto", checkpoint_every=2, logps_chunk="auto")
    assert [made(choice) for choice in spec.memory_choices()] == ORDER
    assert [choice.checkpoint_every for choice in spec.memory_choices()] == [1, 1, 2, 2]
    assert [made(choice) for choice in replace(spec, logps_chunk=64).memory_choices()] == [(False, 64), (True, 64)]
    fixed = ModelSpec("nowhere", gradient_checkpointing=True)
    assert fixed.memory_choices() == [fixed] and (fixed.uses_checkpointing, fixed.chunk) == (True, 1024)
    assert (spec.uses_checkpointing, spec.chunk) == ORDER[-1], "undecided, it is what needs least"


@pytest.mark.parametrize("place", range(4))
def test_the_quickest_that_fits_is_taken_and_said_once(
    place: int,
    cfg: RunConfig,
    plan: MemoryPlan,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The estimates of this model are made to differ in the order of the choices: 4, 3, 2 and 1 MiB."""
    found = [
        MemoryEstimate("training", (replace(one.rows[0], size=(4 - i) << 20),)) for i, one in enumerate(estimates(cfg))
    ]
    by_choice = dict(zip(ORDER, found, strict=True))
    monkeypatch.setattr(MemoryPlan, "estimate", lambda plan, config, model, batch: by_choice[made(model)])
    capacity = int(found[place].total / (1 - FREE_SHARE)) + 1
    monkeypatch.setattr(memory, "device_memory", lambda device: capacity)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert made(fit_memory(plan)[0]) == ORDER[place]
    lines = [line for line in caplog.messages if "auto" in line or "estimated" in line]
    assert len(lines) == 5 and "the fastest that fits in the device's 0.0 GiB" in lines[0]
    assert lines[0].startswith("model.gradient_checkpointing=auto and model.logps_chunk=auto: activations ")
    assert [line.split()[0] for line in lines[1:]] == ["4.00", "3.00", "2.00", "1.00"]


def test_the_estimates_are_those_of_the_choices_and_fall_where_memory_is_what_differs(
    cfg: RunConfig, plan: MemoryPlan
) -> None:
    totals = [one.total for one in estimates(cfg)]
    config = load_config(plan.model.path)
    assert totals == [
        plan.estimate(config, choice, plan.smallest_batch).total for choice in plan.model.memory_choices()
    ]
    assert totals[0] > totals[2] and min(totals) == totals[-1]
    assert estimate_plan(make_memory_plan(cfg)).total == totals[-1], "of a configuration that is undecided"


def test_least_is_taken_where_none_fits_or_memory_is_not_known(
    plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert made(fit_memory(plan)[0]) == ORDER[-1]
    assert "the one that needs the least memory, because no GPU memory could be read" in caplog.text
    monkeypatch.setattr(memory, "device_memory", lambda device: 1)
    assert made(fit_memory(plan)[0]) == ORDER[-1]
    assert "the one that needs the least memory, but it exceeds" in caplog.text

    def broken(*given: object, **named: object) -> None:
        raise TypeError("a list")

    monkeypatch.setattr(MemoryPlan, "estimate", broken)
    assert made(fit_memory(plan)[0]) == ORDER[-1]
    assert "the one that needs the least memory, because there is no estimate" in caplog.text


def test_what_is_set_stays_and_nothing_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    cfg, base, *_ = resolve(world.config("weights=uniform", "model.logps_chunk=64"))
    plan = replace(make_memory_plan(cfg), model=base.spec)
    caplog.clear()
    caplog.set_level(logging.INFO)
    spec, batch = fit_memory(plan)
    assert spec is plan.model and batch == plan.batch and not caplog.messages
    assert load_policy(replace(base, spec=spec)).chunk == 64


def test_the_estimate_of_the_log_is_that_of_the_choice(
    cfg: RunConfig, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda device: 1 << 40)
    caplog.set_level(logging.INFO)
    log_training_memory(plan, *fit_memory(plan), cfg.composed.overrides, cfg.composed.config_dir)
    total = f": {estimates(cfg)[0].total / (1 << 20):.1f} MiB at its peak"
    assert any(total in line for line in caplog.messages)


def test_a_run_with_auto_trains_what_was_chosen_and_keeps_auto(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: blocks computed again, 256 tokens at once. The chunk is no part of what makes a run the run it is."""
    loaded = []

    def load(base: BaseModel) -> ScoredLM:
        loaded.append((load_policy(base), made(base.spec)))
        return loaded[-1][0]

    monkeypatch.setattr(training, "load_policy", load)
    words = ("weights=uniform", "reference=live", "callbacks=none", "trainer.max_steps=1")
    result = run(world.config(*words, *AUTO), tmp_path / "auto")
    assert result is not None and result.steps == 1
    ((policy, choice),) = loaded
    assert choice == ORDER[-1] and policy.chunk == 256 and policy.model.is_activation_checkpointing
    saved = (tmp_path / "auto" / "config.yaml").read_text(encoding="utf-8")
    assert "gradient_checkpointing: auto" in saved and "logps_chunk: auto" in saved
    plain, auto = (make_identity(world.config(*words, *more)).numbers for more in ((), AUTO))
    assert {key for key in plain if plain[key] != auto[key]} == {"model.gradient_checkpointing"}


# ------------------------------------------------------------------------------------------------ several processes


def test_the_smallest_gpu_of_a_node_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [80, 40, 80]
    monkeypatch.setattr(memory, "device_memory", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(total_memory=sizes[place]))
    alone, several = world.config(), world.config("trainer.devices=3")
    assert (make_memory_plan(alone).device_memory(), make_memory_plan(several).device_memory()) == (80, 40)


def test_processes_that_decide_otherwise_are_refused(
    cfg: RunConfig, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = plan.model.memory_choices()
    callback = RankConsistencyCheck(*describe_decision(cfg.model, choices[0]))
    begin = partial(callback.setup, L.Trainer(accelerator="cpu", logger=False), L.LightningModule(), "fit")
    for other, refused in ((choices[0], False), (choices[2], True)):
        values = [describe_decision(cfg.model, choice)[1] for choice in (choices[0], choices[0], other)]
        monkeypatch.setattr(gather, "all_gather_values", lambda value, processes, values=values: values)
        if not refused:
            begin()
            continue
        with pytest.raises(UserError) as caught:
            begin()
        said = str(caught.value)
        assert "process 0: activations kept, 1024 tokens" in said and "process 2: activations recomputed" in said
        assert "set model.gradient_checkpointing=true model.logps_chunk=256 for all processes" in said


# ------------------------------------------------------------------------------------------------ budgets of tokens

FILL = (
    *("batch.micro=null", "batch.eval_micro=null", "batch.tokens=auto", "batch.eval_tokens=auto"),
    *("lengths.max_length=64", "lengths.max_prompt_length=40", "weights=uniform", "reference=live"),
    *("model.dtype=float64", "trainer.max_steps=2", "trainer.validate_every=1", "layout=padded"),
)


def test_budgets_are_as_large_as_a_step_where_there_is_room_and_the_least_where_none_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step is 4 pairs of two rows of 64 tokens; a number of pairs leaves no budget to choose."""
    caplog.set_level(logging.INFO)
    plan = make_plan(world.config(*FILL))
    assert (plan.smallest_batch.token_budget, plan.smallest_batch.eval_token_budget) == (128, 256)
    assert fit_memory(plan)[1] == plan.smallest_batch
    monkeypatch.setattr(memory, "device_memory", lambda device: 1 << 40)
    _, batch = fit_memory(plan)
    assert (batch.token_budget, batch.eval_token_budget) == (512 - 128, MOST)
    said = [line for line in caplog.messages if "batch.tokens=auto" in line]
    assert len(said) == 2 and said[1].startswith("batch.tokens=auto and batch.eval_tokens=auto: activations kept, ")
    assert "384 tokens per forward, 32,768 in validation (the fastest that fits in the device's 1024.0 GiB)" in said[1]
    config = world.config("batch.tokens=auto", "batch.eval_tokens=auto")
    counted = make_plan(config)
    assert (counted.smallest_batch.tokens, counted.smallest_batch.micro) == (None, 2)
    assert fit_memory(counted) == (counted.model, counted.smallest_batch)
    assert make_identity(config).numbers == make_identity(world.config()).numbers


def test_the_judge_reads_as_many_tokens_as_fit(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a judge that thinks first keeps is not estimated."""
    caplog.set_level(logging.INFO)
    made = resolve(world.config("weights=attention", "judge.token_budget=auto"))
    judge = made.readers.make_judge()
    assert judge.choose_token_budget(None) == judge.choose_token_budget(1) == TOKEN_BUDGET
    room = int(judge.estimate_memory(20000).total / (1 - FREE_SHARE)) + 1
    assert 20000 - ROUND < judge.choose_token_budget(room) <= 20000 and judge.choose_token_budget(1 << 40) == MOST
    monkeypatch.setattr(judges, "device_memory", lambda device: room)
    assert judge.load(torch.device("cpu")).model.token_budget == judge.choose_token_budget(room)
    monkeypatch.setattr(memory, "device_memory", lambda device: room)
    log_judge_memory(judge, made.base.device)
    assert f"judge.token_budget=auto: {judge.choose_token_budget(room):,} tokens per forward" in caplog.messages
    with pytest.raises(UserError, match=r"judge\.token_budget must be at least 1, or auto, got 0"):
        world.config("judge.token_budget=0")


class Starved:
    """Out of memory in calls of the training step, each after another one's backward; notes what they began with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Container[int]) -> None:
        self.random: list[Tensor] = []
        self.left: list[bool] = []
        original = PreferenceModule.training_step

        def step(module: PreferenceModule, batch: PreferenceBatch, batch_idx: int) -> Tensor:
            self.random.append(torch.get_rng_state())
            self.left.append(any(parameter.grad is not None for parameter in module.policy.parameters()))
            torch.rand(3)
            if len(self.random) in fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(module, batch, batch_idx)

        monkeypatch.setattr(PreferenceModule, "training_step", step)


def final(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / "last" / STATE, weights_only=True)["state_dict"]
    return state


def test_memory_that_runs_out_in_the_first_step_halves_the_budget_and_moves_no_number(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its second micro-batch, so that gradients are there. A resumed run keeps the half, recomputing or not."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(MemoryPlan, "device_memory", lambda plan: 1 << 40)
    monkeypatch.setattr(memory, "MOST", 128)
    whole = run(world.config(*FILL), tmp_path / "whole")
    with monkeypatch.context() as patch:
        starved = Starved(patch, {2})
        found = run(world.config(*FILL), tmp_path / "half")
    assert whole is not None and found is not None and found.steps == whole.steps == 2
    (said,) = [line for line in caplog.messages if "out of memory" in line]
    assert "batch.tokens=auto is reduced from 128 to 64 tokens per forward, and training restarts" in said
    assert torch.equal(starved.random[0], starved.random[2]) and starved.left[:3] == [False, True, False]
    for key, value in final(tmp_path / "whole").items():
        torch.testing.assert_close(final(tmp_path / "half")[key], value, rtol=1e-9, atol=1e-12)
    for key, number in whole.metrics.items():
        assert found.metrics[key] == pytest.approx(number, rel=1e-6, abs=1e-9), key
    saved = torch.load(tmp_path / "half" / "last" / STATE, weights_only=True)["PreferenceDataModule"]
    assert saved["budgets"] == [128, 64] and "tokens: auto" in (tmp_path / "half" / "config.yaml").read_text()
    caplog.clear()
    words = (f"resume={tmp_path / 'half' / 'best'}", "model.gradient_checkpointing=true")
    run(world.config(*FILL, *words), tmp_path / "more")
    assert any("resuming after optimiser step 1" in line for line in caplog.messages)
    assert any("batch.tokens=64; each has padded rows" in line for line in caplog.messages)
    for key, value in final(tmp_path / "whole").items():
        torch.testing.assert_close(final(tmp_path / "more")[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("fails", "words"), [(range(2, 99), ()), ((2,), ("batch.tokens=128",)), ((4, 5, 6, 7), ())],
    ids=["again", "as it was set", "in a later step"],
)  # fmt: skip
def test_memory_that_runs_out_otherwise_ends_the_run(
    fails: Container[int], words: tuple[str, ...], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryPlan, "device_memory", lambda plan: 1 << 40)
    monkeypatch.setattr(memory, "MOST", 128)
    starved = Starved(monkeypatch, fails)
    with pytest.raises(torch.OutOfMemoryError):
        run(world.config(*FILL, *words), tmp_path / "run")
    assert len(starved.random) == (3 if fails == range(2, 99) else next(i for i in range(9) if i in fails))


def test_a_hardware_option_names_the_points_and_runs_that_it_did_when_it_set_checkpointing(world: World) -> None:
    now, before = (
        world.config("hardware=1x141gb", f"model.gradient_checkpointing={each}") for each in ("auto", "true")
    )
    one, other = make_identity(now), make_identity(before)
    assert one.result == other.result and one.numbers == other.numbers
