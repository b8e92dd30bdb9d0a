"""``python -m attnpo.generate``: generates a model's answers to prompts as JSON lines; a rerun adds missing answers.

Several processes can write to one file: under torchrun or SLURM each process answers its share of the prompts.
"""

import sys
from typing import TYPE_CHECKING

from attnpo.cli.progress import import_phase
from attnpo.cli.terminal import install_signal_handlers

if TYPE_CHECKING:
    from attnpo.evaluation.answers import AnswerConfig

DESCRIPTION = "Answer prompts with a model (a folder, a run's best/, a hub name) and write a JSONL file; resumable."
EXAMPLES = """\
python -m attnpo.generate model.path=outputs/RUN/best data.path=PROMPTS.jsonl
python -m attnpo.generate model.path=MODEL data.path=PROMPTS.jsonl sampling.temperature=0
python -m attnpo.generate model.path=MODEL data.path=PROMPTS.jsonl answering=openai"""


def main(cfg: "AnswerConfig") -> int:
    """Generates the answers and prints the path of the output file; returns 0."""
    with import_phase("loading transformers"):
        from attnpo.evaluation.answers import answer_prompts

    sys.stdout.write(f"{answer_prompts(cfg)}\n")
    return 0


if __name__ == "__main__":
    install_signal_handlers()
    from attnpo.cli.entry import run_entry

    sys.exit(run_entry(main, "generate", None, DESCRIPTION, EXAMPLES, complete=lambda cfg: True))
