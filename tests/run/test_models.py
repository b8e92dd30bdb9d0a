"""Whole runs with adapters: every kind of reference says the same, and what cannot be is refused before it costs."""

import importlib
import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from attnpo.config.compose import load, validate
from attnpo.models.backbone import layer_stack
from attnpo.models.layouts import LAYOUTS, Layout
from attnpo.models.loading import load_model
from attnpo.models.lora import AdapterDisabledReference, has_adapters
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec, ModelSpec
from attnpo.run import memory
from attnpo.run.identity import load_saved_numbers, make_identity
from attnpo.run.memory import MemoryPlan, fit_memory, make_memory_plan
from attnpo.run.models import load_base_model, load_policy, load_reference
from attnpo.run.resolve import BaseModel, ResolvedRun, resolve
from attnpo.run.result import RunResult
from attnpo.run.run import run
from attnpo.run.run_config import RunConfig
from attnpo.run.training import TrainingOutcome, train
from attnpo.schema import UserError
from attnpo.system.files import describe_change, read_checksums
from attnpo.training.metrics_file import read_metrics
from attnpo.weigh import fill_store
from tests.run.worlds import World

training_room = importlib.import_module("attnpo.run.training")
policies_room = importlib.import_module("attnpo.run.models")
LORA = ("model=lora", "model.lora.rank=4", "optimizer.lr=1e-2", "weights=uniform", "callbacks=none")


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, RunResult]]:
    """Folder and result of one run per kind of reference, three steps each, every step validated."""
    place = tmp_path_factory.mktemp("runs")
    return {
        kind: (
            place / kind,
            run(world.config(*LORA, f"reference={kind}", "trainer.validate_every=1"), place / kind),
        )
        for kind in ("adapter_off", "cached", "live")
    }


def losses(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.csv") if name in row]


@pytest.mark.parametrize("kind", ["adapter_off", "cached", "live"])
def test_the_loss_starts_at_ln_2_and_moves(runs: dict[str, tuple[Path, RunResult]], kind: str) -> None:
    folder, result = runs[kind]
    metrics = result.metrics
    sums = abs(metrics["first/val/logps/chosen"]) + abs(metrics["first/val/logps/rejected"])
    assert sums > 10
    # A cached and a live reference are scored in batches of other shapes, which round otherwise.
    bound = 1e-7 if kind == "adapter_off" else 0.1 * sums * 2**-21
    assert abs(metrics["first/val/loss"] - math.log(2)) < bound
    assert abs(losses(folder, "train/loss")[0] - math.log(2)) < bound
    assert abs(metrics["val/loss"] - math.log(2)) > 1e-3
    assert json.loads((folder / "result.json").read_text())["steps"] == 3


def test_every_kind_of_reference_trains_alike(runs: dict[str, tuple[Path, RunResult]]) -> None:
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        wanted = losses(runs["live"][0], name)
        assert len(wanted) >= 3
        for kind in ("adapter_off", "cached"):
            assert losses(runs[kind][0], name) == pytest.approx(wanted, rel=2e-5), (kind, name)


def test_fresh_adapters_are_their_own_reference_unless_another_is_named(world: World) -> None:
    """By the user, by a setting, by the hardware; whatever gives the model its adapters."""
    spec = "model.lora={_target_:attnpo.models.spec.LoraSpec,rank:4}"
    assert [world.config(*words).reference for words in ((), ("model=lora",), ("model=qlora",), (spec,))] == [
        *("live", "adapter_off", "adapter_off", "adapter_off")
    ]
    assert world.config("model=lora").live_reference == "adapter_off"
    assert world.config("model=lora", "reference=first_epoch").reference == "first_epoch"
    assert world.config("model=lora", "model.lora=null").reference == "live"
    paper = ["setting=llama3_8b_base_sft", "model=lora"]
    assert load("fit", paper).reference == "cached" and load("fit", [*paper, "reference=live"]).reference == "live"


def test_the_log_counts_what_is_trained_and_warns_of_a_rate_for_all_weights(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "attnpo"):
        run(world.config(*LORA, "optimizer.lr=9e-6", "trainer.max_steps=1"), tmp_path / "lora")
        run(world.config(*LORA[3:], "optimizer.lr=1e-6", "trainer.max_steps=1"), tmp_path / "whole")
    told = [record.getMessage() for record in caplog.records]
    adapters, whole = (sum(value.numel() for value in found) for found in (load_adapters(world), weights_of(world)))
    assert [line for line in told if line.startswith("training ")] == [
        f"training {adapters} parameters for 1 optimiser steps",
        f"training {whole} parameters for 1 optimiser steps",
    ]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in warned if line.startswith("optimizer.lr=")]) == 1
    assert any(line.startswith("optimizer.lr=9e-06 is too low for adapters") for line in warned)


def weights_of(world: World) -> list[torch.Tensor]:
    return list(load_model(world.model).parameters())


def load_adapters(world: World) -> list[torch.Tensor]:
    policy = load_policy(resolve(world.config(*LORA)).base)
    return [value for name, value in policy.named_parameters() if ".lora_" in name]


def test_checkpointing_and_half_precision_run_the_whole_way(world: World, tmp_path: Path) -> None:
    """The form an 8B model takes on one GPU: bfloat16 base, float32 adapters, autocast, recomputed activations."""
    half = ("model.dtype=bfloat16", "trainer.precision=bf16-mixed", "model.gradient_checkpointing=true")
    result = run(world.config(*LORA, *half, "reference=adapter_off"), tmp_path / "half")
    assert abs(result.metrics["first/val/loss"] - math.log(2)) < 1e-7
    assert abs(result.metrics["val/loss"] - math.log(2)) > 1e-3


def test_cached_log_probs_are_the_bases_to_the_bit(world: World, tmp_path: Path) -> None:
    """Computed from the policy with fresh adapters or from the plain base: the store's key is one, so must they be."""
    found = []
    for name, overrides in (("base", ()), ("adapted", LORA)):
        cfg = World(world.model, world.data, tmp_path / name).config(*LORA[3:], *overrides, "reference=cached")
        if name == "base":
            fill_store(cfg)
        else:
            run(cfg, tmp_path / "run")
        rows = sorted(path for path in (tmp_path / name).rglob("*") if path.suffix in (".arrow", ".parquet"))
        assert rows
        found.append([(path.relative_to(tmp_path / name).as_posix(), path.read_bytes()) for path in rows])
    assert found[0] == found[1]


def test_what_the_settings_build(world: World) -> None:
    cfg, base, *_ = resolve(world.config(*LORA, "reference=adapter_off", "model.lora.target_modules=[q_proj,v_proj]"))
    assert base.spec.lora == LoraSpec(rank=4, target_modules=("q_proj", "v_proj"))
    policy = load_policy(base)
    assert has_adapters(policy.model)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    assert isinstance(load_reference(base, cfg.reference, policy), AdapterDisabledReference)
    live = resolve(world.config(*LORA, "reference=live"))
    copy = load_reference(live.base, live.cfg.reference, policy)
    assert not has_adapters(copy.model)
    start = load_model(world.model).state_dict()
    assert all(torch.equal(value, start[name]) for name, value in copy.model.state_dict().items())
    plain = resolve(world.config()).base
    assert plain.spec.lora is None and not has_adapters(load_policy(plain).model)


def test_adapter_off_without_an_adapter_is_refused_before_anything_loads(world: World, tmp_path: Path) -> None:
    cfg = world.composed("reference=adapter_off")
    with pytest.raises(UserError, match=r"reference=adapter_off needs a new adapter, but model.lora is null"):
        validate(cfg)
    with pytest.raises(UserError, match="reference=adapter: expected one of live, cached, first_epoch, adapter_off"):
        validate(world.composed("reference=adapter"))


def test_adapters_without_peft_are_refused_before_anything_loads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    validate(world.composed())
    with pytest.raises(UserError, match=r"pip install 'attnpo\[lora\]'"):
        validate(world.composed(*LORA))


def test_wrong_settings_are_named_under_their_keys(world: World) -> None:
    for override, text in (
        ("model.lora.rank=0", "model.lora.rank must be at least 1, got 0"),
        ("model.lora.dropout=1.5", "model.lora.dropout must be in"),
        ("model.lora.target_modules=q_proj", r"write model.lora.target_modules=\[q_proj\]"),
        ("+model.lora.alfa=1", r"model.lora.alfa: unknown key .*did you mean model.lora.alpha"),
    ):
        with pytest.raises(UserError, match=text):
            validate(world.composed("model=lora", override))
    assert world.config("model=lora").model.lora == LoraSpec()


@pytest.mark.parametrize("objective", ["cpo", "dpo"])
def test_an_objective_without_a_reference_holds_none(
    objective: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second model is loaded and no log-prob of one is stored, whatever ``reference`` says; DPO loads its own."""
    found: list[TrainingOutcome] = []

    def watch_training(*arguments: Any) -> TrainingOutcome:
        found.append(train(*arguments))
        return found[-1]

    loaded: list[PreTrainedModel] = []

    def counted(base: BaseModel) -> PreTrainedModel:
        loaded.append(load_base_model(base))
        return loaded[-1]

    monkeypatch.setattr(training_room, "train", watch_training)
    monkeypatch.setattr(policies_room, "load_base_model", counted)
    run(world.config(f"objective={objective}", "weights=uniform", "callbacks=none", "trainer.max_steps=1"), tmp_path)
    assert (found[0].reference is None) == (objective != "dpo")
    assert len(loaded) == (2 if objective == "dpo" else 1)


# ------------------------------------------------------------------------------------------------ what is exported


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["callbacks.export_dtype=float32"], False),
        ([], True),
        (["model=qlora", "model.dtype=bfloat16"], True),
    ],
)
def test_the_log_card_and_result_tell_what_rounding_took_of_the_adapters(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: list[str], warned: bool
) -> None:
    """best/ and last/ hold the merged weights, and in a folder of their own the adapters, under the folder's seal."""
    bfloat16 = ["model=lora", "model.dtype=bfloat16", "optimizer.lr=1e-4", "weights=uniform", "callbacks.samples=0"]
    with caplog.at_level("INFO", "attnpo"):
        run(world.config(*bfloat16, *overrides), tmp_path / "run")
    told = [record for record in caplog.records if "of the adapters' update" in record.getMessage()]
    assert {record.levelname == "WARNING" for record in told if "last: " in record.getMessage()} == {warned}
    assert any(re.search("the adapters themselves are in .*last/adapter/", record.getMessage()) for record in told)
    merged = json.loads((tmp_path / "run" / "result.json").read_text())["merged"]
    assert merged["numbers_of"] == "the policy as it was trained, its adapters beside their base"
    for name in ("best", "last"):
        folder = tmp_path / "run" / name
        assert (merged[name]["lost_share"] > 0.1 and merged[name]["unchanged_share"] > 0.1) == warned
        assert (merged[name]["lost_share"] == 0) != warned
        assert describe_change(folder) is None and "adapter/adapter_model.safetensors" in read_checksums(folder)
        card = (folder / "README.md").read_text()
        assert "The numbers in this card were measured on the policy as trained" in card
        assert ("The merged weights differ from that policy" in card) == warned
        assert not has_adapters(load_model(folder))
    shutil.rmtree(folder / "adapter")
    assert describe_change(folder) is not None and not has_adapters(load_model(folder)), "the merged weights do without"


# ------------------------------------------------------------------------------------------------ weights of 4 bits
QLORA = ("model=qlora", "model.dtype=float32", "model.lora.rank=4", "optimizer.lr=1e-2", "weights=uniform")


def test_a_base_of_four_bits_runs_the_whole_way(
    world: World, runs: dict[str, tuple[Path, RunResult]], tmp_path: Path
) -> None:
    """Stored or with the adapters off, the reference is the quantised base; what is exported is whole."""
    for kind in ("cached", "adapter_off"):
        result = run(world.config(*QLORA, f"reference={kind}", "trainer.validate_every=1"), tmp_path / kind)
        metrics = result.metrics
        sums = abs(metrics["first/val/logps/chosen"]) + abs(metrics["first/val/logps/rejected"])
        assert abs(metrics["first/val/loss"] - math.log(2)) < 0.1 * sums * 2**-21
        assert abs(metrics["val/loss"] - math.log(2)) > 1e-3
    found = [losses(tmp_path / kind, "train/loss") for kind in ("cached", "adapter_off")]
    assert found[0] == pytest.approx(found[1], rel=2e-5) and len(found[0]) == 3
    whole = runs["cached"][1].metrics
    assert whole["first/val/logps/chosen"] != pytest.approx(metrics["first/val/logps/chosen"], rel=1e-4)
    state = torch.load(tmp_path / "cached" / "last" / "state.ckpt", weights_only=False)["state_dict"]
    assert state and all(".lora_" in name for name in state)
    exported = load_model(tmp_path / "cached" / "last")
    assert all(value.is_floating_point() for value in exported.parameters())
    assert getattr(exported.config, "quantization_config", None) is None


def test_four_bits_have_log_probs_of_their_own_in_the_store(world: World) -> None:
    keys = [resolve(world.config(*overrides)).base.fingerprint() for overrides in ((), LORA, QLORA)]
    assert keys[0] == keys[1] and keys[2] == {**keys[0], "quantize": "nf4"}


def test_weights_in_one_piece_are_not_sharded(world: World) -> None:
    cfg = world.composed(*LORA, "model.quantize=nf4", "trainer.strategy=fsdp")
    with pytest.raises(UserError, match=r"model\.quantize=nf4 needs unsharded weights, but trainer\.strategy=fsdp"):
        validate(cfg)
    validate(world.composed(*LORA, "model.compile=inductor", "trainer.strategy=fsdp"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch's, as it traces
def test_compiled_blocks_train_alike(
    world: World,
    runs: dict[str, tuple[Path, RunResult]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the first step takes longer is said before anything is compiled."""
    monkeypatch.setenv(policies_room.COMPILED_CODE, str(tmp_path / "code"))
    cfg = world.config(*LORA, "reference=adapter_off", "trainer.validate_every=1", "model.compile=eager")
    with caplog.at_level("INFO", "attnpo"):
        run(cfg, tmp_path / "compiled")
    said = caplog.text.find("model.compile=eager: compiling takes about a minute without a cache")
    assert 0 < said < caplog.text.find("gradients of compiled blocks agree with")
    for name in ("train/loss", "val/loss"):
        assert losses(tmp_path / "compiled", name) == pytest.approx(losses(runs["live"][0], name), rel=2e-5)


# ------------------------------------------------------------------------------------------------ model.compile=auto


def compiling(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, backend: str = "eager"
) -> tuple[MemoryPlan, BaseModel, ScoredLM]:
    """What decides a run's memory, its model as that allows, and its policy; as on a CUDA device where ``backend`` is
    the usual one.
    """
    monkeypatch.setattr(ModelSpec, "backend", lambda self, device: (self.compile and backend, "of this test"), False)
    cfg, base, *_ = resolve(cfg)
    spec, _ = fit_memory(replace(make_memory_plan(cfg), model=base.spec))
    base = replace(base, spec=spec)
    return make_memory_plan(cfg), base, load_policy(base)


def compiles(base: BaseModel, policy: ScoredLM, layout: str, asked: str) -> bool:
    return policies_room.compile_policy(base, policy, LAYOUTS[layout], required=asked != "auto")


def is_compiled(policy: ScoredLM) -> bool:
    return all("forward" in vars(block) for block in layer_stack(policy.model))


def test_auto_leaves_blocks_as_they_are_on_a_cpu(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no other run than one that compiles nothing."""
    given = ("weights=uniform", "reference=live", "callbacks=none", "trainer.max_steps=1")
    with caplog.at_level("INFO", "attnpo"):
        found = run(world.config(*given, "model.compile=auto"), tmp_path / "auto")
    plain = run(world.config(*given), tmp_path / "plain")
    assert found is not None and plain is not None and found.metrics == plain.metrics
    assert "model.compile=auto: blocks are not compiled (on a device of type cpu)" in caplog.text
    saved = load_saved_numbers(tmp_path / "plain" / "config.yaml", make_identity(world.config(*given)).ignored_keys)
    assert make_identity(world.config(*given, "model.compile=auto")).numbers == saved


def test_auto_compiles_for_cuda_unless_something_reads_inside_the_blocks() -> None:
    auto = ModelSpec("nowhere", compile="auto")
    router, reward = replace(auto, router_aux_loss_coef=0.1), replace(auto, reward=True)
    assert [spec.backend("cuda")[0] for spec in (auto, router, reward)] == ["inductor", None, None]
    assert auto.backend("cpu")[0] is None and replace(auto, compile="eager").backend("cpu")[0] == "eager"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch's, as it traces
def test_compiled_blocks_are_tried_once_for_a_model_and_its_versions(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In another layout they are tried anew. Torch's code lies in the store, unless it has a folder already."""
    monkeypatch.setenv(policies_room.COMPILED_CODE, "")
    monkeypatch.delenv(policies_room.COMPILED_CODE)
    tried = count_trials(monkeypatch)
    cfg = world.config("weights=uniform", f"store={tmp_path}", "model.compile=auto")
    with caplog.at_level("INFO", "attnpo"):
        for layout in ("packed", "packed", "padded"):
            _, base, policy = compiling(cfg, monkeypatch)
            assert compiles(base, policy, layout, "auto") and is_compiled(policy)
    assert tried == ["eager", "eager"]
    assert (
        caplog.text.count("using the stored comparison with uncompiled blocks (same model, device and versions)") == 1
    )
    assert os.environ[policies_room.COMPILED_CODE] == str(tmp_path / "inductor")


def count_trials(monkeypatch: pytest.MonkeyPatch, reason: Exception | None = None) -> list[str]:
    """The backends that were tried; with a ``reason`` none of them is right."""
    tried: list[str] = []
    real = policies_room.check_compiled_blocks

    def counted(model: PreTrainedModel, backend: str, *more: Any, **named: Any) -> None:
        tried.append(backend)
        if reason is not None:
            raise UserError("wrong on this card") from (reason.__cause__ or None)
        real(model, backend, *more, **named)

    monkeypatch.setattr(policies_room, "check_compiled_blocks", counted)
    return tried


@pytest.mark.parametrize("breaks", [False, True])
def test_blocks_that_do_not_compile_stay_plain_under_auto_and_are_refused_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, breaks: bool
) -> None:
    """Memory is then fitted to plain blocks. Wrong numbers are kept in the store, an absent toolchain is not."""
    reason = Exception()
    reason.__cause__ = RuntimeError("no toolchain") if breaks else None
    tried = count_trials(monkeypatch, reason)
    given = ("weights=uniform", f"store={tmp_path}", "layout=packed")
    auto = world.config(*given, "model.compile=auto", "model.gradient_checkpointing=auto")
    monkeypatch.setenv(policies_room.COMPILED_CODE, str(tmp_path))
    monkeypatch.setattr(memory, "choose_fastest_fit", lambda found, capacity: (len(found) - 1, "of this test"))
    for _ in range(2):
        plan, base, policy = compiling(auto, monkeypatch)
        policy.model.activation_checkpointing_disable()  # as if compiled blocks had room for their activations
        assert not compiles(base, policy, "packed", "auto")
        spec, _ = policies_room.refit_without_compilation(plan, base.spec, policy)
        assert spec.compile is None and spec.uses_checkpointing
        assert not is_compiled(policy) and policy.model.is_activation_checkpointing
    assert caplog.text.count("model.compile=auto: training continues without compiled blocks (wrong on this card") == 2
    assert len(tried) == (2 if breaks else 1)
    _, base, policy = compiling(world.config(*given, "model.compile=eager"), monkeypatch)
    with pytest.raises(UserError, match="wrong on this card"):
        compiles(base, policy, "packed", "eager")
    assert len(tried) == (3 if breaks else 1)
    short = (*given, "callbacks=none", "trainer.max_steps=1")
    result = run(world.config(*short, "model.compile=auto"), tmp_path / "auto")
    assert result is not None and result.steps == 1
    with pytest.raises(UserError, match="wrong on this card"):
        run(world.config(*short, "model.compile=eager"), tmp_path / "eager")


# ------------------------------------------------------------------------------------------------ layouts


def layout_of(made: ResolvedRun[RunConfig], policy: ScoredLM, *requests: str) -> Layout:
    """The layout that a run takes for its policy."""
    return policies_room.choose_layout(made.base, made.cfg.layout, made.cfg.reference, [policy], set(requests))


def test_a_layout_is_tried_once_for_a_model_and_its_versions(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Another model, dtype, request or version is tried anew, and so is a changed record."""
    given = ("weights=uniform", f"store={tmp_path}")
    made = resolve(world.config(*given, "layout=auto"))
    policy = load_policy(made.base)
    tried: list[str] = []
    select_layout = policies_room.select_layout
    monkeypatch.setattr(
        policies_room, "select_layout", lambda name, *more: tried.append(name) or select_layout(name, *more)
    )
    with caplog.at_level("INFO", "attnpo"):
        assert layout_of(made, policy) is LAYOUTS["shared_prefix"]
        assert layout_of(made, policy) is LAYOUTS["shared_prefix"]
    assert (
        tried == ["auto"]
        and "layout shared_prefix: taken from the store (earlier trial with this model, device and vers" in caplog.text
    )
    assert layout_of(made, policy, "input_gradient") is LAYOUTS["padded"]
    for changes in (("layout=packed",), ("layout=auto", "model.dtype=float64")):
        layout_of(resolve(world.config(*given, *changes)), policy)
    monkeypatch.setattr(policies_room, "VERSION", -1)
    layout_of(made, policy)
    assert tried == ["auto", "auto", "packed", "auto", "auto"]
    for record in (tmp_path / "layouts").iterdir():
        record.write_text(record.read_text().replace("shared_prefix", "padded"))
    assert layout_of(made, policy) is LAYOUTS["shared_prefix"] and len(tried) == 6
