"""Plain data that the rooms hand to each other, and the protocols through which they use each other.

Owns no behaviour beyond checks of its own fields.

Axis names used throughout: ``pairs`` P, ``rows`` 2P (all chosen rows first, then all rejected rows), ``R`` response
positions, ``T`` model tokens, ``n`` source tokens of one response, ``m`` training tokens of one response.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import NamedTuple, NotRequired, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.system.errors import UserError as UserError
from attnpo.system.files import Json as Json
from attnpo.system.files import digest as digest

_T = TypeVar("_T")


BOOKKEEPING = {"moves_numbers": False}
"""Metadata of a field of a component that moves no number beyond rounding, nor does anything below it."""

ON_HOST = {"on_host": True}
"""Metadata of a field of tensors that stays where it is when the others are moved to a device."""

SEEDS = 2**32
"""Seeds lie below it: what NumPy takes."""


def check_range(part: str, bounds: str, **values: float | int | None) -> None:
    """Raises UserError for a setting of the config node ``part`` outside ``bounds``; None passes, NaN never does.

    ``bounds``: an interval as in mathematics, "[0, 1]" with its ends, "(0, 1)" without; "[1, inf)" and "(0, inf)" have
    no upper end, and infinity is outside.
    """
    low, high = (float(end) for end in bounds[1:-1].split(","))
    for name, value in values.items():
        above = value is None or (low <= value if bounds[0] == "[" else low < value)
        if not (above and (value is None or (value <= high if bounds[-1] == "]" else value < high))):
            words = f"at least {low:g}" if bounds[0] == "[" else f"above {low:g}"
            raise UserError(f"{part}.{name} must be {words if high == math.inf else 'in ' + bounds}, got {value}")


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Returns names as a list in words: all of them, or the first ``most`` and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_at_least(part: str, least: int, **values: float | int | None) -> None:
    """Raises UserError for a setting of the config node ``part`` that is below ``least`` or not finite; None passes."""
    check_range(part, f"[{least}, inf)", **values)


def check_seed(key: str, seed: int, count: int = 1) -> None:
    """Raises UserError unless ``count`` seeds counted from ``seed``, the value of ``key``, are ones NumPy takes."""
    if not 0 <= seed <= SEEDS - count:
        raise UserError(f"{key}: expected a whole number from 0 to {SEEDS - count}, got {seed}")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raises UserError for a value of ``key`` that is none of ``choices``."""
    if value not in choices:
        raise UserError(f"{key} must be one of {', '.join(choices)}, got {value!r}")


class Message(TypedDict):
    """One chat turn in the Hugging Face convention; an assistant's may have its reasoning trace beside the content.

    ``tool_calls``, of an assistant's turn, and ``tools``, the functions that may be called, on a prompt's first turn,
    are JSON texts of lists. A turn of the role "tool" has the result of a call and may name it.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[str]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    tools: NotRequired[str]


REASONING = "reasoning_content"
"""Key of a turn's reasoning trace, and the variable that chat templates read it by."""
MORE = (REASONING, "tool_calls", "tool_call_id", "name", "tools")
"""Other keys of a turn, in the order of ``Message``."""


def copy_message(turn: Message) -> Message:
    """Returns a new turn with the role, the content and what else ``turn`` has, in the order of ``Message``."""
    more = {name: turn[name] for name in MORE if turn.get(name)}  # type: ignore[literal-required]
    return cast(Message, {"role": turn["role"], "content": turn["content"], **more})


def prompt_identity(prompt: Sequence[Message]) -> list[list[str]]:
    """Returns what tells one prompt from another, for digests: each turn's role and content, its calls and tools."""
    more = [[turn[name] for name in ("tool_calls", "tools") if turn.get(name)] for turn in prompt]
    return [[turn["role"], turn["content"], *rest] for turn, rest in zip(prompt, more, strict=True)]


# --------------------------------------------------------------------------------------------- preference data


@dataclass(frozen=True)
class PreferencePair:
    """One prompt with a chosen and a rejected response.

    ``pair_id`` is a digest of the content, so the same pair met twice has the same id (duplicates are legal).
    ``extra`` keeps further columns of the row (scores, topics); it never enters the id. ``apart``: reasoning traces
    that begin its responses are weighed apart from the answers after them, and judges read the answers alone.
    """

    pair_id: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    extra: Mapping[str, object] = field(default_factory=dict)
    apart: bool = False

    @classmethod
    def from_texts(
        cls,
        prompt: Sequence[Message],
        chosen: str,
        rejected: str,
        extra: Mapping[str, object] | None = None,
        apart: bool = False,
    ) -> "PreferencePair":
        """Returns the pair with its content digest as id, another one where traces are weighed apart."""
        turns = tuple(copy_message(turn) for turn in prompt)
        key = digest([[list(turn.values()) for turn in turns], chosen, rejected, *(["apart"] if apart else [])])
        return cls(key[:32], turns, chosen, rejected, dict(extra or {}), apart)

    def response(self, side: str) -> str:
        """Returns the text of ``side``, "chosen" or "rejected"."""
        return self.chosen if side == "chosen" else self.rejected


def list_pair_ids(pairs: Sequence[PreferencePair]) -> list[str]:
    """Returns the id of every pair; those that know their ``ids`` without their texts are not read for it."""
    known: list[str] | None = getattr(pairs, "ids", None)
    return [pair.pair_id for pair in pairs] if known is None else known


SIDES = ("chosen", "rejected")


class EncodedResponse(NamedTuple):
    """Training ids of one response and the prompt before it.

    ``offsets`` are half-open character ranges in the response text as it stands in the pair; tokens that hold no
    character of it (end of turn) have an empty range at the text's end.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    offsets: Sequence[tuple[int, int]]


# --------------------------------------------------------------------------------------------- token weights


@dataclass(frozen=True)
class TokenWeights:
    """Raw weights of one response on the source's own tokens, a row per captured layer.

    ``offsets`` are characters of the response as it stands in the pair, half open.
    """

    token_ids: Int[Tensor, " n"]
    offsets: Int[Tensor, "n 2"]
    weights: Float[Tensor, "layers n"]


class TraceLength(NamedTuple):
    """Tokens of a trace that a judge wrote, and whether it ended it itself."""

    tokens: int
    closed: bool


@dataclass(frozen=True)
class JudgeRound:
    """Result of one judge round (one order of the two answers).

    ``verdict_logits`` are the logits of the label tokens (A, B) at the verdict position; ``verdict_token`` is the
    arg max over the vocabulary there; both None when the verdict was not read. ``cut``: the prompt was too long and was
    shortened, so that the judge did not see all of it. ``trace``: what the judge wrote before its verdict, if it did.
    """

    chosen_is_a: bool
    chosen: TokenWeights
    rejected: TokenWeights
    verdict_logits: Float[Tensor, "2"] | None = None
    verdict_token: int | None = None
    cut: bool = False
    trace: TraceLength | None = None

    def side(self, name: str) -> TokenWeights:
        """Returns the weights of ``name``, "chosen" or "rejected"."""
        return self.chosen if name == "chosen" else self.rejected


@dataclass(frozen=True)
class PairWeights:
    """Everything a source captured for one pair: a list of rounds, all with the same layers in the same order."""

    pair_id: str
    rounds: tuple[JudgeRound, ...]


class Kind(Enum):
    """Kind of a weight row: a distribution sums to 1, a factor is used as it is."""

    DISTRIBUTION = "distribution"
    FACTOR = "factor"


# --------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True)
class Sampling:
    """Decoding settings; ``temperature`` 0 is greedy.

    ``presence_penalty`` is taken off the logit of every token that the answer has already, ``frequency_penalty`` as
    many times as it has it; the prompt's tokens do not count. ``stop_ids``: token ids that end an answer, beside those
    that the model and its chat format name.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or positive, and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2 <= penalty <= 2:
                raise UserError(f"{name}_penalty must be from -2 to 2 (0 is none), got {penalty}")
        if any(token < 0 for token in self.stop_ids):
            raise UserError(f"stop_ids must be token ids, none of them negative, got {list(self.stop_ids)}")

    def fingerprint(self) -> dict[str, object]:
        """Returns what identifies the settings in a store; those that came later only where they change something."""
        first = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
        later = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop_ids": sorted(set(self.stop_ids)),
        }
        return {name: getattr(self, name) for name in first} | {name: value for name, value in later.items() if value}


@runtime_checkable
class Generator(Protocol):
    """Answers prompts with text."""

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one answer per prompt, in their order, special tokens removed."""


# --------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class ModelInputs:
    """Model inputs that a layout makes.

    ``input_ids``, ``position_ids`` [batch T]; ``attention_mask`` [batch T] (1 = token) or None; ``predict_index``
    [rows R] is the flat index (into batch*T) of the hidden state that predicts each response token.

    ``segments``: None for one sequence per row; else the batch is one row of many sequences, and each line holds
    (start, count, prefix, shared): the tokens start..start+count-1 follow the ``shared`` tokens from ``prefix`` on, and
    see, causally, those and each other. Every token of the row is in exactly one segment. ``segment_rows`` is the
    response row of each segment; None: their order. Both stay on the CPU: plans are made there, so that no step waits
    for a GPU. ``scored``: row and position of every response token, for the same reason; None: the response mask says.
    """

    input_ids: Int[Tensor, "batch T"]
    position_ids: Int[Tensor, "batch T"]
    attention_mask: Int[Tensor, "batch T"] | None
    predict_index: Int[Tensor, "rows R"]
    segments: Int[Tensor, "segments 4"] | None = field(default=None, metadata=ON_HOST)
    segment_rows: Int[Tensor, "segments"] | None = field(default=None, metadata=ON_HOST)
    scored: Int[Tensor, "N 2"] | None = None

    def to(self, device: torch.device | str) -> "ModelInputs":
        """Returns the same inputs on ``device``."""
        return _move_to_device(self, torch.device(device))


@dataclass(frozen=True)
class InputGradient:
    """Influence of each input token on a model's next token: the L1 norm of a gradient at its embedding.

    ``response``: per response token, 0 off the response; ``prompt``: the sum over the row's prompt tokens, whose number
    is ``prompt_tokens``.
    """

    response: Float[Tensor, "rows R"]
    prompt: Float[Tensor, " rows"]
    prompt_tokens: Int[Tensor, " rows"]


@dataclass(frozen=True)
class TokenStats:
    """Per-token statistics in response space; positions under a false response mask hold 0.

    ``vocab`` has statistics of one model's distribution at each position (entropy, collision), ``joint`` those
    of two models (kl_ref_policy, ...). ``groups`` has the statistics of the batch's other row groups, by their names.
    ``routing``: of a mixture's routers, how often each row's tokens chose each expert and the sum of its probabilities.
    """

    logps: Float[Tensor, "rows R"]
    hidden: Float[Tensor, "rows R d"] | None = None
    vocab: Mapping[str, Float[Tensor, "rows R"]] = field(default_factory=dict)
    joint: Mapping[str, Float[Tensor, "rows R"]] = field(default_factory=dict)
    input_gradient: InputGradient | None = None
    groups: Mapping[str, "TokenStats"] = field(default_factory=dict)
    routing: Float[Tensor, "rows 2 experts"] | None = None


@dataclass(frozen=True)
class RowGroup:
    """Response rows in response space: of the main group 2P, all chosen rows first.

    ``token_weights`` maps a channel to its weights; "reward" is always there for distributions or factors aligned on
    the response tokens. ``factors``: those weights are factors, used as they are, and no distribution.
    ``source_lengths`` is |y| as the weight source counts it.
    """

    response_ids: Int[Tensor, "rows R"]
    response_mask: Bool[Tensor, "rows R"]
    token_weights: Mapping[str, Float[Tensor, "rows R"]]
    source_lengths: Float[Tensor, " rows"]
    reference_logps: Float[Tensor, "rows R"] | None
    inputs: ModelInputs | None = None
    factors: bool = False

    def to(self, device: torch.device | str) -> "RowGroup":
        """Returns the same rows with every tensor on ``device``."""
        return _move_to_device(self, torch.device(device))


@dataclass(frozen=True)
class PreferenceBatch:
    """One micro-batch of P pairs; ``step_pairs`` is the number of pairs in its whole optimiser step (all ranks).

    ``step_tokens``: the chosen and the rejected response tokens of that step, void pairs left out; (0, 0) where nobody
    counted them. ``ahead``: row groups of this rank's whole step that are looked at before it, with its first
    micro-batch only. ``state``: what an objective summed over those. ``step``: optimiser steps taken before this one,
    None outside training.
    """

    groups: Mapping[str, RowGroup]
    pair_weight: Float[Tensor, "pairs"]
    pair_ids: tuple[str, ...]
    pair_values: Mapping[str, Float[Tensor, "pairs"]] = field(default_factory=dict)
    step_pairs: int = 0
    step_tokens: tuple[int, int] = (0, 0)
    ahead: Mapping[str, tuple[RowGroup, ...]] = field(default_factory=dict)
    state: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)
    step: int | None = None

    @property
    def main(self) -> RowGroup:
        """Returns the group of the pairs themselves."""
        return self.groups["main"]

    @property
    def pairs(self) -> int:
        """Returns P."""
        return len(self.pair_ids)

    def to(self, device: torch.device | str) -> "PreferenceBatch":
        """Returns the same batch with every tensor on ``device``."""
        return _move_to_device(self, torch.device(device))


def _move_to_device(value: _T, device: torch.device) -> _T:
    moved: object = value
    if isinstance(value, Tensor):
        moved = value.to(device, non_blocking=True)
    elif isinstance(value, Mapping):
        moved = {key: _move_to_device(item, device) for key, item in value.items()}
    elif isinstance(value, tuple):
        moved = tuple(_move_to_device(item, device) for item in value)
    elif isinstance(value, PreferenceBatch | RowGroup | ModelInputs):
        here = {each.name for each in fields(value) if each.metadata == ON_HOST}
        moved = replace(
            value, **{key: _move_to_device(item, device) for key, item in vars(value).items() if key not in here}
        )
    return cast(_T, moved)


@dataclass(frozen=True)
class ObjectiveOutput:
    """Per-pair results of an objective. ``losses`` carries gradient; rewards and extras are detached."""

    losses: Float[Tensor, " pairs"]
    chosen_rewards: Float[Tensor, " pairs"]
    rejected_rewards: Float[Tensor, " pairs"]
    extras: Mapping[str, Float[Tensor, " pairs"]] = field(default_factory=dict)
