"""Components that a run calls, by what they can do: builders of model and data, truth, measures beside training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the testbed is built without torch
    from attnpo.schema import Json, PreferencePair


@dataclass(frozen=True)
class BuiltFolders:
    """Where the artefacts are, what was measured when they were built, and whether both were already there."""

    model_path: Path
    data_path: Path
    report: dict[str, object]
    reused: bool


@dataclass(frozen=True)
class PreparedJudge:
    """Where the second base is, what was measured when it was built, and whether it was already there."""

    path: Path
    report: dict[str, object]
    reused: bool


@runtime_checkable
class JudgePreparer(Protocol):
    """``prepare`` component that can also build another model to judge."""

    def prepare_judge(self, root: Path) -> PreparedJudge:
        """Returns where it is, built if it is missing."""


@runtime_checkable
class Preparer(Protocol):
    """Builder of model and data (config node ``prepare``)."""

    def prepare(self, root: Path) -> BuiltFolders:
        """Returns where the artefacts are."""


@runtime_checkable
class Truth(Protocol):
    """Scorer of a policy against a known truth (config node ``truth``)."""

    def score(self, *arguments: Any, **named: Any) -> Any:
        """Returns the scores."""

    def base_answers(self, *arguments: Any, **named: Any) -> Any:
        """Returns the base's answers to the prompts of a split, to be sampled once for several scores."""

    def decisive(self, pair: "PreferencePair", side: str, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Returns whether each token, given by its characters of the response, decides the true reward."""

    def is_flipped(self, pair: "PreferencePair") -> bool:
        """Returns whether the rejected response is truly the better one."""


@runtime_checkable
class LayerFinder(Protocol):
    """Finder of the layer of ``weights.layer=auto`` (config node ``auto_layer``)."""

    def settle(self, source: Any, readers: Any, train: Any) -> tuple[Any, Mapping[str, object] | None]:
        """Returns the weights with the layer found on the encoded pairs ``train``, and the record of it.

        As they are, with None, where none is to be found.
        """


@runtime_checkable
class DriftMeasure(Protocol):
    """Measure of where the policy moved, after training (config node ``drift``)."""

    @property
    def pairs(self) -> int:
        """Returns the number of validation pairs that it reads; 0: nothing is measured."""

    def measure(self, *arguments: Any, **named: Any) -> "dict[str, Json]":
        """Returns ``RunResult.drift`` of a policy, its inputs and the answers that were sampled of it."""
