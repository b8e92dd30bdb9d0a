"""Benchmarks as outcomes of studies: refused early, measured row by row, resumed, shown."""

import csv
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from attnpo import fit
from attnpo.config.compose import list_groups, load
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.evaluation.evaluate_config import EvaluateConfig
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.result import EvaluationResult, read_result
from attnpo.evaluation.session import GradingLimits
from attnpo.lab.studies import benchmarks
from attnpo.lab.studies.arms import ComposedConfig
from attnpo.lab.studies.benchmark_settings import EvaluationConfigs, check_benchmarks, prepared_grammar
from attnpo.lab.studies.benchmarks import remaining_limits
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome, PointResults, RowScore
from attnpo.lab.studies.page import finish_study
from attnpo.lab.studies.runner import run_study
from attnpo.lab.studies.study import Arm, Study, benchmark_problems
from attnpo.lab.studies.tables import RANK, benchmark_cells, benchmark_notes, main_table, scores_table
from attnpo.lab.testbed.benchmark import TestbedBenchmark
from attnpo.models.loading import load_model
from attnpo.models.spec import ModelSpec
from attnpo.run import run as runs
from attnpo.run.folders import run_folder
from attnpo.schema import Message, UserError
from attnpo.system.files import describe_change
from attnpo.training.checkpoint_folders import STATE
from tests.evaluation.checkouts import arena_hard_auto, fastchat
from tests.evaluation.grading.loopback import Body, Loopback
from tests.run.worlds import GRAMMAR, build_world

EXPERIMENT = """
# @package study
defaults: [_base, _self_]
_target_: attnpo.lab.studies.study.Study
name: tiny
arms:
  uniform: [weights=uniform]
  attention: [weights=attention]
grid: {lr: [1.0e-3], beta: [0.2]}
grids:
  attention: {lr: [1.0e-3, 1.0e-2]}
seeds: 1
workers: 1
shared: [callbacks=none, reference=cached, trainer.max_steps=1, callbacks.samples=0]
"""
TRUTH = (
    "{grader:truth,grading.rounds:2,benchmark.prompts:4,benchmark.sampling.max_new_tokens:6,"
    f"benchmark.grammar.min_clauses:{GRAMMAR.min_clauses},benchmark.grammar.max_clauses:{GRAMMAR.max_clauses}}}"
)
ASKED = ("study.benchmarks=[testbed]", f"study.evaluate.testbed={TRUTH}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FitConfig]:
    """Makes the config of a study of two arms, of which one has two points, in one world for all tests."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "configs" / "experiment").mkdir(parents=True)
    (folder / "configs" / "experiment" / "tiny.yaml").write_text(EXPERIMENT)
    world = build_world(folder)
    return lambda *more: world.config("experiment=tiny", *more, config_dir=folder / "configs")


def evaluations_of(cfg: FitConfig) -> EvaluationConfigs:
    """What makes the evaluations of a config's study."""
    grammar = prepared_grammar(cfg.values["prepare"])
    return EvaluationConfigs(cfg.study, cfg.composed.config_dir, cfg.trainer.accelerator, grammar)


Finished = tuple[FitConfig, Outcome]


@pytest.fixture(scope="module")
def finished(tiny: Callable[..., FitConfig], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The study with the testbed graded by its truth; the base itself is a published row, too."""
    cfg = tiny(*ASKED, "study.published=['${model.path}']")
    outcome = run_study(cfg, tmp_path_factory.mktemp("finished") / "out")
    finish_study(outcome)
    return cfg, outcome


def results_of(outcome: Outcome, benchmark: str = "testbed") -> dict[str, EvaluationResult]:
    found = (read_result(path) for path in sorted((outcome.folder / "benchmarks" / benchmark).iterdir()))
    return {result.label: result for result in found if result is not None}


# ------------------------------------------------------------------------------------------------ a finished study


def test_every_row_has_the_score_of_its_own_model(finished: Finished) -> None:
    cfg, outcome = finished
    rows = outcome.benchmarks["testbed"]
    assert [name for _, name in rows] == ["base", "uniform", "attention", cfg.model.path]
    found = results_of(outcome)
    assert set(found) == {"base", "uniform", "attention", cfg.model.path}
    for (_, name), score in rows.items():
        (main,) = found[name].scores
        assert (score.name, score.values, score.questions) == ("reward", (main.mean,), 4)
    assert rows["", "base"].values == rows["", cfg.model.path].values, "one model under two names"
    answers = {label: result.key["answers"] for label, result in found.items()}
    assert answers["base"] == answers[cfg.model.path] and answers["base"] != answers["attention"]
    models = {
        label: Path(result.model).relative_to(outcome.folder).parts
        for label, result in found.items()
        if label in ("uniform", "attention")
    }
    assert {label: (parts[0], parts[1].split("-")[0]) for label, parts in models.items()} == {
        "uniform": ("points", "uniform"),
        "attention": ("exports", "attention"),
    }
    assert not outcome.unmeasured and not outcome.failed


def test_models_are_those_of_the_chosen_points_after_their_last_step(finished: Finished) -> None:
    """The arm of one point leaves its model at once; of the other only the chosen point is run once more."""
    _, outcome = finished
    (own,) = (outcome.folder / "points").glob("*/last")
    assert own.parent.name.startswith("uniform-")
    (again,) = (outcome.folder / "exports").glob("*/last")
    best = {point.arm.name: point.label for world in outcome.worlds for point in _best(outcome, world)}
    assert again.parent.name.startswith("attention-") and best["attention"].replace("lr ", "lr=") in again.parent.name
    for model in (own, again):
        assert not (model / STATE).exists() and describe_change(model) is None, "what is only needed to resume is gone"
        assert load_model(str(model)).config.num_hidden_layers == 2
        assert json.loads((model / "checkpoint.json").read_text())["step"] == 1
        assert not (model.parent / "best").exists()
    used = {Path(result.model) for result in results_of(outcome).values()}
    assert {own, again} < used
    assert not [line for line in outcome.warnings if "when the point was rerun" in line]


def _best(outcome: Outcome, world: str) -> list[PointResults]:
    return [*outcome.best_points(world).values()]


def test_the_table_has_the_columns_and_all_rows(finished: Finished) -> None:
    cfg, outcome = finished
    columns, rows = main_table(outcome)
    assert columns.index("testbed") < columns.index("coverage") and "testbed ±" not in columns
    assert [row["arm"] for row in rows] == ["base", "uniform", "attention", cfg.model.path]
    shown = json.loads((outcome.folder / "tables.json").read_text())
    assert "testbed" in json.dumps(shown)
    text = (outcome.folder / "table.md").read_text()
    assert "testbed: reward on 4 questions in 2 rounds, their mean" in text
    with (outcome.folder / "benchmarks.csv").open(newline="") as file:
        scores = {row["arm"]: float(row["testbed"]) for row in csv.DictReader(file)}
    assert scores == {name: score.mean for (_, name), score in outcome.benchmarks["testbed"].items()}


def test_a_repeated_command_runs_nothing_and_asks_nothing(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg, outcome = finished

    def never(*_: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr(runs, "run", never)
    monkeypatch.setattr(ReplyStore, "add", never)
    again = run_study(cfg, outcome.folder)
    assert again.benchmarks == outcome.benchmarks and not again.unmeasured


def test_a_failing_row_is_named_and_the_study_ends_with_its_tables(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, outcome = finished
    original = benchmarks.run_evaluation

    def answer(made: EvaluateConfig, folder: Path) -> EvaluationResult | None:
        if made.label == "uniform":
            raise RuntimeError("out of luck")
        return None if made.label == "attention" else original(made, folder)

    with monkeypatch.context() as patch:
        patch.setattr(benchmarks, "run_evaluation", answer)
        failed = run_study(cfg, outcome.folder)
    rows = {str(row["arm"]): row for row in main_table(failed)[1]}
    assert rows["uniform"]["testbed"] == rows["attention"]["testbed"] == "FAILED"
    assert rows["base"]["testbed"] == outcome.benchmarks["testbed"]["", "base"].mean
    assert failed.unmeasured == [
        "FAILED benchmark testbed, uniform: RuntimeError: out of luck",
        "FAILED benchmark testbed, attention: some grading calls received no reply; run the same command again to "
        "retry them",
    ]
    finish_study(failed)
    assert "out of luck" in (outcome.folder / "table.md").read_text()
    finish_study(outcome)


def test_a_damaged_model_is_made_anew_and_its_grades_stand(
    finished: Finished, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same point gives the same weights, to which the stored answers and replies belong."""
    cfg, outcome = finished
    (weights,) = (outcome.folder / "exports").glob("*/last/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.setattr(ReplyStore, "add", lambda *_: pytest.fail("asked again"))
    with caplog.at_level(logging.WARNING):
        again = run_study(cfg, outcome.folder)
    assert "the model is missing or damaged; rerunning the point" in caplog.text
    assert again.benchmarks == outcome.benchmarks and not again.unmeasured
    assert describe_change(weights.parent) is None


def test_another_run_than_the_chosen_point_is_warned_of(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    _, outcome = finished
    (run,) = (outcome.folder / "exports").iterdir()
    best = next(point for point in _best(outcome, "") if point.arm.name == "attention")
    result = best.results[0]
    moved = replace(result, metrics={**result.metrics, "val/loss": result.metrics["val/loss"] + 0.01})
    point = next(point for point, found in outcome.points if found == result)
    made = ComposedConfig(DictConfig({}), [])
    line = benchmarks._score_change_warning(benchmarks.ModelExport(point, moved, made, run, False))
    assert line is not None and "val/loss was" in line and point.label in line
    assert benchmarks._score_change_warning(benchmarks.ModelExport(point, result, made, run, False)) is None


def test_a_changed_point_is_exported_and_measured_anew(
    tiny: Callable[..., FitConfig], finished: Finished, tmp_path: Path
) -> None:
    """Another number of steps: nothing of the first study's models, answers or replies is taken."""
    _, outcome = finished
    before = {path for name in ("exports", "benchmarks/testbed") for path in (outcome.folder / name).iterdir()}
    more = run_study(tiny(*ASKED, "trainer.max_steps=2"), outcome.folder)
    after = {path for name in ("exports", "benchmarks/testbed") for path in (outcome.folder / name).iterdir()}
    new = sorted(path.parent.name for path in after - before)
    assert new == ["exports", "testbed", "testbed"], "an export, and two arms measured; the base's scores stand"
    assert not more.unmeasured
    for path in (path for path in after - before if path.parent.name == "exports"):
        assert json.loads((path / "last" / "checkpoint.json").read_text())["step"] == 2


# ------------------------------------------------------------------------------------------------ refused


def test_the_base_file_names_every_benchmark() -> None:
    study = load("fit", ["experiment=layer_sweep", "model.path=m", "data.path=d"]).study
    assert set(list_groups()["benchmark"]) <= set(study.evaluate) and set(study.evaluate.values()) == {None}
    assert not study.benchmarks and not study.published


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["study.benchmarks=[testbad]"], r"study\.benchmarks has testbad, .* did you mean testbed\?.*mt_bench"),
        (["study.benchmarks=[mt_bench]"], r"benchmark mt_bench: .*benchmark\.path.*study\.evaluate\.mt_bench="),
        (
            ["study.benchmarks=[mt_bench]", "study.evaluate.mt_bench={benchmark.path:/nowhere}"],
            r"benchmark mt_bench: .*/nowhere",
        ),
        (["study.benchmarks=[testbed]"], r"OPENAI_API_KEY is not set"),
        (
            ["study.benchmarks=[testbed]", "study.evaluate.all={limits.max_cost:1,grader.model:other}"],
            r"limits\.max_cost=1 needs the grader's token price",
        ),
        ([ASKED[0], "study.evaluate.testbed={grader:truth,limits.dry_run:true}"], r"limits\.dry_run=true"),
        ([*ASKED, "study.published=[/no/such/model]"], r"has /no/such/model, which cannot be read: no folder"),
        (
            ["study.benchmarks=[testbed]", "study.evaluate.testbed={grader:local,grader.path:/no/such/judge}"],
            r"no folder at '/no/such/judge' to load the model from",
        ),
        (
            ["study.benchmarks=[implicit_reward]", "study.evaluate.implicit_reward={benchmark.reference:BASE,"
             "benchmark.data.path:/no/pairs.jsonl}"],
            r"benchmark implicit_reward: .*/no/pairs\.jsonl",
        ),
    ],
)  # fmt: skip
def test_what_is_known_to_fail_is_refused_before_anything_is_made(
    tiny: Callable[..., FitConfig], tmp_path: Path, given: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UserError, match=f"(?s){message}"):
        run_study(tiny(*given), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"benchmarks": ["a", "a"]}, r"study\.benchmarks lists a more than once"),
        ({"published": ["m"]}, r"study\.published=\['m'\] needs at least one benchmark"),
        ({"evaluate": {"b": {"x": 1}, "c": None}, "benchmarks": ["a"]}, r"study\.evaluate\.b would have no effect"),
        ({"evaluate": {"all": {"x": 1}}}, r"study\.evaluate\.all would have no effect"),
        (
            {"evaluate": {"a": {"model.path": "m"}}, "benchmarks": ["a"]},
            r"evaluate\.a sets model\.path, which",
        ),
        ({"arms": ["base"], "benchmarks": ["a"]}, r"two rows of the table would be named base"),
    ],
)
def test_keys_that_make_no_sense(keys: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"benchmarks": [], "evaluate": {}, "published": [], "arms": ["uniform"], **keys}
    with pytest.raises(UserError, match=message):
        for problem in benchmark_problems(**asked):
            raise UserError(problem)
    assert not [*benchmark_problems(["a"], {"a": {"x": 1}, "all": {"y": 1}, "b": None}, ["m"], ["uniform"])]
    assert not [*benchmark_problems([], {"b": None}, [], ["base"])]


def test_what_needs_a_base_that_is_still_to_be_built_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In setting=testbed: the key of the grader is looked for all the same."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    given = ["experiment=layer_sweep", "study.benchmarks=[testbed]"]
    cfg = load("fit", [*given, "study.evaluate.testbed={grader:local,grader.path:BASE}"])
    check_benchmarks(evaluations_of(cfg), None)
    with pytest.raises(UserError, match="no folder at '/gone"):
        check_benchmarks(evaluations_of(cfg), ModelSpec("/gone/base"))
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        openai = load("fit", [*given, "study.evaluate.testbed={benchmark.baseline:BASE}"])
        check_benchmarks(evaluations_of(openai), None)


# ------------------------------------------------------------------------------------------------ settings of a row


def test_an_evaluation_is_that_of_its_row() -> None:
    """The grammar is that of the study's world unless the study says otherwise; BASE is the path of the base."""
    cfg = load(
        "fit",
        [
            "experiment=layer_sweep",
            "prepare.grammar.negation=0.5",
            "study.benchmarks=[testbed]",
            "study.evaluate.testbed={grader:truth,benchmark.baseline:BASE,benchmark.grammar.min_clauses:1}",
            "study.evaluate.all={grading.rounds:1,benchmark.prompts:7}",
        ],
    )
    model = ModelSpec("/models/it's here", revision="r1", chat_template="{{ '${x}' }}", fallback_template="{{ y }}")
    evaluations = evaluations_of(cfg)
    made = evaluations.compose_config("testbed", model, "/bases/a b", evaluations.grammar, label="x", output="/out")
    benchmark = made.benchmark
    assert isinstance(benchmark, TestbedBenchmark)
    assert (benchmark.baseline, benchmark.prompts, made.grading.rounds) == ("/bases/a b", 7, 1)
    assert (benchmark.grammar.negation, benchmark.grammar.min_clauses, benchmark.grammar.max_clauses) == (0.5, 1, 5)
    assert made.grader.grammar == benchmark.grammar  # type: ignore[attr-defined]
    assert made.model == replace(model, path="/models/it's here")
    assert (made.label, made.output, made.trainer) == ("x", "/out", {"accelerator": "cpu"})


def test_bounds_hold_for_all_rows_of_a_benchmark(tiny: Callable[..., FitConfig], tmp_path: Path) -> None:
    """3 replies of a neighbour at 1 dollar each leave 7 of 10 dollars and 17 of 20 calls; own replies count later."""
    cfg = tiny(
        "study.benchmarks=[testbed]",
        "study.evaluate.testbed={grader.model:m,grader.price_model:m,grader.price_input:1000000,grader.price_output:0,"
        "limits.max_cost:10,limits.max_calls:20}",
    )
    made = evaluations_of(cfg).compose_config("testbed", cfg.model)
    bounds = {"limits.max_cost": 10.0, "limits.max_calls": 20}
    assert remaining_limits(made.limits, made.grader, tmp_path / "own") == bounds
    assert remaining_limits(GradingLimits(), made.grader, tmp_path / "own") == {}
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        store = ReplyStore(tmp_path / name)
        with store.open_for_writing():
            for item in "abc":
                call = GradingCall("testbed", item, "answer", 0, (Message(role="user", content=item),), max_tokens=4)
                store.add(call, made.grader.identity(), GradingReply("7", input_tokens=1))
    left = {"limits.max_cost": 7.0, "limits.max_calls": 17}
    assert remaining_limits(made.limits, made.grader, tmp_path / "own") == left
    assert remaining_limits(GradingLimits(max_cost=2.0), made.grader, tmp_path / "own") == {"limits.max_cost": 0.0}


# ------------------------------------------------------------------------------------------------ shown


def score(*values: float, **keys: Any) -> RowScore:
    return RowScore("s", values, keys.pop("seeds", len(values)), **keys)


ROWS = {
    ("", "base"): score(1.0, 3.0, grading=0.1),
    ("", "a"): score(2.0, 2.2, grading=0.3),
    ("", "b"): score(2.0, grading=0.1, seeds=2),
    ("", "c"): score(seeds=2),
    ("", "d"): score(5.0, 7.0, grading=0.1, counts={"no verdict": 2}),
}


def outcome_of(rows: dict[tuple[str, str], RowScore]) -> Outcome:
    study = Study("s", {name: [] for name in "abcde"}, control="a", benchmarks=("bench",))
    arms = [Arm(name, ()) for name in study.arms]
    return Outcome(study, arms, [], [], {}, Path("out"), 1.0, benchmarks={"bench": rows})


def test_cells_and_ranks() -> None:
    """Two values 1 apart from their mean: s = sqrt 2, over sqrt 2, times t(1) = 12.706."""
    outcome = outcome_of(ROWS)
    assert benchmark_cells(outcome, "", "base") == {
        "bench": 2.0,
        "bench ±": pytest.approx(12.7062, abs=1e-4),
        "bench grading": 0.1,
    }
    assert benchmark_cells(outcome, "", "b")["bench"] == "FAILED (1 of 2 seeds)"
    assert benchmark_cells(outcome, "", "c") == {"bench": "FAILED", "bench ±": None, "bench grading": None}
    assert benchmark_cells(outcome, "", "e") == {}
    columns, rows = scores_table(outcome)
    assert columns == ["arm", "bench", RANK]
    assert {row["arm"]: row[RANK] for row in rows} == {"base": 3, "a": 2, "b": "-", "c": "-", "d": 1, "e": "-"}


def test_a_score_of_which_the_lower_is_better_ranks_so() -> None:
    """Perplexities: base 2, a 2.1, d 6. One whose direction is not known ranks nobody."""
    lower = {row: replace(score, higher_is_better=False) for row, score in ROWS.items()}
    outcome = outcome_of(lower)
    _, rows = scores_table(outcome)
    assert {row["arm"]: row[RANK] for row in rows} == {"base": 1, "a": 2, "b": "-", "c": "-", "d": 3, "e": "-"}
    aimless = {row: replace(score, higher_is_better=None) for row, score in ROWS.items()}
    _, rows = scores_table(replace(outcome, benchmarks={"ppl": lower, "odd": aimless}))
    assert {row["arm"]: row[RANK] for row in rows}["d"] == 3
    _, rows = scores_table(replace(outcome, benchmarks={"odd": aimless}))
    assert {row[RANK] for row in rows} == {"-"}


def test_notes_say_what_is_within_noise_and_what_was_missing() -> None:
    """base is 0.1 from a, the control; d is 3.9 from it. Both have 1.96 sqrt(.1^2 + .3^2) = 0.62."""
    lines = [*benchmark_notes(outcome_of(ROWS))]
    assert lines[1].startswith("bench: not different from a beyond the grading noise")
    assert lines[1].endswith("1.96 sqrt(a^2 + b^2): base")
    assert lines[2] == "bench, counted over all rows: no verdict 2"


def test_noise_is_that_of_the_table_of_scores() -> None:
    """1.96 sqrt(.3^2 + .4^2) = 0.98, as ``close`` of the report has it (tests/lab/reports/test_scores.py)."""
    rows = {("", name): score(value, grading=spread) for name, value, spread in
            (("a", 6.0, 0.3), ("b", 6.97, 0.4), ("c", 6.99, 0.4), ("d", 5.03, 0.4), ("e", 5.01, 0.4))}  # fmt: skip
    said = [line for line in benchmark_notes(outcome_of(rows)) if line.endswith("1.96 sqrt(a^2 + b^2): b, d")]
    assert len(said) == 1


def test_bounds_are_over_seeds_else_over_questions() -> None:
    assert score(1.0, interval=(0.5, 1.5)).interval_bounds == (0.5, 1.5)
    assert all(map(math.isnan, score(1.0).interval_bounds)) and all(map(math.isnan, score(seeds=1).interval_bounds))
    low, high = score(1.0, 3.0).interval_bounds
    assert (low + high) / 2 == pytest.approx(2.0) and high - low == pytest.approx(2 * 12.7062, abs=1e-3)


# ------------------------------------------------------------------------------------------------ with a server


def judge(body: Body) -> str:
    """A rating for MT-Bench, by the length of what is judged; a verdict for Arena-Hard, which asks for one."""
    text = "".join(message["content"] for message in body["messages"])
    return "[[A>B]]" if "<ask" in text else f"Rating: [[{1 + len(text) % 10}]]"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Loopback(judge) as found:
        yield found


def served(server: Loopback, folder: Path, *names: str) -> list[str]:
    """What names benchmarks that the server grades, with short answers."""
    paths = {"mt_bench": fastchat(folder / "fastchat")}
    if "arena_hard" in names:
        (folder / "arena").mkdir()
        paths["arena_hard"] = arena_hard_auto(folder / "arena")
    return [
        f"study.benchmarks=[{','.join(names)}]",
        f"study.evaluate.all={{grader.model:m,grader.base_url:'{server.base_url}',grading.rounds:1,"
        "benchmark.sampling.max_new_tokens:4}",
        *(f"study.evaluate.{name}={{benchmark.path:'{paths[name]}'}}" for name in names),
    ]


def test_a_killed_study_goes_on_to_the_main_table_and_a_figure_of_score_over_layer(
    tiny: Callable[..., FitConfig],
    server: Loopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Killed after its first row and given again: 3 questions of 2 turns, each graded twice, make 12 calls a row."""
    layers = ("++study.layers=[1,2]", "~study.grids.attention", "++study.ranking=true")
    where = (f"output={tmp_path / 'outputs'}", "name=study")
    cfg = tiny(*layers, *where, *served(server, tmp_path, "mt_bench", "arena_hard"))
    folder, original, done = run_folder(cfg), benchmarks.run_evaluation, []

    def answer(made: EvaluateConfig, where: Path) -> EvaluationResult | None:
        if done:
            raise KeyboardInterrupt
        done.append(where)
        return original(made, where)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), caplog.at_level(logging.INFO):
        patch.setattr(benchmarks, "run_evaluation", answer)
        fit.main(cfg)
    assert "benchmark mt_bench: 4 models with 12 grading calls each, 48 calls in total" in caplog.text
    assert len(server.requests) == 12
    assert fit.main(cfg) == 0
    rated = [request for request in server.requests if "<ask" not in json.dumps(request.body)]
    assert len(rated) == 4 * 12
    assert (folder / "layers-mt_bench.png").stat().st_size > 1000
    assert "layers-mt_bench.png" in json.loads((folder / "study.json").read_text())["figures"]
    assert "mt_bench by layer" in (folder / "report.html").read_text()
    with (folder / "benchmarks.csv").open(newline="") as file:
        table = csv.DictReader(file)
        rows = {row["arm"]: row for row in table}
        assert [*(table.fieldnames or [])] == ["arm", "mt_bench", "arena_hard", RANK]
    assert [*rows] == ["base", "uniform", "attention L1", "attention L2"]
    assert all(1 <= float(row["mt_bench"]) <= 10 for row in rows.values())
    # The verdict is for what is shown first, so that each pair of games is one win and one loss.
    assert {float(row["arena_hard"]) for row in rows.values()} == {50.0}
    assert sum(float(row[RANK]) for row in rows.values()) == pytest.approx(10.0)
    assert "Benchmarks and the average rank" in (folder / "table.md").read_text()
    asked = len(server.requests)
    assert fit.main(cfg) == 0 and len(server.requests) == asked, "nothing is asked twice"
