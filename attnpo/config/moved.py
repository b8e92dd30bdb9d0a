"""Current import paths of moved components, which let older saved configs load; to be removed in 0.2.0."""

import logging
from functools import cache

log = logging.getLogger(__name__)

# Prefixes of import paths; a longer prefix precedes its own prefixes.
MOVED = {
    "attnpo.answers.answer_config.": "attnpo.evaluation.answers.",
    "attnpo.answers.hf_answering.": "attnpo.evaluation.local_chat.",
    "attnpo.answers.openai_answering.": "attnpo.evaluation.openai_chat.",
    "attnpo.evaluation.answers.answer_config.": "attnpo.evaluation.answers.",
    "attnpo.evaluation.answers.hf_answering.": "attnpo.evaluation.local_chat.",
    "attnpo.evaluation.answers.openai_answering.": "attnpo.evaluation.openai_chat.",
    "attnpo.evaluation.grading.limits.": "attnpo.evaluation.session.",
    "attnpo.evaluation.grading.local_grader.": "attnpo.evaluation.local_chat.",
    "attnpo.evaluation.grading.openai_grader.": "attnpo.evaluation.openai_chat.",
    "attnpo.evaluation.pair_set.": "attnpo.evaluation.implicit_reward.",
    "attnpo.evaluation.pairing.answer_sets.": "attnpo.evaluation.pairs.",
    "attnpo.evaluation.pairing.pair_config.": "attnpo.evaluation.pairs.",
    "attnpo.evaluation.pairing.rankers.": "attnpo.evaluation.rankers.",
    "attnpo.evaluation.testbed.": "attnpo.lab.testbed.benchmark.",
    "attnpo.evaluation.weighted_implicit_reward.": "attnpo.evaluation.implicit_reward.",
    "attnpo.grading.limits.": "attnpo.evaluation.session.",
    "attnpo.grading.local_grader.": "attnpo.evaluation.local_chat.",
    "attnpo.grading.openai_grader.": "attnpo.evaluation.openai_chat.",
    "attnpo.grading.truth_grader.": "attnpo.lab.testbed.benchmark.",
    "attnpo.inspection.show_config.ShowConfig": "attnpo.lab.studies.config.ShowRoot",
    "attnpo.lab.studies.fit_config.": "attnpo.lab.studies.config.",
    "attnpo.lab.studies.show_config.": "attnpo.lab.studies.config.",
    "attnpo.lab.studies.weigh_config.": "attnpo.lab.studies.config.",
    "attnpo.lab.testbed.truth_grader.": "attnpo.lab.testbed.benchmark.",
    "attnpo.objectives.otpo.": "attnpo.objectives.twdpo.",
    "attnpo.pairing.answer_sets.": "attnpo.evaluation.pairs.",
    "attnpo.pairing.pair_config.": "attnpo.evaluation.pairs.",
    "attnpo.pairing.rankers.": "attnpo.evaluation.rankers.",
    "attnpo.reports.": "attnpo.lab.reports.",
    "attnpo.runs.implicit_reward.": "attnpo.evaluation.implicit_reward.",
    "attnpo.runs.settings.AutoLayer": "attnpo.lab.measures.AutoLayer",
    "attnpo.runs.settings.DriftSettings": "attnpo.lab.measures.DriftSettings",
    "attnpo.runs.settings.Judge": "attnpo.judge.settings.Judge",
    "attnpo.runs.settings.OtherJudge": "attnpo.judge.settings.OtherJudge",
    "attnpo.runs.settings.Verbalizer": "attnpo.weights.verbalizer_settings.Verbalizer",
    "attnpo.studies.fit_config.": "attnpo.lab.studies.config.",
    "attnpo.studies.weigh_config.": "attnpo.lab.studies.config.",
    "attnpo.studies.": "attnpo.lab.studies.",
    "attnpo.testbed.": "attnpo.lab.testbed.",
}


@cache
def current_import_path(dotted: str) -> str:
    """Converts an old import path to the current one and logs the change once; returns other paths unchanged."""
    for before, now in MOVED.items():
        if dotted.startswith(before):
            found = now + dotted.removeprefix(before)
            log.info("%s is now %s; the old name is accepted until version 0.2.0", dotted, found)
            return found
    return dotted
