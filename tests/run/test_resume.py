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
from attnpo.run.identity import BESIDE, KEPT, LATER, NEEDED, PATHS, identity_of
from attnpo.run.result import RunResult
from attnpo.run.resume import check_same, find_resume, finished, refuse_taken
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.system.files import seal
from attnpo.training.checkpoint_folders import STATE, read_account
from attnpo.training.interrupted import Interrupted
from attnpo.training.module import PreferenceModule
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
    identity = identity_of(world.config(*SHORT, "resume=auto", change))
    for look in (lambda: finished(folder, identity), lambda: find_resume("auto", folder, identity.numbers)):
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
    numbers = identity_of(world.config(*SHORT, "resume=auto", change)).numbers
    assert find_resume("auto", folder, numbers) == folder / "last" / STATE


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
    numbers = identity_of(world.config()).numbers
    assert "model.path" not in numbers and "optimizer.lr" in numbers


def test_keys_that_older_versions_wrote_beside_the_numbers_do_not_stop_a_run() -> None:
    stored = {"optimizer.lr": 1e-4, "verbalizer.max_length": 300, "other_judge.path": None, "default_layer": 1}
    check_same(stored, {"optimizer.lr": 1e-4}, Path("last"))
    check_same(stored, {"optimizer.lr": 1e-4, "model.came_later": None}, Path("last"))
    with pytest.raises(UserError, match=r"optimizer\.betas was \[0\.9, 0\.95\] in last and is 'nothing' now"):
        check_same({**stored, "optimizer.betas": [0.9, 0.95]}, {"optimizer.lr": 1e-4}, Path("last"))


def test_an_option_that_came_later_is_read_as_what_runs_did_before_it(
    world: World, done: tuple[Path, RunResult]
) -> None:
    """A run saved without these keys goes on, and only as it was."""
    stored = read_account(done[0] / "last")["config"]
    older = {key: value for key, value in stored.items() if key not in LATER}
    unread = {
        key
        for key in LATER
        if key in ("judge.span_drop", "optimizer.decay_all") or key.startswith(("prepare.", "truth.", "callbacks."))
    }  # this run prepares nothing, knows no truth, decays no weight, and callbacks do not tell trainings apart
    assert stored.keys() - older.keys() == LATER.keys() - unread
    check_same(older, identity_of(world.config(*SHORT)).numbers, Path("last"))
    for change, was in (
        ("optimizer.warmup_from=zero", "'first'"),
        ("lengths.keep=end", "'start'"),
        ("batch.shuffle=false", "True"),
    ):
        key = change.partition("=")[0]
        for saved in (older, stored):
            with pytest.raises(UserError, match=rf"^resume: {key} was {was} in last and is "):
                check_same(saved, identity_of(world.config(*SHORT, change)).numbers, Path("last"))


class Killed(Exception):
    """Stands for the end of a process in the middle of its training."""


def test_a_run_that_was_saved_when_all_weights_decayed_goes_on_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same command, twice; it ends with the numbers of a run that was never stopped, and so it is saved."""
    command = (*SHORT, "weights=uniform", "optimizer.weight_decay=5", "optimizer.lr=1e-2", "optimizer.warmup=0")
    unbroken = run(world.config(*command, "optimizer.decay_all=true"), tmp_path / "unbroken")
    folder = tmp_path / "run"

    def earlier(place: Path) -> None:
        """Takes the key out of what a run has saved, as a version without it left that."""
        account = json.loads((place / "checkpoint.json").read_text())
        assert account["config"].pop("optimizer.decay_all") is True
        (place / "checkpoint.json").write_text(json.dumps(account))
        seal(place)

    def kill_at(step: int, *changes: str) -> None:
        def begin(module: PreferenceModule, *batch: object) -> None:
            if module.trainer.global_step == step:
                raise Killed
            establish(module, *batch)

        establish = PreferenceModule.on_train_batch_start
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(PreferenceModule, "on_train_batch_start", begin)
            run(world.config(*command, *changes), folder)

    kill_at(1, "optimizer.decay_all=true")
    for name in ("last", "best"):
        earlier(folder / name)
    kill_at(2, "resume=auto")
    assert "weight decay still applies to all weights" in caplog.text
    assert "optimizer.decay_all" not in read_account(folder / "last")["config"]
    ended = run(world.config(*command, "resume=auto"), folder)
    assert ended.steps == 3 and ended.metrics == unbroken.metrics
    assert "decay_all" not in OmegaConf.load(folder / "config.yaml").optimizer
    assert run(world.config(*command, "resume=auto"), folder) == ended, "a finished one gives its result"
    other = run(world.config(*command), tmp_path / "new")
    assert other.metrics["val/loss"] != unbroken.metrics["val/loss"]
    with pytest.raises(UserError, match=r"^resume: optimizer\.decay_all was False in .* and is True now"):
        run(world.config(*command, "optimizer.decay_all=true", "resume=auto"), tmp_path / "new")


def test_which_weights_decay_is_no_part_of_a_run_that_decays_none(world: World) -> None:
    """So that its identity is what it was before there was the key."""
    plain = identity_of(world.config())
    assert "optimizer.decay_all" not in plain.numbers
    assert identity_of(world.config("optimizer.weight_decay=0.1")).numbers["optimizer.decay_all"] is False
    assert plain.result == identity_of(world.config("optimizer.decay_all=true")).result


def test_a_run_of_an_earlier_version_goes_on(world: World) -> None:
    """``older_run.json`` is what the quickstart's checkpoint said of itself at commit c83c58e, with true labels."""
    older = json.loads((Path(__file__).parent / "older_run.json").read_text(encoding="utf-8"))
    with pytest.raises(UserError, match=r"label_noise was 0\.0 in last and is 0\.25 now"):
        check_same(older, identity_of(load("fit", ["weights=attention", "objective.beta=0.3"])).numbers, Path("last"))
    asked = identity_of(load("fit", ["weights=attention", "prepare=clean", "objective.beta=0.3"])).numbers
    later = {key for key, value in asked.items() if key not in older and value is not None}
    assert later - LATER.keys() == set()
    check_same(older, asked, Path("last"))
    moved = {key for key, value in older.items() if key.endswith("._target_") and asked[key] != value}
    assert "judge._target_" in moved  # a class that has changed its module since
    with pytest.raises(
        UserError, match=r"^resume: judge\._target_ was 'attnpo\.studies\.judging\.Judge' in last and is "
    ):
        check_same(older, {**asked, "judge._target_": "attnpo.judge.settings.OtherJudge"}, Path("last"))


def test_keys_of_reference_spans_count_where_spans_are_those(world: World) -> None:
    spans = ["judge.span_drop=1", "judge.span_closing=x"]
    plain_spans = load("fit", ["weights=attention", *spans])
    assert identity_of(plain_spans).numbers == identity_of(load("fit", ["weights=attention"])).numbers
    as_theirs = identity_of(load("fit", ["weights=attention", "judge.span=reference", *spans])).numbers
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
    numbers = identity_of(world.config(*SHORT, "resume=auto")).numbers
    assert find_resume("auto", tmp_path, numbers) == tmp_path / "last.new" / STATE
    (tmp_path / "last.old").rmdir()  # without it the new one may be half written
    assert find_resume("auto", tmp_path, numbers) is None


def test_a_new_run_does_not_take_a_folder_with_checkpoints(world: World, done: tuple[Path, RunResult]) -> None:
    folder, _ = done
    with pytest.raises(UserError, match=r"holds a run that was saved after step 3: .*resume=auto.* another name"):
        refuse_taken(folder)
    there = ("experiment=none", f"name={folder.name}", f"output={folder.parent}")
    with pytest.raises(UserError, match=r"holds a run that was saved after step 3: "):
        main(world.config(*SHORT, *there))
    assert main(world.config(*SHORT, *there, "resume=auto")) == 0
    refuse_taken(folder / "free")


def test_a_run_that_starts_anew_leaves_nothing_of_the_one_before(world: World, tmp_path: Path) -> None:
    """The runner of a study starts unfinished points anew in their folders."""
    folder = tmp_path / "run"
    run(world.config(*SHORT, "trainer.max_epochs=2"), folder)
    assert read_account(folder / "last")["step"] == 6
    run(world.config(*SHORT, "callbacks=none"), folder)
    assert not (folder / "last").exists() and not (folder / "best").exists()
    assert json.loads((folder / "result.json").read_text())["steps"] == 3
    assert "\n4," not in (folder / "metrics.csv").read_text()


def test_what_an_interrupted_run_says() -> None:
    stop = Interrupted(15, 7, 12, Path("outputs/night/last"))
    assert stop.exit_status == 143
    assert (
        str(stop) == "stopped by SIGTERM at step 7 of 12, saved outputs/night/last; go on with name=night resume=auto"
    )
    assert str(Interrupted(2, 0, 12)) == "stopped by SIGINT at step 0 of 12, nothing saved"
