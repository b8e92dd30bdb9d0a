"""Components of the lab that a run calls by its config, before and after training. Light: read before a model loads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnpo.lab.light import LayerRules
from attnpo.run.combinations import needs_layer_search
from attnpo.run.components import Truth
from attnpo.schema import Json, PreferencePair, check_at_least


@dataclass(frozen=True)
class AutoLayer(LayerRules):
    """Finds the layer of ``weights.layer=auto`` (config node ``auto_layer``)."""

    def resolve_layer(self, source: Any, readers: Any, train: Any) -> tuple[Any, Mapping[str, object] | None]:
        """Returns the weights with the layer found on the encoded pairs ``train``, and the record of it.

        As they are, with None, where none is to be found.
        """
        if not needs_layer_search(source):
            return source, None
        from attnpo.lab.auto_layer import find_layer

        choice = find_layer(source, readers, train, self)
        return replace(source, layer=choice.layer), choice.numbers()


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
        check_at_least("drift", 0, pairs=self.pairs)
        check_at_least("drift", 1, train_pairs=self.train_pairs, answers=self.answers)

    def unread(self) -> dict[str, str]:
        """Names the keys without effect."""
        return {} if self.pairs else dict.fromkeys(("train_pairs", "answers"), "drift.pairs=0 measures nothing")

    def measure(
        self,
        policy: Any,
        inputs: Any,
        readers: Any,
        objective: Any,
        reference: str,
        truth: Truth | None,
        sampled: Sequence[PreferencePair],
    ) -> dict[str, Json]:
        """Returns ``RunResult.drift``; ``sampled`` are the policy's answers as chosen, the base's as rejected.

        ``readers``: what the run's weights are read with, and its base; ``reference``: the kind of its reference.
        """
        if not self.pairs:
            return {}
        from attnpo.lab.drift import measure_drift

        counts = {"val": self.pairs, "train": self.train_pairs}
        return measure_drift(policy, inputs, readers, objective, reference, truth, sampled[: self.answers], counts)
