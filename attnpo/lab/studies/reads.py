"""How often models read a pair for its weights, and for training the scorers that weigh it. Light: plain counts."""

from dataclasses import dataclass
from pathlib import Path

from attnpo.objectives.base import PreferenceObjective
from attnpo.run.result import RunResult
from attnpo.weights.base import WeightSource, online_reads

ROWS = 2  # sequences of a pair: the prompt with each response


@dataclass(frozen=True)
class Reads:
    """What an arm's weights ask of models, beyond what training does with any weights.

    ``once``: sequences read of each pair before training, in ``seconds`` (None: not known). ``again``: sequences read
    forward and backward once more whenever a pair is trained on. ``step_pairs``: pairs of an optimiser step.
    """

    once: int = 0
    seconds: float | None = None
    again: int = 0
    step_pairs: int = 1


def times_trained(result: RunResult, step_pairs: int) -> float:
    """Returns how often a run trained on each of its pairs, by its steps of ``step_pairs``; NaN without a count of
    pairs.
    """
    return result.steps * step_pairs / result.input("train", "pairs")


@dataclass(frozen=True)
class ScorerRun:
    """A trained scorer: its model folder, the run's result, and the sequences that training read of each pair.

    ``forwards`` has those of the reference too; validation is not counted.
    """

    model: Path
    result: RunResult
    forwards: float
    backwards: float

    @classmethod
    def of(
        cls,
        model: Path,
        result: RunResult,
        step_pairs: int,
        objective: PreferenceObjective,
        weights: WeightSource,
        reference: str,
    ) -> "ScorerRun":
        """Returns the scorer of a finished run; ``reference``: when its reference is read, if it is at all."""
        times, more = times_trained(result, step_pairs), 0.0
        if "reference" in objective.requires | online_reads(weights):
            more = ROWS * (1.0 if reference in ("cached", "first_epoch") else times)
        return cls(model, result, ROWS * times + more, ROWS * times)
