"""What can happen to the files of a run folder: found, and mended or refused in one line; never another trajectory."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from attnpo import fit, generate, report
from attnpo.config.compose import compose, load, parse_as
from attnpo.lab.studies import runner
from attnpo.lab.studies.arms import ComposedConfig
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.plan import TimeEstimate
from attnpo.lab.studies.shared_inputs import SharedInputs
from attnpo.lab.studies.study import ONLY, Arm, Point, Study
from attnpo.lab.studies.workers import WorkerSettings, run_point
from attnpo.run.identity import load_saved_numbers, make_identity
from attnpo.run.result import RunResult
from attnpo.run.resume import RESULT
from attnpo.schema import UserError
from attnpo.system import files
from attnpo.system.files import file_digest
from attnpo.training.checkpoint_folders import STATE, read_checkpoint_info
from attnpo.training.checkpoints import CheckpointFolder, LastCheckpoint
from attnpo.training.metrics_file import read_metrics
from tests.corruption.damages import DAMAGES, PARSED, SEALED, empty, flip_bit, garbage
from tests.run.worlds import GRAMMAR, World, build_world

KEYS = (
    "experiment=none",
    "weights=uniform",
    "optimizer.lr=0.01",
    "trainer.max_epochs=2",
    "trainer.validate_every=2",
    "callbacks.save_every=1",
    "callbacks.samples=0",
    "callbacks.report=false",
)
STOPPED, STEPS = 3, 6


@dataclass(frozen=True)
class Runs:
    """A run that was killed after its third of six steps (``best/`` is of the second), and the same unbroken."""

    world: World
    stopped: Path
    unbroken: Path
    end: dict[str, Any]
    composed: DictConfig

    def config(self, folder: Path, *more: str) -> FitConfig:
        """What ``attnpo.fit`` is given to go on with the run in ``folder``."""
        more = (f"name={folder.name}", f"output={folder.parent}", "resume=auto", *more)
        return changed(self.composed, *more)


def changed(composed: DictConfig, *more: str) -> FitConfig:
    """A config with more overrides, as composing it anew would give, in a hundredth of the time."""
    cfg = composed.copy()
    for override in more:
        key, _, value = override.partition("=")
        OmegaConf.update(cfg, key, None if value == "null" else value)
    root = parse_as(cfg, FitConfig)
    return root


@contextmanager
def killed(last: int) -> Iterator[None]:
    """Runs here die when they would save a step after ``last``."""

    def save(self: CheckpointFolder, trainer: Any, **named: Any) -> None:
        if trainer.global_step > last:
            raise ZeroDivisionError("killed")
        CheckpointFolder.save(self, trainer, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(LastCheckpoint, "save", save)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Its model has dropout, so that random states matter too."""
    place = tmp_path_factory.mktemp("runs")
    world = build_world(place)
    config = world.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.2}))
    made = Runs(world, place / "stopped", place / "unbroken", {}, world.composed(*KEYS))
    assert fit.main(made.config(made.unbroken)) == 0
    with killed(STOPPED):
        fit.main(made.config(made.stopped))
    steps = {name: read_checkpoint_info(made.stopped / name)["step"] for name in ("best", "last")}
    assert steps == {"best": 2, "last": STOPPED}
    made.end.update(end_of(made.unbroken))
    assert made.end["result"]["steps"] == STEPS
    return made


def end_of(folder: Path) -> dict[str, Any]:
    """All that a finished run leaves but what the clock says."""
    result = json.loads((folder / RESULT).read_text())
    del result["seconds"]
    result["metrics"] = without_speed(result["metrics"])
    return {
        "result": result,
        "rows": [without_speed(row) for row in read_metrics(folder / "metrics.csv")],
        "policies": [(folder / name / "model.safetensors").read_bytes() for name in ("best", "last")],
        "settings": load_saved_numbers(
            folder / "config.yaml", make_identity(load("fit", ["experiment=none"])).ignored_keys
        ),
    }


def without_speed(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.endswith("_per_s")}


def of_sealed(*names: str) -> list[tuple[str, str]]:
    """Files under a seal, and the seal, with what befalls them."""
    return [(file, name) for file in names for name in SEALED] + [("digests.json", name) for name in PARSED]


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@cache
def composed(entry: str, *overrides: str) -> DictConfig:
    return compose(entry, list(overrides))


def answer(command: Callable[[], object]) -> str | None:
    """The one line in which a command was refused, or None when it ran; any other error is a traceback."""
    try:
        command()
    except UserError as refused:
        assert "\n" not in str(refused)
        return str(refused)
    return None


def test_a_state_is_not_read_again_for_its_digest(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken from what goes to the disk, and is that of the file; a resumed run reads it once."""
    read: list[str] = []

    def digest(path: Path) -> str:
        read.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(files, "file_digest", digest)
    folder = copied(runs.stopped, tmp_path / "run")
    assert fit.main(runs.config(folder)) == 0
    assert read.count(STATE) == 1 and read.count("model.safetensors") >= 2
    monkeypatch.undo()
    for name in ("best", "last"):
        assert files.describe_change(folder / name) is None
        assert STATE in files.read_checksums(folder / name)


# ------------------------------------------------------------------------------------------------ going on

STATES = ("first bit", "bit in the middle", "last bit", "cut in half", "removed")
CASES = [
    *((f"last/{STATE}", name) for name in STATES),
    *((f"{place}.json", name) for place in ("last/checkpoint", "best/checkpoint") for name in SEALED),
    *(("last/metrics.csv", name) for name in SEALED),
    *(("last/digests.json", name) for name in DAMAGES),
    *((file, name) for file in ("config.yaml", "metrics.csv") for name in ("empty", "removed")),
]


@pytest.mark.parametrize(("file", "name"), CASES)
def test_a_damaged_run_is_not_gone_on_with_as_another(runs: Runs, tmp_path: Path, file: str, name: str) -> None:
    """It ends like the unbroken one to the bit, or is refused in a line that names what is damaged."""
    folder = copied(runs.stopped, tmp_path / "run")
    DAMAGES[name](folder / file)
    refusal = answer(lambda: fit.main(runs.config(folder)))
    if refusal is None:
        assert file in ("config.yaml", "metrics.csv")
        assert end_of(folder) == runs.end
        return
    assert str((folder / file).parent) in refusal and Path(file).name in refusal
    way = folder / "best" if file.startswith("last/") else None
    assert way is None or f"continue with resume={way}" in refusal
    assert not (folder / RESULT).exists()


def test_the_way_that_a_refusal_names_ends_like_the_unbroken_run(runs: Runs, tmp_path: Path) -> None:
    folder = copied(runs.stopped, tmp_path / "run")
    flip_bit(folder / "last" / STATE)
    assert answer(lambda: fit.main(runs.config(folder, f"resume={folder / 'best'}"))) is None
    assert end_of(folder) == runs.end


def test_a_best_that_is_as_new_takes_the_place_of_a_damaged_last(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost by it, so nobody need be asked."""
    folder = copied(runs.stopped, tmp_path / "run")
    shutil.rmtree(folder / "last")
    shutil.copytree(folder / "best", folder / "last")
    flip_bit(folder / "last" / STATE)
    assert answer(lambda: fit.main(runs.config(folder))) is None
    (line,) = [text for text in caplog.messages if "has changed since it was written" in text]
    assert f"{folder / 'best'}" in line
    assert end_of(folder) == runs.end


@pytest.mark.parametrize("worse", ["last/state.ckpt", "best/checkpoint.json", "both"])
def test_a_point_of_a_study_mends_itself(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture, worse: str
) -> None:
    """From best/, or from the beginning; its line is in the log and its end that of the unbroken run."""
    folder = copied(runs.stopped, tmp_path / "run")
    for file in ("last/state.ckpt", "best/state.ckpt") if worse == "both" else (worse,):
        garbage(folder / file)
    given = [*runs.world.overrides(*KEYS), f"name={folder.name}", f"output={folder.parent}"]
    _, error = run_point(given, folder, None, None, None)
    assert error is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    way = (
        "this run starts from the beginning"
        if worse in ("both", "best/checkpoint.json")
        else f"resuming from {folder / 'best'}"
    )
    assert way in line and "\n" not in line
    assert end_of(folder) == runs.end


def test_files_of_others_beside_a_checkpoint_do_not_matter(runs: Runs, tmp_path: Path) -> None:
    folder = copied(runs.stopped, tmp_path / "run")
    (folder / "last" / "notes.txt").write_text("mine")
    (folder / "best" / "README.md").write_text("mine")
    (folder / "best" / "model.safetensors").unlink()
    assert answer(lambda: fit.main(runs.config(folder))) is None
    assert end_of(folder)["result"] == runs.end["result"]


# ------------------------------------------------------------------------------------------------ finished runs


def finished(runs: Runs, folder: Path) -> RunResult | None:
    """What a study takes as the result of its only point, whose folder this is; None where it would run it."""
    point, study = Point(Arm("uniform", ()), (), 0), Study("one", {"uniform": []})
    plan = SimpleNamespace(study=study, workers=WorkerSettings(1, None, None, 0))
    pace = TimeEstimate(folder.parent / "pace.json", "", 1)
    so_far = runner.StudyProgress(plan, folder.parent, pace, {(ONLY, 0): SharedInputs(ONLY, 0)})  # type: ignore[arg-type]
    own = {(ONLY, "uniform"): ComposedConfig(runs.composed, runs.world.overrides(*KEYS))}
    ran: list[Path] = []

    def execute(jobs: list[tuple[list[str], Path]], *_: Any) -> Iterator[Any]:
        ran.extend(at for _, at in jobs)
        yield from ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "point_folder", lambda *_: folder)
        patch.setattr(runner, "run_jobs", execute)
        so_far.run_points([point], own)
    assert [*(one for one, _ in so_far.done), *ran] == [folder if ran else point], "taken or run"
    return dict(so_far.done).get(point)


@pytest.mark.parametrize(("file", "name"), of_sealed(RESULT, "config.yaml"))
def test_a_damaged_result_is_none_for_a_study(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, name: str
) -> None:
    """The point is run again, and one line says why; without a result it is not finished anyway."""
    folder = tmp_path / "point"
    folder.mkdir()
    for part in (RESULT, "config.yaml", "digests.json"):
        shutil.copy(runs.unbroken / part, folder / part)
    assert finished(runs, folder) is not None and not caplog.messages
    DAMAGES[name](folder / file)
    assert finished(runs, folder) is None
    if (file, name) != (RESULT, "removed"):
        (line,) = caplog.messages
        assert str(folder) in line and file in line and "\n" not in line


@pytest.mark.parametrize(("file", "name"), [(RESULT, "an empty object"), ("digests.json", "empty")])
def test_a_damaged_result_is_made_again(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, name: str
) -> None:
    """The run is not finished: it is scored again from its last step, and one line says why."""
    folder = copied(runs.unbroken, tmp_path / "run")
    DAMAGES[name](folder / file)
    assert answer(lambda: fit.main(runs.config(folder))) is None
    (line,) = [text for text in caplog.messages if "treated as unfinished" in text]
    assert str(folder) in line and file in line
    assert end_of(folder) == runs.end


def test_a_damaged_result_without_a_checkpoint_is_not_overwritten(runs: Runs, tmp_path: Path) -> None:
    """What settings made it cannot be known: a study's point, whose folder they name, is run anew."""
    folder = copied(runs.unbroken, tmp_path / "run")
    shutil.rmtree(folder / "last")
    shutil.rmtree(folder / "best")
    (folder / "config.yaml").write_text("{}")
    refusal = answer(lambda: fit.main(runs.config(folder)))
    assert (
        refusal is not None and "config.yaml has changed since it was written" in refusal and "another name" in refusal
    )
    assert (folder / RESULT).exists()
    given = [*runs.world.overrides(*KEYS), f"name={folder.name}", f"output={folder.parent}"]
    assert run_point(given, folder, None, None, None)[1] is None
    assert end_of(folder) == runs.end


# ------------------------------------------------------------------------------------------------ reports


def reported(folder: Path, output: Path) -> str | None:
    cfg = changed(composed("report"), f"output={output}", "name=r")
    return answer(lambda: report.main(cfg.with_value("what", (str(folder),))))


@pytest.mark.parametrize(("file", "name"), of_sealed(RESULT, "config.yaml"))
def test_a_damaged_run_is_not_reported(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, name: str
) -> None:
    folder = copied(runs.unbroken, tmp_path / "run")
    DAMAGES[name](folder / file)
    refusal = reported(folder, tmp_path)
    if name == "removed" and file == "digests.json":  # so are those of earlier versions
        assert refusal is None and "run: it has no digests.json" in capsys.readouterr().out
        return
    assert refusal is not None and str(folder) in refusal and file in refusal


@pytest.fixture(scope="module")
def study(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two points."""
    place = tmp_path_factory.mktemp("study")
    (place / "configs" / "experiment").mkdir(parents=True)
    (place / "configs" / "experiment" / "tiny.yaml").write_text(STUDY)
    keys = ("experiment=tiny", f"output={place}", "name=study")
    assert fit.main(runs.world.config(*keys, config_dir=place / "configs")) == 0
    return place / "study"


STUDY = """\
# @package study
_target_: attnpo.lab.studies.study.Study
name: tiny
arms:
  uniform: [weights=uniform]
  attention: [weights=attention]
grid: {lr: [1e-3], beta: [0.2]}
seeds: 1
workers: 1
shared: [callbacks=none, reference=cached, trainer.max_steps=1]
"""


@pytest.mark.parametrize(("file", "name"), of_sealed("table.md", "tables.json", "results.csv", "study.json"))
def test_a_damaged_study_is_not_reported(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, name: str
) -> None:
    folder = copied(study, tmp_path / "study")
    DAMAGES[name](folder / file)
    refusal = reported(folder, tmp_path)
    if name == "removed" and file == "digests.json":
        assert refusal is None and "it has no digests.json" in capsys.readouterr().out
        return
    assert refusal is not None and str(folder) in refusal and file in refusal and "command again" in refusal


@pytest.mark.parametrize("file", [RESULT, "config.yaml"])
@pytest.mark.parametrize("done", [True, False], ids=["finished", "not finished"])
def test_a_damaged_point_is_left_out_and_named(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, done: bool
) -> None:
    folder = copied(study, tmp_path / "study")
    point = sorted((folder / "points").iterdir())[0]
    empty(point / file)
    if not done:
        for name in ("table.md", "tables.json", "results.csv", "study.json", "digests.json"):
            (folder / name).unlink()
    assert reported(folder, tmp_path) is None
    out = " ".join(capsys.readouterr().out.split())
    assert f"{point.name}: {file} has changed since it was written" in out
    assert done or "not finished, 1 of 2 started points have a result" in out


# ------------------------------------------------------------------------------------------------ policies


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": GRAMMAR.prompts("train")[0].text}) + "\n")
    return path


def answered(model: Path, prompts: Path, output: Path) -> str | None:
    more = ("sampling.max_new_tokens=2", "trainer.accelerator=cpu")
    cfg = load("generate", [f"model.path={model}", f"data.path={prompts}", f"output={output / 'answers.jsonl'}", *more])
    return answer(lambda: generate.main(cfg))


@pytest.mark.parametrize(
    ("file", "name"), of_sealed("model.safetensors", "config.json", "generation_config.json", "tokenizer.json")
)
def test_a_damaged_policy_answers_nothing(
    runs: Runs, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, name: str
) -> None:
    model = copied(runs.unbroken / "best", tmp_path / "best")
    DAMAGES[name](model / file)
    refusal = answered(model, prompts, tmp_path)
    if name == "removed" and file == "digests.json":  # any other folder has none either
        assert refusal is None
        return
    assert refusal is not None and str(model) in refusal and file in refusal


def test_a_damaged_policy_is_not_trained_further(runs: Runs, tmp_path: Path) -> None:
    model = copied(runs.unbroken / "best", tmp_path / "best")
    flip_bit(model / "model.safetensors")
    cfg = runs.config(tmp_path / "next", f"model.path={model}", "resume=null")
    refusal = answer(lambda: fit.main(cfg))
    assert refusal is not None and "model.safetensors has changed since it was written" in refusal


def test_a_policy_with_files_of_others_is_loaded(runs: Runs, prompts: Path, tmp_path: Path) -> None:
    """A card that was edited, a file that was added, a training state that was left out."""
    model = copied(runs.unbroken / "best", tmp_path / "best")
    (model / "README.md").write_text("mine")
    (model / "quantised.gguf").write_text("mine")
    (model / STATE).unlink()
    assert answered(model, prompts, tmp_path) is None
