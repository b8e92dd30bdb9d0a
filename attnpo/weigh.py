"""``python -m attnpo.weigh``: weights, and with ``reference=cached`` the reference's log-probs, into the store.

Any number of processes may fill one store: under torchrun or SLURM every process takes its share of the pairs.
"""

import sys
from typing import TYPE_CHECKING

from attnpo.console import hear_signals

if TYPE_CHECKING:
    from attnpo.runs.run_config import RunConfig

DESCRIPTION = "Capture judge weights, and with reference=cached the reference's log-probs, in the store; resumable."
EXAMPLES = """\
python -m attnpo.weigh setting=real_smoke model.path=MODEL data.path=PAIRS
torchrun --nproc-per-node 2 -m attnpo.weigh setting=llama3_8b_base_sft hardware=2x80gb"""


def main(cfg: "RunConfig") -> int:
    """0; what was found and what was computed is logged."""
    from attnpo.runs.startup import announce

    announce("weigh", cfg, None)
    from attnpo.runs.fill_store import fill_store

    fill_store(cfg)
    return 0


if __name__ == "__main__":
    hear_signals()
    from attnpo.command_line import run_entry

    sys.exit(run_entry(main, "weigh", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: cfg.prepare is None))
