"""Protocols for the components that a run calls: model and data builders, the true reward, extra measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the testbed is built without torch
    from attnpo.schema import Json, PreferencePair


@dataclass(frozen=True)
class BuiltFolders:
    """Result of ``prepare``: model and data folders, build measurements, and whether an earlier build was reused."""

    model_path: Path
    data_path: Path
    report: dict[str, object]
    reused: bool


@dataclass(frozen=True)
class PreparedJudge:
    """Result of ``prepare_judge``: the judge's folder, build measurements, and whether an earlier build was reused."""

    path: Path
    report: dict[str, object]
    reused: bool


@runtime_checkable
class JudgePreparer(Protocol):
    """``prepare`` component that can also build a second model to use as the judge."""

    def prepare_judge(self, root: Path) -> PreparedJudge:
        """Returns the judge's folder, building the judge if it is missing."""


@runtime_checkable
class Preparer(Protocol):
    """Builds the model and the data (config node ``prepare``)."""

    def prepare(self, root: Path) -> BuiltFolders:
        """Returns the model and data folders, building them if they are missing."""


@runtime_checkable
class Truth(Protocol):
    """Scores a policy with a known true reward (config node ``truth``)."""

    def score(self, *arguments: Any, **named: Any) -> Any:
        """Returns the policy's scores."""

    def base_answers(self, *arguments: Any, **named: Any) -> Any:
        """Returns the base model's responses to a split's prompts, which several calls to ``score`` can share."""

    def mark_decisive(self, pair: "PreferencePair", side: str, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Returns whether each token, given as a character range in the response, decides the true reward."""

    def is_flipped(self, pair: "PreferencePair") -> bool:
        """Returns whether the true reward prefers the rejected response."""


@runtime_checkable
class LayerFinder(Protocol):
    """Component that finds the layer for ``weights.layer=auto`` (config node ``auto_layer``)."""

    def resolve_layer(self, source: Any, readers: Any, train: Any) -> tuple[Any, Mapping[str, object] | None]:
        """Searches for the layer on the encoded pairs ``train``, if a search is needed.

        Returns the source with that layer and a record of the search. Without a search, returns the unchanged source
        and None.
        """


@runtime_checkable
class DriftMeasure(Protocol):
    """Measures how the policy changed during training (config node ``drift``)."""

    @property
    def pairs(self) -> int:
        """Returns the number of validation pairs to measure on; 0 disables the measurement."""

    def measure(self, *arguments: Any, **named: Any) -> "dict[str, Json]":
        """Returns the content of ``RunResult.drift``, measured on the run's inputs and on sampled responses."""
