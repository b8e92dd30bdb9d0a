"""Base classes of weight sources. Layers are counted from 1 as in the paper (32 = last of 32)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.layers import Row
from attnpo.judge.layers import resolve_layer as resolve_layer
from attnpo.schema import (
    SIDES,
    EncodedResponse,
    Kind,
    PairWeights,
    PreferenceBatch,
    PreferencePair,
    TokenStats,
    UserError,
)
from attnpo.weights.postprocess import Postprocess

PairedWeights = tuple[Float[Tensor, "rows R"], Float[Tensor, " pairs"]]
"""Weights of a batch's rows, and a weight for each of its pairs, by which the pair's loss is multiplied."""

SomeSource = TypeVar("SomeSource", bound="WeightSource")


@dataclass(frozen=True)
class ScorerModel:
    """Causal LM that scores training tokens; ``path`` None is the run's own model as training starts from it.

    ``instruction`` is added to the last user turn, after a blank line, when this scorer reads a pair. The chat format
    is the run's in any case.
    """

    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    instruction: str | None = None

    def __post_init__(self) -> None:
        if self.instruction is not None and not self.instruction.strip():
            raise UserError("a scorer's instruction must have words; null is a scorer without one")

    def unread(self) -> dict[str, str]:
        """Keys without effect: the run's own model has its own revision."""
        return {"revision": "the scorer is the model itself (path=null)"} if self.path is None else {}

    def fingerprint(self) -> dict[str, object]:
        """Returns what it is asked; its weights are the run's to identify."""
        return {} if self.instruction is None else {"instruction": self.instruction}


class WeightSource(ABC):
    """Where token weights come from. A source of one's own is a frozen dataclass of one of the classes below.

    ``kind``: whether a row is a distribution over the response or a factor used as it is. ``signed``: whether negative
    weights are legal. ``tokens``: "source", rows live on the source's own tokens and are aligned; "train", they are on
    the training ids. ``requires``: what is read to make them, of "judge", "generator", "scorers" and "reward"; empty,
    nothing is. ``columns``: columns of the data that are read, which ``PreferencePair.extra`` holds. ``postprocess``:
    how rounds become one distribution; None takes their mean as it is. ``partial``: it may be silent about tokens, a
    raw 0 says nothing about the token, and a pair with less than ``min_coverage`` of a response's tokens is dropped
    unless the run says otherwise.
    """

    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    signed: ClassVar[bool] = False
    tokens: ClassVar[str] = "train"
    requires: ClassVar[frozenset[str]] = frozenset()
    columns: ClassVar[tuple[str, ...]] = ()
    partial: ClassVar[bool] = False
    postprocess: Postprocess | None
    min_coverage: float

    def resolve(self: SomeSource, num_layers: int) -> SomeSource:
        """Returns the source with each layer's name as a number from 1; UserError when outside the range."""
        return self

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers to store, from 1 and rising; (0,) is one row of no layer, () stores nothing."""
        return ()

    def rows_to_store(self, num_layers: int, num_heads: Callable[[], int]) -> tuple[Row, ...]:
        """Returns the rows to store; ``num_heads`` is asked only when heads are chosen."""
        return self.capture_layers(num_layers)

    def rows_read(self) -> tuple[Row, ...]:
        """Returns the stored rows that ``select`` reads, of a resolved source; empty without layers."""
        return ()

    def capture_fingerprint(self) -> Mapping[str, object]:
        """Returns every setting that changes a stored number; never the layer, the heads or the post-processing."""
        return {"source": type(self).__name__.lower()}

    @abstractmethod
    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Returns raw weights of ``pairs`` in their order, a row for each of ``layers``, read by the loaded model."""

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """Returns ``captured`` (rows of ``layers``) with the one row left that this source is about."""
        return captured


class CapturedSource(WeightSource):
    """Source that a model is read for: captured once, stored raw, selected on every use.

    Without layers, as here, it has one row, under the number 0 of what belongs to no single layer.
    """

    tokens: ClassVar[str] = "source"

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers to store, from 1 and rising; (0,) is one row of no layer."""
        return (0,)

    def rows_read(self) -> tuple[Row, ...]:
        """Returns the stored rows that ``select`` reads, of a resolved source."""
        return (0,)


class ScoredSource(CapturedSource):
    """Source that reads what other models make of the training tokens (``requires`` "scorers").

    ``name``: its option in the config. ``compares_whole``: whether whole distributions of two models are compared:
    vocabularies must be of one size then.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = Kind.FACTOR
    tokens: ClassVar[str] = "train"
    requires: ClassVar[frozenset[str]] = frozenset({"scorers"})
    compares_whole: bool = False
    postprocess = None

    @property
    @abstractmethod
    def scorers(self) -> Mapping[str, ScorerModel]:
        """Returns the models by the config key that describes each, the first before the one it is compared with."""


class TextSource(WeightSource):
    """Source whose weights each run makes anew: on the training tokens, without a model, stored by no one.

    ``name`` is the option of the config. ``neutral``: whether its weights say no more than an objective without weights
    does (equal weights).
    """

    name: ClassVar[str] = "of one's own"
    neutral: ClassVar[bool] = False
    postprocess = None

    def capture_fingerprint(self) -> Mapping[str, object]:
        """Returns the name of the source; nothing is stored under it."""
        return {"source": self.name}

    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Raises UserError: these weights are not stored."""
        name = type(self).__name__
        raise UserError(f"weights of {name} are made anew by each run, nothing is captured; run attnpo.fit directly")

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns a weight for every training token of ``pair``'s response ``side``.

        A source whose weights of a response depend on the other one has ``weigh_pair`` instead.
        """
        raise UserError(f"{type(self).__name__} has neither weigh nor weigh_pair: give it one of them")

    def weigh_pair(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse]
    ) -> dict[str, Float[Tensor, " _"]]:
        """Returns a weight for every training token of each response, by side."""
        return {side: self.weigh(pair, side, encoded[side]) for side in SIDES}

    def pair_weight(self, pair: PreferencePair) -> float:
        """Returns what multiplies the pair's loss, finite and 0 or more; UserError naming the pair otherwise."""
        return 1.0


Uncaptured = TextSource  # the name of before 0.2.0


class OnlineSource(TextSource):
    """Source that weighs each batch from what the training step computes; equal weights until then.

    ``statistics``: what it reads of ``TokenStats`` beside the log-probabilities, named as in an objective's
    ``requires``.
    """

    statistics: ClassVar[frozenset[str]] = frozenset()

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns equal weights."""
        return equal_weights(encoded)

    @abstractmethod
    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"] | PairedWeights:
        """Returns the weights of the batch's main rows, from detached statistics; 0 off the response.

        A source may give a weight for each pair as well (finite, 0 or more; 0 takes the pair out of the step's loss,
        whose normaliser stays its number of pairs).
        """


def equal_weights(encoded: EncodedResponse) -> Float[Tensor, " m"]:
    """Returns 1/m for each of a response's m training tokens, float32."""
    count = len(encoded.response_ids)
    return torch.full((count,), 1.0 / max(1, count))


def online_reads(source: WeightSource) -> frozenset[str]:
    """Returns what a run computes for ``source`` in every step, named as in an objective's ``requires``.

    Empty if not online.

    "reference" among it: the log-probabilities of the frozen reference.
    """
    return source.statistics if isinstance(source, OnlineSource) else frozenset()


def is_neutral(source: WeightSource) -> bool:
    """Returns whether an objective that reads no weights loses nothing with ``source``, which costs nothing."""
    return not source.requires and not (isinstance(source, TextSource) and not source.neutral)


def least_coverage(source: WeightSource, asked: float | None = None) -> float:
    """Returns the coverage a pair must have: as asked, else the source's own; 0 if that weighs every token."""
    if asked is not None:
        return asked
    return source.min_coverage if source.partial else 0.0
