"""Where components went that a saved configuration may name by an older import path; until 0.2.0."""

import logging
from functools import cache

log = logging.getLogger(__name__)

# Beginnings of import paths, a longer one before one that it begins with.
MOVED = {
    "attnpo.answers.": "attnpo.evaluation.answers.",
    "attnpo.evaluation.testbed.": "attnpo.lab.testbed.benchmark.",
    "attnpo.grading.truth_grader.": "attnpo.lab.testbed.truth_grader.",
    "attnpo.grading.": "attnpo.evaluation.grading.",
    "attnpo.inspection.show_config.ShowConfig": "attnpo.lab.studies.config.ShowRoot",
    "attnpo.lab.studies.fit_config.": "attnpo.lab.studies.config.",
    "attnpo.lab.studies.show_config.": "attnpo.lab.studies.config.",
    "attnpo.lab.studies.weigh_config.": "attnpo.lab.studies.config.",
    "attnpo.objectives.otpo.": "attnpo.objectives.twdpo.",
    "attnpo.pairing.": "attnpo.evaluation.pairing.",
    "attnpo.reports.": "attnpo.lab.reports.",
    "attnpo.runs.implicit_reward.": "attnpo.evaluation.weighted_implicit_reward.",
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
def find_present(dotted: str) -> str:
    """Returns the import path that an older one stands for today, and logs it once; others as they are."""
    for before, now in MOVED.items():
        if dotted.startswith(before):
            found = now + dotted.removeprefix(before)
            log.info("%s is %s now; the older name is read until version 0.2.0", dotted, found)
            return found
    return dotted
