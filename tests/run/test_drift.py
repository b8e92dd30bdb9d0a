"""Where a run's policy moved, through whole runs on a tiny world: with and without a truth, and where nothing moved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.config.compose import load
from attnpo.data.prepare import TrainingExample
from attnpo.lab import drift
from attnpo.lab.drift import score_base
from attnpo.lab.measures import DriftSettings
from attnpo.models.scored import ScoredLM
from attnpo.run.models import load_policy
from attnpo.run.other_pairs import weigh_other_pairs
from attnpo.run.point_cache import cache_between_runs, clear_caches
from attnpo.run.result import RunResult
from attnpo.run.run import run
from attnpo.schema import PreferencePair, RowGroup, TokenStats, UserError
from tests.run.made import Made, make
from tests.run.worlds import World

DRIFT = ("drift.pairs=4", "drift.train_pairs=8", "drift.answers=5")
TRUTH = (
    "truth={_target_:attnpo.lab.testbed.scoring.TruthScorer,prompts:6,max_new_tokens:12,"
    "grammar:{_target_:attnpo.lab.testbed.grammar.Grammar,min_clauses:1,max_clauses:2}}"
)
RUN = ("callbacks=none", "optimizer.lr=0.01", "objective.beta=0.5", *DRIFT)


def kept(monkeypatch: pytest.MonkeyPatch) -> list[list[PreferencePair]]:
    """The sampled answers of every run that follows."""
    seen: list[list[PreferencePair]] = []

    measure = DriftSettings.measure

    def measured(settings: DriftSettings, *trained: Any) -> object:
        seen.append(list(trained[-1]))
        return measure(settings, *trained)

    monkeypatch.setattr(DriftSettings, "measure", measured)
    return seen


def test_a_run_with_a_truth_measures_everything(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds the KL on all answers to the scorer's: by rows in float64, and by hidden states against both heads."""
    sampled = kept(monkeypatch)
    before = {path.parent.name for path in world.store.rglob("key.json")}
    more = ("drift.answers=6", "callbacks.report=true", "callbacks.heat_maps=0")
    result = run(world.config(*RUN, TRUTH, *more), tmp_path / "run")
    found = result.drift
    assert RunResult.read((tmp_path / "run" / "result.json").read_text()) == result
    assert (found["pairs"]["responses"], found["answers"]["responses"]) == (8, 6)
    assert found["answers"]["kl"] == pytest.approx(result.truth["test"].numbers["kl"], rel=1e-4)
    assert found["pairs"]["kl"] > 0 and set(found["ranking_accuracy"]) == {
        "train", "validation", "train_clean", "train_flipped"
    }  # fmt: skip
    assert found["ranking_accuracy"]["train_flipped"] is None, "no label of this world is wrong"
    assert found["ranking_accuracy"]["train_clean"] == found["ranking_accuracy"]["train"]
    assert set(found["displacement"]) == {
        *(f"{split}_{side}" for split in ("train", "validation") for side in ("chosen", "rejected")), "base_answers"
    }  # fmt: skip
    for part in ("pairs", "answers"):
        assert sum(one["tokens"] for one in found[part]["truth"].values()) == pytest.approx(1, abs=1e-5)
        assert set(found[part]["classes"]) == {"end_of_turn", "no_weight", "below_uniform", "weighted"}
        assert result.drift_value(f"{part}/deciles/weight/10") > 1 > result.drift_value(f"{part}/deciles/weight/1")
    assert 0 < result.drift_value("effective_beta/p50") < result.drift_value("effective_beta/max")
    assert len(sampled[0]) == 6 and sampled[0][0].chosen != sampled[0][0].rejected
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Where the policy moved" in page and "below uniform" in page
    assert (tmp_path / "run" / "drift.png").read_bytes().startswith(b"\x89PNG")
    tables = {path.parent.name for path in world.store.rglob("key.json")} - before
    assert len(tables) <= 2, "answers are weighed beside the store"


def test_points_of_a_process_ask_the_base_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second point reads the base's numbers from memory; in another precision it does not."""
    asked: list[int] = []

    def counted(base: ScoredLM, group: RowGroup) -> TokenStats:
        asked.append(len(group.response_ids))
        return score_base(base, group)

    monkeypatch.setattr(drift, "score_base", counted)
    overrides = ("callbacks=none", "optimizer.lr=0.01", *DRIFT)
    outside = run(world.config(*overrides), tmp_path / "outside").drift
    with cache_between_runs():
        first = run(world.config(*overrides), tmp_path / "first").drift
        before = len(asked)
        second = run(world.config(*overrides), tmp_path / "second").drift
        assert before > 0 and len(asked) == before, "the base was asked again"
        run(world.config(*overrides, "trainer.precision=bf16-mixed"), tmp_path / "bf16")
        assert len(asked) > before, "numbers of another precision"
    clear_caches()
    for one in (outside, first, second):
        del one["seconds"]
    assert first == second == outside


def test_without_a_truth_the_pairs_are_measured(world: World, tmp_path: Path) -> None:
    cfg = world.config(*RUN)
    assert cfg.unused_keys()["drift.answers"] == "answers are sampled only with a truth"
    result = run(cfg, tmp_path / "run")
    assert set(result.drift) == {"pairs", "ranking_accuracy", "displacement", "effective_beta", "seconds"}
    assert set(result.drift["ranking_accuracy"]) == {"train", "validation"}
    assert "truth" not in result.drift["pairs"]
    plain = world.config("callbacks=none")
    assert plain.drift.unused_keys()["answers"] == "drift.pairs=0 turns measuring off"


@pytest.fixture
def made(world: World) -> Made:
    return make(world.config(*RUN))


def drift_of(made: Made, sampled: list[PreferencePair]) -> dict[str, Any]:
    """What is measured of a policy that was not trained."""
    cfg, policy = made.cfg, load_policy(made.base)
    return cfg.drift.measure(policy, made.inputs, made.readers, cfg.objective, cfg.reference, cfg.truth, sampled)


def test_a_policy_that_was_not_trained_has_not_moved(made: Made) -> None:
    found = drift_of(made, [])
    assert found["pairs"]["kl"] == 0 and set(found["displacement"].values()) == {0.0}
    assert found["ranking_accuracy"] == {"train": 0.5, "validation": 0.5}


def beta_of(world: World, *overrides: str) -> tuple[dict[str, float], list[TrainingExample]]:
    made = make(world.config("callbacks=none", *DRIFT, *overrides))
    return drift_of(made, [])["effective_beta"], made.inputs.examples["train"].examples


def test_the_beta_of_a_token_is_what_the_objective_multiplies_it_by(world: World) -> None:
    plain, _ = beta_of(world, "objective=dpo", "weights=uniform", "objective.beta=0.3")
    assert list(plain.values()) == pytest.approx([0.3] * 4)
    scaled, examples = beta_of(world, "objective=twdpo", "weights=attention", "objective.beta=0.3")
    rows = [(row, length) for one in examples for row, length in zip(one.weights, one.lengths, strict=True)]
    assert scaled["max"] == pytest.approx(max(0.3 * length * float(row.max()) for row, length in rows), rel=1e-5)
    shares, _ = beta_of(
        world, "objective=twdpo", "weights=attention", "objective.beta=0.3", "objective.length_scale=false"
    )
    assert shares["max"] == pytest.approx(max(0.3 * float(row.max()) for row, _ in rows), rel=1e-5)


def weighed_again(made: Made, pairs: list[PreferencePair]) -> list[TrainingExample]:
    return weigh_other_pairs(made.inputs.recipe, made.inputs.weighed, made.readers, pairs)


def test_an_answer_the_judge_cannot_be_shown_counts_without_weights(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = made.inputs.pairs["val"].pairs[0]
    empty = PreferencePair.from_texts(pair.prompt, "", pair.rejected)
    same = PreferencePair.from_texts(pair.prompt, pair.chosen, pair.chosen)  # a policy that answers as its base did
    found = weighed_again(made, [pair, empty, same])
    assert [example.pair_id for example in found] == [pair.pair_id, empty.pair_id, same.pair_id]
    assert bool(found[2].weights[0].any())
    assert bool(found[0].weights[0].any()) and not bool(found[1].weights[0].any())
    assert len(found[1].weights[0]) == len(found[1].chosen.response_ids) == 1, "the end of the turn alone"


@pytest.mark.parametrize(
    ("overrides", "classes"),
    [
        (["transform=shuffled"], 4),
        (["transform=cross_pair"], 4),
        (["transform=token_profile"], 4),
        (["weights.heads=[1]"], 4),
        (["weights=true_importance", "weights.grammar=${truth.grammar}"], 4),
        (["weights=gradient", "objective=tidpo"], 2),  # weights that training computes: the end of the turn, the rest
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_sampled_answers_are_weighed_as_the_pairs_are(world: World, overrides: list[str], classes: int) -> None:
    made = make(world.config(*RUN, TRUTH, *overrides))
    files = {path: path.stat().st_mtime_ns for path in world.store.rglob("*")}
    found = drift_of(made, made.inputs.pairs["val"].pairs)
    assert [len(found[part]["classes"]) for part in ("pairs", "answers")] == [classes, classes]
    assert ("effective_beta" in found) is (classes == 4) and found["answers"]["responses"] == 5
    assert {path: path.stat().st_mtime_ns for path in world.store.rglob("*")} == files


def test_pairs_weighed_once_more_get_the_weights_they_have(made: Made) -> None:
    again = weighed_again(made, made.inputs.pairs["val"].pairs)
    for one, other in zip(again, made.inputs.examples["val"].examples, strict=True):
        assert one.pair_id == other.pair_id and one.lengths == other.lengths
        for new, old in zip(one.weights, other.weights, strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("key", "least"), [("pairs", 0), ("train_pairs", 1), ("answers", 1)])
def test_counts_below_their_least_are_refused(key: str, least: int) -> None:
    with pytest.raises(UserError, match=rf"drift\.{key} must be at least {least}, got {least - 1}"):
        load("fit", ["setting=testbed", f"drift.{key}={least - 1}"])
