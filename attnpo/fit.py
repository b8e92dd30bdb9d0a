"""``python -m attnpo.fit``: trains one run, or runs the study defined by the setting or an experiment."""

import logging
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from attnpo.cli.progress import import_phase
from attnpo.cli.terminal import command_text, exit_process, install_signal_handlers, make_printable
from attnpo.system.processes import is_main_process, world_size

if TYPE_CHECKING:
    from pathlib import Path

    from attnpo.lab.studies.config import FitConfig
    from attnpo.lab.studies.plan import StudyPlan
    from attnpo.training.settings import LoggerSettings, TrainerSettings

log = logging.getLogger("attnpo.fit")  # __name__ is "__main__" when run as a command

DESCRIPTION = "Train with token-weighted preference optimisation: judge, weights, training, report."
EXAMPLES = """\
python -m attnpo.fit                                               the quickstart, on a CPU
python -m attnpo.fit experiment=layer_sweep seeds=1                a study of the paper, one seed
python -m attnpo.fit experiment=none weights=uniform seed=3        one run; any key can be set
python -m attnpo.fit setting=llama3_8b_instruct hardware=1x141gb   a run of the paper"""


def main(cfg: "FitConfig") -> int:
    """Trains a run or a study; returns 0, or 1 if a grid point, a world or an analysis of the study failed.

    Raises:
        RunInterrupted: a signal ended training; progress was saved.
        UserError: another job uses the folder, or the config or its inputs are invalid.
    """
    from attnpo.lab.studies.config import require_one_process
    from attnpo.run.folders import make_folder, run_folder
    from attnpo.run.messages import log_opening_lines
    from attnpo.system.locks import folder_lock

    require_one_process(cfg.study, cfg.composed.arguments())
    folder = run_folder(cfg)
    plan: StudyPlan | None = None
    if cfg.study is None:
        _check_before_start(cfg.trainer, cfg.logger)
    else:
        from attnpo.lab.studies.plan import plan_study

        plan = plan_study(cfg)
    budget = None if plan is None else f"{plan.describe_size()}, {plan.time_estimate().forecast()}"
    with ExitStack() as held:
        if folder.exists():  # check for another job first, then the folder's content, before printing anything
            held.enter_context(folder_lock(folder, cfg.lock_timeout, leading=is_main_process()))
            if plan is None and cfg.resume is None:
                _check_folder_is_unused(folder)
            log_opening_lines("fit", cfg, folder, budget)
        else:
            log_opening_lines("fit", cfg, folder, budget)
            if is_main_process():
                make_folder(folder)
            held.enter_context(folder_lock(folder, cfg.lock_timeout, leading=is_main_process()))
        try:
            return _execute(cfg, folder, plan)
        finally:
            _destroy_process_group()


def _check_before_start(trainer: "TrainerSettings", logger: "LoggerSettings") -> None:
    """Checks the launcher and the experiment tracker before anything is printed or created.

    Raises:
        UserError: the launcher is incompatible with the settings, or the tracker is not available.
    """
    from attnpo.training.processes import apply_launcher

    apply_launcher(trainer)
    if logger.wandb is not None:
        from attnpo.training.settings import check_wandb

        check_wandb(logger)


def _check_folder_is_unused(folder: "Path") -> None:
    with import_phase("loading transformers"):
        from attnpo.run.resume import refuse_existing_run, require_usable_folder

    refuse_existing_run(folder)
    require_usable_folder(folder, None)


def _destroy_process_group() -> None:
    """Destroys torch's process group, whose threads could otherwise abort the process at exit."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _execute(cfg: "FitConfig", folder: "Path", plan: "StudyPlan | None") -> int:
    from attnpo.run.messages import closing_lines, resume_arguments
    from attnpo.training.interrupted import RunInterrupted

    if plan is None:
        with import_phase("loading transformers"):
            from attnpo.run.resume import refuse_existing_run
            from attnpo.run.run import run
            from attnpo.training.checkpoint_folders import latest_checkpoint

        if cfg.resume is None:
            refuse_existing_run(folder)
        name = folder.relative_to(cfg.output).as_posix()
        try:
            result = run(cfg, folder)
        except RunInterrupted as stop:
            if stop.saved is not None and world_size() == 1:
                stop.advice = f"continue with {command_text('fit', *resume_arguments(cfg.composed, name))}"
            raise
        except OSError as problem:  # such as a full disk
            if (saved := latest_checkpoint(folder)) is not None:
                more = (
                    command_text("fit", *resume_arguments(cfg.composed, name)) if world_size() == 1 else "resume=auto"
                )
                problem.add_note(
                    f"the last saved step is {saved[0]}, in {saved[1]}: free some space, then continue with {more}"
                )
            raise
        if result is not None:
            for line in closing_lines(cfg.composed, cfg.seed, folder, result):
                log.info("%s", line)
        return 0
    from attnpo.config.compose import to_yaml
    from attnpo.lab.studies.notes import next_commands as next_studies
    from attnpo.lab.studies.page import finish_study, print_interim_table, publish_study
    from attnpo.lab.studies.runner import run_study
    from attnpo.run.folders import CONFIG
    from attnpo.system.files import write_atomically

    write_atomically(folder / CONFIG, to_yaml(cfg.values))
    try:
        outcome = run_study(cfg, folder, print_interim_table, plan)
    except KeyboardInterrupt as stop:  # raised by a sweep point in this process, or by this process itself
        advice = f"finished runs are kept; continue with {command_text('fit', *cfg.composed.arguments())}"
        if isinstance(stop, RunInterrupted):
            stop.advice = advice
        else:
            log.info("%s", advice)
        raise
    finish_study(outcome)
    publish_study(cfg.logger.wandb, cfg.values, outcome)
    for line in ("next steps:", *(f"  {text}" for text in next_studies(cfg.composed, outcome))):
        sys.stdout.write(f"{make_printable(line)}\n")
    return 1 if outcome.failed or outcome.unmeasured else 0


if __name__ == "__main__":
    install_signal_handlers()
    from attnpo.cli.entry import run_entry
    from attnpo.data.tables import check_validation as early

    exit_process(
        run_entry(main, "fit", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: cfg.prepare is None, early=early)
    )
