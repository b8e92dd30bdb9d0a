"""What may be resumed: the same run, not yet finished, never overwritten by accident."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from attnpo.config.compose import load
from attnpo.config.fields import bookkeeping_keys
from attnpo.config.named_files import FUNCTIONS
from attnpo.fit import main
from attnpo.run.identity import BESIDE, KEPT, NEEDED, PATHS, make_identity
from attnpo.run.result import RunResult
from attnpo.run.resume import find_checkpoint, find_finished_result, refuse_existing_run
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.system.files import write_checksums
from attnpo.training.checkpoint_folders import STATE, read_checkpoint_info
from attnpo.training.interrupted import RunInterrupted
from tests.run.worlds import World

SHORT = ("trainer.validate_every=1", "callbacks.samples=0", "callbacks.report=false")


@pytest.fixture(scope="module")
def done(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """A finished run's folder and its result."""
    folder = tmp_path_factory.mktemp("done") / "run"
    return folder, run(world.config(*SHORT), folder)


def test_a_finished_run_gives_its_result_back(world: World, done: tuple[Path, RunResult]) -> None:
    """Nothing is read, trained or written again."""
    folder, result = done
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    elsewhere = World(world.model, folder / "nowhere", world.store)  # its data would not be found
    assert run(elsewhere.config(*SHORT, "resume=auto"), folder) == result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_that_was_killed_while_scoring_is_scored_without_training(
    world: World, done: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """The state after the last step is there, the result is not."""
    folder, result = done
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("last", "best"):
        (copy / name).symlink_to(folder / name)
    again = run(world.config(*SHORT, "resume=auto"), copy)
    assert again.metrics == result.metrics and again.steps == result.steps == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("objective.beta=0.7", "objective.beta was 0.1 "),
        ("optimizer.lr=0.5", "optimizer.lr was 0.0001 "),
        ("trainer.max_epochs=3", "trainer.max_epochs was 1 "),
        ("batch.pairs=8", "batch.pairs was 4 "),
        ("seed=3", "seed was 0 "),
        ("weights=uniform", "weights._target_ was "),
        ("weights.layers=[1,2]", "weights.layers was []"),
        ("judge.max_length=300", "judge.max_length was "),
        ("callbacks.monitor=val/rewards/margins", "callbacks.monitor was 'val/loss'"),
    ],
)
def test_another_run_is_refused_by_its_first_differing_key(
    world: World, done: tuple[Path, RunResult], change: str, named: str
) -> None:
    folder, _ = done
    identity = make_identity(world.config(*SHORT, "resume=auto", change))
    for look in (
        lambda: find_finished_result(folder, identity),
        lambda: find_checkpoint("auto", folder, identity.numbers),
    ):
        with pytest.raises(UserError, match=r"^resume: ") as refused:
            look()
        assert f"resume: {named}" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        *("batch.micro=1", "trainer.threads=2", "callbacks.save_every=5", "trainer.devices=2", "logger=wandb"),
        *("verbalizer.max_length=300", "other_judge.path=/x", "default_layer=last", "verbalized_epochs=3"),
        *("trainer.validate_every=2", "drift.pairs=4"),
    ],
)
def test_bookkeeping_may_change(world: World, done: tuple[Path, RunResult], change: str) -> None:
    folder, _ = done
    numbers = make_identity(world.config(*SHORT, "resume=auto", change)).numbers
    assert find_checkpoint("auto", folder, numbers) == folder / "last" / STATE


def test_every_bookkeeping_key_exists(world: World) -> None:
    """A key renamed in the configs would silently count as one that moves numbers."""
    options = (Path(__file__).parents[2] / "configs" / "weights").glob("*.yaml")
    everywhere = [
        OmegaConf.create(world.config().values),
        *(OmegaConf.create({"weights": OmegaConf.create(path.read_text().replace("???", "x"))}) for path in options),
    ]
    names = (*bookkeeping_keys(world.config()), *PATHS, *FUNCTIONS, *BESIDE, *NEEDED, *KEPT)
    there = {key for cfg in everywhere for key in names if OmegaConf.select(cfg, key, default="absent") != "absent"}
    assert set(names) == there
    numbers = make_identity(world.config()).numbers
    assert "model.path" not in numbers and "optimizer.lr" in numbers


@pytest.mark.parametrize(
    ("file", "said"), [("checkpoint.json", "has no value for"), ("digests.json", "has no digests")]
)
def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(
    world: World, done: tuple[Path, RunResult], tmp_path: Path, file: str, said: str
) -> None:
    """One had fewer options, an older one no digests: neither is gone on with, nor its run begun anew over it."""
    folder = shutil.copytree(done[0], tmp_path / "run")
    (folder / "result.json").unlink()
    for place in (folder / "last", folder / "best"):
        account = json.loads((place / file).read_text())
        account.get("config", {}).pop("optimizer.warmup_from", None)
        (place / file).write_text(json.dumps(account))
        write_checksums(place)
        if file == "digests.json":
            (place / file).unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for resume in ("auto", str(folder / "last")):
        with pytest.raises(UserError) as refused:
            run(world.config(*SHORT, f"resume={resume}"), folder)
        assert str(folder / "last") in str(refused.value) and said in str(refused.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_which_weights_decay_is_no_part_of_a_run_that_decays_none(world: World) -> None:
    """So that its identity is what it was before there was the key."""
    plain = make_identity(world.config())
    assert "optimizer.decay_all" not in plain.numbers
    assert make_identity(world.config("optimizer.weight_decay=0.1")).numbers["optimizer.decay_all"] is False
    assert plain.result == make_identity(world.config("optimizer.decay_all=true")).result


def test_keys_of_reference_spans_count_where_spans_are_those(world: World) -> None:
    spans = ["judge.span_drop=1", "judge.span_closing=x"]
    plain_spans = load("fit", ["weights=attention", *spans])
    assert make_identity(plain_spans).numbers == make_identity(load("fit", ["weights=attention"])).numbers
    as_theirs = make_identity(load("fit", ["weights=attention", "judge.span=reference", *spans])).numbers
    assert (as_theirs["judge.span_drop"], as_theirs["judge.span_closing"]) == (1, "x")


def test_other_contents_under_the_same_settings_are_refused(
    world: World, done: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """Two training pairs have changed places."""
    folder, _ = done
    data = tmp_path / "data"
    data.mkdir()
    for file in world.data.iterdir():
        lines = file.read_text().splitlines()
        (data / file.name).write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    cfg = World(world.model, data, world.store).config(*SHORT, f"resume={folder / 'last'}")
    with pytest.raises(UserError, match=r"^resume: data\.path \(train\) was "):
        run(cfg, tmp_path / "other")


def test_another_chat_template_at_the_same_path_is_refused(
    world: World, done: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """Weights, config and pairs are the same; the ids that are trained on would be others."""
    model = tmp_path / "model"
    shutil.copytree(world.model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += "{# other #}"
    tokenizer.save_pretrained(model)
    cfg = World(model, world.data, world.store).config(*SHORT, f"resume={done[0] / 'last'}")
    with pytest.raises(UserError, match=r"^resume: tokenizer and chat template was "):
        run(cfg, tmp_path / "other")


def test_the_newest_state_is_found_between_two_renames(
    world: World, done: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """Killed when last/ had been moved aside and its successor was not yet in its place."""
    folder, _ = done
    (tmp_path / "last.new").symlink_to(folder / "last")
    (tmp_path / "last.old").mkdir()
    numbers = make_identity(world.config(*SHORT, "resume=auto")).numbers
    assert find_checkpoint("auto", tmp_path, numbers) == tmp_path / "last.new" / STATE
    (tmp_path / "last.old").rmdir()  # without it the new one may be half written
    assert find_checkpoint("auto", tmp_path, numbers) is None


def test_a_new_run_does_not_take_a_folder_with_checkpoints(world: World, done: tuple[Path, RunResult]) -> None:
    folder, _ = done
    with pytest.raises(UserError, match=r"contains a run saved after step 3: .*resume=auto.* another name"):
        refuse_existing_run(folder)
    there = ("experiment=none", f"name={folder.name}", f"output={folder.parent}")
    with pytest.raises(UserError, match=r"contains a run saved after step 3: "):
        main(world.config(*SHORT, *there))
    assert main(world.config(*SHORT, *there, "resume=auto")) == 0
    refuse_existing_run(folder / "free")


def test_a_run_that_starts_anew_leaves_nothing_of_the_one_before(world: World, tmp_path: Path) -> None:
    """The runner of a study starts unfinished points anew in their folders."""
    folder = tmp_path / "run"
    run(world.config(*SHORT, "trainer.max_epochs=2"), folder)
    assert read_checkpoint_info(folder / "last")["step"] == 6
    run(world.config(*SHORT, "callbacks=none"), folder)
    assert not (folder / "last").exists() and not (folder / "best").exists()
    assert json.loads((folder / "result.json").read_text())["steps"] == 3
    assert "\n4," not in (folder / "metrics.csv").read_text()


def test_what_an_interrupted_run_says() -> None:
    stop = RunInterrupted(15, 7, 12, Path("outputs/night/last"))
    assert stop.exit_status == 143
    assert (
        str(stop)
        == "stopped by SIGTERM at step 7 of 12, saved outputs/night/last; continue with name=night resume=auto"
    )
    assert str(RunInterrupted(2, 0, 12)) == "stopped by SIGINT at step 0 of 12, nothing saved"
