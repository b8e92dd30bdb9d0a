"""Plain data classes and protocols shared by the package's subpackages.

Contains no behaviour beyond field validation.

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
"""Metadata for a component field that, like all values nested in it, changes computed numbers only by rounding."""

ON_HOST = {"on_host": True}
"""Metadata for a tensor field that stays on the CPU when other fields move to a device."""

SEEDS = 2**32
"""Exclusive upper bound of seeds, as in NumPy."""


def check_range(part: str, bounds: str, **values: float | int | None) -> None:
    """Checks that settings of the config node ``part`` are within ``bounds``; accepts None but not NaN.

    ``bounds`` is an interval in mathematical notation: "[0, 1]" includes its endpoints, "(0, 1)" excludes them. "[1,
    inf)" and "(0, inf)" have no upper bound, but infinity itself is rejected.

    Raises:
        UserError: a value is out of bounds.
    """
    low, high = (float(end) for end in bounds[1:-1].split(","))
    for name, value in values.items():
        above = value is None or (low <= value if bounds[0] == "[" else low < value)
        if not (above and (value is None or (value <= high if bounds[-1] == "]" else value < high))):
            words = f"at least {low:g}" if bounds[0] == "[" else f"above {low:g}"
            raise UserError(f"{part}.{name} must be {words if high == math.inf else 'in ' + bounds}, got {value}")


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Joins up to ``most`` names with commas and counts the rest ("and 4 more")."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_at_least(part: str, least: int, **values: float | int | None) -> None:
    """Checks that settings of the config node ``part`` are finite and at least ``least``; accepts None.

    Raises:
        UserError: a value is too small or not finite.
    """
    check_range(part, f"[{least}, inf)", **values)


def check_seed(key: str, seed: int, count: int = 1) -> None:
    """Checks that NumPy accepts ``count`` consecutive seeds starting at ``seed``, the value of the key ``key``.

    Raises:
        UserError: the first or last seed is out of range.
    """
    if not 0 <= seed <= SEEDS - count:
        raise UserError(f"{key}: expected a whole number from 0 to {SEEDS - count}, got {seed}")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Checks that ``value``, given for ``key``, is one of ``choices``.

    Raises:
        UserError: ``value`` is not one of them.
    """
    if value not in choices:
        raise UserError(f"{key} must be one of {', '.join(choices)}, got {value!r}")


class Message(TypedDict):
    """Chat turn in the Hugging Face convention; an assistant turn may also have a reasoning trace.

    ``tool_calls`` (on an assistant turn) and ``tools`` (the callable functions, on a prompt's first turn) are JSON
    lists in string form. A turn with role "tool" contains the result of a call and may name the call.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[str]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    tools: NotRequired[str]


REASONING = "reasoning_content"
"""Key of a turn's reasoning trace; chat templates use the same variable name."""
MORE = (REASONING, "tool_calls", "tool_call_id", "name", "tools")
"""Optional keys of a turn, in the order of ``Message``."""


def copy_message(turn: Message) -> Message:
    """Copies a turn: role, content and the optional keys that are set, in the order of ``Message``."""
    more = {name: turn[name] for name in MORE if turn.get(name)}  # type: ignore[literal-required]
    return cast(Message, {"role": turn["role"], "content": turn["content"], **more})


def prompt_identity(prompt: Sequence[Message]) -> list[list[str]]:
    """Returns the parts of a prompt that identify it in digests: role, content, tool calls and tools of each turn."""
    more = [[turn[name] for name in ("tool_calls", "tools") if turn.get(name)] for turn in prompt]
    return [[turn["role"], turn["content"], *rest] for turn, rest in zip(prompt, more, strict=True)]


# --------------------------------------------------------------------------------------------- preference data


@dataclass(frozen=True)
class PreferencePair:
    """One prompt with a chosen and a rejected response.

    ``pair_id`` is a digest of the content, so duplicates share an id (they are allowed). ``extra`` contains the row's
    other columns (scores, topics) and is not part of the id. ``apart``: whether reasoning traces at the start of the
    responses are weighted separately from the answers that follow; judges then read only the answers.
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
        """Builds a pair whose id is a digest of the content and of ``apart``."""
        turns = tuple(copy_message(turn) for turn in prompt)
        key = digest([[list(turn.values()) for turn in turns], chosen, rejected, *(["apart"] if apart else [])])
        return cls(key[:32], turns, chosen, rejected, dict(extra or {}), apart)

    def response(self, side: str) -> str:
        """Returns the text of ``side``, "chosen" or "rejected"."""
        return self.chosen if side == "chosen" else self.rejected


def list_pair_ids(pairs: Sequence[PreferencePair]) -> list[str]:
    """Returns the ids of all pairs, without reading the pairs if ``pairs`` has an attribute ``ids``."""
    known: list[str] | None = getattr(pairs, "ids", None)
    return [pair.pair_id for pair in pairs] if known is None else known


SIDES = ("chosen", "rejected")


class EncodedResponse(NamedTuple):
    """Token ids of a prompt and a response for training.

    ``offsets`` are half-open character ranges in the pair's response text; tokens without characters in the text (end
    of turn) have an empty range at its end.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    offsets: Sequence[tuple[int, int]]


# --------------------------------------------------------------------------------------------- token weights


@dataclass(frozen=True)
class TokenWeights:
    """Raw weights of one response on the weight source's own tokens, one row per captured layer.

    ``offsets`` are half-open character ranges in the pair's response text.
    """

    token_ids: Int[Tensor, " n"]
    offsets: Int[Tensor, "n 2"]
    weights: Float[Tensor, "layers n"]


class TraceLength(NamedTuple):
    """Number of tokens in a judge's reasoning trace; ``closed``: whether the judge closed the trace itself."""

    tokens: int
    closed: bool


@dataclass(frozen=True)
class JudgeRound:
    """Result of one judge round (one order of the two answers).

    ``verdict_logits`` are the logits of the label tokens (A, B) at the verdict position and ``verdict_token`` is the
    argmax over the vocabulary there; both are None if the verdict was not read. ``cut``: whether the prompt was too
    long and was truncated. ``trace``: length of the reasoning that the judge generated before its verdict, if any.
    """

    chosen_is_a: bool
    chosen: TokenWeights
    rejected: TokenWeights
    verdict_logits: Float[Tensor, "2"] | None = None
    verdict_token: int | None = None
    cut: bool = False
    trace: TraceLength | None = None

    def side(self, name: str) -> TokenWeights:
        """Returns the weights of the response ``name``, "chosen" or "rejected"."""
        return self.chosen if name == "chosen" else self.rejected


@dataclass(frozen=True)
class PairWeights:
    """Weights captured by a source for one pair: judge rounds, all with the same layers in the same order."""

    pair_id: str
    rounds: tuple[JudgeRound, ...]


class Kind(Enum):
    """Kind of a row of weights: a distribution sums to 1; factors are used as is."""

    DISTRIBUTION = "distribution"
    FACTOR = "factor"


# --------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True)
class Sampling:
    """Decoding settings; ``temperature`` 0 is greedy.

    ``presence_penalty`` is subtracted from the logit of each token that the answer already contains, and
    ``frequency_penalty`` once per occurrence; prompt tokens are ignored. ``stop_ids``: additional token ids that end an
    answer, besides those of the model and its chat format.
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
                raise UserError(f"{name}_penalty must be between -2 and 2 (0 is off), got {penalty}")
        if any(token < 0 for token in self.stop_ids):
            raise UserError(f"stop_ids must be non-negative token ids, got {list(self.stop_ids)}")

    def fingerprint(self) -> dict[str, object]:
        """Returns the settings that identify stored answers; settings added later are included only if set."""
        first = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
        later = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop_ids": sorted(set(self.stop_ids)),
        }
        return {name: getattr(self, name) for name in first} | {name: value for name, value in later.items() if value}


@runtime_checkable
class Generator(Protocol):
    """Text generator that answers chat prompts."""

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one answer per prompt, in the same order and without special tokens."""


# --------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a forward pass, either one sequence per row or many sequences packed into a single row.

    ``input_ids``, ``position_ids`` [batch T]; ``attention_mask`` [batch T] (1 = token) or None; ``predict_index``
    [rows R] is the flat index (into batch*T) of the hidden state that predicts each response token.

    ``segments``: None for one sequence per row. Otherwise, one (start, count, prefix, shared) per packed segment:
    tokens start..start+count-1 continue the ``shared`` tokens that start at ``prefix``, and attend causally to those
    and to each other. Each token of the row is in exactly one segment. ``segment_rows``: response row of each segment;
    None means in order. Both stay on the CPU, where attention is planned, so no step waits for the GPU. ``scored``: row
    and position of each response token, precomputed for the same reason; None means they follow from the response mask.
    """

    input_ids: Int[Tensor, "batch T"]
    position_ids: Int[Tensor, "batch T"]
    attention_mask: Int[Tensor, "batch T"] | None
    predict_index: Int[Tensor, "rows R"]
    segments: Int[Tensor, "segments 4"] | None = field(default=None, metadata=ON_HOST)
    segment_rows: Int[Tensor, "segments"] | None = field(default=None, metadata=ON_HOST)
    scored: Int[Tensor, "N 2"] | None = None

    def to(self, device: torch.device | str) -> "ModelInputs":
        """Moves the inputs to ``device``."""
        return _move_to_device(self, torch.device(device))


@dataclass(frozen=True)
class InputGradient:
    """Influence of each input token on a model's next token: the L1 norm of the gradient at the token's embedding.

    ``response``: value per response token, 0 elsewhere; ``prompt``: sum over the prompt tokens of a row;
    ``prompt_tokens``: number of prompt tokens.
    """

    response: Float[Tensor, "rows R"]
    prompt: Float[Tensor, " rows"]
    prompt_tokens: Int[Tensor, " rows"]


@dataclass(frozen=True)
class TokenStats:
    """Per-token statistics in response space; positions outside the response mask are 0.

    ``vocab``: statistics of one model's distribution at each position (entropy, collision). ``joint``: statistics of
    two models (kl_ref_policy, ...). ``groups``: statistics of the batch's other row groups, by name. ``routing``: for a
    mixture of experts, how often each row's tokens were routed to each expert, and the summed router probabilities.
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
    """Response rows in response space; the main group has 2P rows, all chosen rows first.

    ``token_weights`` maps a channel to its weights; the channel "reward" always contains the distributions or factors
    aligned with the response tokens. ``factors``: whether these weights are factors, used as is, rather than
    distributions. ``source_lengths`` is |y| as counted by the weight source.
    """

    response_ids: Int[Tensor, "rows R"]
    response_mask: Bool[Tensor, "rows R"]
    token_weights: Mapping[str, Float[Tensor, "rows R"]]
    source_lengths: Float[Tensor, " rows"]
    reference_logps: Float[Tensor, "rows R"] | None
    inputs: ModelInputs | None = None
    factors: bool = False

    def to(self, device: torch.device | str) -> "RowGroup":
        """Moves all tensors of the rows to ``device``."""
        return _move_to_device(self, torch.device(device))


@dataclass(frozen=True)
class PreferenceBatch:
    """Micro-batch of P pairs; ``step_pairs`` is the number of pairs in the whole optimizer step, across all ranks.

    ``step_tokens``: numbers of chosen and rejected response tokens in that step, excluding void pairs; (0, 0) if not
    counted. ``ahead``: row groups of this rank's whole step that are scored before it; only the first micro-batch
    contains them. ``state``: sums that the objective computed over those groups. ``step``: number of optimizer steps
    taken so far; None outside training.
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
        """Returns the main row group, which contains the pairs themselves."""
        return self.groups["main"]

    @property
    def pairs(self) -> int:
        """Returns the number of pairs, P."""
        return len(self.pair_ids)

    def to(self, device: torch.device | str) -> "PreferenceBatch":
        """Moves all tensors of the batch to ``device``."""
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
    """Per-pair results of an objective. ``losses`` carry gradients; rewards and extras are detached."""

    losses: Float[Tensor, " pairs"]
    chosen_rewards: Float[Tensor, " pairs"]
    rejected_rewards: Float[Tensor, " pairs"]
    extras: Mapping[str, Float[Tensor, " pairs"]] = field(default_factory=dict)
