"""A disk that is full, or a folder that is removed, beneath a command: one line, with the file and what is kept."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnpo import evaluate, fit, generate, pair, report, show, weigh
from attnpo.cli.entry import run_entry
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.evaluation.jsonl_store import JsonlStore, KeyedRow, ReplyStore
from attnpo.lab.studies import workers
from attnpo.schema import Message
from tests.bad_input.conftest import Record
from tests.run.worlds import World, build_world

KEPT = "files written earlier are intact: free space, or choose a folder on another disk, and rerun the same command"
LOST = "the file that did not fit"
LARGEST = 900  # bytes: a lock fits, nothing that a command leaves does


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A disk that is full within any file beyond ``size`` bytes.

    What is imported there is not compiled to a file, which Python would leave cut short and never read again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    compiles = sys.dont_write_bytecode
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            sys.dont_write_bytecode = compiles


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """A world whose store is filled, and a folder with a run of it, prompts and answers."""
    folder = tmp_path_factory.mktemp("full")
    world = build_world(folder / "world")
    argv = world.overrides(f"output={folder}", "name=run", "trainer.max_steps=1", "callbacks.report=false")
    assert run_entry(fit.main, "fit", [*argv, "experiment=none"], "", "") == 0
    prompts = [{"prompt": f"question {n}", "uid": f"u{n}"} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    answers = [{**row, "answer": f"answer {n}", "points": n} for row in prompts for n in range(2)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return world, folder


Started = Callable[[World, Path, Path], int]


def start_weigh(world: World, at: Path, out: Path) -> int:
    return run_entry(weigh.main, "weigh", world.overrides(f"export={out / 'weights.jsonl'}"), "", "")


def start_show(world: World, at: Path, out: Path) -> int:
    return show.run_show([f"run={at / 'run'}", "rows=3", f"out={out / 'pair.html'}"])


def start_generate(world: World, at: Path, out: Path) -> int:
    argv = [f"model.path={world.model}", f"data.path={at / 'prompts.jsonl'}", f"output={out / 'answers.jsonl'}"]
    tiny = ("data.columns.id=uid", "sampling.max_new_tokens=6", "trainer.accelerator=cpu")
    return run_entry(generate.main, "generate", [*argv, *tiny], "", "")


def start_pair(world: World, at: Path, out: Path) -> int:
    argv = [f"answers.path={at / 'answers.jsonl'}", "ranker=column", "ranker.column=points"]
    return run_entry(pair.main, "pair", [*argv, f"output={out / 'pairs.jsonl'}"], "", "")


def start_fit(world: World, at: Path, out: Path) -> int:
    argv = world.overrides(f"output={out}", "name=run", "callbacks=none", "experiment=none")
    return run_entry(fit.main, "fit", argv, "", "")


def start_evaluate(world: World, at: Path, out: Path) -> int:
    argv = ["benchmark=implicit_reward", f"model.path={at / 'run' / 'last'}", f"output={out / 'e'}"]
    return run_entry(evaluate.main, "evaluate", [*argv, "trainer.accelerator=cpu"], "", "")


def start_report(world: World, at: Path, out: Path) -> int:
    argv = ["run", str(at / "run"), f"output={out}", "name=r"]
    return run_entry(report.main, "report", argv, "", "", positional="what")


COMMANDS = (*(start_weigh, start_show, start_generate, start_pair, start_fit, start_evaluate), start_report)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.__name__.removeprefix("start_"))
def test_a_full_disk_ends_every_command_with_one_line(
    command: Started, place: tuple[World, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], record: Record
) -> None:
    with files_up_to(LARGEST):
        status = command(*place, tmp_path)
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1) and said.startswith(f"error: {tmp_path}"), said
    assert f" cannot be written: {os.strerror(errno.EFBIG)}; {KEPT}" in said
    record(f"a full disk below {command.__name__.removeprefix('start_')}", said.strip(), LOST)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_run_whose_steps_are_saved_says_how_to_go_on(
    place: tuple[World, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    from attnpo.run import run

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number), "result.json")

    monkeypatch.setattr(run, "write_result", refuse)
    argv = place[0].overrides(f"output={tmp_path}", "name=r", "trainer.max_steps=1", "callbacks.report=false")
    assert run_entry(fit.main, "fit", [*argv, "experiment=none"], "", "") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: result.json cannot be written: {os.strerror(number)}; the last saved step is 1, in "
    )
    assert "free some space, then continue with " in said and "name=r resume=auto" in said and said.count("\n") == 1


def test_a_grade_that_does_not_fit_leaves_those_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = GradingCall("marks", "q", "mark", 0, (Message(role="user", content="q"),), max_tokens=4)

    def grade(cfg: object) -> int:
        store = ReplyStore(tmp_path)
        with store.open_for_writing():
            store.add(call, {"model": "m"}, GradingReply("5"))
            store.add(call, {"model": "n"}, GradingReply("6" * 5000))
        return 0

    with files_up_to(LARGEST):
        assert run_entry(grade, "generate", ["model.path=m", "data.path=d"], "", "") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'grades.jsonl'} cannot be written: ") and KEPT in said
    with ReplyStore(tmp_path).open_for_writing():
        pass  # removes the half line
    assert len(ReplyStore(tmp_path)) == 1


def test_a_point_on_a_full_disk_is_told_by_its_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log lies there as well: neither a line of it that fails nor its end hides what the point says."""

    def refuse(*arguments: object) -> None:
        logging.getLogger("attnpo").warning("a line of the point's log")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.csv")

    monkeypatch.setattr(workers, "load", refuse)
    (tmp_path / "log.txt").symlink_to("/dev/full")
    result, problem = workers.run_point([], tmp_path, None, None, None)
    assert result is None and problem is not None
    assert problem.startswith(f"metrics.csv cannot be written: {os.strerror(errno.ENOSPC)}; {KEPT}")
    assert "Logging error" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [("attnpo.fit", "--help"), ("attnpo.fit", "--cfg", "job")])
def test_output_on_a_full_disk_is_told(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: a file cannot be written: {os.strerror(errno.ENOSPC)}; ")


def test_a_folder_that_is_removed_beneath_a_command_is_told(
    place: tuple[World, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = JsonlStore.append

    def remove(self: JsonlStore[KeyedRow], rows: Iterable[KeyedRow]) -> None:
        shutil.rmtree(self.path.parent)
        append(self, rows)

    monkeypatch.setattr(JsonlStore, "append", remove)
    assert start_generate(*place, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the folder {tmp_path / 'out'} does not exist: it was removed or renamed while")
    assert said.count("\n") == 1
