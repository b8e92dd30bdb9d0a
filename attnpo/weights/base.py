"""What a weight source is and what it works with. Layers are counted from 1 as in the paper (32 = last of 32)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from attnpo.judge.layers import Row
from attnpo.judge.layers import resolve_layer as resolve_layer
from attnpo.schema import (
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

SomeSource = TypeVar("SomeSource", bound="Layerless")


@dataclass(frozen=True)
class ScorerModel:
    """A causal LM that scores training tokens; ``path`` None is the run's own model as training starts from it.

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
        """What it is asked; its weights are the run's to identify."""
        return {} if self.instruction is None else {"instruction": self.instruction}


@runtime_checkable
class WeightSource(Protocol):
    """Where token weights come from: captured once, stored raw, selected on every use."""

    @property
    def kind(self) -> Kind:
        """Whether a row is a distribution over the response or a factor used as it is."""

    @property
    def signed(self) -> bool:
        """Whether negative weights are legal."""

    @property
    def tokens(self) -> str:
        """ "source": rows live on the source's own tokens and are aligned; "train": on the training ids."""

    @property
    def requires(self) -> frozenset[str]:
        """What capturing needs: a subset of {"judge", "generator", "scorers", "reward"}; empty: nothing is captured."""

    @property
    def postprocess(self) -> Postprocess | None:
        """How the rounds become one distribution; None takes the mean over rounds as it is."""

    def resolve(self, num_layers: int) -> "WeightSource":
        """The same source with every layer name turned into a 1-based number; UserError when outside the range."""

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """The 1-based layers to store, rising; (0,) for the one row of a source without layers; () stores nothing."""

    def wanted(self) -> tuple[Row, ...]:
        """The stored rows that ``select`` reads, of a resolved source; empty for a source without layers."""

    def capture_fingerprint(self) -> Mapping[str, object]:
        """Every setting that changes a stored number; never the layer, the heads or the post-processing."""

    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Raw weights of ``pairs`` in their order, a row for each of ``layers``, read by the model that was loaded."""

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """``captured`` (rows of ``layers``) with the one row left that this source is about."""


class Layerless:
    """What sources without layers do where others choose one; ``rows`` are the numbers theirs are stored under."""

    rows: ClassVar[tuple[int, ...]] = (0,)

    def resolve(self: SomeSource, num_layers: int) -> SomeSource:
        """The source itself: it has no layer."""
        return self

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """One row, under the number 0 of what belongs to no single layer; none where nothing is captured."""
        return self.rows

    def wanted(self) -> tuple[int, ...]:
        """The same row."""
        return self.rows

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """``captured`` as it is."""
        return captured


class Uncaptured(Layerless):
    """A source whose weights each run makes anew: on the training tokens, without a model, stored by no one.

    ``name`` is the option of the config, ``why_not_captured`` what a command is told that would store them.
    """

    name: ClassVar[str]
    why_not_captured: ClassVar[str]
    rows: ClassVar[tuple[int, ...]] = ()
    tokens: ClassVar[str] = "train"
    requires: ClassVar[frozenset[str]] = frozenset()
    postprocess: ClassVar[Postprocess | None] = None
    neutral: ClassVar[bool] = False

    def capture_fingerprint(self) -> dict[str, object]:
        """The name of the source."""
        return {"source": self.name}

    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Raises UserError: these weights are not stored."""
        raise UserError(f"{self.why_not_captured}; run attnpo.fit directly")


class Unlayered(Layerless):
    """A source without layers: a distribution on the source's own tokens unless it says otherwise."""

    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    signed: ClassVar[bool] = False
    tokens: ClassVar[str] = "source"


@runtime_checkable
class NativeSource(WeightSource, Protocol):
    """A source that needs no capture: it weighs the training tokens from what they are."""

    @property
    def neutral(self) -> bool:
        """Whether its weights say no more than an objective without weights does (equal weights)."""

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """A weight for every training token of ``pair``'s response ``side``."""


@runtime_checkable
class PairedSource(WeightSource, Protocol):
    """A source without capture whose weights of a response depend on the other response's training tokens too."""

    @property
    def neutral(self) -> bool:
        """As for ``NativeSource``."""

    def weigh_pair(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse]
    ) -> dict[str, Float[Tensor, " _"]]:
        """A weight for every training token of each response, by side."""


@runtime_checkable
class ColumnSource(WeightSource, Protocol):
    """A source that reads columns of the data, which ``PreferencePair.extra`` holds."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names."""


@runtime_checkable
class OnlineSource(NativeSource, Protocol):
    """A source that weighs each batch from what the training step computes; ``weigh`` fills its place until then."""

    @property
    def statistics(self) -> frozenset[str]:
        """What it reads of ``TokenStats`` beside the log-probabilities, named as in an objective's ``requires``."""

    def weights(
        self, policy: TokenStats, reference: TokenStats | None, batch: PreferenceBatch
    ) -> Float[Tensor, "rows R"] | PairedWeights:
        """The weights of the batch's main rows, from detached statistics; 0 off the response.

        A source may give a weight for each pair as well (finite, 0 or more; 0 takes the pair out of the step's loss,
        whose normaliser stays its number of pairs).
        """


@runtime_checkable
class PairWeigher(NativeSource, Protocol):
    """A source that also weighs whole pairs, from what the data says of them."""

    def pair_weight(self, pair: PreferencePair) -> float:
        """What multiplies the pair's loss, finite and 0 or more; UserError naming the pair otherwise."""


@runtime_checkable
class ScoredSource(WeightSource, Protocol):
    """A source that reads what other models make of the training tokens (``requires`` "scorers")."""

    @property
    def scorers(self) -> Mapping[str, ScorerModel]:
        """The models by the config key that describes each, the first before the one it is compared with."""

    @property
    def compares_whole(self) -> bool:
        """Whether whole distributions of two models are compared, so that their vocabularies must be of one size."""


@runtime_checkable
class PartialSource(WeightSource, Protocol):
    """A source that may be silent about tokens: a raw 0 means that nothing was said about the token.

    Silence counts against coverage; a response about which nothing was said never becomes uniform.
    """

    @property
    def min_coverage(self) -> float:
        """The share of a response's tokens with a weight below which its pair is dropped, unless the run says."""


def online_reads(source: WeightSource) -> frozenset[str]:
    """What a run computes for ``source`` in every step, named as in an objective's ``requires``; empty if not online.

    "reference" among it: the log-probabilities of the frozen reference.
    """
    return source.statistics if isinstance(source, OnlineSource) else frozenset()


def is_neutral(source: WeightSource) -> bool:
    """Whether an objective that reads no weights loses nothing with ``source``: it costs nothing and says nothing."""
    return not source.requires and not (isinstance(source, NativeSource | PairedSource) and not source.neutral)


def least_coverage(source: WeightSource, asked: float | None = None) -> float:
    """The coverage a pair must have: what was asked for, else the source's own; 0 if that weighs every token."""
    if asked is not None:
        return asked
    return source.min_coverage if isinstance(source, PartialSource) else 0.0
