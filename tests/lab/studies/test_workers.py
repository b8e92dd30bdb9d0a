"""Points in processes of their own: one that is killed costs no other; where a GPU is used there is one at a time."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.lab.studies import workers
from attnpo.lab.studies.workers import EDITED, KILLED, Job, WorkerSettings, needs_gpu, run_jobs
from tests.run.fragile import fragile

TWO = WorkerSettings(2, None, None, 1.0)


def outcomes(
    names: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, here: bool = False
) -> dict[str, tuple[Any, str | None]]:
    """What became of jobs of these names, two at a time."""
    monkeypatch.setattr(workers, "run_point", fragile)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    jobs: list[Job] = [([name], folder) for name in names]
    ended = run_jobs(jobs, TWO, here)
    found = {names[place]: (result and result["name"], error) for place, result, error in ended}
    assert found.keys() == set(names)
    return found


def test_a_killed_point_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the one beside it again and those that waited; the culprit is tried by itself once.

    A GPU of the machine keeps no study on a CPU from running in processes.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = outcomes(["killed", "beside", "third", "fourth"], tmp_path, monkeypatch)
    assert found == {"killed": (None, KILLED), **{name: (name, None) for name in ("beside", "third", "fourth")}}
    assert len((tmp_path / "killed").read_text().splitlines()) == 2
    ran = [(tmp_path / name).read_text().splitlines() for name in ("third", "fourth")]
    assert [len(lines) for lines in ran] == [1, 1] and [str(os.getpid())] not in ran


def test_a_point_that_was_killed_beside_another_may_do_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(["unlucky", "beside"], tmp_path, monkeypatch)
    assert found == {"unlucky": ("unlucky", None), "beside": ("beside", None)}


def test_a_last_point_that_is_killed_does_not_take_the_study_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated command has that one point left."""
    (tmp_path / "beside").write_text("ran\n")
    assert outcomes(["killed"], tmp_path, monkeypatch) == {"killed": (None, KILLED)}


def test_points_on_a_gpu_run_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(["third", "fourth"], tmp_path, monkeypatch, here=True)
    assert {(tmp_path / name).read_text() for name in ("third", "fourth")} == {f"{os.getpid()}\n"}


def test_a_process_that_would_import_edited_code_runs_no_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of the points are named by the source that the study began with; here by an earlier one."""
    monkeypatch.setattr(workers, "source_digest", lambda: "another")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    jobs: list[Job] = [(["seed=0"], tmp_path / name) for name in ("one", "two")]
    assert sorted(run_jobs(jobs, TWO)) == [(0, None, EDITED), (1, None, EDITED)]
    assert not list(tmp_path.iterdir())


def test_an_edit_while_a_worker_imports_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start the files were those of the study; this process stands for a worker that has imported by now."""
    edited: list[str] = []
    monkeypatch.setattr(workers, "_source", ["what the study began with"])
    monkeypatch.setattr(workers, "_edited", edited)
    for seed in (0, 1):
        assert workers.run_point([f"seed={seed}"], tmp_path / "point", None, None, None) == (None, EDITED)
    assert edited == [EDITED] and not list(tmp_path.iterdir())


STUDY = """
import os, sys
from pathlib import Path
from attnpo.lab.studies import workers
from tests.run.fragile import fragile
if __name__ == "__main__":
    workers.run_point = fragile
    os.cpu_count = lambda: 2
    jobs = [(["beside"], Path(place)) for place in sys.argv[1:]]
    list(workers.run_jobs(jobs, workers.WorkerSettings(2, None, None, 1.0)))
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that is over but not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_the_processes_of_a_study_end_with_it(tmp_path: Path) -> None:
    """SIGKILL, which leaves no time to end them."""
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    study = subprocess.Popen(
        [sys.executable, script, *places], env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    )
    files = [place / "beside" for place in places]
    try:
        for _ in range(1200):
            if all(file.exists() and file.read_text().endswith("\n") for file in files):
                break
            assert study.poll() is None
            time.sleep(0.1)
        workers = [int(file.read_text()) for file in files]
        assert all(map(alive, workers))
    finally:
        study.kill()
        study.wait()
    deadline = time.monotonic() + 15
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize(
    ("there", "accelerators", "expected"),
    [
        (True, ["cpu", "cpu"], False),
        (True, ["cpu", "auto"], True),
        (True, ["gpu"], True),
        (False, ["auto"], False),
        (True, [], False),
    ],
)
def test_a_study_on_a_cpu_leaves_the_gpu_of_its_machine_alone(
    there: bool, accelerators: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert needs_gpu(accelerators) == expected


def stopped_point(folder: Path) -> None:
    """A worker whose point a signal ends, and whose queue never gives it anything again."""

    def stop(*settings: object) -> None:
        raise KeyboardInterrupt

    workers.load = stop  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        workers.run_point([], folder, None, None, 1)
    time.sleep(300)


def test_a_worker_that_a_signal_ended_is_gone_soon(tmp_path: Path) -> None:
    """Another, killed while it waited for a point, may have kept the queue's lock: the study waited for ever."""
    worker = get_context("spawn").Process(target=stopped_point, args=(tmp_path,))
    worker.start()
    worker.join(120)
    ended = worker.exitcode
    worker.kill()
    assert ended == 1
