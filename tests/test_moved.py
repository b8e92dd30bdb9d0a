"""Older names: a saved configuration is read with them, and two commands of before say where they went."""

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnpo.config.moved import MOVED, current_import_path
from attnpo.config.reader import import_target
from attnpo.run.identity import shorten_class_path
from attnpo.run.resume import MADE
from attnpo.run.run import run
from attnpo.system.files import file_digest, write_checksums
from tests.run.worlds import build_world
from tests.test_entry_points import in_turn

# The components of configs/ whose modules were others before the rooms of DESIGN were built, with what they are now.
BEFORE = {
    "attnpo.answers.answer_config.AnswerConfig": "AnswerConfig",
    "attnpo.answers.hf_answering.HFAnswering": "HFAnswering",
    "attnpo.answers.openai_answering.OpenAIAnswering": "OpenAIAnswering",
    "attnpo.evaluation.answers.answer_config.AnswerRules": "AnswerRules",
    "attnpo.evaluation.answers.hf_answering.HFAnswering": "HFAnswering",
    "attnpo.evaluation.answers.openai_answering.OpenAIAnswering": "OpenAIAnswering",
    "attnpo.evaluation.grading.limits.GradingLimits": "GradingLimits",
    "attnpo.evaluation.grading.local_grader.LocalGrader": "LocalGrader",
    "attnpo.evaluation.grading.openai_grader.OpenAIGrader": "OpenAIGrader",
    "attnpo.evaluation.pair_set.UnseenPairs": "UnseenPairs",
    "attnpo.evaluation.pairing.answer_sets.AnswerSource": "AnswerSource",
    "attnpo.evaluation.pairing.pair_config.PairRules": "PairRules",
    "attnpo.evaluation.pairing.rankers.RewardRanker": "RewardRanker",
    "attnpo.evaluation.testbed.TestbedBenchmark": "TestbedBenchmark",
    "attnpo.evaluation.weighted_implicit_reward.WeightedImplicitReward": "WeightedImplicitReward",
    "attnpo.grading.limits.GradingLimits": "GradingLimits",
    "attnpo.grading.local_grader.LocalGrader": "LocalGrader",
    "attnpo.grading.openai_grader.OpenAIGrader": "OpenAIGrader",
    "attnpo.grading.truth_grader.TruthGrader": "TruthGrader",
    "attnpo.inspection.show_config.ShowConfig": "ShowRoot",
    "attnpo.objectives.otpo.OTPO": "OTPO",
    "attnpo.lab.studies.fit_config.FitConfig": "FitConfig",
    "attnpo.lab.studies.show_config.ShowRoot": "ShowRoot",
    "attnpo.lab.studies.weigh_config.WeighConfig": "WeighConfig",
    "attnpo.lab.testbed.truth_grader.TruthGrader": "TruthGrader",
    "attnpo.pairing.answer_sets.AnswerSource": "AnswerSource",
    "attnpo.pairing.pair_config.PairConfig": "PairConfig",
    "attnpo.pairing.rankers.JudgeRanker": "JudgeRanker",
    "attnpo.reports.passport_config.PassportConfig": "PassportConfig",
    "attnpo.reports.report_config.ReportConfig": "ReportConfig",
    "attnpo.runs.implicit_reward.WeightedImplicitReward": "WeightedImplicitReward",
    "attnpo.runs.settings.AutoLayer": "AutoLayer",
    "attnpo.runs.settings.DriftSettings": "DriftSettings",
    "attnpo.runs.settings.Judge": "Judge",
    "attnpo.runs.settings.OtherJudge": "OtherJudge",
    "attnpo.runs.settings.Verbalizer": "Verbalizer",
    "attnpo.studies.faithfulness.Faithfulness": "Faithfulness",
    "attnpo.studies.fit_config.FitConfig": "FitConfig",
    "attnpo.studies.study.Grid": "Grid",
    "attnpo.studies.study.Study": "Study",
    "attnpo.studies.weigh_config.WeighConfig": "WeighConfig",
    "attnpo.testbed.grammar.Grammar": "Grammar",
    "attnpo.testbed.importance.TrueImportance": "TrueImportance",
    "attnpo.testbed.known_parts.KnownParts": "KnownParts",
    "attnpo.testbed.prepare.Testbed": "Testbed",
    "attnpo.testbed.scoring.TruthScorer": "TruthScorer",
}


@pytest.mark.parametrize("before", BEFORE)
def test_an_older_import_path_gives_the_class_of_today(before: str) -> None:
    found, problem = import_target(before, "class")
    assert problem == "" and isinstance(found, type) and found.__name__ == BEFORE[before]
    assert not found.__module__.startswith(before.rpartition(".")[0])


def test_every_older_beginning_is_tried() -> None:
    assert [old for old in MOVED if not any(before.startswith(old) for before in BEFORE)] == []


def test_an_older_name_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    current_import_path.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert current_import_path("attnpo.testbed.grammar.Grammar") == "attnpo.lab.testbed.grammar.Grammar"
    assert [line for line in caplog.messages if "testbed" in line] == [
        "attnpo.testbed.grammar.Grammar is now attnpo.lab.testbed.grammar.Grammar; the old name is accepted until "
        "version 0.2.0"
    ]
    assert current_import_path("attnpo.weights.sources.attention.Attention").endswith("sources.attention.Attention")


def test_a_run_that_was_saved_with_older_names_goes_on(tmp_path: Path) -> None:
    """Its configuration counts as the same: a component is its class, wherever that is."""
    world, folder = build_world(tmp_path), tmp_path / "run"
    words = ["callbacks.samples=0", "callbacks.report=false"]
    first = run(world.config(*words, "trainer.max_epochs=1"), folder)
    saved = folder / "config.yaml"
    text = saved.read_text(encoding="utf-8")
    older = text
    for before in BEFORE:
        present = current_import_path(before)
        if shorten_class_path(before) == shorten_class_path(present):
            older = older.replace(f"_target_: {present}\n", f"_target_: {before}\n")
    assert older != text and "attnpo.runs.settings.Judge" in older
    saved.write_text(older, encoding="utf-8")
    write_checksums(
        folder, {"result.json": file_digest(folder / "result.json")}, only=MADE
    )  # as that version had written it
    assert OmegaConf.load(saved)["judge"]["_target_"] == "attnpo.runs.settings.Judge"
    again = run(world.config(*words, "trainer.max_epochs=1", "resume=auto"), folder)
    assert first is not None and again is not None and again.to_json() == first.to_json()


def test_a_command_of_before_says_where_it_went() -> None:
    """In the package and, of a report, beside it."""
    went = {
        "verify PATH": "python -m tests.conformance PATH",
        "theory PATH": "python -m experiments.theory",
        "report gains cases.json level=0.5": "python -m experiments.gains FOLDER ... --kl 1.0",
        "report name=r ranks printed.csv": "python -m experiments.check_tables TABLE.csv ...",
    }
    ways = [[f"attnpo.{command}".split(), ["attnpo", *command.split()]] for command in went]
    found, _ = in_turn([words for both in ways for words in both])
    for done, words in zip(found, (words for words in went.values() for _ in range(2)), strict=True):
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
