"""``load_run`` and ``load_study``: a tiny study that ran, read as frames; folders that are something else."""

import csv
import json
import math
from pathlib import Path

import pytest

import attnpo
from attnpo.lab.results import read_study
from attnpo.lab.studies.tables import main_table
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.system.files import safe_filename
from experiments.gains.cases import LENGTH, Harvest, collect_study_cases
from tests.docs.test_own_data import write_model
from tests.gains.test_gains import Ran, a_study, record
from tests.lab.reports.test_reporting import a_run as bare_run
from tests.lab.reports.test_reporting import a_study as older_study
from tests.lab.studied import Finished
from tests.run.worlds import VAL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python_api.md"


@pytest.fixture(scope="module")
def study(true_study: Finished) -> Path:
    return true_study.folder


def point_of(study: Path) -> Path:
    """The folder of one of its points."""
    (folder,) = study.glob(f"points/{safe_filename('attention L2')}-*-beta=0.2-*")
    return folder


def test_a_run_as_frames(study: Path) -> None:
    folder = point_of(study)
    run = attnpo.load_run(str(folder))
    assert run.result == RunResult.read((folder / "result.json").read_text(encoding="utf-8"))
    assert run.notes == () and run.config["trainer"]["max_steps"] == 3  # type: ignore[index,call-overload]
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        written = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)]
    assert len(run.metrics) == len(written) and str(run.metrics["step"].dtype) == "Int64"
    last = written[-1]
    assert {name: run.metrics.iloc[-1][name] for name in last} == last
    curve = run.curves.query("split == 'train' and metric == 'loss'")
    assert list(curve["value"]) == [row["train/loss"] for row in written if "train/loss" in row] and len(curve) == 3
    lines_ = [json.loads(line) for line in (folder / "generations.jsonl").read_text(encoding="utf-8").splitlines()]
    assert list(run.samples["policy"]) == [line["policy"] for line in lines_] and len(lines_) == 2
    assert run.samples["prompt"][0] == f"user: {lines_[0]['prompt'][0]['content']}"
    assert run.result.truth is not None
    assert dict(zip(run.scores["split"], run.scores["reward"], strict=True)) == {
        split: scores.numbers["reward"] for split, scores in run.result.truth.items()
    }


def test_a_study_as_frames(true_study: Finished, study: Path) -> None:
    found = attnpo.load_study(study)
    assert found.is_finished
    arms = ["uniform", "attention L2"] * 2  # at two betas
    rewards = [run.result.truth["test"].numbers["reward"] for run in found.runs() if run.result.truth]
    assert list(found.points["arm"]) == arms and list(found.points["test/reward"]) == rewards
    columns, rows = main_table(true_study.outcome)
    assert list(found.arms.columns) == columns
    assert [list(found.arms[name].dropna()) for name in ("reward", "KL")] == [
        [row[name] for row in rows] for name in ("reward", "KL")
    ]
    assert len(found.tables) == 2
    assert list(found.samples["arm"]) == [arm for arm in arms for _ in range(2)]
    assert set(found.samples.columns) >= {"seed", "prompt", "policy", "reference"} and len(found.predictions) == 0
    assert [run.result.seed for run in found.runs("attention L2", 0)] == [0, 0] and found.runs("uniform", 1) == []
    frontier = found.frontier
    assert len(frontier) == 4 and frontier.groupby("arm")["chosen"].sum().to_dict() == dict.fromkeys(arms, 1)
    rows = {row["kl"]: row for row in frontier.to_dict("records")}
    assert len(rows) == 4
    for run in found.runs():
        assert run.result.truth is not None
        test = run.result.truth["test"]
        row = rows[test.numbers["kl"]]
        assert row["low"] <= row["reward"] <= row["high"]
        assert row["reward"] == pytest.approx(sum(test.rewards) / len(test.rewards))
    chosen = frontier[frontier["chosen"]]
    shown = dict(zip(found.arms["arm"], found.arms["KL"], strict=True))
    assert {arm: shown[arm] for arm in chosen["arm"]} == dict(zip(chosen["arm"], chosen["kl"], strict=True))


def test_reward_at_a_kl_by_hand(tmp_path: Path) -> None:
    """One point a seed at KL 1 and 4: linear in the root of KL from the base, which is not known here."""
    ran = {("w: a", 0): Ran(0.5, 0.9), ("w: a", 1): Ran(0.7, 0.9), ("w: b", 0): Ran(0.2, 4.0)}
    folder = a_study(tmp_path / "s", {"w: a": record("x"), "w: b": record("y")}, ran)
    study = attnpo.load_study(folder)
    (row,) = study.at_kl(1.0).to_dict("records")
    assert (row["world"], row["arm"], row["mark"], row["seeds"]) == ("w", "a", "<", 2)
    assert row["reward"] == pytest.approx(0.6) and row["kl"] == pytest.approx(0.9)
    assert dict(zip(study.frontier["arm"], study.frontier["reward"], strict=True)) == pytest.approx(
        {"a": 0.6, "b": 0.2}
    )
    with pytest.raises(UserError, match="expected a KL above 0"):
        study.at_kl(-1.0)


def test_its_gains_are_read(true_study: Finished) -> None:
    """From the command's overrides through its points to ``experiments.gains``."""
    results = [result for _, result in true_study.outcome.points]
    level = 0.9 * min(result.truth["test"].numbers["kl"] for result in results if result.truth)
    harvest = Harvest()
    collect_study_cases(read_study(true_study.folder), "out", level, harvest)
    (case,) = harvest.cases().to_dict("records")
    assert case["world"] == "out" and harvest.lost == {}
    assert 0 < case["effective share"] <= 1
    assert all(math.isfinite(case[name]) for name in ("agreement with labels", LENGTH, "training pairs"))


def test_what_is_not_finished_says_so(tmp_path: Path) -> None:
    bare_run(tmp_path / "s" / "points" / "uniform-seed0-0", None)
    (tmp_path / "s" / "predictions.json").write_text("{}")
    study = attnpo.load_study(tmp_path / "s")
    assert not study.is_finished and list(study.points["run"]) == ["uniform-seed0-0"] and len(study.samples) == 0
    for frame in ("arms", "frontier"):
        with pytest.raises(UserError, match=r"no tables yet.*not finished, 1 of 1 started points"):
            getattr(study, frame)
    (run,) = study.runs()
    assert math.isclose(run.result.metrics["val/loss"], 0.5) and "not checked" in run.notes[0]
    with pytest.raises(UserError, match=r"the run's setting has no known reward"):
        run.scores  # noqa: B018
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match=r"the run is not finished: it has config\.yaml but no result\.json.*name=r"):
        attnpo.load_run(tmp_path / "r")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    run, study = bare_run(tmp_path / "r", 0.5), older_study(tmp_path / "s", {"uniform": 0.5})
    with pytest.raises(UserError, match=r"found a run; use load_run"):
        attnpo.load_study(run)
    with pytest.raises(UserError, match=r"found a study; use load_study"):
        attnpo.load_run(study)
    for load in (attnpo.load_run, attnpo.load_study):
        with pytest.raises(UserError, match=r"expected the folder of a finished study .* found r/, s/"):
            load(tmp_path)
        with pytest.raises(UserError, match=r"it does not exist"):
            load(tmp_path / "nowhere")
    (run / "result.json").write_text('{"seed": 1}')
    with pytest.raises(UserError, match=r"cannot be read as a run result"):
        attnpo.load_run(run)


def test_the_page_runs(true_study: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python_api.md, block after block; others: tests/test_fitting.py, run/test_plain_lightning.py, TRL's own."""
    blocks = [part.partition("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
    elsewhere = ("DPOTrainer", "attnpo.train(", "L.Trainer(")
    mine = [block for block in blocks if not any(word in block for word in elsewhere)]
    assert len(blocks) - len(mine) == 4 and len(mine) == 5
    write_model("llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNPO_CACHE", str(tmp_path / "cache"))
    names: dict[str, object] = {
        "RUN": str(point_of(true_study.folder)),
        "STUDY": true_study.folder,
        "MODEL": str(tmp_path / "model"),
        "PAIRS": true_study.world.data,
    }
    for block in mine:
        exec(compile(block, "page", "exec"), names)
    assert "<!DOCTYPE html>" in (tmp_path / "weights.html").read_text(encoding="utf-8")
    assert len((tmp_path / "weights.jsonl").read_text(encoding="utf-8").splitlines()) > VAL
    assert (tmp_path / "weights.parquet").is_file()
