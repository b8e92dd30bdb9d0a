"""``experiments.gains`` on folders made by hand: who is compared with whom, what was known before, what follows."""

import csv
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from attnpo.display.output import tables_to_json
from attnpo.display.page import Section, TableBlock
from attnpo.lab.results import read_study
from attnpo.schema import UserError
from attnpo.system.files import safe_filename, write_record
from experiments.gains.__main__ import main, report_gains
from experiments.gains.cases import (
    EFFECTIVE,
    FAITHFUL,
    KNOWN,
    LENGTH,
    TRUE_MASS,
    TRUE_NOISE,
    Harvest,
    arms_to_compare,
    collect_study_cases,
    read_cases,
)

SOURCES = "attnpo.weights.sources"
UNIFORM, ATTENTION = f"{SOURCES}.uniform.Uniform", f"{SOURCES}.attention.Attention"
ROLLOUT = f"{SOURCES}.rollout.Rollout"
TWDPO = "attnpo.objectives.twdpo.TwDPO"


def record(source: str, *, noise: float = 0.0, **more: object) -> dict[str, object]:
    """The config of an arm as study.json keeps it; ``__`` in a keyword is a dot."""
    layer = {"weights.layer": 1, "weights.layers": [], "weights.heads": []} if source == ATTENTION else {}
    values = {
        "weights._target_": source,
        "objective._target_": TWDPO,
        "objective.beta": 0.3,
        "objective.loss_type": "sigmoid",
        "optimizer.lr": 5e-05,
        "prepare.pairs.label_noise": noise,
        "transforms": {},
    }
    return {**values, **layer, **{key.replace("__", "."): value for key, value in more.items()}}


@dataclass(frozen=True)
class Ran:
    """A point by hand: its test reward at its KL, and numbers of its judge."""

    reward: float
    kl: float = 1.0
    accuracy: float = 0.75
    share: float = 0.5


def a_study(
    folder: Path, arms: Mapping[str, dict[str, object]], ran: Mapping[tuple[str, int], Ran], worlds: bool = True
) -> Path:
    """A finished study of one grid point, by arm ("world: arm" where it has worlds) and seed."""
    folder.mkdir(parents=True)
    (folder / "tables.json").write_text(tables_to_json([Section("Arms", [TableBlock(["arm"], [["a"]])])]))
    rows, runs = [], []
    for number, ((label, seed), one) in enumerate(ran.items()):
        named = label.split(": ") if worlds else [label]
        place = folder / "points" / f"{safe_filename('-'.join(named))}-lr=5e-05-beta=0.3-seed{seed}-{number:08x}"
        a_point(place, seed, one)
        keys = ["world", "arm"] if worlds else ["arm"]
        grid = {"optimizer.lr": "5e-05", "objective.beta": "0.3"}
        row = dict(zip(keys, named, strict=True)) | {"seed": seed, **grid}
        rows.append(row | {"test/reward": one.reward, "steps": 12, "seconds": 2.5})
        run = {"world": named[0] if worlds else "", "arm": named[-1], "layer": None, "seed": seed}
        values = [f"{key}={value}" for key, value in grid.items()]
        runs.append({**run, "values": values, "folder": f"points/{place.name}"})
    (folder / "study.json").write_text(json.dumps({"arms": arms, "kl_limit": 2.0, "runs": runs}))
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def a_point(place: Path, seed: int, one: Ran, seconds: float = 2.5) -> None:
    scores = {"reward": one.reward, "kl": one.kl, "rewards": [one.reward - 0.5, one.reward + 0.5]}
    tokens = {"chosen": {"p50": 20}, "rejected": {"p50": 24}}
    result = {
        "seed": seed,
        "steps": 12,
        "metrics": {},
        "seconds": {"all": seconds},
        "inputs": {
            "train": {"pairs": 96, "effective_share": one.share, "coverage": 0.9, "tokens": tokens},
            "judge": {"pair_accuracy": one.accuracy, "consistency": 0.8},
        },
        "truth": {"scores": {"test": scores, "validation": {**scores, "rewards": []}}},
    }
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps(result))


def an_analysis(folder: Path, world: str, seed: int, layers: Mapping[int, tuple[float, float]], at: int = 0) -> None:
    """A measure of faithfulness whose score at each layer is the first number, the true mass the second."""
    weights = {
        f"layer {layer}": {"layer": layer, "mass": mass, "remove": {"0.1": [score, score], "0.2": [score, score]}}
        for layer, (score, mass) in layers.items()
    }
    (folder / "analyses").mkdir(exist_ok=True)
    name = safe_filename("-".join(["faithfulness", *([world] if world else []), f"seed{seed}"]))
    path = folder / "analyses" / f"{name}-{at:016x}.json"
    write_record(path, {"of": "x", "found": {"weights": weights}})
    os.utime(path, (1_000_000 - at, 1_000_000 - at))  # a later ``at`` is older


def write_gains(folders: list[Path], tmp_path: Path, level: float = 1.0) -> Path:
    report_gains(folders, level, tmp_path / "r")
    return tmp_path / "r"


def rows_of(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / "gains.csv").open(encoding="utf-8", newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["table"] == table]


def many_worlds(folder: Path, gain: Callable[[float, float], float], worlds: int = 8) -> Path:
    """A study of worlds with three seeds and two layers; ``gain`` of the judge's accuracy and chance."""
    random = np.random.default_rng(3)
    arms, ran = {}, {}
    for number in range(worlds):
        world, accuracy = f"w {number}", random.uniform(0.6, 0.95)
        arms[f"{world}: plain"] = record(UNIFORM, noise=0.1 * number)
        for layer in (1, 2):
            arms[f"{world}: L{layer}"] = record(ATTENTION, noise=0.1 * number, weights__layer=layer)
        for seed in range(3):
            ran[f"{world}: plain", seed] = Ran(0.2, accuracy=float("nan"))
            for layer in (1, 2):
                reward = 0.2 + gain(accuracy, random.normal())
                ran[f"{world}: L{layer}", seed] = Ran(reward, accuracy=accuracy, share=random.uniform())
    return a_study(folder, arms, ran)


# ------------------------------------------------------------------------------------------------ who is compared


def test_arms_are_told_by_their_config() -> None:
    """Names lie here: what is called attention is uniform. Only plain TwDPO on weights as they are read counts."""
    arms = {
        "anchored control": record(UNIFORM, objective__anchor=0.05),
        "attention": record(UNIFORM),
        "uniform": record(ATTENTION, weights__layer=2),
        "rollout": record(ROLLOUT),
        "carried": record(ATTENTION, align__method="characters", objective__length_from="train"),
        "shuffled": record(ATTENTION, transforms__shuffled__seed=0),
        "anchored": record(ATTENTION, objective__anchor=0.05),
        "clipped": record(ATTENTION, objective__clip_ratio=1.0),
        "robust": record(ATTENTION, objective__loss_type="robust"),
        "other objective": record(ATTENTION, objective__beta=0.1) | {"objective._target_": "attnpo.objectives.tdpo.T"},
        "longer": record(ATTENTION, prepare__pairs__train=12) | {"prepare.pairs.label_noise": 0.3},
        "truth": record("attnpo.lab.testbed.importance.TrueImportance"),
        "older": {key: value for key, value in record(ATTENTION).items() if key != "objective.loss_type"},
    }
    told = [("uniform", "attention"), ("rollout", "attention"), ("carried", "attention"), ("older", "attention")]
    assert list(arms_to_compare(arms)) == told


def test_what_is_known_of_a_case_by_hand(tmp_path: Path) -> None:
    arms = {"few, 0.3: u": record(UNIFORM, noise=0.3), "few, 0.3: a": record(ATTENTION, noise=0.3)}
    ran = {("few, 0.3: u", 4): Ran(0.25), ("few, 0.3: a", 4): Ran(0.375, accuracy=0.875, share=0.5)}
    folder = a_study(tmp_path / "s", arms, ran)
    an_analysis(folder, "few, 0.3", 4, {1: (0.7, 0.2), 2: (9.0, 9.0)})
    an_analysis(folder, "0.3", 4, {1: (8.0, 8.0)})
    harvest = Harvest()
    assert collect_study_cases(read_study(folder), "s", 1.0, harvest) == []
    (case,) = harvest.cases().to_dict("records")
    assert (case["world"], case["seed"], case["group"]) == ("s: few, 0.3", 4, "s: few, 0.3, seed 4")
    assert case["gain"] == pytest.approx(0.125)
    assert [case[name] for name in KNOWN] == pytest.approx([0.875, 0.8, 0.5, 96, 0.9, 22, 11, 0.7])
    assert (case[LENGTH], case[EFFECTIVE], case[FAITHFUL]) == pytest.approx((22, 11, 0.7))
    assert (case[TRUE_NOISE], case[TRUE_MASS]) == (0.3, 0.2)


def test_only_points_of_the_tables_count(tmp_path: Path) -> None:
    """Folders of another version or of another grid stay beside the study's own and are not read."""
    arms = {"u": record(UNIFORM), "a": record(ATTENTION)}
    ran = {("u", 0): Ran(0.25), ("a", 0): Ran(0.5)}
    folder = a_study(tmp_path / "s", arms, ran, worlds=False)
    a_point(folder / "points" / "a-lr=5e-05-beta=0.3-seed0-0000000a", 0, Ran(9.0), seconds=3.5)
    a_point(folder / "points" / "a-lr=5e-05-beta=1.0-seed0-0000000b", 0, Ran(9.0))
    harvest = Harvest()
    collect_study_cases(read_study(folder), "s", 1.0, harvest)
    assert harvest.cases()["gain"].tolist() == pytest.approx([0.25])


def test_the_newest_of_several_measures_counts_and_is_named(tmp_path: Path) -> None:
    ran = {("u", 0): Ran(0.25), ("a", 0): Ran(0.5)}
    folder = a_study(tmp_path / "s", {"u": record(UNIFORM), "a": record(ATTENTION)}, ran, worlds=False)
    an_analysis(folder, "", 0, {1: (0.7, 0.2)}, at=9)
    an_analysis(folder, "", 0, {1: (0.5, 0.1)}, at=1)
    harvest = Harvest()
    notes = collect_study_cases(read_study(folder), "s", 1.0, harvest)
    assert notes == ["s: several faithfulness analyses, using the newest: seed 0"]
    assert harvest.cases()[FAITHFUL].tolist() == [0.5]


@pytest.mark.parametrize(
    "found", [["weights"], {"weights": {"layer 1": 0.5}}, {"weights": {"layer 1": {"layer": 1, "share": 0.5}}}]
)
def test_another_analysis_with_weights_of_its_own_is_no_measure_of_faithfulness(tmp_path: Path, found: object) -> None:
    ran = {("u", 0): Ran(0.25), ("a", 0): Ran(0.5)}
    folder = a_study(tmp_path / "s", {"u": record(UNIFORM), "a": record(ATTENTION)}, ran, worlds=False)
    an_analysis(folder, "", 0, {1: (0.7, 0.2)})
    write_record(folder / "analyses" / f"probe-seed0-{1:016x}.json", {"of": "x", "found": found})
    harvest = Harvest()
    assert collect_study_cases(read_study(folder), "s", 1.0, harvest) == []
    assert harvest.cases()[FAITHFUL].tolist() == [0.7]


def test_a_path_that_ends_early_is_no_case(tmp_path: Path) -> None:
    arms = {"u": record(UNIFORM), "a": record(ATTENTION), "b": record(ATTENTION, weights__layer=2)}
    runs = {("u", 0): Ran(0.25), ("u", 1): Ran(0.25, kl=0.5), ("a", 0): Ran(0.5), ("a", 1): Ran(0.5)}
    folder = a_study(tmp_path / "s", arms, {**runs, ("b", 0): Ran(0.5, kl=0.5), ("b", 2): Ran(0.5)}, worlds=False)
    harvest = Harvest()
    collect_study_cases(read_study(folder), "s", 1.0, harvest)
    assert harvest.cases()[["seed", "gain"]].to_numpy().tolist() == [[0, 0.25]]
    assert harvest.lost == {
        "the arm's path has no point near KL 1": 1,
        "the control's path has no point near KL 1": 1,
        "the control has no points with a known truth": 1,
    }


def test_two_studies_with_the_same_runs_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Worlds of the same config are one world under any name; a seed of its own is a case of its own."""
    arms = {"u": record(UNIFORM), "a": record(ATTENTION)}
    both = {("u", 0): Ran(0.25), ("a", 0): Ran(0.5)}
    one = a_study(tmp_path / "one", arms, both, worlds=False)
    ran = {(f"w: {arm}", seed): found for (arm, _), found in both.items() for seed in (0, 1)}
    two = a_study(tmp_path / "two", {f"w: {name}": found for name, found in arms.items()}, ran)
    an_analysis(two, "w", 0, {1: (0.7, 0.2)})
    folder = write_gains([one, two], tmp_path)
    (world,) = rows_of(folder, "worlds")
    assert (world["world"], world["cases"], world["seeds"]) == ("one", "2", "2")
    (faithful,) = [row for row in rows_of(folder, "known") if row["number"] == FAITHFUL]
    assert faithful["cases"] == "1", "what only the second study measured is known of the first's run"
    assert "counted once although several studies have them: 1" in capsys.readouterr().out


def test_cases_stand_for_the_folders_of_their_studies(tmp_path: Path) -> None:
    """Read from the file that an earlier report left, a study counts as from its folder, under its first name."""
    arms = {"u": record(UNIFORM), "a": record(ATTENTION, weights__layer=3)}
    lone = a_study(tmp_path / "lone", arms, {("u", 0): Ran(0.25), ("a", 0): Ran(0.5), ("a", 1): Ran(0.5)}, worlds=False)
    many = many_worlds(tmp_path / "many", lambda accuracy, chance: accuracy - 0.7 + 0.01 * chance)
    together = (write_gains([many, lone], tmp_path / "t") / "gains.csv").read_text()
    file = write_gains([many], tmp_path / "m") / "cases.json"
    shutil.rmtree(many)
    again = write_gains([file, lone], tmp_path / "c")
    rows = [line.split(",") for line in together.splitlines()]
    assert rows and sorted(rows) == sorted(line.split(",") for line in (again / "gains.csv").read_text().splitlines())
    write_gains([file, again / "cases.json"], tmp_path / "both")
    assert (tmp_path / "both" / "r" / "gains.csv").read_text().splitlines()[0] == together.splitlines()[0]
    with pytest.raises(UserError, match=r"cases\.json: expected cases at KL 2, but they are at KL 1; use --kl 1"):
        write_gains([file], tmp_path / "l", 2)
    file.write_text(file.read_text().replace('"seed": 1', '"seed": 2', 1))
    with pytest.raises(UserError, match=r"cases\.json: expected the unchanged cases\.json of an earlier report"):
        write_gains([file], tmp_path / "d")


def test_the_committed_cases_are_whole_and_give_the_pages_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harvest, docs = Harvest(), Path(__file__).parents[2] / "docs"
    read_cases(docs / "gain_cases.json", 0.5, harvest)
    cases = harvest.cases()
    assert set(cases["seed"]) == set(range(20, 30)) and len(cases) == len(harvest.found)
    page = (docs / "results_weights.md").read_text(encoding="utf-8")
    assert f"Of {len(cases)} cases" in page
    assert main([str(docs / "gain_cases.json"), "--kl", "0.5", "--output", str(tmp_path / "r")]) == 0
    assert "nothing known before training predicts the gain here" in " ".join(capsys.readouterr().out.split())
    rows = [line for line in (tmp_path / "r" / "gains.md").read_text(encoding="utf-8").splitlines() if "[-" in line]
    assert len(rows) >= len(KNOWN) and [row for row in rows[: len(KNOWN)] if row not in page] == []
    assert main([str(docs / "gain_cases.json"), "--output", str(tmp_path / "other")]) == 2
    assert "expected cases at KL 1, but they are at KL 0.5; use --kl 0.5" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ what follows


def test_a_planted_number_predicts_and_a_random_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = many_worlds(tmp_path / "planted", lambda accuracy, chance: accuracy - 0.8 + 0.01 * chance)
    folder = write_gains([planted], tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "known before training and predicts the gain here: agreement with labels (" in out
    assert "nothing known before training orders the weights of one judge" in out
    rows = {row["number"]: row for row in rows_of(folder, "known")}
    accuracy, share = rows["agreement with labels"], rows["effective share"]
    assert (accuracy["cases"], accuracy["worlds"]) == ("48", "8")
    assert float(accuracy["sign right"]) > 0.85 > float(accuracy["majority"]) and float(accuracy["left out"]) > 0.8
    assert share["correlation, 95 %"].startswith(("0.", "-0.")) and accuracy["within a world, 95 %"] == ""
    assert any(name.startswith("agreement with labels + ") for name in rows)
    assert (folder / "gains.png").is_file()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 1 and "planted: w 3, seed 2" in page
    assert {row["number"] for row in rows_of(folder, "testbed")} == {TRUE_NOISE, TRUE_MASS}


def test_gains_by_chance_are_predicted_by_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gains([many_worlds(tmp_path / "chance", lambda _, chance: chance)], tmp_path)
    assert "nothing known before training predicts the gain here" in capsys.readouterr().out


def test_a_lone_world_gives_no_interval_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_gains([many_worlds(tmp_path / "lone", lambda accuracy, chance: chance, worlds=1)], tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "1 world: no interval over worlds, and no world can be predicted from others" in out
    rows = rows_of(folder, "known")
    assert rows[2]["correlation, 95 %"].endswith("[no interval]") and rows[2]["sign right"] == ""


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    arms = {"u": record(UNIFORM), "a": record(ATTENTION, transforms__shuffled__seed=0)}
    shuffled = a_study(tmp_path / "shuffled", arms, {("u", 0): Ran(0.25), ("a", 0): Ran(0.5)}, worlds=False)
    with pytest.raises(UserError, match=r"both reaching KL 1, found none; try another --kl or folder"):
        write_gains([shuffled], tmp_path)
    lone = many_worlds(tmp_path / "lone", lambda accuracy, chance: chance, worlds=1)
    with pytest.raises(UserError, match=r"found none \(the arm's path has no point near KL 2: 6\)"):
        write_gains([lone], tmp_path, 2)
    with pytest.raises(UserError, match="--kl: expected a KL above 0, got -1"):
        write_gains([lone], tmp_path, -1)
    told = json.loads((lone / "study.json").read_text())
    (lone / "study.json").write_text(json.dumps({"runs": told["runs"]}))
    with pytest.raises(UserError, match=r"study\.json: expected the configs of the study's arms"):
        write_gains([lone], tmp_path)
    (lone / "tables.json").unlink()
    with pytest.raises(UserError, match="lone: expected a finished study, but it is not finished, 9 of 9"):
        write_gains([lone], tmp_path)
    shutil.rmtree(lone)
    with pytest.raises(UserError, match="it does not exist"):
        write_gains([lone], tmp_path)
