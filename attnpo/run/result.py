"""Result of a run: the typed contents of ``result.json``, which is written and read only here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnpo.system.files import Json, flatten, parse_json

REWARDS = "rewards"
# A model counts as destroyed if its largest weight grew by more than GROWTH, or if the mean log-probability of chosen
# answers became UNLIKELY times as negative and fell by more than LOST_NATS nats per token.
GROWTH, UNLIKELY, LOST_NATS = 1e3, 3.0, 2.0
LESS = "its other numbers mean nothing; set a smaller optimizer.lr"
OVERLAP = "trained_on"  # key in the summary of the validation pairs


@dataclass(frozen=True)
class TruthScores:
    """True-reward scores of a policy on the held-out prompts of one split.

    ``numbers``: scalars by name. ``rewards``: true reward of each prompt, averaged over its responses.
    ``base_rewards``: the same for the base model.
    """

    numbers: dict[str, float]
    rewards: list[float]
    base_rewards: list[float] | None = None


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    ``seconds``: durations of training and of the whole run. ``metrics``: last logged values. ``inputs``: statistics of
    the inputs. ``truth``: true-reward scores by split, None if unknown. ``drift``: measurements of policy drift.
    ``merged``: rounding errors of merged adapters, by folder.
    """

    seed: int
    steps: int
    seconds: dict[str, float]
    metrics: dict[str, float]
    inputs: dict[str, Json]
    versions: dict[str, str]
    truth: dict[str, TruthScores] | None
    drift: dict[str, Json] = field(default_factory=dict)
    merged: dict[str, Json] = field(default_factory=dict)

    def split(self, name: str) -> dict[str, Json]:
        """Returns the statistics of a split's pairs, or an empty mapping if the run recorded none."""
        part = self.inputs.get(name)
        return part if isinstance(part, dict) else {}

    def input(self, split: str, name: str) -> float:
        """Returns a number from a split's statistics by its dotted ``name``; NaN if it is missing."""
        return _number_at(self.split(split), name, ".")

    def drift_value(self, name: str) -> float:
        """Returns a number from ``drift`` by its path (``answers/kl``); NaN if it is missing."""
        return _number_at(self.drift, name, "/")

    @property
    def judge(self) -> dict[str, Json]:
        """Returns the statistics of the judge's verdicts, or an empty mapping if no verdicts were read."""
        return self.split("judge")

    @property
    def judge_warning(self) -> str | None:
        """Returns a warning if the judge's verdicts show no preference, else None."""
        warning = self.judge.get("warning")
        return None if warning is None else str(warning)

    @property
    def overlap_warning(self) -> str | None:
        """Returns a warning if validation pairs also appear in the training data; None if not, or if not checked."""
        found = self.split("val").get(OVERLAP)
        warning = found.get("warning") if isinstance(found, dict) else None
        return None if warning is None else str(warning)

    @property
    def is_destroyed(self) -> bool:
        """Returns whether training destroyed the model: weights exploded, or chosen responses became unlikely."""
        return self.metrics.get("moved/growth", 1.0) > GROWTH or self._is_unlikely

    @property
    def _is_unlikely(self) -> bool:
        first, last = (self.metrics.get(f"{name}val/logps/chosen", math.nan) for name in ("first/", ""))
        return last < UNLIKELY * first and first - last > LOST_NATS * self.input("val", "tokens.chosen.p50")

    @property
    def training_warning(self) -> str | None:
        """Returns a warning if training changed no weight or destroyed the model, else None."""
        moved = self.metrics
        if moved.get("moved/grad_norm") == 0:
            return "no step had a nonzero gradient, so nothing was learned: check the token weights and the objective"
        if moved.get("moved/weights") == 0:
            return "training did not change any weight, so the policy equals the base: set a larger optimizer.lr"
        if self._is_unlikely:
            first, last = moved["first/val/logps/chosen"], moved["val/logps/chosen"]
            return (
                f"training destroyed the model: log-prob of chosen responses {last:.0f} "
                f"({first:.0f} before training); {LESS}"
            )
        if self.is_destroyed:
            return f"training destroyed the model: its weights grew {moved['moved/growth']:.0e}-fold; {LESS}"
        return None

    @property
    def warnings(self) -> list[str]:
        """Returns the warnings to show with the scores: failed training, leaked pairs, a bad judge, lost weights."""
        lost = [f"{name}: {part['warning']}" for name in ("train", "val") if "warning" in (part := self.split(name))]
        found = (self.training_warning, self.overlap_warning, self.judge_warning, *lost)
        return [text for text in found if text is not None]

    def to_json(self) -> dict[str, object]:
        """Returns the content of ``result.json``."""
        truth = None
        if self.truth is not None:
            truth = {
                "scores": {split: {**found.numbers, REWARDS: found.rewards} for split, found in self.truth.items()},
                "base_rewards": {
                    split: found.base_rewards for split, found in self.truth.items() if found.base_rewards is not None
                },
            }
        return {**vars(self), "truth": truth}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunResult":
        """Builds the result from the output of ``to_json``. Raises ValueError for anything else."""
        try:
            truth = None
            if data["truth"]:
                base = data["truth"].get("base_rewards", {})
                truth = {
                    split: TruthScores(
                        {name: value for name, value in found.items() if name != REWARDS},
                        found.get(REWARDS, []),
                        base.get(split),
                    )
                    for split, found in data["truth"]["scores"].items()
                }
            seconds, metrics, inputs = (dict(data[name]) for name in ("seconds", "metrics", "inputs"))
            versions = dict(data.get("versions", {}))
            drift = dict(data.get("drift", {}))
            merged = dict(data.get("merged", {}))
            numbers = int(data.get("seed", 0)), int(data["steps"])
            return cls(*numbers, seconds, metrics, inputs, versions, truth, drift, merged)
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"this is not the result of a run: {problem!r}") from problem

    @classmethod
    def read(cls, text: str) -> "RunResult":
        """Parses the text of a ``result.json``. Raises ValueError for anything else."""
        data = parse_json(text)
        if not isinstance(data, dict):
            raise ValueError(f"this is not the result of a run: expected a JSON object, got {type(data).__name__}")
        return cls.from_json(data)


def _number_at(node: Mapping[str, Json], name: str, between: str) -> float:
    """Returns the number at ``name``, a path of keys joined by ``between``; NaN if it is missing."""
    value = dict(flatten(node, between)).get(name)
    return float(value) if isinstance(value, int | float) else math.nan
