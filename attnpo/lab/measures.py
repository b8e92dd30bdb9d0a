"""Components of the lab that a run calls by its config, before and after training. Light: read before a model loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnpo.lab.layer_rules import LayerRules
from attnpo.schema import Json, PreferencePair, check_least


@dataclass(frozen=True)
class AutoLayer(LayerRules):
    """Finds the layer of ``weights.layer=auto`` (config node ``auto_layer``)."""

    def settle(self, context: Any, encoded: Any) -> Any:
        """Returns the run's context with the layer found, or as it is where none is to be found."""
        from attnpo.lab.auto_layer import settle_layer

        return settle_layer(context, encoded, self)


@dataclass(frozen=True)
class DriftSettings:
    """Measures where the policy moved, on the first pairs in the order of ids or prompts (config node ``drift``).

    ``pairs``: validation pairs, for the KL by token; 0 measures nothing. ``train_pairs``: training pairs, for the
    ranking accuracy. ``answers``: answers sampled from the policy, for the KL by token; none where no ``truth`` samples
    them.
    """

    pairs: int = 0
    train_pairs: int = 256
    answers: int = 96

    def __post_init__(self) -> None:
        check_least("drift", 0, pairs=self.pairs)
        check_least("drift", 1, train_pairs=self.train_pairs, answers=self.answers)

    def unread(self) -> dict[str, str]:
        """Names the keys without effect."""
        return {} if self.pairs else dict.fromkeys(("train_pairs", "answers"), "drift.pairs=0 measures nothing")

    def measure(self, inputs: Any, policy: Any, sampled: Sequence[PreferencePair]) -> dict[str, Json]:
        """Returns ``RunResult.drift``; ``sampled`` are the policy's answers as chosen, the base's as rejected."""
        if not self.pairs:
            return {}
        from attnpo.lab.drift import measure_drift

        return measure_drift(inputs, policy, sampled[: self.answers], self.pairs, self.train_pairs)
