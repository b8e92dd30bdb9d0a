"""What a study says at its end, on results made by hand: the table of a terminal, the outcome in words, commands."""

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attnpo.cli import terminal as console
from attnpo.cli.terminal import command_text, format_override
from attnpo.config.compose import list_groups, load
from attnpo.display.output import print_sections
from attnpo.display.page import Section
from attnpo.lab.studies import notes
from attnpo.lab.studies.notes import study_warnings
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.study import Arm, Point
from attnpo.lab.studies.tables import short_table
from attnpo.run.messages import next_commands, resume_arguments
from attnpo.schema import UserError
from tests.lab.studies.test_tables import LOW, STUDY, make_outcome, result, typed

LONG = Arm("words by position L1", ("weights=attention",))
NAMES = {"uniform": 0.1, "words by position L1": 0.9}


def compared(gain: float, seeds: int = 3) -> Outcome:
    """Two arms, one of which has ``gain`` on every prompt."""
    plain, arms = [0.1, 0.2, 0.3, 0.2], (Arm("uniform", ("weights=uniform",)), LONG)
    points = [
        (Point(arm, LOW, seed), result(test=[value + gain * (arm is LONG) for value in plain]))
        for arm in arms
        for seed in range(seeds)
    ]
    study = replace(STUDY, arms={"uniform": [], LONG.name: []})
    return Outcome(study, list(arms), typed(points), [], {"grid": "g"}, Path("out put"), 12.0)


def test_the_table_of_a_terminal_has_every_digit_in_80_columns() -> None:
    out = io.StringIO()
    print_sections(Console(file=out, width=80), [Section("Arms", [short_table(compared(0.25))])])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    (row,) = [line for line in text.splitlines() if "+0.250" in line]
    numbers = r"0\.450 \[0\.\d{3}, 0\.\d{3}\]\s+\+0\.250 \[0\.250, 0\.250\]\s+0\.750\s+0\.75"
    assert re.search(rf"words by(?: position L1)?\s+{numbers}", row)
    assert "eff. weights" not in text


def test_a_point_that_failed_keeps_its_mark() -> None:
    lost = make_outcome([(Point(Arm("uniform", ()), LOW, 0), result())], [(Point(LONG, LOW, 0), "no luck")])
    table = short_table(replace(lost, arms=[Arm("uniform", ()), LONG]))
    assert "FAILED, all 1 points" in str(table.rows)


@pytest.mark.parametrize(
    ("gain", "words"), [(0.25, "better than uniform"), (-0.25, "worse than uniform"), (0.0, "a tie with uniform")]
)
def test_the_outcome_is_said_with_its_interval_and_a_tie_as_a_tie(gain: float, words: str) -> None:
    line, apart = notes.describe_result(compared(gain), "")
    assert line.startswith(words) and f"{LONG.name} {gain:+.3f} [" in line
    assert apart.startswith("each arm has one point and nothing is tuned") and f"{LONG.name} 0.75" in apart


def test_arms_with_a_grid_are_not_called_untuned() -> None:
    outcome = compared(0.25)
    other = [(replace(point, values=("objective.beta=9",)), result) for point, result in outcome.points]
    (line,) = notes.describe_result(replace(outcome, points=[*outcome.points, *other]), "")
    assert line.startswith("better than uniform")


def test_best_points_of_several_arms_are_not_passed_off_as_a_comparison_at_equal_kl() -> None:
    third = Arm("rollout", ("weights=rollout",))
    points = [
        (Point(arm, (f"objective.beta={beta}",), seed), at_kl(kl, [0.1, 0.2 + gain, 0.3, 0.2]))
        for arm, gain, kl in ((Arm("uniform", ()), 0.0, 0.4), (LONG, 0.5, 2.3), (third, 0.1, 1.0))
        for seed in range(2)
        for beta in (0.1, 0.3)
    ]
    arms = [Arm("uniform", ()), LONG, third]
    study = replace(STUDY, arms={arm.name: [] for arm in arms})
    said = list(notes.describe_result(Outcome(study, arms, typed(points), [], {}, Path("out"), 1.0), ""))
    assert any("KL to the base differs (0.40 to 2.30), see the tables at equal KL" in line for line in said)


def test_an_arm_without_all_seeds_at_a_kl_gets_no_verdict() -> None:
    arms, points = [Arm("uniform", ()), LONG], []
    for arm, gain in ((arms[0], 0.0), (LONG, 0.5)):
        for seed in range(3):
            for beta, kl in (("0.1", 0.3), ("0.3", 0.9)):
                far = 2.0 if arm is LONG and seed == 2 else 0.0  # its path begins beyond twice the level
                rewards = [0.1, 0.2 + gain + kl, 0.3 + kl, 0.2]
                points.append((Point(arm, (f"objective.beta={beta}",), seed), at_kl(kl + far, rewards)))
    study = replace(STUDY, arms={arm.name: [] for arm in arms}, kl_levels=(0.5,))
    said = list(notes.describe_result(Outcome(study, arms, typed(points), [], {}, Path("out"), 1.0), ""))
    assert not any("at KL 0.5 (reward" in line for line in said), said


def at_kl(kl: float, rewards: list[float]) -> dict[str, Any]:
    """A result whose policy is ``kl`` nats from the base on the test prompts."""
    made = result(test=rewards)
    made["truth"]["scores"]["test"]["kl"] = kl
    return made


def test_a_destroyed_model_is_not_chosen_and_an_idle_one_is_named() -> None:
    """By its accuracy alone the destroyed one would stand for the arm; truth None: nothing else is known."""
    arm, idle = Arm("attention", ("weights=attention",)), Arm("uniform", ("weights=uniform",))
    made = {(arm, LOW): {}, (arm, ("lr=1",)): {"moved/growth": 1e30}, (idle, LOW): {"moved/weights": 0.0}}
    points = []
    for place, ((of, values), found) in enumerate(made.items()):
        answer = {**result(accuracy=0.6 + 0.1 * (place == 1)), "truth": None}
        answer["metrics"] |= found
        points.append((Point(of, values, 0), answer))
    study = replace(STUDY, arms={"uniform": [], "attention": []})
    said = list(notes.describe_result(Outcome(study, [arm, idle], typed(points), [], {}, Path("out"), 1.0), ""))
    assert any("attention 60.0 %" in line for line in said), said
    warned = study_warnings(Outcome(study, [arm, idle], typed(points), [], {}, Path("out"), 1.0))
    assert any("uniform: training did not change any weight" in line for line in warned), warned
    lost = Outcome(study, [arm, idle], typed(points[1:]), [], {}, Path("out"), 1.0)
    assert any("WARNING: attention: training destroyed the model" in line for line in study_warnings(lost))


def test_one_seed_is_said_to_be_one() -> None:
    assert any("one seed" in line for line in notes.describe_result(compared(0.25, seeds=1), ""))


def test_the_commands_of_a_study_compose() -> None:
    """Read out of the printed lines, as a shell would take them."""
    cfg = load("fit", ["experiment=layer_sweep", "seeds=1", "study.workers=1", "trainer.max_steps=6"])
    lines = notes.next_commands(cfg.composed, compared(0.25))
    assert [shlex.split(line)[2] for line in lines] == ["attnpo.report", "attnpo.fit", "attnpo.fit"]
    assert shlex.split(lines[0])[3:] == ["out put"]
    more, other = (load("fit", shlex.split(line)[3:]) for line in lines[1:])
    assert (more.study.name, more.seeds, more.study.workers, more.trainer.max_steps) == ("layer_sweep", 5, 1, 6)
    assert (other.study.name, other.seeds, other.trainer.max_steps) == ("controls", 1, 6)


def test_the_commands_of_a_run_compose(tmp_path: Path) -> None:
    given = ["experiment=none", "weights=attention", "weights.layer=1", "name=my run", f"output={tmp_path}"]
    cfg = load("fit", given)
    report, seed, twin = (shlex.split(text)[3:] for text in next_commands(cfg.composed, cfg.seed, tmp_path / "my run"))
    assert report == [str(tmp_path / "my run")]
    assert load("fit", seed).seed == 1 and load("fit", seed).name is None
    assert load("fit", twin).composed.choices["weights"] == "uniform"
    back = load("fit", resume_arguments(cfg.composed, "my run"))
    assert (back.name, back.resume, back.output) == ("my run", "auto", str(tmp_path))


SMOKE = ("setting=real_smoke", "experiment=none", "model.path=MODEL", "data.path=PAIRS", "data.val_share=0.1")
NO_ANSWERS = ("model=reward", "callbacks.samples=0", "objective.sft_coef=0", "objective.beta=1", "reference=live")


@pytest.mark.parametrize("objective", list_groups()["objective"])
def test_a_run_suggests_only_what_fit_takes(objective: str, tmp_path: Path) -> None:
    """After every objective, with weights of every kind, and after reward models."""
    tried = [(f"weights={name}",) for name in ("uniform", "attention", "gradient")]
    accepted = 0
    for words in [*tried, *([("weights=uniform", *NO_ANSWERS)] if objective == "cpo" else [])]:
        try:
            cfg = load("fit", [*SMOKE, f"objective={objective}", *words])
        except UserError:
            continue
        accepted += 1
        report, seed, *twin = (shlex.split(text)[2:] for text in next_commands(cfg.composed, cfg.seed, tmp_path))
        assert (report, seed[0]) == (["attnpo.report", str(tmp_path)], "attnpo.fit")
        assert load("fit", seed[1:]).seed == cfg.seed + 1
        assert len(twin) == (not cfg.model.reward)
        for _, *given in twin:
            other = load("fit", given)
            assert {other.composed.choices["weights"], cfg.composed.choices["weights"]} >= {"uniform"}
            assert other.weights != cfg.weights
    assert accepted


def test_dpo_and_factors_get_a_twin_of_another_objective(tmp_path: Path) -> None:
    for words, twin in (
        (("objective=dpo", "weights=uniform"), ["weights=attention", "objective=twdpo"]),
        (("objective=otpo", "weights=transport"), ["weights=uniform", "objective=dpo"]),
        (("objective=tidpo", "objective.alpha=0.5", "weights=gradient"), ["weights=uniform", "objective=dpo"]),
    ):
        cfg = load("fit", [*SMOKE, *words])
        printed = next_commands(cfg.composed, cfg.seed, tmp_path)
        assert shlex.split(printed[2])[3:] == [*SMOKE, *twin]


OWN = """# @package study
defaults: [_base, _self_]
name: small
arms: {one: [objective=twdpo], other: [objective=ipo]}
control: one
grid: ${grid}
"""


@pytest.mark.parametrize("refused", [False, True])
def test_a_study_suggests_only_what_fit_takes(refused: bool, tmp_path: Path) -> None:
    """``weights=uniform`` is the user's choice in this study, and of no effect in ``controls``, which refuses it."""
    (tmp_path / "own options" / "experiment").mkdir(parents=True)
    (tmp_path / "own options" / "experiment" / "small.yaml").write_text(OWN)
    given = ["experiment=small", *(["weights=uniform"] if refused else [])]
    cfg = load("fit", given, tmp_path / "own options")
    printed = [shlex.split(text)[3:] for text in notes.next_commands(cfg.composed, compared(0.25))]
    assert len(printed) == (2 if refused else 3)
    for *words, flag, folder in printed[1:]:
        assert (flag, folder) == ("--config-dir", str(tmp_path / "own options"))
        plan_study(load("fit", words, Path(folder)))


def test_commands_are_spelled_as_they_were_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(console.CALLED, "attnpo")
    assert command_text("fit", "a=b c") == "attnpo fit 'a=b c'"
    monkeypatch.delenv(console.CALLED)
    assert command_text("fit", "a=1") == "python -m attnpo.fit a=1"
    assert (format_override("name", "it's"), format_override("name", "a-b/c")) == ("name='it\\'s'", "name=a-b/c")
    assert console.command_text is command_text
