"""Lab components that run before and after training if the config selects them. Heavy modules are imported lazily."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnpo.lab.light import LayerRules
from attnpo.run.combinations import needs_layer_search
from attnpo.run.components import Truth
from attnpo.schema import Json, PreferencePair, check_at_least


@dataclass(frozen=True)
class AutoLayer(LayerRules):
    """Resolves ``weights.layer=auto`` to a layer (config node ``auto_layer``)."""

    def resolve_layer(self, source: Any, readers: Any, train: Any) -> tuple[Any, Mapping[str, object] | None]:
        """Replaces ``layer=auto`` with the layer found on ``train``; returns the weights and a record of the search.

        If the layer is not ``auto``, returns the weights unchanged and None as the record.
        """
        if not needs_layer_search(source):
            return source, None
        from attnpo.lab.auto_layer import find_layer

        choice = find_layer(source, readers, train, self)
        return replace(source, layer=choice.layer), choice.to_dict()


@dataclass(frozen=True)
class DriftSettings:
    """Settings of the drift measurement, which uses the first pairs sorted by id or prompt (config node ``drift``).

    ``pairs``: number of validation pairs for the KL by token; 0 turns the measurement off. ``train_pairs``: number of
    training pairs for the ranking accuracy. ``answers``: number of answers sampled from the policy for the KL by token,
    only in settings with a ``truth``.
    """

    pairs: int = 0
    train_pairs: int = 256
    answers: int = 96

    def __post_init__(self) -> None:
        check_at_least("drift", 0, pairs=self.pairs)
        check_at_least("drift", 1, train_pairs=self.train_pairs, answers=self.answers)

    def unused_keys(self) -> dict[str, str]:
        """Lists config keys that have no effect, with reasons."""
        return {} if self.pairs else dict.fromkeys(("train_pairs", "answers"), "drift.pairs=0 turns measuring off")

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
        """Measures and returns the content of ``RunResult.drift``; empty if ``pairs`` is 0.

        ``readers``: the run's readers of token weights. ``reference``: type of the run's reference. ``sampled``: pairs
        with the policy's answers as chosen and the base's as rejected.
        """
        if not self.pairs:
            return {}
        from attnpo.lab.drift import measure_drift

        counts = {"val": self.pairs, "train": self.train_pairs}
        return measure_drift(policy, inputs, readers, objective, reference, truth, sampled[: self.answers], counts)
