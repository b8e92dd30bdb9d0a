"""``python -m attnpo.evaluate``: a model on a benchmark, from its answers to a table's row; repeated, it goes on.

``benchmark=judge`` is the judge's passport, which is composed like a run.
"""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.progress import import_phase
from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.evaluation.evaluate_config import EvaluateConfig
    from attnpo.lab.reports.passport_config import PassportConfig

DESCRIPTION = """\
Measure a model on a benchmark: its answers, their grades, scores with their spreads.
benchmark=judge says before training whether a judge is worth reading;
`benchmark=judge --help` lists its groups.
A grader's key comes from the environment alone; limits.max_cost bounds what it may cost."""
EXAMPLES = """\
python -m attnpo.evaluate benchmark=mt_bench benchmark.path=FastChat model.path=RUN/best
python -m attnpo.evaluate benchmark=testbed grader=truth model.path=outputs/RUN/best
python -m attnpo.evaluate benchmark=judge"""
PASSPORT = "benchmark=judge"
ON_JUDGES = "Say before training whether a judge is worth reading: its verdicts, and what its attention rests on."
JUDGES = """\
python -m attnpo.evaluate benchmark=judge
python -m attnpo.evaluate benchmark=judge setting=real_smoke model.path=MODEL data.path=PAIRS"""


def main(cfg: "EvaluateConfig") -> int:
    """Returns 0; 1 where calls got no reply, so that the command has to be given again."""
    with import_phase("loading transformers"):
        from attnpo.evaluation.evaluating import evaluate
        from attnpo.evaluation.implicit_reward import fill_from_run

    return evaluate(
        cfg.with_component("benchmark", fill_from_run(cfg.benchmark, cfg.model.path, cfg.composed.overrides))
    )


def run_judge_passport(cfg: "PassportConfig") -> int:
    """Returns 0; the passport is printed, and written into a folder."""
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
