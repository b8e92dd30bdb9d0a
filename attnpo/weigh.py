"""``python -m attnpo.weigh``: weights, and with ``reference=cached`` the reference's log-probs, into the store.

Any number of processes may fill one store: under torchrun or SLURM every process takes its share of the pairs.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.cli.progress import importing
from attnpo.cli.terminal import hear_signals

if TYPE_CHECKING:
    from attnpo.lab.studies.config import WeighConfig

DESCRIPTION = "Capture judge weights, and with reference=cached the reference's log-probs, in the store; resumable."
EXAMPLES = """\
python -m attnpo.weigh setting=real_smoke model.path=MODEL data.path=PAIRS export=OUT.parquet
torchrun --nproc-per-node 2 -m attnpo.weigh setting=llama3_8b_base_sft hardware=2x80gb"""


def main(cfg: "WeighConfig") -> int:
    """0; what was found and what was computed is logged."""
    from attnpo.run.messages import announce

    announce("weigh", cfg, None)
    with importing("loading transformers"):
        from attnpo.data.prepared_rows import prune
        from attnpo.run.fill_store import fill_store
        from attnpo.run.folders import store_root
        from attnpo.run.weight_export import check_export, write_weights

    if cfg.prune is not None:
        prune(store_root(cfg.store), cfg.prune)
        return 0
    if cfg.export is not None:
        check_export(cfg.weights, Path(cfg.export))
        cfg.require_unread("export", Path(cfg.export).expanduser())
    fill_store(cfg)
    if cfg.export is not None:
        write_weights(cfg, Path(cfg.export))
    return 0


if __name__ == "__main__":
    hear_signals()
    from attnpo.cli.entry import run_entry
    from attnpo.data.tables import check_validation as early

    sys.exit(
        run_entry(main, "weigh", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: cfg.prepare is None, early=early)
    )
