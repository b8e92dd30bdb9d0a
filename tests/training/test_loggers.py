"""W&B runs as their own file records them: config, steps, media, exit codes, sessions; and life without the package."""

import json
import sys
from pathlib import Path

import pytest

from attnpo.schema import UserError
from attnpo.training.loggers import (
    STEP,
    WandbRunLogger,
    load_or_create_run_id,
    make_loggers,
    open_loggers,
    wandb_loggers,
)
from attnpo.training.metrics_file import LOGS
from attnpo.training.settings import LoggerSettings, WandbSettings
from tests.training.wandb_files import keep_home, only, records, rows, sessions, values

OFFLINE = LoggerSettings(WandbSettings(mode="offline", group="a study", tags=("one", "two")))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_home(tmp_path, monkeypatch)


def test_a_run_is_recorded_by_optimiser_step_with_its_plain_config_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {"objective": {"beta": 0.1}, "batch": {"pairs": 4}, "tags": ["x"], "seeds": None}
    with open_loggers(OFFLINE, tmp_path / "run", config) as loggers:
        tracker = wandb_loggers(loggers)[0]
        tracker.log_metrics({"val/loss": 0.7}, step=0)
        tracker.log_metrics({"train/loss": 0.6}, step=0)
        tracker.log_metrics({"train/loss": 0.5}, step=1)
        tracker.log_metrics({"val/loss": 0.4}, step=2)
    assert tuple(capfd.readouterr()) == ("", "")
    (session,) = sessions(tmp_path / "run")
    run = only(session, "run")
    assert (run.project, run.run_group, run.display_name, run.job_type) == ("attnpo", "a study", "run", "train")
    assert list(run.tags) == ["one", "two"]
    stored = values(run.config.update)
    assert {key: value for key, value in stored.items() if key != "_wandb"} == config
    assert [(row["_step"], row[STEP], row.get("val/loss"), row.get("train/loss")) for row in rows(session)] == [
        (0, 0, 0.7, 0.6),
        (1, 1, None, 0.5),
        (2, 2, 0.4, None),
    ]
    metrics = [record.metric for record in records(session) if record.WhichOneof("record_type") == "metric"]
    assert [(metric.name or metric.glob_name, metric.step_metric) for metric in metrics] == [(STEP, ""), ("*", STEP)]
    assert only(session, "exit").exit_code == 0
    assert not any(record.WhichOneof("record_type") in ("output", "output_raw") for record in records(session))


@pytest.mark.parametrize(("error", "code"), [(UserError, 1), (KeyboardInterrupt, 130), (SystemExit, 130)])
def test_a_run_that_ends_early_says_so(tmp_path: Path, error: type[BaseException], code: int) -> None:
    def broken() -> None:
        with open_loggers(OFFLINE, tmp_path / "run", {}) as loggers:
            loggers[-1].log_metrics({"train/loss": 1.0}, step=0)
            raise error("enough")

    with pytest.raises(error):
        broken()
    (session,) = sessions(tmp_path / "run")
    assert only(session, "exit").exit_code == code and rows(session)[0]["train/loss"] == 1.0


def test_a_resumed_session_continues_the_id_and_another_run_has_its_own(tmp_path: Path) -> None:
    for start in (0, 3):
        with open_loggers(OFFLINE, tmp_path / "run", {}) as loggers:
            loggers[-1].log_metrics({"train/loss": 1.0}, step=start)
    with open_loggers(OFFLINE, tmp_path / "other", {}) as loggers:
        loggers[-1].log_metrics({"train/loss": 1.0}, step=0)
    first, second = sessions(tmp_path / "run")
    ids = [only(session, "run").run_id for session in (first, second, *sessions(tmp_path / "other"))]
    assert ids[0] == ids[1] != ids[2]
    assert [rows(session)[0]["_step"] for session in (first, second)] == [0, 3]
    assert json.loads((tmp_path / "run" / LOGS / "wandb.json").read_text()) == {"id": ids[0]}


def test_the_id_survives_rubbish_and_a_sweep_may_give_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_or_create_run_id(tmp_path)
    assert load_or_create_run_id(tmp_path) == made and len(made) == 8
    (tmp_path / LOGS / "wandb.json").write_text("{")
    assert load_or_create_run_id(tmp_path) != made
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-agent")
    assert load_or_create_run_id(tmp_path / "swept") == "of-the-agent" != load_or_create_run_id(tmp_path)


def test_two_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    """A run that is open elsewhere in the process is neither written to nor closed."""
    pair = [WandbRunLogger(WandbSettings(mode="offline"), tmp_path / name, {}) for name in ("a", "b")]
    for number, tracker in enumerate(pair):
        tracker.log_metrics({"value": float(number)}, step=0)
    pair[0].close("success")
    pair[1].log_metrics({"value": 5.0}, step=1)
    pair[1].close("failed")
    assert [[row["value"] for row in rows(sessions(tmp_path / name)[0])] for name in ("a", "b")] == [[0.0], [1.0, 5.0]]


def test_a_run_that_logged_nothing_starts_nothing(tmp_path: Path) -> None:
    with open_loggers(OFFLINE, tmp_path / "run", {}):
        pass
    assert not (tmp_path / "run").exists()


def test_online_without_an_account_names_the_ways_out(tmp_path: Path) -> None:
    tracker = WandbRunLogger(WandbSettings(mode="online"), tmp_path / "run", {})
    with pytest.raises(UserError, match=r"wandb login.*logger\.wandb\.mode=offline.*logger=csv"):
        tracker.log_metrics({"value": 1.0}, step=0)


def test_the_environment_can_put_an_online_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_loggers(LoggerSettings(WandbSettings()), tmp_path / "run", {}) as loggers:
        loggers[-1].log_metrics({"value": 1.0}, step=0)
    assert len(sessions(tmp_path / "run")) == 1


# ------------------------------------------------------------------------------------------------ without the package


def test_a_missing_package_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"logger=wandb needs the package wandb.*pip install wandb.*logger=csv"):
        make_loggers(OFFLINE, tmp_path / "run", {})
    alone = make_loggers(LoggerSettings(), tmp_path / "run", {})
    assert len(alone) == 1 and wandb_loggers(alone) == []
    assert not (tmp_path / "run").exists()
