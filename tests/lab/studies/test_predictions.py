"""Predictions beside their outcomes, on results made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from attnpo.display.page import Paragraph, TableBlock
from attnpo.evaluation.intervals import Interval
from attnpo.lab.figures import GainPoint, gain_figure
from attnpo.lab.studies.notes import edge_axes, footnotes, study_warnings
from attnpo.lab.studies.outcome import Outcome, group_by_point
from attnpo.lab.studies.page import write_study_report
from attnpo.lab.studies.predictions import (
    check_prediction_arms,
    decide_claim,
    predictions_section,
    register_predictions,
)
from attnpo.lab.studies.study import (
    Arm,
    Claim,
    Grid,
    Point,
    Predictions,
    Study,
    WorldAxis,
    expand_arms,
    make_points,
    settings_digest,
    settings_record,
)
from attnpo.lab.studies.tables import equal_kl_sections
from attnpo.schema import UserError
from tests.lab.studies.test_tables import result, typed

VALUES = ("objective.beta=1.0",)
ARMS: dict[str, list[str]] = {"uniform": [], "attention": [], "shuffled": []}
BASE_REWARDS = [-0.5, -0.5]


def claim(above: list[tuple[str, str]], below: list[tuple[str, str]], level: float = 0.5) -> Claim:
    return Claim("a", "in words", tuple(above), tuple(below), level)


STUDY = Study(
    "s",
    ARMS,
    grid=Grid(beta=(0.1, 1.0)),
    worlds={"calm": [], "noisy": []},
    only_in={"shuffled": ["noisy"]},
    kl_levels=(0.5,),
    world_axis=WorldAxis("noise", {"calm": 0.0, "noisy": 0.5}, ("attention", "shuffled")),
    predictions=Predictions(
        (0, 1),
        "The rule.",
        {
            "hit": claim([("noisy", "attention")], [("noisy", "uniform")]),
            "miss": claim([("calm", "attention")], [("calm", "uniform")]),
            "open": claim([("noisy", "shuffled")], [("noisy", "uniform")]),
            "more": claim([("noisy", "attention"), ("calm", "uniform")], [("noisy", "uniform"), ("calm", "attention")]),
            "far": claim([("noisy", "attention")], [("noisy", "uniform")], level=2.0),
        },
    ),
)


def points(rewards: dict[tuple[str, str], list[float]], seeds: tuple[int, ...] = (0, 1)) -> list[tuple[Point, Any]]:
    """One run per arm, world and seed at KL 0.75, with the test rewards given by (world, arm)."""
    made = []
    for (world, arm), values in rewards.items():
        for seed in seeds:
            one = result(validation=0.5, kl=0.75, test=[value + seed / 8 for value in values])
            one["truth"]["base_rewards"] = {"test": BASE_REWARDS, "validation": [-0.5]}
            made.append((Point(Arm(arm, (), None, world), VALUES, seed), one))
    return made


REWARDS = {
    ("calm", "uniform"): [0.5, 0.5],
    ("calm", "attention"): [0.25, 0.25],
    ("noisy", "uniform"): [0.25, 0.25],
    ("noisy", "attention"): [0.5, 0.5],
    ("noisy", "shuffled"): [0.0, 0.5],
}


def outcome(folder: Path = Path("out"), study: Study = STUDY, **more: Any) -> Outcome:
    found = points(REWARDS, **more)
    return Outcome(study, list(dict.fromkeys(p.arm for p, _ in found)), typed(found), [], {}, folder, 1.0)


def test_hits_misses_and_open_ones_are_shown_alike() -> None:
    (section,) = predictions_section(outcome())
    table, note = section.blocks
    assert isinstance(table, TableBlock) and isinstance(note, Paragraph)
    decided = dict(zip(STUDY.predictions.claims, (row["outcome"] for row in table.rows), strict=True))  # type: ignore
    assert decided == {"hit": "hit", "miss": "MISS", "open": "open", "more": "hit", "far": "not at equal KL"}
    assert "The rule. Of 5 predictions 2 are hit, 1 missed and 2 open" in note.text
    assert {row["seeds"] for row in table.rows} == {"2 of 2"}  # type: ignore[call-overload,index]
    # The base at -0.5, the points at KL 0.75: on the path at 0.5, twice the share of a quarter more or less.
    share = (0.5 / 0.75) ** 0.5
    assert str(table.rows[3]["difference"]).startswith(f"{share * 0.5:+.3f} ")  # type: ignore[call-overload,index]


def test_a_prediction_that_only_some_seeds_bear_out_stays_open() -> None:
    """The second seed's path of one arm ends before the level."""
    short = [(p, m) for p, m in points(REWARDS) if (p.arm.world, p.arm.name, p.seed) != ("noisy", "attention", 1)]
    arms = list(dict.fromkeys(p.arm for p, _ in short))
    (section,) = predictions_section(Outcome(STUDY, arms, typed(short), [], {}, Path("out"), 1.0))
    rows = {str(row["prediction"]): row for row in section.blocks[0].rows[:1]}  # type: ignore[union-attr]
    (first,) = rows.values()
    assert (first["outcome"], first["seeds"]) == ("open: 1 of 2 seeds have results at this KL", "1 of 2")


def test_results_on_other_seeds_are_called_exploration() -> None:
    assert any("not registered for seeds 7:" in line for line in study_warnings(outcome(seeds=(0, 7))))
    assert not any("not registered for" in line for line in study_warnings(outcome()))
    (section,) = predictions_section(outcome(seeds=(0,)))
    assert "So far (missing seeds: 1), of 5 predictions" in section.blocks[-1].text  # type: ignore[union-attr]


def test_other_seeds_decide_no_prediction() -> None:
    """Seeds 7 and 8 alone show nothing; beside registered ones they move no difference."""
    assert predictions_section(outcome(seeds=(7, 8))) == []
    (alone,), (mixed,) = predictions_section(outcome(seeds=(0,))), predictions_section(outcome(seeds=(0, 7)))
    assert alone.blocks[0].rows == mixed.blocks[0].rows  # type: ignore[union-attr]
    assert {row["seeds"] for row in mixed.blocks[0].rows} == {"1 of 2"}  # type: ignore[union-attr]


def test_predictions_hold_for_the_settings_they_were_fixed_for() -> None:
    """A study with another grid, other arms or worlds is exploration, whatever its seeds."""
    assert STUDY.predictions is not None
    fixed = replace(STUDY, predictions=replace(STUDY.predictions, settings=settings_digest({})))
    assert not any("grid, arms or worlds" in line for line in study_warnings(outcome(study=fixed)))
    moved = replace(STUDY, predictions=replace(STUDY.predictions, settings=settings_digest({"grid": "another"})))
    assert any("grid, arms or worlds" in line for line in study_warnings(outcome(study=moved)))
    assert predictions_section(outcome(study=fixed)) and predictions_section(outcome(study=moved)) == []
    record = settings_record(STUDY, {}, None)
    assert settings_digest(record) == settings_digest(settings_record(replace(STUDY, predictions=None), {}, None))


def test_predictions_that_change_after_the_first_run_are_named(tmp_path: Path) -> None:
    """The first ones are kept; before any run they may be changed."""
    assert STUDY.predictions is not None
    other = replace(STUDY, predictions=replace(STUDY.predictions, rule="Another rule."))
    assert (
        register_predictions(STUDY, tmp_path) == []
        and register_predictions(other, tmp_path) == []
        and register_predictions(other, tmp_path) == []
    )
    (tmp_path / "points" / "one").mkdir(parents=True)
    (tmp_path / "points" / "one" / "result.json").write_text("{}")
    assert register_predictions(other, tmp_path) == []
    (said,) = register_predictions(STUDY, tmp_path)
    assert "were run with other predictions" in said and register_predictions(other, tmp_path) == []
    kept = tmp_path / "predictions.json"
    kept.write_text(kept.read_text().replace("Another", "Any"))
    (said,) = register_predictions(other, tmp_path)
    assert "changed since" in said


def test_a_prediction_about_a_layer_is_checked_once_the_depth_is_known() -> None:
    layered = replace(STUDY, layers=(1, "last"), world_axis=None, only_in={}, predictions=None)
    with pytest.raises(UserError, match=r"claims\.one: arm attention does not run in world calm"):
        predicting(layered, "attention")
    arms = [arm for world in STUDY.worlds for arm in expand_arms(layered, 4, world=world)]
    check_prediction_arms(predicting(layered, "attention L4"), arms)
    with pytest.raises(UserError, match=r"claims\.one: expected arms of the study, got attention L3 in world calm"):
        check_prediction_arms(predicting(layered, "attention L3"), arms)
    with pytest.raises(UserError, match=r"claims\.one: arm atention L4 does not run in world calm"):
        predicting(layered, "atention L4")


def predicting(study: Study, arm: str) -> Study:
    """The study with one prediction about an arm of the world calm."""
    one = claim([("calm", arm)], [("calm", "uniform")])
    return replace(study, predictions=Predictions((0,), "The rule.", {"one": one}))


def test_a_changed_prediction_changes_the_digest() -> None:
    """Of the record, which stands under every table, and which knows of predictions."""
    record = settings_record(STUDY, {}, None)
    assert STUDY.predictions is not None
    moved = {**STUDY.predictions.claims, "hit": claim([("noisy", "uniform")], [("noisy", "attention")])}
    assert settings_record(replace(STUDY, predictions=replace(STUDY.predictions, claims=moved)), {}, None) != record
    assert "predictions" not in settings_record(replace(STUDY, predictions=None), {}, None)
    assert any("grid, arms and predictions, fixed before" in line for line in footnotes(outcome()))


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.1, 0.5, "hit"), (-0.5, -0.1, "MISS"), (-0.1, 0.5, "open"), (0.0, 0.5, "open")]
)
def test_the_interval_alone_decides(low: float, high: float, word: str) -> None:
    assert decide_claim(Interval(0.2, low, high, 2, 2)) == word
    assert decide_claim(None) == "open"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"only_in": {"attention": ["stormy"]}},
            r"only_in\.attention: expected the name of an arm and a list of worlds from calm, noisy",
        ),
        ({"only_in": {"uniform": ["calm"]}}, "only_in restricts the control uniform"),
        ({"world_axis": WorldAxis("x", {"stormy": 1.0}, ("attention",))}, "world_axis refers to stormy"),
        ({"only_in": {"attention": ["noisy"]}}, r"claims\.miss: arm attention does not run in world calm"),
    ],
)
def test_names_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(STUDY, **change)
    with pytest.raises(UserError, match="the same number"):
        claim([("calm", "attention")], [])


def test_an_arm_runs_in_its_worlds_alone() -> None:
    arms = [arm for world in STUDY.worlds for arm in expand_arms(STUDY, 2, world=world)]
    assert [arm.label for arm in arms] == [
        "calm: uniform",
        "calm: attention",
        "noisy: uniform",
        "noisy: attention",
        "noisy: shuffled",
    ]
    assert len(make_points(STUDY, arms, [0])) == 10
    summary = equal_kl_sections(outcome())[1].blocks[0]
    assert isinstance(summary, TableBlock)
    assert summary.rows[1]["calm"] == "" and "no clear" in str(summary.rows[1]["noisy"])  # type: ignore[call-overload,index]


def test_a_chosen_point_on_the_edge_of_its_grid_is_named() -> None:
    grid = Grid(lr=(5e-5, 1e-4), beta=(0.1, 0.3, 1.0), keys={"objective.sft": ("mean", "sum", "batch")})
    made = {
        beta: group_by_point([(Point(Arm("a", ()), ("optimizer.lr=5e-05", f"objective.beta={beta}"), 0), one)])[0]
        for beta, ((_, one),) in ((b, typed([(Point(Arm("a", ()), (), 0), result())])) for b in ("0.1", "0.3", "1.0"))
    }
    assert {beta: edge_axes(point, grid) for beta, point in made.items()} == {
        "0.1": ["beta 0.1"],
        "0.3": [],
        "1.0": ["beta 1.0"],
    }
    assert edge_axes(made["0.1"], replace(grid, beta=(0.1, 0.3))) == [], "two values are all edge"


def test_the_gains_are_drawn_over_the_scale_of_the_worlds(tmp_path: Path) -> None:
    assert "gains.png" in write_study_report(outcome(tmp_path), [])
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")
    nothing = gain_figure({"at KL 1": {"a": [GainPoint(0.0, float("nan"))]}}, tmp_path / "none.png", xlabel="x")
    assert nothing.stat().st_size > 0


@pytest.mark.parametrize("panels", [1, 3])
def test_nothing_of_the_gains_is_cut_off_at_the_edge_of_the_picture(panels: int, tmp_path: Path) -> None:
    line = [GainPoint(place, place / 2, place / 2 - 0.1, place / 2 + 0.1, place < 0.2) for place in (0.0, 0.1, 0.4)]
    arms = {"attention": line, "true importance (knows the truth, or most)": line}
    shown = {f"at KL {number} to the base": arms for number in range(panels)}
    path = gain_figure(shown, tmp_path / "gains.png", xlabel="share of wrong labels", title="what token weights gain")
    image = matplotlib.image.imread(path)[:, :, :3]
    edges = (image[:3], image[-3:], image[:, :3], image[:, -3:])
    assert all((edge == image[0, 0]).all() for edge in edges)
