"""Whole runs on a tiny world: what they write, what they find again, and what they refuse."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from attnpo.config.compose import load
from attnpo.lab.studies.config import FitConfig
from attnpo.run.point_cache import cache_between_runs, clear_caches
from attnpo.run.result import RunResult
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.training.metrics_file import read_metrics
from attnpo.weigh import fill_store
from tests.run.made import make_inputs
from tests.run.worlds import TRAIN, VAL, World, judge_loads
from tests.training.processes import in_two_processes

QUICK = ("callbacks=none",)
PAIRS = TRAIN + VAL


@pytest.fixture
def world(fresh: World) -> World:
    """The same model and pairs with an empty store."""
    return fresh


@pytest.fixture(scope="module")
def first(template: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path, RunResult]:
    """A world whose store one run has filled, that run's folder and its result."""
    place = tmp_path_factory.mktemp("first")
    world = World(template.model, template.data, place / "store")
    return world, place / "run", run(world.config("trainer.validate_every=1"), place / "run")


def losses(folder: Path, name: str = "train/loss") -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.csv") if name in row]


# ------------------------------------------------------------------------------------------------ what a run leaves


def test_a_run_leaves_everything_a_reader_needs(first: tuple[World, Path, RunResult]) -> None:
    _, folder, result = first
    assert json.loads((folder / "result.json").read_text()) == result.to_json()
    assert result.steps == 3 and len(losses(folder)) == 3 and result.drift == {}
    assert len(losses(folder, "val/loss")) == 4
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    example = json.loads((folder / "generations.jsonl").read_text().splitlines()[0])
    assert set(example) == {"prompt", "policy", "reference"}
    assert "Token weights of the first pairs" in page and page.count("background") > 20
    assert "Answers before and after training" in page and "after (policy)" in page
    assert "log-prob: policy -" in page, "facts of each token"
    assert re.search(r'<th [^>]*class="num"[^>]*>validation</th>', page) is not None, "inputs, a column per split"
    assert (folder / "curves.svg").is_file()
    assert len((folder / "generations.jsonl").read_text().splitlines()) == 2
    config = OmegaConf.load(folder / "config.yaml")
    assert config.objective.beta == 0.1 and "???" not in (folder / "config.yaml").read_text()
    inputs = result.inputs
    assert (inputs["train"]["read"], inputs["train"]["pairs"], inputs["val"]["pairs"]) == (TRAIN, TRAIN, VAL)
    assert inputs["weights"] == {"from_store": 0, "computed": PAIRS}
    assert 0.0 < inputs["train"]["effective_share"] < 1.0
    assert set(inputs["judge"]) >= {"agreement", "pair_accuracy", "consistency"}


AFTERWARDS = {
    "cleaning up the run's folder": "attnpo.run.run.merge_metrics",
    "moving the policy back to its device": "attnpo.run.run.restore_attention",
    "scoring by the true reward": "attnpo.run.run.score_by_true_reward",
    "measuring where the policy moved": "attnpo.lab.measures.DriftSettings.measure",
    "sampling answers": "attnpo.run.run.write_samples",
    "writing the report": "attnpo.run.report.write_run_report",
    "sending results to the loggers": "attnpo.run.report.log_run_to_wandb",
}
OTHERS = {
    "could not close the run's loggers": "attnpo.training.loggers.close_loggers",
    "its export failed": "attnpo.training.export.Exporter.export",
}


@pytest.mark.parametrize("what", [tuple(AFTERWARDS), *((other,) for other in OTHERS)], ids=["all", *OTHERS])
def test_what_fails_after_the_last_step_costs_neither_policy_nor_result(
    first: tuple[World, Path, RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: tuple[str, ...],
) -> None:
    world, _, unbroken = first

    def fails(*given: object, step: int = 3, **named: object) -> None:
        if step == 3:
            raise IndexError("index out of range in self")

    for one in what:
        monkeypatch.setattr({**AFTERWARDS, **OTHERS}[one], fails)
    with caplog.at_level(logging.WARNING):
        result = run(world.config("trainer.validate_every=1"), tmp_path / "run")
    assert result is not None and result.metrics["val/loss"] == unbroken.metrics["val/loss"]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result.to_json()
    found = [line for line in caplog.messages if "IndexError: index out of range in self" in line]
    assert all(line.startswith("warning: ") for line in found) and all(
        any(one in line for line in found) for one in what
    )
    if what == tuple(AFTERWARDS):
        failures = (tmp_path / "run" / "failures.txt").read_text()
        assert all(one in failures for one in what) and failures.count("Traceback") == len(what)
    state = torch.load(tmp_path / "run" / "last" / "state.ckpt", weights_only=True)
    assert state["global_step"] == 3
    if what == ("its export failed",):  # the way on that the log gives
        monkeypatch.undo()
        (tmp_path / "run" / "result.json").unlink()
        run(world.config("trainer.validate_every=1", "resume=auto"), tmp_path / "run")
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "last")


@pytest.mark.parametrize("lost", ["run.run.score_by_true_reward", "lab.measures.DriftSettings.measure"])
def test_a_point_without_what_points_are_compared_by_is_run_again(
    first: tuple[World, Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def fails(*given: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(f"attnpo.{lost}", fails)
    with pytest.raises(IndexError):
        run(first[0].config(), tmp_path / "run", point=True)
    assert not (tmp_path / "run" / "result.json").exists()


def test_one_failure_leaves_the_rest_even_where_its_traceback_cannot_be_written(
    first: tuple[World, Path, RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*given: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("attnpo.run.run.write_samples", fails)
    monkeypatch.setattr("attnpo.run.run.FAILURES", "gone/failures.txt")
    assert run(first[0].config("callbacks.samples=1"), tmp_path / "run") is not None
    assert any("sampling answers failed after training" in line for line in caplog.messages)
    assert all((tmp_path / "run" / name).is_file() for name in ("result.json", "report.html"))


def test_an_export_that_fails_before_the_last_step_ends_the_run(
    first: tuple[World, Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr("attnpo.training.export.Exporter.export", fails)
    with pytest.raises(IndexError):
        run(first[0].config("trainer.validate_every=1"), tmp_path / "run")


# ------------------------------------------------------------------------------------------------ what is found again


def test_an_objective_with_anchors_gets_them_sampled_in_a_run(world: World, tmp_path: Path) -> None:
    """``objective=tidpo`` asks for an answer of the policy to each prompt, and for a term that reads it."""
    run(world.config(*QUICK, "objective=tidpo", "weights=gradient", "reference=live"), tmp_path / "run")
    triplets = losses(tmp_path / "run", "train/rewards/triplet")
    assert len(triplets) == 3 and any(term > 0 for term in triplets)
    assert any(share < 1 for share in losses(tmp_path / "run", "train/rewards/triplet_unmeasured"))


def test_stored_weights_train_like_fresh_ones_without_a_judge(
    first: tuple[World, Path, RunResult], tmp_path: Path
) -> None:
    world, folder, _ = first
    with judge_loads() as loaded:
        result = run(world.config("trainer.validate_every=1", *QUICK), tmp_path / "again")
    assert loaded == []
    assert result.inputs["weights"] == {"from_store": PAIRS, "computed": 0}
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert losses(tmp_path / "again", name) == losses(folder, name), name


def test_a_cached_reference_trains_like_a_live_one(first: tuple[World, Path, RunResult], tmp_path: Path) -> None:
    world, folder, _ = first
    run(world.config("trainer.validate_every=1", "reference=cached", *QUICK), tmp_path / "cached")
    for name in ("train/loss", "val/loss"):
        assert losses(tmp_path / "cached", name) == pytest.approx(losses(folder, name), rel=2e-6), name


def computed(cfg: FitConfig) -> int:
    """Pairs that the judge has to read for this configuration; they are in the store afterwards."""
    with judge_loads() as loaded:
        report = make_inputs(cfg).weighed.report
    assert report is not None and len(loaded) == (report.computed > 0)
    return report.computed


@pytest.mark.parametrize(
    "change",
    [
        "judge.assembly=ids",
        "judge.template_file=judge/short.txt",
        "judge.dtype=float64",
        "judge.chat=false",
        "judge.max_length=300",
        "judge.max_response_length=100",
        "judge.labels=[B,A]",
        "judge.span=reference",
        "model.chat_template",
    ],
)
def test_what_changes_the_judges_numbers_changes_the_key(
    first: tuple[World, Path, RunResult], tmp_path: Path, change: str
) -> None:
    world, _, _ = first
    if change == "model.chat_template":
        (tmp_path / "other.jinja").write_text(
            "{{ '<bos>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user> please ' + m['content'] }}"
            "{% else %}{{ '<assistant> ' + m['content'] + '<end>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
        )
        change = f"model.chat_template={tmp_path / 'other.jinja'}"
    assert computed(world.config(change)) == PAIRS


@pytest.mark.parametrize(
    "change",
    [
        "weights.layer=1",
        "weights.postprocess.sink_tokens=0",
        "align.method=characters",
        "judge.token_budget=4096",
        "model.dtype=float64",
    ],
)
def test_what_does_not_change_them_finds_the_stored_ones(first: tuple[World, Path, RunResult], change: str) -> None:
    assert computed(first[0].config(change)) == 0


def test_other_weights_in_the_model_folder_are_another_judge(world: World, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(world.model, model)
    mine = World(model, world.data, world.store)
    assert computed(mine.config()) == PAIRS
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    changed.save_pretrained(model)
    assert computed(mine.config()) == PAIRS


def tables(world: World, kind: str) -> int:
    return len(list((world.store / kind).iterdir()))


def test_what_changes_the_references_numbers_changes_its_key(world: World) -> None:
    """Layer, beta and seed find the same table."""
    base = ("weights=uniform", "reference=cached")
    changes = ("lengths.max_prompt_length=200", "model.dtype=float64", "lengths.max_length=450", "lengths.keep=end")
    fill_store(world.config(*base))
    fill_store(world.config(*base, "objective.beta=0.7", "seed=3"))
    assert tables(world, "reference") == 1
    for count, change in enumerate(changes, 2):
        fill_store(world.config(*base, change))
        assert tables(world, "reference") == count, change


# ------------------------------------------------------------------------------------------------ several processes


def test_two_shards_fill_the_store_that_fit_then_finds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = world.config("reference=cached")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"python -m attnpo\.weigh"):
        make_inputs(cfg)
    monkeypatch.setenv("RANK", "0")
    with judge_loads() as loaded:
        fill_store(cfg)
    assert len(loaded) == 1
    with pytest.raises(UserError, match=r"weights are missing .* 2 processes.* python -m attnpo\.weigh"):
        make_inputs(cfg)
    monkeypatch.setenv("RANK", "1")
    fill_store(cfg)
    inputs = make_inputs(cfg)
    assert inputs.weighed.report is not None
    assert (inputs.weighed.report.hits, inputs.weighed.report.computed) == (PAIRS, 0)
    monkeypatch.delenv("WORLD_SIZE")
    with judge_loads() as loaded:
        run(world.config("reference=cached", *QUICK), world.store.parent / "run")
    assert loaded == []


def test_a_reference_that_is_not_stored_is_refused_in_several_processes(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match=r"reference log-probs are missing .* attnpo\.weigh .*reference=cached"):
        run(world.config("weights=uniform", "reference=cached", *QUICK), tmp_path / "run")


def test_two_sharded_processes_make_one_run(first: tuple[World, Path, RunResult], tmp_path: Path) -> None:
    """FSDP2 through the command line: the losses of one process, one set of files, samples of the gathered policy.

    How many devices there are, the launcher says. The layout is tried before the policy is sharded.
    """
    world, folder, result = first
    kept = world.store / "layouts"
    before = {path.name: path.read_text() for path in kept.iterdir()}
    shutil.rmtree(kept)
    more = ["experiment=none", "name=two", f"output={tmp_path}", "trainer.strategy=fsdp"]
    command = ["attnpo.fit", *world.overrides("trainer.validate_every=1", "batch.micro=1", *more)]
    codes, output = in_two_processes(["-m", *command], tmp_path)
    assert codes == [0, 0], output[-6000:]
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert losses(tmp_path / "two", name) == pytest.approx(losses(folder, name), rel=2e-5, abs=2e-5), name
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in folder.iterdir()}
    assert json.loads((tmp_path / "two" / "result.json").read_text())["inputs"] == {
        **result.inputs,
        "weights": {"from_store": PAIRS, "computed": 0},
    }
    assert len((tmp_path / "two" / "generations.jsonl").read_text().splitlines()) == 2
    taken = {path.name: path.read_text() for path in kept.iterdir()}
    assert taken and taken.items() <= before.items() and '"taken": "shared_prefix"' in "".join(taken.values())


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("given", "lacking"),
    [([], "model.path and data.path"), (["data.path=x"], "model.path"), (["model.path=x"], "data.path")],
)
def test_paths_that_are_not_given_are_asked_for(given: list[str], lacking: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^set {lacking}, e.g. "):
        run(load("fit", ["setting=real_smoke", *given]), tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("judge.template_file=nowhere.txt", r"judge\.template_file=nowhere\.txt: no such file"),
        ("data.val_split=nowhere", r"data\.val_split=nowhere"),
    ],
)
def test_a_wrong_setting_is_named(
    first: tuple[World, Path, RunResult], tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(first[0].config(override), tmp_path / "run")


# ------------------------------------------------------------------------------------------------ memory


def test_points_of_a_process_share_what_they_have_read(world: World) -> None:
    """Whatever moves a weight is weighed anew; what only moves the training is not. Outside, nothing is kept."""
    fresh = make_inputs(world.config())
    with cache_between_runs():
        first = make_inputs(world.config())
        same = make_inputs(world.config("objective.beta=0.7", "optimizer.lr=1e-3", "reference=cached"))
        layer, control = make_inputs(world.config("weights.layer=1")), make_inputs(world.config("transform=shuffled"))
        shorter = make_inputs(world.config("lengths.max_length=450"))
    outside = make_inputs(world.config())
    clear_caches()
    with cache_between_runs():
        again = make_inputs(world.config())
    clear_caches()
    assert same.examples is first.examples and same.pairs is first.pairs
    assert layer.pairs is first.pairs and control.pairs is first.pairs
    assert shorter.pairs is not first.pairs and outside.pairs is not first.pairs and again.pairs is not first.pairs
    for one, other in zip(first.examples["train"].examples, fresh.examples["train"].examples, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))
    for changed in (layer, control):
        pairs = zip(changed.examples["train"].examples, first.examples["train"].examples, strict=True)
        assert any(not torch.equal(one.weights[0], other.weights[0]) for one, other in pairs)
