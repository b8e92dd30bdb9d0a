"""A study's page and figures: one look per arm, columns explained, runs linked, arms side by side, without a truth."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from attnpo.display.column_notes import column_notes
from attnpo.display.heatmap import heatmap_html
from attnpo.display.look import COLOURS, INK, svg_path
from attnpo.display.pair_record import Verdict
from attnpo.display.weighted_pair import WeightedPair
from attnpo.lab.studies.figures import assign_arm_styles, study_figures, unweighted_accuracy, unweighted_margin
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.page import arms_section, write_study_report
from attnpo.lab.studies.study import Arm, Grid, Point, Study
from attnpo.run.for_page import FILE, load_page_examples, save_page_examples
from attnpo.run.result import RunResult
from attnpo.schema import Message, PreferencePair
from tests.display.sides import END, pair_of, response
from tests.display.test_heat import Reader
from tests.display.test_page import HOSTILE

STUDY = Study(
    "s",
    {"uniform": [], "attention": [], "shuffled": []},
    truth_arms={"true importance": []},
    grid=Grid(lr=(5e-5,), beta=(0.1, 0.3)),
)
ARMS = (
    Arm("uniform", ("weights=uniform",)),
    Arm("attention L1", ("weights=attention",), 1),
    Arm("attention L2", ("weights=attention", "transform=null"), 2),
    Arm("shuffled", ("weights=attention", "transform=shuffled")),
    Arm("true importance", ()),
)


def result(place: int, seed: int, beta: float, known: bool) -> RunResult:
    """A run whose numbers grow with its arm, seed and beta."""
    value = 0.1 * place + 0.02 * seed + beta
    scores = {"reward": value, "kl": 1.0 + value, "win_rate": 0.5, "length": 9.0, "broken": 0.0, "base_reward": 0.0,
              "base_length": 9.0, "base_broken": 0.0, "rewards": [value, value + 0.1]}  # fmt: skip
    both = {"validation": scores, "test": scores}
    return RunResult.from_json(
        {
            "seed": seed,
            "steps": 3,
            "metrics": {
                "val/loss": 9.0 + value,
                "val/rewards/accuracies": 0.5 + 0.1 * beta,
                "val/rewards/margins": 8.0,
            },
            "inputs": {"train": {"pairs": 4, "effective_share": 0.5, "coverage": 1.0}},
            "seconds": {"all": 1.0},
            "truth": {"scores": both, "base_rewards": {"test": [0.0, 0.1]}} if known else None,
            "drift": {
                "pairs": {"kl": 1.0 + value},
                "ranking_accuracy": {"validation": 0.5 + 0.5 * value},
                "displacement": {"validation_chosen": -1.0, "validation_rejected": -1.0 - value},
            },
        }
    )


def make(folder: Path, known: bool = True, worlds: tuple[str, ...] = ("",)) -> Outcome:
    """A study of five arms, two points each and two seeds."""
    arms = [replace(arm, world=world) for world in worlds for arm in (ARMS if known else ARMS[:-1])]
    points = [
        (Point(arm, ("optimizer.lr=5e-05", f"objective.beta={beta}"), seed), result(place, seed, beta, known))
        for place, arm in enumerate(arms)
        for beta in (0.1, 0.3)
        for seed in (0, 1)
    ]
    study = STUDY if worlds == ("",) else replace(STUDY, worlds={world: [] for world in worlds})
    folders = {point: folder / "points" / f"{number}" for number, (point, _) in enumerate(points)}
    return Outcome(study, arms, points, [], {"grid": "g"}, folder, 1.0, folders=folders)


def test_every_world_and_figure_has_one_look_per_arm(tmp_path: Path) -> None:
    looks = assign_arm_styles(make(tmp_path))
    assert looks["uniform"].colour == INK and looks["uniform"].note == "control"
    assert [looks[arm.name].colour for arm in ARMS[1:]] == list(COLOURS[:4])
    assert [looks[arm.name].filled for arm in ARMS] == [True, True, True, False, True], "a transform hollows its arm"
    assert looks["true importance"].note == "knows the truth"
    outcome = make(tmp_path, worlds=("calm", "noisy"))
    assert assign_arm_styles(outcome) == looks
    images = study_figures(outcome)
    assert len(images) == 6, "arms, frontier and layers of each world"
    for image in images:
        drawn = svg_path(image.source).read_text()
        assert COLOURS[0].lower() in drawn and COLOURS[1].lower() in drawn, image.source.name


def test_the_page_explains_its_columns_and_links_its_runs(tmp_path: Path) -> None:
    outcome = make(tmp_path)
    for folder in list(outcome.folders.values())[:3]:
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("{}")
    written = write_study_report(outcome, [arms_section(outcome)])
    stems = ("arms", "frontier", "layers")
    assert written == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    code = (tmp_path / "report.html").read_text()
    read = Reader(code)
    heads = {attrs.get("title") for tag, attrs in read.seen if tag == "th"}
    assert any(title and "nats" in title for title in heads) and "true reward minus that of uniform" in read.text
    links = [attrs["href"] for tag, attrs in read.seen if tag == "a" and "points/" in str(attrs["href"])]
    assert set(links) == {f"points/{number}/result.json" for number in range(3)}
    assert all((tmp_path / str(link)).is_file() for link in links)
    assert "Comparison without a known true reward" not in code
    assert "http" not in code and len(code) < 700_000


def test_every_column_of_the_main_tables_is_explained(tmp_path: Path) -> None:
    for known in (True, False):
        table = next(block for block in arms_section(make(tmp_path, known)).blocks if hasattr(block, "columns"))
        assert set(column_notes(table.columns)) == set(table.columns)


def rows(text: str) -> list[WeightedPair]:
    side = response((text, 0.5), (END, 0.5), reference_logp=[-0.5, -0.25])
    verdicts = (Verdict(True, (1.0, -1.0), "A"), Verdict(False))
    return [pair_of(side, None, [Message(role="user", content=text)], verdicts)]


def sampled(name: str) -> list[PreferencePair]:
    prompts = [[Message(role="user", content=f"prompt {number} {HOSTILE}")] for number in range(9)]
    return [
        PreferencePair.from_texts(prompt, f"answer of {name} {HOSTILE}", "answer of the base") for prompt in prompts
    ]


def test_what_a_run_keeps_is_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_page_examples(tmp_path, [*rows(HOSTILE), *rows("second")], sampled("x"))
    kept = load_page_examples(tmp_path)
    assert kept is not None and heatmap_html(kept.heat) == heatmap_html(rows(HOSTILE))
    assert [answer.prompt[:8] for answer in kept.answers] == ["prompt 0", "prompt 2", "prompt 4", "prompt 6"]
    assert kept.answers[0].base == "answer of the base"
    (tmp_path / FILE).write_text('{"pairs": [{}], "answers": []}')
    assert load_page_examples(tmp_path) is None and "so the page omits it" in caplog.text
    assert load_page_examples(tmp_path / "none") is None


def test_arms_stand_side_by_side_and_what_they_wrote_cannot_act(tmp_path: Path) -> None:
    outcome = make(tmp_path)
    for point, folder in outcome.folders.items():
        folder.mkdir(parents=True)
        save_page_examples(folder, rows(f"token {HOSTILE}"), sampled(f"{point.arm.name} seed {point.seed}"))
    write_study_report(outcome, [arms_section(outcome)])
    read = Reader((tmp_path / "report.html").read_text())
    for arm in ARMS:
        assert f"answer of {arm.name} seed 0 {HOSTILE}" in read.text
    assert "seed 1 <" not in read.text and read.text.count("answer of the base") == 4
    assert len([1 for tag, attrs in read.seen if attrs.get("class") == "heat-row"]) == len(ARMS)
    assert len([tag for tag, _ in read.seen if tag == "script"]) == 1


# ------------------------------------------------------------------------------------------------ without a truth


def test_a_study_without_a_truth_is_compared_without_weights(tmp_path: Path) -> None:
    outcome = make(tmp_path, known=False)
    written = write_study_report(outcome, [arms_section(outcome)])
    stems = ("yardstick-layers", "yardstick")
    assert written == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    read = Reader((tmp_path / "report.html").read_text())
    assert "of different arms cannot be compared" in read.text and "unweighted margin" in read.text
    # Attention L1, place 1, beta 0.3: 0.4 and 0.42 over the seeds; uniform 0.3 and 0.32.
    assert "0.705" in read.text and "+0.050 [" in read.text, "accuracy, and what it has more than the control"
    assert "0.410" in read.text and "+0.100 [" in read.text, "margin in nats"
    drawn = svg_path(tmp_path / "yardstick.png").read_text()
    for words in ("unweighted accuracy", "unweighted margin", "KL to the base", "uniform (control)", "chance"):
        assert words in drawn


def test_the_margin_is_measured_or_what_validation_logged() -> None:
    measured = result(1, 0, 0.1, known=False)
    assert unweighted_margin(measured) == pytest.approx(0.2) and unweighted_accuracy(measured) == pytest.approx(0.6)
    logged = {"val/logps/chosen": -3.0, "first/val/logps/chosen": -4.0, "val/logps/rejected": -9.0,
              "first/val/logps/rejected": -7.5}  # fmt: skip
    assert unweighted_margin(replace(measured, drift={}, metrics=logged)) == pytest.approx(1.0 + 1.5)
    assert math.isnan(unweighted_margin(replace(measured, drift={}, metrics={}))) and math.isnan(
        unweighted_accuracy(replace(measured, drift={}))
    )


def test_where_nothing_was_measured_the_page_still_says_what_cannot_be_compared(tmp_path: Path) -> None:
    made = make(tmp_path, known=False)
    outcome = replace(made, points=[(point, replace(found, drift={})) for point, found in made.points])
    assert write_study_report(outcome, [arms_section(outcome)]) == []
    assert "of different arms cannot be compared" in (tmp_path / "report.html").read_text()
