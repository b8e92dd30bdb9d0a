"""``python -m attnpo.fit``: one run, or the study that the setting or an experiment asks for."""

import sys

from omegaconf import DictConfig

from attnpo.config import run_entry

DESCRIPTION = "Train with token-weighted preference optimisation: judge, weights, training, report."
EXAMPLE = "python -m attnpo.fit experiment=layer_sweep seeds=1"


def main(cfg: DictConfig) -> int:
    """0 when everything ran; 1 when a point of a study failed."""
    from attnpo.studies.folders import run_folder
    from attnpo.studies.run import run
    from attnpo.studies.runner import run_study
    from attnpo.studies.tables import finish_study

    folder = run_folder(cfg)
    if cfg.study is None:
        run(cfg, folder)
        return 0
    outcome = run_study(cfg, folder)
    finish_study(outcome)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(run_entry(main, "fit", None, DESCRIPTION, EXAMPLE, complete=lambda cfg: cfg.prepare is None))
