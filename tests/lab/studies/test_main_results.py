"""The study of the paper's main table: its rows, their grids on every setting, and the table in the paper's shape."""

import csv
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from attnpo.config.compose import load
from attnpo.lab.results import run_row
from attnpo.lab.studies.arms import (
    ComposedConfig,
    check_distinct_arms,
    check_user_overrides,
    make_composer,
    point_config,
)
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.page import finish_study
from attnpo.lab.studies.runner import run_study
from attnpo.lab.studies.study import Arm, Grid, Point, Study, expand_arms, make_points
from attnpo.lab.studies.tables import RANK, main_table, mean_ranks, ranking_sections
from attnpo.run.combinations import require_reference
from attnpo.run.identity import make_identity
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from tests.run.worlds import World

LLAMAS = ("llama3_8b_base_sft", "llama3_8b_instruct")


@cache
def composed(*overrides: str) -> FitConfig:
    """The study's configuration, which must not be changed."""
    return load("fit", ["experiment=main_results", *overrides])


@cache
def arms_on(setting: str) -> dict[tuple[str, str], ComposedConfig]:
    """Every arm's configuration by world and name, composed once."""
    return make_composer(composed(f"setting={setting}"), study_on(setting)).compose_all_arms()


def study_on(setting: str) -> Study:
    made = composed(f"setting={setting}").study
    assert isinstance(made, Study)
    return made


# ------------------------------------------------------------------------------------------------ rows and grids


def test_the_rows_are_the_papers(paper_tables: Path) -> None:
    """In its order, with one control after them."""
    with (paper_tables / "main_results.csv").open(newline="", encoding="utf-8") as file:
        methods = list(dict.fromkeys(row["method"] for row in csv.DictReader(file)))
    assert [*study_on("testbed").arms] == [*methods[1:], "AttentionPO shuffled"] and methods[0] == "Base"


@pytest.mark.parametrize("setting", ["testbed", "llama3_8b_instruct"])
def test_every_point_is_a_sound_run(setting: str) -> None:
    """The last point of every arm, whose values are the farthest from the defaults; no two arms are the same runs."""
    cfg, study = composed(f"setting={setting}"), study_on(setting)
    check_user_overrides(make_composer(cfg, study), make_identity(cfg).result)
    made = arms_on(setting)
    arms = expand_arms(study, 4, truth=cfg.truth is not None)
    for arm in arms:
        point = make_points(study, [arm], [0])[-1]
        found = point_config(made["", arm.name], point)
        assert found.config.study is None  # it is sound
        assert set(point.values) < set(found.overrides)
    check_distinct_arms(study, arms, made)


def test_only_methods_that_ask_more_of_their_reference_hold_one() -> None:
    made = arms_on("testbed")
    held = {name for (_, name), arm in made.items() if arm.config.reference == "live"}
    refused = set()
    for (_, name), arm in made.items():
        try:
            require_reference("cached", arm.config.objective)
        except UserError:
            refused.add(name)
    assert held == refused == {"TDPO", "TI-DPO", "KTO"}


def test_on_the_testbed_every_method_has_eight_points_and_the_same_learning_rates() -> None:
    study = study_on("testbed")
    grids = {name: study.grid_of(name) for name in study.arms}
    assert {len(grid.point_overrides()) for grid in grids.values()} == {8}
    assert {grid.lr for grid in grids.values()} == {(2.5e-5, 5e-5)}
    per_token = [name for name, grid in grids.items() if grid.beta == (0.26, 0.78, 2.6, 7.8)]
    assert per_token == ["IPO", "SimPO"]
    others = [name for name, grid in grids.items() if not grid.beta]
    assert [(name, [*grids[name].keys]) for name in others] == [
        ("RRHF", ["objective.sft_coef"]),
        ("SLiC-HF", ["objective.delta"]),
        ("ORPO", ["objective.lam"]),
    ]


@pytest.mark.parametrize("setting", LLAMAS)
def test_a_row_of_a_llama_setting_is_one_point_with_its_published_values(setting: str) -> None:
    study = study_on(setting)
    instruct = setting == "llama3_8b_instruct"
    expected: dict[str, dict[str, float]] = {
        "AttentionPO": {"optimizer.lr": 1e-6, "objective.beta": 5e-3},
        "AttentionPO shuffled": {"optimizer.lr": 1e-6, "objective.beta": 5e-3},
        "DPO": {"optimizer.lr": 7e-7 if instruct else 5e-7, "objective.beta": 0.01, "batch.pairs": 128},
        "SimPO": {
            "optimizer.lr": 1e-6 if instruct else 6e-7,
            "objective.beta": 2.5 if instruct else 2.0,
            "objective.gamma_beta_ratio": 0.55 if instruct else 0.5,
            "batch.pairs": 128,
        },
        "TDPO": {"optimizer.lr": 5e-6, "objective.beta": 0.01, "objective.alpha": 0.5},
        "TI-DPO": {
            **{"optimizer.lr": 1e-6, "objective.beta": 0.01, "objective.alpha": 0.5, "weights.lam": 0.7},
            **{"objective.gamma_triplet": 0.1, "objective.triplet_margin": 1e-3},
        },
        "OTPO": {
            **{"optimizer.lr": 5e-7, "objective.beta": 0.01},
            **{"batch.pairs": 64, "trainer.gradient_clip_val": 20.0},
        },
    }
    for name in study.arms:
        grid = study.grid_of(name)
        assert {len(values) for values in grid.axes.values()} == {1}
        found = {key: value for key, (value,) in grid.axes.items()}
        if name in expected:
            assert found == expected[name] and grid.origin.startswith("as published")
        else:
            assert (found["optimizer.lr"], found["batch.pairs"]) == (5e-7, 128) and "search range" in grid.origin
    cfg = composed(f"setting={setting}")
    assert (cfg.batch.pairs, cfg.trainer.max_epochs, cfg.optimizer.schedule) == (32, 1, "cosine")
    assert (cfg.trainer.precision, cfg.optimizer.warmup, cfg.trainer.gradient_clip_val) == ("bf16-mixed", 0.1, 1.0)


# ------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("objective.sft_coef=0.3", r"grids\.rrhf\.keys=\{objective\.sft_coef:\[0\.3\]\}.*, or use experiment=none"),
        (
            "optimizer.lr=1e-3",
            r"optimizer\.lr=1e-3 would have no effect, .*grid sets this key: use .*grids\.rrhf\.lr=\[1e-3\]",
        ),
        ("objective=simpo", r"sets objective, .* so objective=simpo would have no effect"),
        ("reference=live", r"sets .*reference.* so reference=live would have no effect"),
    ],
)
def test_an_override_that_spoils_the_study_is_refused(given: str, message: str) -> None:
    cfg = composed(given)
    with pytest.raises(UserError, match=message):
        check_user_overrides(make_composer(cfg, cfg.study), make_identity(cfg).result)


def test_a_grid_given_as_the_message_says_reaches_its_arm_alone() -> None:
    cfg = composed("grids.orpo.keys={objective.lam:[0.3]}", "grids.rdpo.lr=[1.0e-3]")
    study: Study = cfg.study
    check_user_overrides(make_composer(cfg, study), make_identity(cfg).result)
    assert study.grid_of("ORPO").keys == {"objective.lam": (0.3,)}
    assert (study.grid_of("R-DPO").lr, study.grid_of("DPO").lr) == ((1e-3,), (2.5e-5, 5e-5))
    assert make_composer(cfg, study).overrides_for_points() == ["experiment=main_results"]


def test_a_setting_without_grids_has_every_method_once_at_its_defaults() -> None:
    study = study_on("real_smoke")
    assert {study.grid_of(name) for name in study.arms} == {Grid(origin="defaults")}


# ------------------------------------------------------------------------------------------------ a run


def test_a_study_over_other_keys_runs_to_its_table_and_is_read_back(world: World, tmp_path: Path) -> None:
    """Three objectives, each with its own key, as single points of a tiny world."""
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "few.yaml").write_text(
        "# @package study\n_target_: attnpo.lab.studies.study.Study\nname: few\narms:\n"
        "  DPO: [weights=uniform]\n  ORPO: [objective=orpo, weights=uniform]\ncontrol: DPO\n"
        "grids:\n  ORPO:\n    keys: {objective.lam: [0.1, 1.0]}\n"
        "    origin: as published\n"
        "seeds: 1\nworkers: 1\nshared: [callbacks=none, reference=cached, trainer.max_steps=1]\n",
        encoding="utf-8",
    )
    cfg = world.config("experiment=few", config_dir=tmp_path / "configs")
    outcome = run_study(cfg, tmp_path / "out")
    assert not outcome.failed
    assert [point.values for point, _ in outcome.points] == [(), ("objective.lam=0.1",), ("objective.lam=1.0",)]
    assert outcome.record["grids"] == {"ORPO": {"lr": [], "beta": [], "keys": {"objective.lam": [0.1, 1.0]}}}
    assert {path.name.split("-seed")[0] for path in (tmp_path / "out" / "points").iterdir()} == {
        "DPO", "ORPO-lam=0.1", "ORPO-lam=1.0",
    }  # fmt: skip
    (place,) = (tmp_path / "out" / "points").glob("ORPO-lam=0.1-*")
    assert run_row(place)["lam"] == 0.1, "what tells runs apart where there is no table yet"
    finish_study(outcome)
    text = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "grid of ORPO (as published): lr as set, lam [0.1, 1.0]" in text
    assert "| as published |" in text
    assert "objective.lam" in (tmp_path / "out" / "results.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "Methods and their average rank" not in text, "nothing to rank by without a truth"


# ------------------------------------------------------------------------------------------------ the table


def scores(reward: float, kl: float) -> dict[str, Any]:
    own = {"reward": reward, "kl": kl, "rewards": [reward], "win_rate": 0.5 + reward / 4, "length": 20.0, "broken": 0.0}
    return {**own, "base_reward": 0.0, "base_length": 18.0, "base_broken": 0.0}


def result(reward: float, kl: float) -> RunResult:
    both = {"validation": scores(reward, kl), "test": scores(reward, kl)}
    return RunResult.from_json(
        {
            "steps": 1,
            "metrics": {},
            "inputs": {"train": {"pairs": 2, "effective_share": 1.0, "coverage": 1.0}},
            "seconds": {"all": 1.0},
            "truth": {"scores": both, "base_rewards": {"test": [0.0], "validation": [0.0]}},
        }
    )


STUDY = Study(
    "s",
    {"good": [], "far": [], "lost": [], "bad": []},
    control="good",
    grid=Grid(beta=(0.1,), origin="beta per response"),
    kl_levels=(1.0,),
    ranking=True,
)


def outcome_of(study: Study) -> Outcome:
    arms = {name: Arm(name, ()) for name in study.arms}
    found = {"good": (0.9, 1.0), "far": (1.0, 4.0), "bad": (-0.5, 1.0)}
    points = [(Point(arms[name], ("objective.beta=0.1",), 0), result(*values)) for name, values in found.items()]
    failed = [(Point(arms["lost"], ("objective.beta=0.1",), 0), "RuntimeError: out of luck")]
    return Outcome(study, list(arms.values()), points, failed, {}, Path("out"), 1.0)


def test_the_table_ranks_the_base_and_every_arm_with_results() -> None:
    """By reward, win rate and reward at KL 1: far has half of its way to KL 4 there, 0.5."""
    (section,) = ranking_sections(outcome_of(STUDY))
    rows = {str(row["arm"]): row for row in section.blocks[0].rows}  # type: ignore[union-attr]
    assert list(rows) == ["base", "good", "far", "lost", "bad"]
    assert rows["far"]["reward at KL 1"] == "0.500~", "its first point is at KL 4"
    assert {name: rows[name][RANK] for name in ("good", "far", "base", "bad")} == {
        "good": pytest.approx(5 / 3),
        "far": pytest.approx(4 / 3),
        "base": 3.0,
        "bad": 4.0,
    }
    assert rows["lost"][RANK] == "FAILED, all 1 points" and rows["lost"]["values"] == "beta per response"


def test_only_a_study_that_asks_for_it_has_the_table() -> None:
    assert ranking_sections(outcome_of(Study("s", STUDY.arms, control="good", grid=STUDY.grid))) == []


def test_what_lacks_a_score_is_left_out_of_the_ranks() -> None:
    assert mean_ranks({"one": [1.0, 2.0], "two": [2.0, 1.0], "astray": [math.nan, 9.0]}) == {"one": 1.5, "two": 1.5}
    assert mean_ranks({"astray": [math.nan]}) == {}


def test_the_main_table_says_where_the_values_come_from() -> None:
    columns, rows = main_table(outcome_of(STUDY))
    assert "values" in columns
    assert [row.get("values") for row in rows] == [
        None,
        "beta per response",
        "beta per response",
        None,
        "beta per response",
    ]
