"""Data between the judge and the weights: its prompts, what it wrote, and what was read off it.

Owns no behaviour. Axes are named as in ``attnpo.schema``.
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
    """Text that a judge wrote before its verdict: ids, the same as text, and whether it ended the trace itself."""

    ids: tuple[int, ...]
    text: str
    closed: bool

    @property
    def length(self) -> TraceLength:
        """Returns what is kept of it beside the weights."""
        return TraceLength(len(self.ids), self.closed)


@dataclass(frozen=True)
class JudgePrompt:
    """One tokenised judge round.

    ``spans`` maps "chosen" and "rejected" to half-open token ranges of ``input_ids``; ``offsets`` maps them to the
    characters (of the response in the pair) each token of the range covers.
    """

    pair_id: str
    input_ids: list[int]
    chosen_is_a: bool
    spans: Mapping[str, tuple[int, int]]
    offsets: Mapping[str, list[tuple[int, int]]]
    cut: bool = False


@dataclass(frozen=True)
class JudgeReading:
    """Numbers that one forward of the judge gave for one prompt.

    ``rows`` holds, per wanted layer in the order asked, the attention of the verdict position on every prompt
    token: mean over query heads, or one row per head when ``per_head`` was asked. ``verdict_logps``: the natural
    log-probabilities of the two labels and, last, of the arg max token, over the whole vocabulary. ``trace``: what the
    judge wrote between the prompt and the verdict position, if it did.
    """

    rows: Float[Tensor, "layers T"] | Float[Tensor, "layers heads T"]
    rollout: Float[Tensor, " T"] | None = None
    verdict_logits: Float[Tensor, "2"] | None = None
    verdict_token: int | None = None
    verdict_logps: Float[Tensor, "3"] | None = None
    trace: TraceLength | None = None

    @property
    def label_mass(self) -> float | None:
        """Returns the probability of the two labels together at the verdict position; None where they were not read."""
        return None if self.verdict_logps is None else min(1.0, float(self.verdict_logps[:2].double().exp().sum()))


@runtime_checkable
class JudgeModel(Protocol):
    """Causal LM that is asked for attention rows and verdicts."""

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
        """Readings of a list of prompts, in their order; 1-based ``layers``; one forward gives all that is asked."""


@runtime_checkable
class PromptBuilder(Protocol):
    """Builds the judge rounds of a pair; ``attnpo.judge.prompts.JudgePrompts`` is the one in use."""

    @property
    def label_ids(self) -> tuple[int, int]:
        """Returns token ids of the two labels (A, B)."""

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Returns round 0 with the chosen response as answer A, round 1 with the rejected one."""

    def fingerprint(self) -> Mapping[str, object]:
        """Returns every setting of the prompts that changes a number."""


@dataclass(frozen=True)
class LoadedJudge:
    """Judge in memory with its prompts; ``verdict`` also reads the two label logits, which takes the full depth."""

    model: JudgeModel
    prompts: PromptBuilder
    verdict: bool = True


# Raised by hand with every change of the code that moves a stored number. Not a digest of the source: that would throw
# hours of judge passes away for a comment, and the code that moves them lies in the rooms below too. Whoever forgets to
# raise one is told by tests/weights/test_versions.py, which pins numbers under each version.
CAPTURE_VERSION = "2"


class WeightReader(ABC):
    """Reader of token weights off a model, described without loading it; the store asks it for what is lacking.

    ``name`` and ``done`` are its words in the log ("judge", "judged"). ``rounds``: rows for each response and layer.
    ``reads``: sequences that models read of a pair, an answer that one writes counted once. ``verdict``: whether
    verdicts are read as well. ``trace``: how a judge thinks before it is read, if it does.
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
        """Layers of the model if they are read one by one, with those that have attention; 0 where none are."""
        return 0

    @property
    def num_heads(self) -> int:
        """Returns query heads of each layer, read from its config alone; UserError when layers differ in it."""
        return 0

    @abstractmethod
    def describe_pass(self, rows: str) -> str:
        """Returns in words what a pass does that reads ``rows``."""

    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Returns what identifies the model's numbers, for the store's key."""

    @abstractmethod
    def fingerprint_of_prompts(self) -> Mapping[str, object]:
        """Returns every setting of what the model is shown that changes a number, for the store's key."""

    @abstractmethod
    def load(self, device: torch.device) -> object:
        """Loads the model onto ``device`` and returns what its sources capture with."""
