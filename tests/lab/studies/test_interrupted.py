"""Ctrl-C at a study, by processes of its own: what stands stays, its last words say how to go on, and that does."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from attnpo.cli.entry import run_entry
from attnpo.lab.studies import runner
from attnpo.lab.studies.workers import Done, Job
from attnpo.run import run as runs
from attnpo.run.result import RunResult
from attnpo.run.resume import RESULT
from tests.run.worlds import World, build_world

ROOT = Path(__file__).resolve().parents[3]
POINTS = 4
# Of the study that is proposed next, whose points are many.
SMALL = ("grid.lr=[1e-4]", "grid.beta=[0.1]", "grids.length_norm.lr=[1e-4]", "grids.length_norm.beta=[2.0]")
STUDY = """
# @package study
defaults:
  - _base
  - _self_
name: tiny
arms:
  uniform: [weights=uniform]
  attention: [weights=attention]
control: uniform
grid:
  _target_: attnpo.lab.studies.study.Grid
  lr: [1.0e-3]
  beta: [0.2]
seeds: 2
shared: [callbacks=none, reference=cached, trainer.max_steps=1]
"""


@dataclass(frozen=True)
class Ended:
    """What a study left when Ctrl-C had ended it."""

    status: int
    out: str
    errors: str
    left: list[int]
    finished: dict[Path, RunResult]

    @property
    def command(self) -> list[str]:
        """The command that it says goes on."""
        (line,) = [line for line in self.errors.splitlines() if "continue with " in line]
        return shlex.split(line.partition("continue with ")[2])


def of_session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session, *_ = (place / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(place.name))
    return found


def heed_interrupts() -> None:
    """Undoes what tests that a shell runs in the background inherit: there SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def results(output: Path) -> dict[Path, RunResult]:
    """The finished points under a folder."""
    return {path: RunResult.from_json(json.loads(path.read_text(encoding="utf-8"))) for path in output.rglob(RESULT)}


def start(command: Sequence[str]) -> int:
    """The exit status of a printed command, in this process."""
    _, _, module, *words = command
    name = module.removeprefix("attnpo.")
    positional = "what" if name == "report" else None
    return run_entry(import_module(module).main, name, words, "", "", positional=positional)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out put")


@pytest.fixture(scope="module")
def words(output: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What ``fit`` is given."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "tiny.yaml").write_text(STUDY)
    world: World = build_world(tmp_path_factory.mktemp("world"))
    return [*world.overrides("experiment=tiny", f"output={output}"), "--config-dir", str(folder)]


@pytest.fixture(scope="module")
def ended(words: list[str], output: Path) -> Iterator[Ended]:
    """The study after Ctrl-C in its terminal, which reaches all its processes, once a point has ended."""
    with subprocess.Popen(
        [sys.executable, "-m", "attnpo.fit", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as study:
        assert study.stderr is not None
        lines = []
        for line in study.stderr:
            lines.append(line)
            if f"point 1/{POINTS} " in line:
                break
        before = of_session(study.pid)
        os.killpg(study.pid, signal.SIGINT)
        out, errors = study.communicate(timeout=120)
    deadline = time.monotonic() + 15
    while of_session(study.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = of_session(study.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (study.pid in before and len(before) > (os.cpu_count() or 1) > 1) or os.cpu_count() == 1, lines
    yield Ended(study.returncode, out, "".join(lines) + errors, left, results(output))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ctrl_c_ends_every_process_and_says_how_to_go_on(ended: Ended, words: list[str]) -> None:
    assert (ended.status, ended.left) == (130, []), ended.errors
    assert "Traceback" not in ended.errors
    assert ended.errors.splitlines()[-1] == "stopped by SIGINT; stored results are kept"
    assert ended.command == ["python", "-m", "attnpo.fit", *words]
    assert 1 <= len(ended.finished) < POINTS


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_the_table_so_far_is_printed(ended: Ended) -> None:
    assert "of 2 points: the arms cannot be compared yet" in ended.out and "minus" not in ended.out


def test_the_printed_command_goes_on_with_what_is_finished(
    ended: Ended, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each point runs once; then the commands that the finished study prints are run, with points of no training.

    One that ended in a process of its own is taken away and run anew in this one: it ends alike.
    """
    trained: list[Path] = []
    elsewhere = next(iter(ended.finished))
    elsewhere.parent.rename(tmp_path / "elsewhere")
    run = runs.run

    def counted(cfg: object, folder: Path, point: bool) -> RunResult | None:
        trained.append(folder)
        return run(cfg, folder, point=point)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "run", counted)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # points in this process
    assert start(ended.command) == 0
    now = results(output)
    assert len(now) == POINTS and len(trained) == POINTS - len(ended.finished) + 1
    assert now[elsewhere].metrics == pytest.approx(ended.finished[elsewhere].metrics, rel=1e-5, abs=1e-6)
    assert all(now[path] == result for path, result in ended.finished.items() if path != elsewhere)

    ready = next(iter(now.values()))

    def done_already(jobs: Sequence[Job], *settings: object) -> Iterator[Done]:
        yield from ((place, ready, None) for place in range(len(jobs)))

    monkeypatch.setattr(runner, "run_jobs", done_already)
    printed = re.findall(r"^  (python -m attnpo\..*)$", capsys.readouterr().out, re.MULTILINE)
    commands = [shlex.split(line) for line in printed]
    assert [command[2] for command in commands] == ["attnpo.report", "attnpo.fit", "attnpo.fit"]
    monkeypatch.chdir(tmp_path)  # where the report's own folder goes
    assert [start(command) for command in (*commands[:2], [*commands[2], *SMALL])] == [0, 0, 0]
