"""Base classes for weight sources. Layers are numbered from 1, as in the paper (layer 32 is the last of 32)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.layers import StoredRow
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
"""Token weights of a batch's rows, and one factor per pair that multiplies the pair's loss."""

SomeSource = TypeVar("SomeSource", bound="WeightSource")


@dataclass(frozen=True)
class ScorerModel:
    """Causal LM that scores training tokens. If ``path`` is None, it is the run's own model before training.

    ``instruction`` is added to the last user turn, after a blank line, when this scorer reads a pair. All scorers use
    the run's chat format.
    """

    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    instruction: str | None = None

    def __post_init__(self) -> None:
        if self.instruction is not None and not self.instruction.strip():
            raise UserError("a scorer's instruction must contain text; set it to null to use no instruction")

    def unused_keys(self) -> dict[str, str]:
        """Lists keys that have no effect: ``revision``, if ``path`` is None."""
        return {"revision": "the scorer is the run's own model (path=null)"} if self.path is None else {}

    def fingerprint(self) -> dict[str, object]:
        """Returns the instruction, if there is one. The run adds the fingerprint of the model's weights."""
        return {} if self.instruction is None else {"instruction": self.instruction}


class WeightSource(ABC):
    """Base class of all token-weight sources. Custom sources are frozen dataclasses that subclass one of those below.

    ``kind``: whether a row is a distribution over the response or consists of factors that are used unchanged.
    ``signed``: whether weights may be negative. ``tokens``: "source" for rows on the source's own tokens, which are
    then aligned; "train" for rows on the training ids. ``requires``: which of "judge", "generator", "scorers" and
    "reward" must be loaded; empty if nothing is needed. ``columns``: data columns that the source reads from
    ``PreferencePair.extra``. ``postprocess``: rules that turn the rounds into one distribution; None uses the plain
    mean of the rounds. ``partial``: the source may leave tokens without a weight. A raw 0 then means "no weight", and a
    pair is dropped if a response has weights for less than ``min_coverage`` of its tokens, unless the run sets a
    different minimum.
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
        """Returns the source with layer names replaced by 1-based numbers; UserError if a layer is out of range."""
        return self

    def layers_to_store(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers to store, 1-based and ascending. (0,) means one row without a layer; () means no rows."""
        return ()

    def rows_to_store(self, num_layers: int, num_heads: Callable[[], int]) -> tuple[StoredRow, ...]:
        """Returns the rows to store; ``num_heads`` is called only if the source selects heads."""
        return self.layers_to_store(num_layers)

    def rows_to_read(self) -> tuple[StoredRow, ...]:
        """Returns the stored rows that ``select`` reads; empty if there are no layers. The source must be resolved."""
        return ()

    def capture_fingerprint(self) -> Mapping[str, object]:
        """Returns all settings that affect the stored values; layer, heads and post-processing do not affect them."""
        return {"source": type(self).__name__.lower()}

    @abstractmethod
    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Computes the raw weights of ``pairs``, in order, with the loaded model: one row for each of ``layers``."""

    def select(self, captured: PairWeights, layers: tuple[StoredRow, ...]) -> PairWeights:
        """Reduces ``captured``, which has the rows ``layers``, to the one row that this source uses."""
        return captured


class CapturedSource(WeightSource):
    """Source whose raw weights are captured from a model once and stored. Each use selects from the stored rows.

    By default there is one row without a layer, stored as layer 0.
    """

    tokens: ClassVar[str] = "source"

    def layers_to_store(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers to store, 1-based and ascending; (0,) means one row without a layer."""
        return (0,)

    def rows_to_read(self) -> tuple[StoredRow, ...]:
        """Returns the stored rows that ``select`` reads; the source must be resolved."""
        return (0,)


class ScoredSource(CapturedSource):
    """Source that compares how two models score the training tokens (``requires`` is "scorers").

    ``name``: the value of ``weights`` in the config that selects this source. ``compares_whole``: whether the source
    compares full next-token distributions, which requires vocabularies of the same size.
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
        """Returns the models by config key; the first one is compared with the second."""


class TextSource(WeightSource):
    """Source whose weights are computed from the training tokens in each run, without a model or the store.

    ``name``: the value of ``weights`` in the config that selects this source. ``neutral``: whether all weights are
    equal, in which case an objective may ignore them.
    """

    name: ClassVar[str] = "of one's own"
    neutral: ClassVar[bool] = False
    postprocess = None

    def capture_fingerprint(self) -> Mapping[str, object]:
        """Returns only the name of the source, because its weights are not stored."""
        return {"source": self.name}

    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Raises UserError, because these weights are never stored."""
        name = type(self).__name__
        raise UserError(f"the weights of {name} are computed in each run and never stored; run attnpo.fit directly")

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns a weight for each training token of ``pair``'s response on ``side``.

        If the weights of one response depend on the other response, the source overrides ``weigh_pair`` instead.
        """
        raise UserError(f"{type(self).__name__} implements neither weigh nor weigh_pair; implement one of them")

    def weigh_pair(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse]
    ) -> dict[str, Float[Tensor, " _"]]:
        """Returns a weight for each training token of both responses, by side."""
        return {side: self.weigh(pair, side, encoded[side]) for side in SIDES}

    def pair_weight(self, pair: PreferencePair) -> float:
        """Returns the factor that multiplies the pair's loss; UserError unless it is finite and at least 0."""
        return 1.0


Uncaptured = TextSource  # its name before 0.2.0


class OnlineSource(TextSource):
    """Source that computes each batch's weights from training-step statistics. Before training, all weights are equal.

    ``statistics``: the parts of ``TokenStats`` that the source reads in addition to the log-probabilities, named as in
    an objective's ``requires``.
    """

    statistics: ClassVar[frozenset[str]] = frozenset()

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns equal weights."""
        return equal_weights(encoded)

    @abstractmethod
    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"] | PairedWeights:
        """Computes the weights of the batch's main rows from detached statistics. They are 0 outside the response.

        A source may also return a weight for each pair (finite, at least 0). A weight of 0 removes the pair from the
        step's loss; the loss is still divided by the total number of pairs.
        """


def equal_weights(encoded: EncodedResponse) -> Float[Tensor, " m"]:
    """Returns 1/m for each of a response's m training tokens, float32."""
    count = len(encoded.response_ids)
    return torch.full((count,), 1.0 / max(1, count))


def online_statistics(source: WeightSource) -> frozenset[str]:
    """Returns the statistics that a run computes for ``source`` in every step, named as in an objective's ``requires``.

    Empty if the source is not online. "reference" means the log-probabilities of the frozen reference.
    """
    return source.statistics if isinstance(source, OnlineSource) else frozenset()


def is_neutral(source: WeightSource) -> bool:
    """Returns whether ``source`` requires no model and has equal token weights, so any objective may ignore it."""
    return not source.requires and not (isinstance(source, TextSource) and not source.neutral)


def required_coverage(source: WeightSource, asked: float | None = None) -> float:
    """Returns the minimum coverage of a pair: ``asked`` if given, else the source's minimum (0 unless partial)."""
    if asked is not None:
        return asked
    return source.min_coverage if source.partial else 0.0
