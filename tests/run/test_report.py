"""What a run and a study send to their tracker and write into the model card."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from attnpo.config.compose import load
from attnpo.display.column_notes import column_notes
from attnpo.display.figures import training_curves
from attnpo.display.page import KeyValues, TableBlock
from attnpo.lab.studies.arms import make_composer
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.page import publish_study
from attnpo.lab.studies.study import Arm, Point, Study
from attnpo.lab.testbed.scoring import NUMBERS
from attnpo.run.input_summary import example_statistics
from attnpo.run.report import (
    card_facts,
    flat_numbers,
    inputs_section,
    log_run_to_wandb,
    make_exporter,
    readable_name,
    true_reward_table,
)
from attnpo.run.result import RunResult
from attnpo.run.run import run
from attnpo.training.loggers import open_loggers
from attnpo.training.model_card import model_card
from tests.run.made import Made, make
from tests.run.worlds import TRAIN, VAL, World
from tests.training.wandb_files import keep_home, only, records, rows, sessions, values

ROOT = Path(__file__).resolve().parents[2]
TRACKED = ("logger=wandb", "logger.wandb.mode=offline")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_home(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def made(world: World) -> Made:
    """What a run has whose train split has lost a row."""
    file = world.data / "train.jsonl"
    lines = file.read_text().splitlines()
    bare = {name: value for name, value in json.loads(lines[0]).items() if name != "rejected"}
    file.write_text("\n".join([*lines, json.dumps({**bare, "rejected": None})]) + "\n")
    return make(world.config("weights.layer=1", "objective.beta=0.037"))


RESULT: dict[str, Any] = {
    "seed": 0,
    "steps": 3,
    "seconds": {"train": 1.5, "all": 2.5},
    "metrics": {"val/loss": 0.625, "first/val/loss": 0.6931},
    "versions": {"torch": "2"},
    "truth": {"scores": {"test": {"reward": 0.25, "kl": 1.5, "rewards": [0.0, 0.5]}}},
}


# ------------------------------------------------------------------------------------------------ page


def test_inputs_and_scores_are_tables_with_words_for_heads() -> None:
    places = {"p50": 1, "p90": 2, "p99": 3, "max": 4}
    split = {"read": 9, "unmatched_share": 0.5, "lengths": places, "tokens": {"chosen": {**places, "max": 7}}}
    given = {
        "train": split,
        "val": {**split, "read": 5},
        "judge_prompts": {"read": 8},
        "label_mass": {"written": [["is", 6], ["a", 2]]},
    }
    result = RunResult.from_json({**RESULT, "inputs": given})
    single, spread, rest = inputs_section(result).blocks
    assert isinstance(single, TableBlock) and isinstance(spread, TableBlock) and isinstance(rest, KeyValues)
    assert single.columns == ["entry", "training", "validation"]
    assert single.rows == [["read", 9, 5], ["unmatched share", 0.5, 0.5]]
    assert spread.columns[:2] == ["length in tokens", "training p50"] and spread.columns[-1] == "validation max"
    assert spread.rows == [["lengths", *[1, 2, 3, 4] * 2], ["chosen", *[1, 2, 3, 7] * 2]]
    assert rest.values == {"judge prompts: read": 8, "label mass: written": "'is' (6), 'a' (2)"}
    assert result.truth is not None
    table = true_reward_table(result.truth)
    assert table.rows == [["test", 0.25, 1.5]] and list(table.columns) == ["prompts", "reward", "KL"]
    assert set(table.notes) == set(table.columns)


def test_every_score_against_the_truth_is_explained() -> None:
    heads = ["KL" if name == "kl" else readable_name(name) for name in NUMBERS]
    assert set(column_notes(heads)) == set(heads) and "base broken" in heads


# ------------------------------------------------------------------------------------------------ tracker


def media(session: Path, row: dict[str, Any], key: str) -> Path:
    return session / "files" / str(row[f"{key}/path"])


def flat_rows(session: Path) -> list[dict[str, Any]]:
    """History rows with nested values under joined keys."""
    found = []
    for record in records(session):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def test_a_run_sends_its_result_account_samples_curves_and_heat_maps(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    training_curves([{"step": 0.0, "train/loss": 0.7}, {"step": 1.0, "train/loss": 0.6}], folder / "curves.png", "x")
    turns = [{"role": "user", "content": "say <b>"}]
    (folder / "generations.jsonl").write_text(json.dumps({"prompt": turns, "policy": "good", "reference": "bad"}))
    settings = made.cfg.callbacks
    result = RunResult.from_json({**RESULT, "inputs": example_statistics(made.inputs)})
    logger = make_config(made, *TRACKED).logger
    with open_loggers(logger, folder, {}) as loggers:
        loggers[-1].log_metrics({"train/loss": 0.6}, step=2)
        log_run_to_wandb(loggers, made.inputs, result, made.base.tokenizer, settings, folder)
    (session,) = sessions(folder)
    last = flat_rows(session)[-1]
    assert (last["_step"], last["trainer/global_step"]) == (3, 3)
    page = media(session, last, "weights/heat_maps").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.count("heat-row") > settings.heat_maps and "wandb.ai" not in page
    with Image.open(media(session, last, "curves")) as picture:
        assert picture.size[0] > 100
    samples = json.loads(media(session, last, "samples").read_text())
    assert samples["columns"] == ["prompt", "policy", "reference"]
    assert samples["data"] == [["user: say <b>", "good", "bad"]]
    account = json.loads(media(session, last, "account").read_text())
    entries = {row[0]: row[1:] for row in account["data"]}
    assert account["columns"] == ["entry", "train", "val"] and entries["read"] == [TRAIN + 1, VAL]
    assert entries["pairs"] == [TRAIN, VAL]
    assert entries["coverage"] == [result.inputs[split]["coverage"] for split in ("train", "val")]
    summary: dict[str, Any] = {}
    for record in records(session):
        if record.WhichOneof("record_type") == "summary":
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
    assert summary["result/truth/scores/test/reward"] == 0.25
    assert summary["result/metrics/first/val/loss"] == 0.6931
    assert summary["result/inputs/train/read"] == TRAIN + 1


def make_config(made: Made, *more: str) -> Any:

    return load("fit", [*made.cfg.composed.overrides, *more])


def test_what_was_switched_off_is_not_sent(made: Made, tmp_path: Path) -> None:
    """An earlier run's files may lie in the folder; without a tracker nothing is sent at all."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "generations.jsonl").write_text("rubbish of an earlier run")
    (folder / "curves.png").write_bytes(b"rubbish")
    cfg = make_config(made, *TRACKED, "callbacks.samples=0", "callbacks.report=false", "callbacks.heat_maps=0")
    result = RunResult.from_json({**RESULT, "inputs": example_statistics(made.inputs)})
    with open_loggers(cfg.logger, folder, {}) as loggers:
        log_run_to_wandb(loggers, made.inputs, result, made.base.tokenizer, cfg.callbacks, folder)
        log_run_to_wandb(loggers[:1], made.inputs, result, made.base.tokenizer, made.cfg.callbacks, folder)
    (row,) = flat_rows(sessions(folder)[0])
    assert {key.partition("/")[0] for key in row if not key.startswith("_")} == {"account", "trainer"}


def test_points_of_a_study_share_a_group(world: World) -> None:
    study = Study("it's a sweep", {"uniform": []})
    assert make_composer(world.config(), study).tracked == ()
    assert make_composer(world.config(*TRACKED, "logger.wandb.group=mine"), study).tracked == ()
    more = make_composer(world.config(*TRACKED), study).tracked
    assert world.config(*TRACKED, *more).logger.wandb.group == "it's a sweep"


def study_outcome(folder: Path, arms: list[Arm], accuracies: tuple[float, ...], **more: Any) -> Outcome:
    """Returns the outcome of a study with one point for each arm."""
    split = {"effective_share": 0.5, "coverage": 1.0}
    common = {"inputs": {"train": split, "val": split}, "steps": 3, "seconds": {"all": 1.5}, "truth": None}
    points = [
        (
            Point(arm, (), 7),
            RunResult.from_json({**common, "metrics": {"val/loss": 0.6, "val/rewards/accuracies": one}}),
        )
        for arm, one in zip(arms, accuracies, strict=True)
    ]
    study = Study("duel", {arm.name: [] for arm in arms}, **more)
    return Outcome(study, arms, points, [], {"grid": {}}, folder, 3.0)


def test_a_study_sends_its_table_and_every_point(world: World, tmp_path: Path) -> None:
    outcome = study_outcome(tmp_path / "duel", [Arm("attention", ()), Arm("uniform", ())], (0.75, 0.5))
    publish_study(world.config().logger.wandb, {}, outcome)
    assert not (tmp_path / "duel").exists(), "without logger=wandb nothing is sent"
    cfg = world.config(*TRACKED)
    for _ in range(2):
        publish_study(cfg.logger.wandb, cfg.values, outcome)
    first, second = sessions(tmp_path / "duel")
    runs = [only(session, "run") for session in (first, second)]
    assert runs[0].run_id == runs[1].run_id
    assert (runs[0].run_group, runs[0].job_type, runs[0].display_name) == ("duel", "study", "duel")
    (row,) = flat_rows(first)
    table = json.loads(media(first, row, "study/table").read_text())
    assert [line[table["columns"].index("val accuracy")] for line in table["data"]] == [0.75, 0.5]
    every = json.loads(media(first, row, "study/points").read_text())
    assert [line[:2] for line in every["data"]] == [["attention", 7], ["uniform", 7]]
    assert only(first, "exit").exit_code == 0


def test_the_points_of_a_study_of_worlds_name_theirs(world: World, tmp_path: Path) -> None:
    """Else two points of an arm could not be told apart."""
    worlds: dict[str, list[str]] = {"calm": [], "noisy": []}
    arms = [Arm("uniform", (), world=name) for name in worlds]
    outcome = study_outcome(tmp_path / "duel", arms, (0.5, 0.5), worlds=worlds)
    cfg = world.config(*TRACKED)
    publish_study(cfg.logger.wandb, cfg.values, outcome)
    (session,) = sessions(tmp_path / "duel")
    (row,) = flat_rows(session)
    every = json.loads(media(session, row, "study/points").read_text())
    assert every["columns"][:4] == ["world", "arm", "seed", "values"]
    assert [line[:3] for line in every["data"]] == [["calm", "uniform", 7], ["noisy", "uniform", 7]]


def test_numbers_are_found_at_any_depth_and_nothing_else() -> None:
    node = {"a": 1, "b": {"c": 0.5, "d": {"e": 2}, "f": "x"}, "g": [1, 2], "h": True, "i": float("nan"), "j": None}
    assert dict(flat_numbers(node)) == {"a": 1, "b/c": 0.5, "b/d/e": 2}


# ------------------------------------------------------------------------------------------------ card


def facts_of(made: Made) -> dict[str, Any]:
    return card_facts(made.cfg, made.base.spec, made.inputs, example_statistics(made.inputs))


def test_the_card_tells_how_the_run_was_made(world: World, made: Made) -> None:
    facts = facts_of(made)
    assert json.loads(json.dumps(facts)) == facts, "plain data"
    train = facts["data"]["splits"]["train"]
    assert (train["read"], train["kept"]) == (TRAIN + 1, TRAIN)
    assert train["read"] == train["kept"] + sum(train["dropped"].values()) and train["dropped"]
    method = facts["method"]
    assert (method["objective"]["name"], method["objective"]["settings"]["beta"]) == ("TwDPO", 0.037)
    assert (method["weights"]["name"], method["weights"]["settings"]["layer"]) == ("Attention", 1)
    assert method["weights"]["settings"]["postprocess.sink_tokens"] == 1
    assert method["judge"]["name"] == "the base model itself" and 0.0 <= method["verdicts"]["pair_accuracy"] <= 1.0
    arrived = {"coverage", "source_coverage", "kept_mass_chosen", "kept_mass_rejected"}
    assert facts["statistics"]["train"].keys() == arrived | {"effective_share", "unmatched_share"}
    assert facts["hyperparameters"]["optimizer.lr"] == made.cfg.optimizer.lr
    assert facts["base"]["path"] == str(world.model) and facts["base"]["hub"] is None
    assert "objective.beta=0.037" in facts["command"] and f"model.path={world.model}" in facts["command"]
    card = model_card(facts, {"val/loss": 0.5}, step=3)
    assert "base_model" not in yaml.safe_load(card.split("---\n")[1])
    assert "| train | 13 | 12 |" in card and "0.037" in card


def test_the_card_does_not_tell_where_things_lie_that_the_user_did_not_name(
    world: World, made: Made, tmp_path: Path
) -> None:
    """Neither the store nor the output folder, nor the places of what ``prepare`` built there."""
    card = model_card(facts_of(made), {})
    assert str(world.store) not in card and "store=" not in card
    assert not re.search(r"(^|[\s'\"])(output|name|logger)=", card)


def test_without_a_judge_the_card_names_none(world: World) -> None:
    facts = facts_of(make(world.config("weights=uniform")))
    assert facts["method"]["judge"] is None and facts["method"]["verdicts"] is None
    card = model_card(facts, {})
    assert "judge" not in card.partition("## Method")[2].partition("## Token weights")[0].lower()


def test_the_exporter_knows_every_end_and_card_facts_are_optional(made: Made) -> None:
    spec, chat, facts = made.base.spec, made.base.chat, facts_of(made)
    exporter = make_exporter(spec, chat, "bfloat16", None)
    assert set(exporter.end_ids) == chat.end_ids and exporter.facts is None
    assert exporter.dtype == "bfloat16" and make_exporter(spec, chat, None, facts).facts == facts


# ------------------------------------------------------------------------------------------------ whole runs


def test_a_whole_run_is_tracked_and_exported(world: World, tmp_path: Path) -> None:
    """Metrics at the steps of metrics.csv, media after them, one W&B run, a folder with card and generation config.

    A second run in the process is a W&B run of its own.
    """
    folder = tmp_path / "run"
    run(world.config(*TRACKED, "callbacks=none", "trainer.max_steps=1"), tmp_path / "before")
    assert wandb.run is None and len(sessions(tmp_path / "before")) == 1
    result = run(world.config(*TRACKED, "trainer.validate_every=1", "callbacks.export_dtype=bfloat16"), folder)
    (session,) = sessions(folder)
    config = values(only(session, "run").config.update)
    assert config["objective"]["beta"] == 0.1 and config["model"]["path"] == str(world.model)
    seen = rows(session)
    assert [row["_step"] for row in seen if "val/loss" in row] == [0, 1, 2, 3]
    assert [row["_step"] for row in seen if "train/loss" in row] == [0, 1, 2]
    assert all(row["_step"] == row["trainer/global_step"] for row in seen)
    assert next(row for row in reversed(seen) if "val/loss" in row)["val/loss"] == result.metrics["val/loss"]
    last = flat_rows(session)[-1]
    for name in ("account", "samples", "curves", "weights/heat_maps"):
        assert media(session, last, name).is_file(), name
    assert only(session, "exit").exit_code == 0
    ends = GenerationConfig.from_pretrained(folder / "last").eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(folder / "last")
    assert ends == tokenizer.eos_token_id
    assert str(AutoModelForCausalLM.from_pretrained(folder / "last", dtype="auto").dtype) == "torch.bfloat16"
    card = (folder / "last" / "README.md").read_text()
    assert "Validation at step 3" in card and f"| val/loss | {result.metrics['val/loss']:.6g} |" in card


BLOCK = """
import sys
from importlib.machinery import PathFinder
class WithoutWandb(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "wandb" else super().find_spec(name, path, target)
sys.meta_path = [WithoutWandb if finder is PathFinder else finder for finder in sys.meta_path]
from attnpo.fit import main
from attnpo.cli.entry import run_entry
codes = [run_entry(main, "fit", arguments, "", "") for arguments in {arguments!r}]
sys.exit(0 if codes == [0, 2] and "wandb" not in sys.modules else f"exit codes {codes}")
"""


def test_a_whole_run_needs_no_wandb_and_asking_for_it_names_the_package(world: World, tmp_path: Path) -> None:
    first, second = (
        [*world.overrides("experiment=none", f"output={tmp_path}", f"name={name}", *more)]
        for name, more in (("csv", ()), ("tracked", TRACKED))
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = BLOCK.replace("{arguments!r}", repr([first, second]))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "csv" / "report.html").is_file() and (tmp_path / "csv" / "best" / "README.md").is_file()
    assert re.search(r"^error: logger=wandb needs the package wandb.*logger=csv$", done.stderr, re.MULTILINE)
