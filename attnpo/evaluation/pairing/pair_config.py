"""What ``attnpo.pair`` was asked for: which answers, who ranks them, which pairs are made."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from attnpo.config.compose import RUNS_ROOT, Root
from attnpo.evaluation.pairing.answer_sets import AnswerSource
from attnpo.evaluation.pairing.base import Ranker
from attnpo.schema import BOOKKEEPING, check_choice, check_least
from attnpo.system.files import clean
from attnpo.training.settings import ACCELERATORS


class Take(Enum):
    """Which pairs a prompt gives: the best against the worst, the best against each other one, or every two."""

    BEST_WORST = "best_worst"
    BEST_REST = "best_rest"
    ALL = "all"


@dataclass(frozen=True)
class PairRules:
    """Which answers of a prompt become a pair (config node ``pairs``).

    Equal scores never do; nor do those that differ by less than ``min_gap``.
    """

    take: Take = Take.BEST_WORST
    min_gap: float = 0.0

    def __post_init__(self) -> None:
        check_least("pairs", 0, min_gap=self.min_gap)


@dataclass(frozen=True)
class PairConfig(Root):
    """The whole of what ``attnpo.pair`` composes; a field per key of ``configs/pair.yaml``."""

    answers: AnswerSource
    ranker: Ranker
    pairs: PairRules
    trainer: dict[str, str] = field(default_factory=dict, metadata=BOOKKEEPING)
    output: str | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        check_choice("trainer.accelerator", self.trainer.get("accelerator", "auto"), ACCELERATORS)

    @property
    def dry_run(self) -> bool:
        """Tells whether the ranker only says what ranking takes: ``limits.dry_run`` of one that has limits."""
        return getattr(getattr(self.ranker, "limits", None), "dry_run", False) is True

    def path(self) -> Path:
        """``output``, or a file in a folder named after the answers and the kind of ranker."""
        if self.output is not None:
            return Path(self.output).expanduser()
        answers = Path(self.answers.path)
        named = answers.parent.name if answers.stem == "answers" and answers.parent.name else answers.name.split(".")[0]
        kind = self.ranker.name.split(" ")[0]
        return RUNS_ROOT / f"pairs-{clean(named.removeprefix('answers-'))}-{kind}" / "pairs.jsonl"
