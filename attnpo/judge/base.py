"""Data types and protocols shared by the judge and the weights: prompts, reasoning traces, readings.

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


class ReasoningTrace(NamedTuple):
    """Reasoning that a judge generated before its verdict: token ids, text, and whether the judge closed it itself."""

    ids: tuple[int, ...]
    text: str
    closed: bool

    @property
    def length(self) -> TraceLength:
        """Returns the length record that is stored with the weights."""
        return TraceLength(len(self.ids), self.closed)


@dataclass(frozen=True)
class JudgePrompt:
    """Tokenised prompt of one judge round.

    ``spans`` maps "chosen" and "rejected" to half-open token ranges of ``input_ids``; ``offsets`` lists, for each side,
    the response characters that each token in its range covers.
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

    ``rows``: attention from the verdict position to each prompt token, per layer in the requested order: the mean over
    query heads or, with ``per_head``, one row per head. ``verdict_logps``: natural log-probabilities of the two labels
    and of the argmax token, over the whole vocabulary. ``trace``: length of the reasoning trace between the prompt and
    the verdict position, if any.
    """

    rows: Float[Tensor, "layers T"] | Float[Tensor, "layers heads T"]
    rollout: Float[Tensor, " T"] | None = None
    verdict_logits: Float[Tensor, "2"] | None = None
    verdict_token: int | None = None
    verdict_logps: Float[Tensor, "3"] | None = None
    trace: TraceLength | None = None

    @property
    def label_mass(self) -> float | None:
        """Returns the total probability of both labels at the verdict position; None if it was not read."""
        return None if self.verdict_logps is None else min(1.0, float(self.verdict_logps[:2].double().exp().sum()))


@runtime_checkable
class JudgeModel(Protocol):
    """Causal LM that returns attention rows and verdicts."""

    @property
    def num_layers(self) -> int:
        """Returns the number of layers; layers are numbered from 1."""

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
        """Returns one reading per prompt, in order, each from a single forward pass; ``layers`` are 1-based."""


@runtime_checkable
class PromptBuilder(Protocol):
    """Builds the judge rounds of a pair; implemented by ``attnpo.judge.prompts.JudgePromptBuilder``."""

    @property
    def label_ids(self) -> tuple[int, int]:
        """Returns the token ids of the two labels (A, B)."""

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Returns round 0 with the chosen response as answer A, and round 1 with the rejected one."""

    def fingerprint(self) -> Mapping[str, object]:
        """Returns all prompt settings that affect the results."""


@dataclass(frozen=True)
class LoadedJudge:
    """Loaded judge with its prompt builder. ``verdict``: the two label logits are also read, which needs full depth."""

    model: JudgeModel
    prompts: PromptBuilder
    verdict: bool = True


# Increase by hand with every code change that changes a stored number. It is not a digest of the source, because a
# changed comment would then invalidate hours of judge passes, and lower packages change the numbers too.
# tests/weights/test_versions.py pins numbers under each version and fails if an increase was forgotten.
CAPTURE_VERSION = "2"


class WeightReader(ABC):
    """Reads token weights from a model, for example to compute rows that the store lacks.

    Only ``load`` loads the model; everything else describes it without loading it. ``name`` and ``done``: noun and
    participle for the reader in the log ("judge", "judged"). ``rounds``: rows per response and layer. ``reads``: number
    of sequences that models process per pair; a generated response counts once. ``verdict``: whether verdicts are read
    as well. ``trace``: settings of the judge's reasoning; None if it does not reason.
    """

    name: ClassVar[str]
    done: ClassVar[str]
    rounds: ClassVar[int] = 1
    reads: int = 2
    trace: TraceRules | None = None

    @property
    def verdict(self) -> bool:
        """Returns whether verdicts are read as well."""
        return False

    @property
    def num_layers(self) -> int:
        """Returns the number of layers and which of them have attention; 0 if layers are not read separately."""
        return 0

    @property
    def num_heads(self) -> int:
        """Returns the number of query heads per layer without loading the model; raises UserError if layers differ."""
        return 0

    @abstractmethod
    def describe_pass(self, rows: str) -> str:
        """Describes a pass that reads ``rows``, for the log."""

    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Returns all model settings that affect the results, for the store's key."""

    @abstractmethod
    def prompts_fingerprint(self) -> Mapping[str, object]:
        """Returns all settings of the model's input that affect the results, for the store's key."""

    @abstractmethod
    def load(self, device: torch.device) -> object:
        """Loads the model onto ``device``; returns the object from which sources capture weights."""
