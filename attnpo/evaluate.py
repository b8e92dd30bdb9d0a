"""``python -m attnpo.evaluate``: evaluates a model on a benchmark; an interrupted evaluation can be resumed.

``benchmark=judge`` writes the judge's passport instead and accepts the settings of a training run.
"""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.progress import import_phase
from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.evaluation.evaluate_config import EvaluateConfig
    from attnpo.lab.reports.passport_config import PassportConfig

DESCRIPTION = """\
Evaluate a model on a benchmark: generate answers, grade them, report scores with their spread.
benchmark=judge checks before training whether a judge is worth using;
`benchmark=judge --help` lists its groups.
A grader's API key is read from the environment only; limits.max_cost caps its cost."""
EXAMPLES = """\
python -m attnpo.evaluate benchmark=mt_bench benchmark.path=FastChat model.path=RUN/best
python -m attnpo.evaluate benchmark=testbed grader=truth model.path=outputs/RUN/best
python -m attnpo.evaluate benchmark=judge"""
PASSPORT = "benchmark=judge"
ON_JUDGES = "Check before training whether a judge is worth using: its verdicts, and where its attention goes."
JUDGES = """\
python -m attnpo.evaluate benchmark=judge
python -m attnpo.evaluate benchmark=judge setting=real_smoke model.path=MODEL data.path=PAIRS"""


def main(cfg: "EvaluateConfig") -> int:
    """Runs the evaluation; returns 0, or 1 if some calls got no reply and the command must be rerun."""
    with import_phase("loading transformers"):
        from attnpo.evaluation.evaluating import evaluate
        from attnpo.evaluation.implicit_reward import fill_from_run

    return evaluate(
        cfg.with_component("benchmark", fill_from_run(cfg.benchmark, cfg.model.path, cfg.composed.overrides))
    )


def run_judge_passport(cfg: "PassportConfig") -> int:
    """Prints the judge's passport and writes it to a folder; returns 0."""
    with import_phase("loading transformers"):
        from attnpo.lab.reports.passport import write_passport

    write_passport(cfg)
    return 0


if __name__ == "__main__":
    install_signal_handlers()
    from attnpo.cli.entry import run_entry

    words = sys.argv[1:]
    if PASSPORT in words:
        rest = [word for word in words if word != PASSPORT]
        from attnpo.data.tables import check_validation as early

        ready, name = (lambda cfg: cfg.prepare is None), f"evaluate {PASSPORT}"
        sys.exit(
            run_entry(
                run_judge_passport, "passport", rest, ON_JUDGES, JUDGES, command_name=name, complete=ready, early=early
            )
        )
    sys.exit(run_entry(main, "evaluate", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: True))
