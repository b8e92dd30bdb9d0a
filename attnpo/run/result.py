"""Result of a run: what ``result.json`` holds, typed. Written and read here alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnpo.system.files import Json, flatten, parse_json

REWARDS = "rewards"
# A model is destroyed where its largest weight grew by more, or where the mean log-probability of chosen answers fell
# below so many times what it was and by so many nats for each of their tokens.
GROWTH, UNLIKELY, LOST_NATS = 1e3, 3.0, 2.0
LESS = "no improvement whatever its other numbers; give a smaller optimizer.lr"
OVERLAP = "trained_on"  # of the account of validation pairs


@dataclass(frozen=True)
class TruthScores:
    """Scores of a policy on the held-out prompts of one split.

    ``numbers``: scalars by name. ``rewards``: the true reward of every prompt, mean of its answers; ``base_rewards``:
    the base's.
    """

    numbers: dict[str, float]
    rewards: list[float]
    base_rewards: list[float] | None = None


@dataclass(frozen=True)
class RunResult:
    """Account of a finished run.

    ``seconds``: of the training and of all. ``metrics``: the last logged values. ``inputs``: what became of them.
    ``truth``: scores by split, None without one. ``drift``: where the policy moved. ``merged``: what merging adapters
    took, by folder.
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
        """Returns what became of a split's pairs; empty where it is not said."""
        part = self.inputs.get(name)
        return part if isinstance(part, dict) else {}

    def input(self, split: str, name: str) -> float:
        """Returns a number of a split's account by its dotted ``name``; NaN where it is missing."""
        return _number(self.split(split), name, ".")

    def drift_value(self, name: str) -> float:
        """Returns a number of ``drift`` by its path (``answers/kl``); NaN where it is missing."""
        return _number(self.drift, name, "/")

    @property
    def judge(self) -> dict[str, Json]:
        """Returns how good the judge's verdicts are; empty where none were read."""
        return self.split("judge")

    @property
    def judge_warning(self) -> str | None:
        """Returns what is wrong with the judge's verdicts, if they tell nothing of preference."""
        warning = self.judge.get("warning")
        return None if warning is None else str(warning)

    @property
    def overlap_warning(self) -> str | None:
        """Returns how much of validation is trained on as well; None where nothing is, or where it was not counted."""
        found = self.split("val").get(OVERLAP)
        warning = found.get("warning") if isinstance(found, dict) else None
        return None if warning is None else str(warning)

    @property
    def is_destroyed(self) -> bool:
        """Returns whether training left no usable model: weights blown up, or chosen answers that became unlikely."""
        return self.metrics.get("moved/growth", 1.0) > GROWTH or self._unlikely

    @property
    def _unlikely(self) -> bool:
        first, last = (self.metrics.get(f"{name}val/logps/chosen", math.nan) for name in ("first/", ""))
        return last < UNLIKELY * first and first - last > LOST_NATS * self.input("val", "tokens.chosen.p50")

    @property
    def training_warning(self) -> str | None:
        """Returns that training moved no weight, or destroyed the model; None where neither is so."""
        moved = self.metrics
        if moved.get("moved/grad_norm") == 0:
            return "no step had a gradient, so nothing was learned: look at the weights and the objective"
        if moved.get("moved/weights") == 0:
            return "training moved no weight: the policy is the base as it was; give a larger optimizer.lr"
        if self._unlikely:
            first, last = moved["first/val/logps/chosen"], moved["val/logps/chosen"]
            return f"the model is destroyed: log-prob of chosen answers {last:.0f}, {first:.0f} before; {LESS}"
        if self.is_destroyed:
            return f"the model is destroyed: weights {moved['moved/growth']:.0e} times larger; {LESS}"
        return None

    @property
    def warnings(self) -> list[str]:
        """Returns warnings that belong beside every figure: failed training, leaked pairs, the judge, lost weights."""
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
        """Returns the result that ``to_json`` wrote. ValueError for what is no result of a run."""
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
            raise ValueError(f"it is no result of a run: {problem!r}") from problem

    @classmethod
    def read(cls, text: str) -> "RunResult":
        """Returns the result in the text of a ``result.json``. ValueError for what is none."""
        data = parse_json(text)
        if not isinstance(data, dict):
            raise ValueError(f"it is no result of a run: expected keys with values, got {type(data).__name__}")
        return cls.from_json(data)


def _number(node: Mapping[str, Json], name: str, between: str) -> float:
    """Returns the number at ``name``, its keys joined by ``between``; NaN where it is missing."""
    value = dict(flatten(node, between)).get(name)
    return float(value) if isinstance(value, int | float) else math.nan
