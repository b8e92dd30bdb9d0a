"""``python -m attnpo.fit``: one run, or the study that the setting or an experiment asks for."""

from typing import TYPE_CHECKING

from attnpo.console import hear_signals, leads, leave

if TYPE_CHECKING:
    from pathlib import Path

    from attnpo.studies.fit_config import FitConfig

DESCRIPTION = "Train with token-weighted preference optimisation: judge, weights, training, report."
EXAMPLES = """\
python -m attnpo.fit                                               the quickstart, on a CPU
python -m attnpo.fit experiment=layer_sweep seeds=1                a study of the paper, one seed
python -m attnpo.fit experiment=none weights=uniform seed=3        one run; any key can be set
python -m attnpo.fit setting=llama3_8b_instruct hardware=1x141gb   a run of the paper"""


def main(cfg: "FitConfig") -> int:
    """0 when everything ran; 1 when a point, a world or an analysis of a study failed.

    Raises:
        Interrupted: a signal ended training; what there is is saved.
        UserError: another job works in the folder, or something is not as it must be.
    """
    from attnpo.locks import locked
    from attnpo.runs.folders import make_folder, run_folder
    from attnpo.runs.startup import announce
    from attnpo.studies.fit_config import require_one_process

    require_one_process(cfg)
    folder = run_folder(cfg)
    announce("fit", cfg, folder)
    if leads():
        make_folder(folder)
    with locked(folder, cfg.lock_timeout, leading=leads()):
        try:
            return _work(cfg, folder)
        finally:
            _leave_group()


def _leave_group() -> None:
    """Ends this process's part in its job's process group, whose threads may else abort the process at its exit."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _work(cfg: "FitConfig", folder: "Path") -> int:
    if cfg.study is None:
        from attnpo.runs.resume import refuse_taken

        refuse_taken(cfg, folder)
        from attnpo.runs.run import run

        run(cfg, folder)
        return 0
    from attnpo.studies.report import finish_study, publish_study
    from attnpo.studies.runner import run_study
    from attnpo.training.interrupted import Interrupted

    try:
        outcome = run_study(cfg, folder)
    except Interrupted as stop:
        stop.advice = "the same command goes on with the study"
        raise
    finish_study(outcome)
    publish_study(cfg, outcome)
    return 1 if outcome.failed or outcome.unmeasured else 0


if __name__ == "__main__":
    hear_signals()
    from attnpo.command_line import run_entry

    leave(run_entry(main, "fit", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: cfg.prepare is None))
