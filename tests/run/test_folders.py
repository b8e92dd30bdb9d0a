"""Run folders: never shared by two runs, always shared by the processes of one."""

from pathlib import Path

import pytest

from attnpo.config.compose import load
from attnpo.run.folders import STAMP, run_folder
from attnpo.schema import UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STAMP, "WORLD_SIZE", "RANK", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")  # so that what the code sets is undone afterwards
        monkeypatch.delenv(name)


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    cfg = load("fit", ["experiment=none", f"output={tmp_path}"])
    first = run_folder(cfg)
    first.mkdir()
    assert (first.name, run_folder(cfg).name) == ("run-20260101-000000", "run-20260101-000000-2")


def test_a_study_is_found_again_under_its_setting(tmp_path: Path) -> None:
    cfg = load("fit", ["experiment=layer_sweep", f"output={tmp_path}"])
    assert run_folder(cfg) == tmp_path / "layer_sweep-testbed"
    other = load("fit", ["experiment=layer_sweep", "setting=real_smoke", f"output={tmp_path}"])
    assert run_folder(other) == tmp_path / "layer_sweep-real_smoke"
    assert run_folder(load("fit", [f"output={tmp_path}"])).name.startswith("quickstart-2")


def test_several_processes_share_a_folder_or_ask_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load("fit", ["experiment=none", f"output={tmp_path}"])
    launched = run_folder(cfg)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_folder(cfg) == launched
    monkeypatch.delenv(STAMP)
    with pytest.raises(UserError, match="2 processes: set name=NAME"):
        run_folder(cfg)
    assert run_folder(load("fit", ["experiment=none", "name=x", f"output={tmp_path}"])) == tmp_path / "x"


def test_resuming_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"resume=auto .* needs name=NAME"):
        run_folder(load("fit", ["experiment=none", "resume=auto", f"output={tmp_path}"]))
