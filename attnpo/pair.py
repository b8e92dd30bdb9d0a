"""``python -m attnpo.pair``: builds preference pairs from several answers to each prompt; interrupted jobs can resume.

Several processes can write to one file: under torchrun or SLURM each process handles its share of the prompts.
"""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.evaluation.pairs import PairConfig

DESCRIPTION = "Rank several answers to each prompt and write preference pairs that data.path reads; resumable."
EXAMPLES = """\
python -m attnpo.pair answers.path=ANSWERS.jsonl ranker.grader.path=JUDGE
python -m attnpo.pair answers.path=ANSWERS.jsonl ranker=reward ranker.path=REWARD_MODEL
python -m attnpo.pair answers.path=ANSWERS.jsonl ranker=column ranker.column=score"""


def main(cfg: "PairConfig") -> int:
    """Builds the pairs and prints the path of the output file.

    Returns 0, or 1 if some answers got no score and the command must be rerun.
    """
    from attnpo.evaluation.pairs import make_pairs
    from attnpo.system.processes import world_size

    path = make_pairs(cfg)
    if path is None:
        return 1 if world_size() == 1 and not cfg.dry_run else 0
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    install_signal_handlers()
    from attnpo.cli.entry import run_entry

    sys.exit(run_entry(main, "pair", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: True))
