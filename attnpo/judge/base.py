"""Data types and protocols between the judge and the weights: prompts, written traces, readings.

Apart from small derived values (``JudgeReading.label_mass``), nothing is computed here. Axes are named as in
``attnpo.schema``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.settings import TraceRules
from attnpo.schema import PreferencePair, TraceLength


class WrittenTrace(NamedTuple):
    """Text that a judge wrote before its verdict: token ids, text, and whether the judge ended the trace itself."""

    ids: tuple[int, ...]
    text: str
    closed: bool

    @property
    def length(self) -> TraceLength:
        """Returns the length record that is stored with the weights."""
        return TraceLength(len(self.ids), self.closed)


@dataclass(frozen=True)
class JudgePrompt:
    """One tokenised judge round.

    ``spans`` maps "chosen" and "rejected" to half-open token ranges of ``input_ids``; ``offsets`` maps them to the
    characters (of the response in the pair) that each token of the range covers.
    """

    pair_id: str
    input_ids: list[int]
    chosen_is_a: bool
    spans: Mapping[str, tuple[int, int]]
    offsets: Mapping[str, list[tuple[int, int]]]
    cut: bool = False


@dataclass(frozen=True)
class JudgeReading:
    """Results of one forward pass of the judge on one prompt.

    ``rows``: attention of the verdict position to every prompt token, for each requested layer in the requested order,
    as the mean over query heads or, with ``per_head``, as one row per head. ``verdict_logps``: natural
    log-probabilities of the two labels and of the arg max token, over the whole vocabulary. ``trace``: length of the
    text that the judge wrote between the prompt and the verdict position, if any.
    """

    rows: Float[Tensor, "layers T"] | Float[Tensor, "layers heads T"]
    rollout: Float[Tensor, " T"] | None = None
    verdict_logits: Float[Tensor, "2"] | None = None
    verdict_token: int | None = None
    verdict_logps: Float[Tensor, "3"] | None = None
    trace: TraceLength | None = None

    @property
    def label_mass(self) -> float | None:
        """Returns the sum of the probabilities of both labels at the verdict position; None if these were not read."""
        return None if self.verdict_logps is None else min(1.0, float(self.verdict_logps[:2].double().exp().sum()))


@runtime_checkable
class JudgeModel(Protocol):
    """Causal LM that returns attention rows and verdicts."""

    @property
    def num_layers(self) -> int:
        """Returns the depth of the model; layers are counted 1..num_layers."""

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        """Returns the readings of a list of prompts in order, from one forward pass each; ``layers`` are 1-based."""


@runtime_checkable
class PromptBuilder(Protocol):
    """Builds the judge rounds of a pair; implemented by ``attnpo.judge.prompts.JudgePromptBuilder``."""

    @property
    def label_ids(self) -> tuple[int, int]:
        """Returns the token ids of the two labels (A, B)."""

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Returns round 0 with the chosen response as answer A, and round 1 with the rejected one."""

    def fingerprint(self) -> Mapping[str, object]:
        """Returns every setting of the prompts that changes a number."""


@dataclass(frozen=True)
class LoadedJudge:
    """Loaded judge with its prompt builder; with ``verdict``, both label logits are read too, at full depth."""

    model: JudgeModel
    prompts: PromptBuilder
    verdict: bool = True


# Increase by hand with every code change that changes a stored number. It is not a digest of the source, because a
# changed comment would then invalidate hours of judge passes, and lower packages change the numbers too.
# tests/weights/test_versions.py pins numbers under each version and fails if an increase was forgotten.
CAPTURE_VERSION = "2"


class WeightReader(ABC):
    """Reads token weights from a model that it describes without loading it; the store uses it to compute missing rows.

    ``name`` and ``done``: noun and participle for the reader in the log ("judge", "judged"). ``rounds``: rows per
    response and layer. ``reads``: number of sequences that models read per pair; an answer that a model writes counts
    once. ``verdict``: whether verdicts are read as well. ``trace``: how a judge reasons before it is read; None if it
    does not.
    """

    name: ClassVar[str]
    done: ClassVar[str]
    rounds: ClassVar[int] = 1
    reads: int = 2
    trace: TraceRules | None = None

    @property
    def verdict(self) -> bool:
        """Tells whether verdicts are read as well."""
        return False

    @property
    def num_layers(self) -> int:
        """Returns the depth, with the layers that have attention; 0 if the reader does not read single layers."""
        return 0

    @property
    def num_heads(self) -> int:
        """Returns the number of query heads per layer, without loading the model; UserError if layers differ in it."""
        return 0

    @abstractmethod
    def describe_pass(self, rows: str) -> str:
        """Describes for the log what a pass over ``rows`` does."""

    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Returns every setting of the model that changes a number, for the store's key."""

    @abstractmethod
    def prompts_fingerprint(self) -> Mapping[str, object]:
        """Returns every setting of the model's input that changes a number, for the store's key."""

    @abstractmethod
    def load(self, device: torch.device) -> object:
        """Loads the model onto ``device``; returns the object that sources use for capturing."""
