"""``python -m attnpo.fit``: one run, or the study that the setting or an experiment asks for."""

import os
import sys
import time
from pathlib import Path

from omegaconf import DictConfig

from attnpo.config import run_entry

DESCRIPTION = "Train with token-weighted preference optimisation: judge, weights, training, report."
EXAMPLE = "python -m attnpo.fit experiment=layer_sweep seeds=1"


def main(cfg: DictConfig) -> int:
    """0 when everything ran; 1 when a point of a study failed."""
    from attnpo.schema import UserError
    from attnpo.studies.run import run
    from attnpo.studies.runner import run_study
    from attnpo.studies.tables import finish_study

    stamp = os.environ.setdefault("ATTNPO_STAMP", time.strftime("%Y%m%d-%H%M%S"))  # one for all ranks of a launcher
    if cfg.resume == "auto" and cfg.name is None:
        raise UserError("resume=auto continues the run of a folder, so it needs name=NAME (the folder under `output`)")
    if cfg.study is None:
        run(cfg, Path(cfg.output) / (cfg.name or f"run-{stamp}"))
        return 0
    setting = cfg.composed.get("choices", {}).get("setting", "setting")
    name = cfg.name or "-".join([cfg.study.name, stamp if cfg.study.get("restart") else setting])
    outcome = run_study(cfg, Path(cfg.output) / name)
    finish_study(outcome)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(run_entry(main, "fit", None, DESCRIPTION, EXAMPLE, complete=lambda cfg: cfg.prepare is None))
