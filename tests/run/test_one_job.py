"""Commands that meet in one folder: one of them works there, the others say who does and leave everything as it is."""

import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from attnpo import fit
from attnpo.config.compose import compose, load, validate
from attnpo.evaluation.answers import AnswerConfig
from attnpo.generate import main as generate
from attnpo.report import main as report
from attnpo.schema import UserError
from attnpo.system.locks import folder_lock
from tests import warm
from tests.run.worlds import World, build_world
from tests.training.processes import of_torchrun

PLAIN = ("experiment=none", "name=x", "callbacks=none", "weights=uniform", "trainer.validate_every=1")
STUDY = """
# @package study
_target_: attnpo.lab.studies.study.Study
name: tiny
arms: {uniform: [weights=uniform], sharper: [weights=uniform, objective.beta=0.7]}
control: null
seeds: 1
workers: 2
shared: [callbacks=none]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    (folder / "configs" / "experiment").mkdir(parents=True)
    (folder / "configs" / "experiment" / "tiny.yaml").write_text(STUDY)
    return build_world(folder)


def config_dir(world: World) -> Path:
    return world.model.parent / "configs"


class Started(NamedTuple):
    process: warm.Process
    output: Path


@contextmanager
def started(world: World, output: Path, *overrides: str) -> Iterator[Started]:
    """``attnpo.fit`` as a user starts it."""
    command = ["-m", "attnpo.fit", *world.overrides(f"output={output}", *overrides)]
    said = output / f"said-{time.monotonic_ns()}.txt"
    process = warm.start([*command, "--config-dir", str(config_dir(world))], os.environ, said)
    try:
        yield Started(process, said)
    finally:
        process.kill()


def until_locked(folder: Path, first: Started) -> None:
    end = time.monotonic() + 300
    while not list((folder / ".lock").glob("*")):
        assert first.process.poll() is None and time.monotonic() < end, first.output.read_text()
        time.sleep(0.05)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_two_starts_under_one_name_one_trains(world: World, tmp_path: Path) -> None:
    """Config and result are of one run."""
    with started(world, tmp_path, *PLAIN, "seed=1") as first, started(world, tmp_path, *PLAIN, "seed=2") as second:
        codes = [process.wait(timeout=300) for process, _ in (first, second)]
        said = [output.read_text() for _, output in (first, second)]
    assert sorted(codes) == [0, 2], said
    refused = said[codes.index(2)].splitlines()
    assert re.match(r"error: .*/x (is in use by process \d+ on host|contains a finished run)", refused[-1]), refused
    seed = codes.index(0) + 1
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert (result["seed"], OmegaConf.load(tmp_path / "x" / "config.yaml").seed) == (seed, seed)
    assert not (tmp_path / "x" / ".lock").exists()


@pytest.mark.parametrize("kind", ["run", "study"])
def test_a_second_start_is_refused_until_the_first_is_gone(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """SIGKILL needs no hand. A study's workers work under its lock."""
    given = PLAIN if kind == "run" else ("experiment=tiny", "name=x")
    cfg = world.config(*given, f"output={tmp_path}", "trainer.max_steps=1", "seed=2", config_dir=config_dir(world))
    with started(world, tmp_path, *given, "trainer.max_epochs=100000") as first:
        until_locked(tmp_path / "x", first)
        with pytest.raises(UserError) as refused:
            fit.main(cfg)
        text = f"{tmp_path / 'x'} is in use by process {first.process.pid} on host {socket.gethostname()} since 2"
        assert str(refused.value).startswith(text) and "\n" not in str(refused.value)
        assert first.process.poll() is None
        first.process.kill()
        first.process.wait(timeout=60)
    with caplog.at_level(logging.INFO):
        assert fit.main(cfg) == 0
    gone = [line for line in caplog.messages if "has exited; taking over its lock" in line]
    assert [f"process {first.process.pid} on host" in line for line in gone] == [True]
    results = [json.loads(path.read_text())["seed"] for path in (tmp_path / "x").rglob("result.json")]
    assert results == [2] * (1 if kind == "run" else 2)
    assert not (tmp_path / "x" / ".lock").exists()


def test_a_refused_start_reads_and_writes_nothing(world: World, tmp_path: Path) -> None:
    """A run that is over, or that has other settings, is told who works there all the same."""
    cfg = world.config(*PLAIN, f"output={tmp_path}", "trainer.max_steps=1")
    assert fit.main(cfg) == 0
    with folder_lock(tmp_path / "x"):
        before = contents(tmp_path)
        for more in ([], ["seed=1"], ["resume=auto"], ["resume=nowhere"]):
            with pytest.raises(UserError, match="is in use by process"):
                fit.main(world.config(*PLAIN, f"output={tmp_path}", *more))
        assert contents(tmp_path) == before
    with pytest.raises(UserError, match="contains a finished run"):
        fit.main(cfg)
    assert contents(tmp_path).keys() == before.keys() - {name for name in before if ".lock" in name}


def test_a_run_that_is_refused_leaves_no_folder(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        fit.main(world.config(*PLAIN, f"output={tmp_path}", "resume=nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_the_other_processes_of_a_job_come_in(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get as far as their leader does; here to the end of a run that is over."""
    cfg = world.config(*PLAIN, f"output={tmp_path}", "trainer.max_steps=1", "resume=auto")
    assert fit.main(cfg) == 0
    for name, value in {**of_torchrun(1), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with folder_lock(tmp_path / "x"):
        assert fit.main(cfg) == 0
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError, match="is in use by process"):
            fit.main(cfg)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_number_of_seconds(value: str) -> None:
    with pytest.raises(UserError, match="lock_timeout: expected"):
        validate(compose("fit", [f"lock_timeout={value}"]), complete=False)


# ------------------------------------------------------------------------------------------------ other commands


def answering(world: World, output: Path, *more: str) -> AnswerConfig:
    overrides = [f"model.path={world.model}", f"data.path={world.data}", f"output={output}", "trainer.accelerator=cpu"]
    return load("generate", [*overrides, "sampling.max_new_tokens=2", "data.rows='2'", *more])


def test_a_file_of_answers_is_written_by_one_job(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files beside it are free; each process of a job has a part of its own."""
    with folder_lock(tmp_path, file="answers.jsonl"):
        with pytest.raises(
            UserError, match=r"/answers\.jsonl is in use by process .* choose another location with output=FILE\.jsonl"
        ):
            generate(answering(world, tmp_path / "answers.jsonl"))
        assert generate(answering(world, tmp_path / "others.jsonl")) == 0
    assert generate(answering(world, tmp_path / "answers.jsonl")) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with folder_lock(tmp_path, file="shared.part0.jsonl"):
        assert generate(answering(world, tmp_path / "shared.jsonl")) == 0
    with folder_lock(tmp_path, file="shared.part1.jsonl"), pytest.raises(UserError, match="is in use by process"):
        generate(answering(world, tmp_path / "shared.jsonl"))


def test_a_report_is_written_by_one_job(world: World, tmp_path: Path) -> None:
    def asked(*more: str) -> Any:
        return load("report", ["what=[weights]", *world.overrides("name=r", f"output={tmp_path}", *more)])

    with folder_lock(tmp_path / "r"), pytest.raises(UserError, match="/r is in use by process"):
        report(asked())
    assert list(tmp_path.iterdir()) == []
    assert report(asked()) == 0
    with pytest.raises(UserError, match="contains the report of another command"):
        report(asked("top=3"))
    assert report(asked("lock_timeout=5")) == 0  # the same report
