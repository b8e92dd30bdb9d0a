"""Run folders: what a run may clear, may not mix or overwrite, and how an end that was cut short is made up for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.fit import main
from attnpo.run import report
from attnpo.run.folders import make_folder, run_folder
from attnpo.run.identity import make_identity
from attnpo.run.resume import clear_folder, find_checkpoint
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.training.checkpoint_folders import STATE, read_checkpoint_info
from attnpo.training.metrics_file import read_metrics
from tests.run.worlds import World
from tests.training.processes import in_two_processes

SHORT = ("trainer.validate_every=1", "callbacks.samples=0", "callbacks.report=false")


@pytest.fixture(scope="module")
def done(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder."""
    folder = tmp_path_factory.mktemp("done") / "run"
    run(world.config(*SHORT), folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_speed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.endswith("_per_s")} for row in rows]


# ------------------------------------------------------------------------------------------------ foreign files


def test_a_folder_with_files_of_others_is_refused_before_anything_is_read(world: World, tmp_path: Path) -> None:
    """Not even the data are looked for, and every file stays."""
    folder = tmp_path / "outputs"
    for name in ("logs/theirs.txt", "best/model.bin", "metrics.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs")
    before = contents(folder)
    nowhere = World(world.model, tmp_path / "nowhere", world.store)
    with pytest.raises(UserError, match=r"outputs must be empty or .* contains best, logs, metrics\.csv: set name="):
        run(nowhere.config(*SHORT), folder)
    (folder / "config.yaml").write_text("theirs: too\n")
    with pytest.raises(UserError, match="and more: set name="):
        clear_folder(folder)
    (folder / "config.yaml").unlink()
    assert contents(folder) == before


def test_a_run_clears_what_a_run_wrote_and_nothing_else(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    for name in ("logs/mine.txt", "notes.md", "log.txt"):
        (folder / name).write_text("kept")
    (folder / "report.html").write_text("of the earlier run")
    clear_folder(folder)
    assert set(contents(folder)) == {"config.yaml", "logs/mine.txt", "notes.md", "log.txt"}


def test_the_folder_of_a_point_that_has_only_its_log_is_taken(tmp_path: Path) -> None:
    """Also when it was killed while its configuration was being written."""
    for name in ("log.txt", "error.txt", "config.yaml.part", ".nfs0001"):
        (tmp_path / name).write_text("x")
    clear_folder(tmp_path)
    assert len(contents(tmp_path)) == 4


# ------------------------------------------------------------------------------------------------ two runs, one folder


def test_a_checkpoint_of_another_folder_is_not_mixed_with_the_run_that_is_there(
    world: World, done: Path, tmp_path: Path
) -> None:
    for held in ("last", "result.json"):
        folder = tmp_path / held.partition(".")[0]
        folder.mkdir()
        (folder / held).symlink_to(done / held)
        with pytest.raises(UserError, match=r"resume=.*another folder, but .* contains a (run|finished)") as refused:
            run(world.config(*SHORT, f"resume={done / 'best'}"), folder)
        assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_a_finished_run_without_checkpoints_is_not_overwritten(world: World, tmp_path: Path) -> None:
    overrides = (*SHORT, "callbacks=none", "experiment=none", "name=x", f"output={tmp_path}")
    assert main(world.config(*overrides)) == 0
    before = contents(tmp_path / "x")
    with pytest.raises(UserError, match=r"x contains a finished run: .*resume=auto.* another name"):
        main(world.config(*overrides, "seed=3"))
    assert contents(tmp_path / "x") == before
    assert main(world.config(*overrides, "resume=auto")) == 0
    assert contents(tmp_path / "x") == before


def test_a_run_forked_after_the_last_step_has_a_whole_folder(world: World, done: Path, tmp_path: Path) -> None:
    """Its own last/, exported, and the rows of its source."""
    folder = tmp_path / "fork"
    source = contents(done)
    result = run(world.config(*SHORT, f"resume={done / 'last'}"), folder)
    assert contents(done) == source
    assert result.steps == 3 and read_checkpoint_info(folder / "last")["step"] == 3
    assert (folder / "last" / "model.safetensors").read_bytes() == (done / "last" / "model.safetensors").read_bytes()
    numbers = make_identity(world.config(*SHORT, "resume=auto")).numbers
    assert find_checkpoint("auto", folder, numbers) == folder / "last" / STATE
    assert read_metrics(folder / "metrics.csv") == read_metrics(done / "metrics.csv")


def test_a_run_forked_midway_ends_like_its_source(
    world: World, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was stopped after its second step; the rows up to there come from it."""
    source, folder = tmp_path / "source", tmp_path / "fork"
    with monkeypatch.context() as patch:
        patch.setattr("attnpo.training.checkpoints.LastCheckpoint.save", _until(2))
        with pytest.raises(RuntimeError, match="killed"):
            run(world.config(*SHORT), source)
    assert read_checkpoint_info(source / "last")["step"] == 2
    rows = contents(source)["metrics.csv"]
    run(world.config(*SHORT, f"resume={source / 'last'}"), folder)
    assert contents(source)["metrics.csv"] == rows
    assert without_speed(read_metrics(folder / "metrics.csv")) == without_speed(read_metrics(done / "metrics.csv"))
    assert read_checkpoint_info(folder / "last")["step"] == 3


def _until(step: int) -> Any:
    from attnpo.training.checkpoints import CheckpointFolder

    def save(self: CheckpointFolder, trainer: Any, **named: Any) -> None:
        if trainer.global_step > step:
            raise RuntimeError("killed")
        CheckpointFolder.save(self, trainer, **named)

    return save


# ------------------------------------------------------------------------------------------------ an end cut short


def test_a_run_killed_in_its_report_is_reported_when_it_is_resumed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step was trained and saved, the answers were sampled; resume=auto trains nothing and makes up the rest."""
    folder, cfg = tmp_path / "run", world.config(SHORT[0], "resume=auto")

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "write_run_report", killed)
        with pytest.raises(KeyboardInterrupt):
            run(cfg, folder)
    assert read_checkpoint_info(folder / "last")["step"] == 3 and not (folder / "result.json").exists()
    state = (folder / "last" / STATE).read_bytes()
    rows, numbers = read_metrics(folder / "metrics.csv"), json.loads((folder / "result.json.part").read_text())
    result = run(cfg, folder)
    assert json.loads((folder / "result.json").read_text()) == result.to_json()
    assert result.metrics == numbers["metrics"] and result.steps == 3
    assert (folder / "last" / STATE).read_bytes() == state
    assert read_metrics(folder / "metrics.csv") == rows
    assert (folder / "report.html").is_file() and (folder / "curves.png").is_file()
    assert len((folder / "generations.jsonl").read_text().splitlines()) == 2


def test_a_sharded_run_killed_after_its_last_step_is_finished(world: World, tmp_path: Path) -> None:
    """Nothing gathers the policy when no step is left: it comes from the checkpoint, which holds what is trained."""
    trained = ["model=lora", "model.dtype=bfloat16", "optimizer.lr=1e-3"]
    more = ["experiment=none", "name=two", f"output={tmp_path}", "trainer.strategy=fsdp", "trainer.devices=2"]
    command = ["-m", "attnpo.fit", *world.overrides("batch.micro=1", "callbacks.report=false", *more, *trained)]
    run(world.config("callbacks=none"), tmp_path / "fills the store")
    codes, output = in_two_processes(command, tmp_path)
    assert codes == [0, 0], output[-6000:]
    before = contents(tmp_path / "two")
    (tmp_path / "two" / "result.json").unlink()
    codes, output = in_two_processes([*command, "resume=auto"], tmp_path)
    assert codes == [0, 0], output[-6000:]
    after = contents(tmp_path / "two")
    assert after["generations.jsonl"] == before["generations.jsonl"]
    assert json.loads(after["result.json"])["metrics"] == json.loads(before["result.json"])["metrics"]


# ------------------------------------------------------------------------------------------------ places that cannot be


@pytest.mark.parametrize("form", ["file", "longer"])
def test_an_output_that_cannot_be_is_named_before_anything_is_read(world: World, tmp_path: Path, form: str) -> None:
    (tmp_path / "file").write_text("a file")
    output = {"file": tmp_path / "file", "longer": tmp_path / ("long" * 100)}[form]
    nowhere = World(world.model, tmp_path / "nowhere", world.store)  # its data would not be found
    with pytest.raises(
        UserError, match=r"^output=: cannot create or write to the folder .*: .*; set output="
    ) as refused:
        main(nowhere.config(*SHORT, "experiment=none", "name=x", f"output={output}"))
    assert str(output) in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_in_the_way_of_no_file(tmp_path: Path, world: World) -> None:
    folder = run_folder(world.config("experiment=none", "name=a/b", f"output={tmp_path}"))
    make_folder(folder)
    make_folder(folder)
    assert list(folder.iterdir()) == []
    with pytest.raises(UserError, match=r"^output=: cannot create or write to the folder "):
        make_folder(Path("/dev/null/x"))


# ------------------------------------------------------------------------------------------------ damaged states


@pytest.mark.parametrize("damage", ["empty", "cut", "other"])
def test_a_damaged_state_is_named_before_anything_is_read(
    world: World, done: Path, tmp_path: Path, damage: str
) -> None:
    """With best/ as the way on while that is whole."""
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    (folder / "result.json").unlink()
    state = folder / "last" / STATE
    if damage == "other":
        torch.save({"weights": torch.zeros(2)}, state)
    else:
        state.write_bytes(state.read_bytes()[: 0 if damage == "empty" else -1000])
    nowhere = World(world.model, tmp_path / "nowhere", world.store)
    cfg = nowhere.config(*SHORT, "resume=auto")
    with pytest.raises(UserError) as refused:
        run(cfg, folder)
    text = str(refused.value)
    assert text.startswith(f"resume=auto: {state} is damaged or incomplete") and f"resume={folder / 'best'}" in text
    assert "\n" not in text
    (folder / "best" / STATE).write_bytes(b"x")
    with pytest.raises(UserError, match=r"set resume= to a different checkpoint"):
        find_checkpoint("auto", folder, make_identity(cfg).numbers)
    assert state.exists()


def test_a_damaged_last_is_left_behind_by_way_of_best(world: World, done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    (folder / "result.json").unlink()
    (folder / "last" / STATE).write_bytes(b"")
    result = run(world.config(*SHORT, f"resume={folder / 'best'}"), folder)
    assert result.steps == 3
    numbers = make_identity(world.config(*SHORT, "resume=auto")).numbers
    assert find_checkpoint("auto", folder, numbers) == folder / "last" / STATE
