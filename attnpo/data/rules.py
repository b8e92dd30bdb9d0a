"""Defines and validates a run's data settings: lengths, alignment, and division of steps into micro-batches."""

from dataclasses import dataclass, field, replace
from enum import Enum

from attnpo.schema import BOOKKEEPING, UserError, check_at_least
from attnpo.text.alignment import AlignMethod

AUTO = "auto"


class OverlongAction(Enum):
    """Action for a pair with a branch longer than ``max_length``."""

    CUT = "cut"
    DROP = "drop"


class KeepSide(Enum):
    """Side of the sequence that is kept when prompt and response together exceed ``max_length``."""

    START = "start"
    END = "end"


@dataclass(frozen=True)
class LengthRules:
    """Length limits for training, in tokens (paper appendix: 2048 and 1800).

    The prompt keeps its last ``max_prompt_length`` tokens. ``keep`` selects which ``max_length`` tokens of prompt and
    response remain: the first ones, which truncates the end of the response, or the last ones, which truncates the
    beginning of the prompt and, if necessary, of the response (TRL's ``truncation_mode`` keep_start and keep_end; the
    authors used keep_end). With ``overlong: drop``, pairs that would be truncated are dropped instead. Truncated and
    dropped pairs are counted.
    """

    max_length: int = 2048
    max_prompt_length: int = 1800
    overlong: OverlongAction = OverlongAction.CUT
    keep: KeepSide = KeepSide.START

    def __post_init__(self) -> None:
        if not 0 < self.max_prompt_length < self.max_length:
            raise UserError(
                f"lengths.max_prompt_length must be between 1 and lengths.max_length - 1 = {self.max_length - 1}, "
                f"got {self.max_prompt_length}"
            )


@dataclass(frozen=True)
class AlignRules:
    """Settings for mapping weights from source tokens to training tokens, and the coverage required of each pair.

    ``min_coverage``: minimum share of a response's content tokens that match a source token; pairs with a response
    below this share are dropped and counted. None uses the source's default (paper: 0.9 for verbalised weights, no
    limit for attention).
    """

    method: AlignMethod = AlignMethod.LEVENSHTEIN
    min_coverage: float | None = None

    def __post_init__(self) -> None:
        if self.min_coverage is not None and not 0 <= self.min_coverage <= 1:
            raise UserError(f"align.min_coverage must be in [0, 1], got {self.min_coverage}")


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes: ``pairs`` per optimizer step over all ranks, ``micro`` pairs per forward pass (paper: 32 and 1).

    If ``tokens`` is given instead of ``micro``, the pairs of a step are sorted by length and grouped so that a forward
    pass of one process contains at most that many tokens, padding included. ``eval_micro`` (default 8) and
    ``eval_tokens`` are the corresponding limits for validation. A budget of "auto" uses as many tokens as fit into the
    estimated memory; a number of pairs takes precedence over "auto". These four settings affect only memory and speed;
    results change only by rounding. Without ``shuffle``, every epoch uses the training pairs in row order.
    """

    pairs: int = 32
    micro: int | None = field(default=None, metadata=BOOKKEEPING)
    eval_micro: int | None = field(default=None, metadata=BOOKKEEPING)
    tokens: int | str | None = field(default=None, metadata=BOOKKEEPING)
    eval_tokens: int | str | None = field(default=None, metadata=BOOKKEEPING)
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_at_least("batch", 1, pairs=self.pairs)
        for start in ("", "eval_"):
            micro, tokens = f"{start}micro", f"{start}tokens"
            if getattr(self, tokens) == AUTO and getattr(self, micro) is not None:
                object.__setattr__(self, tokens, None)
            given = {name: getattr(self, name) for name in (micro, tokens) if getattr(self, name) is not None}
            for name, value in given.items():
                if value != AUTO and (isinstance(value, str) or value < 1):
                    auto = f" or {AUTO}" * (name == tokens)
                    raise UserError(f"batch.{name} must be at least 1, or null{auto}, got {value!r}")
            if len(given) == 2:
                raise UserError(
                    f"batch.{micro}={given[micro]} and batch.{tokens}={given[tokens]} both limit a forward pass: "
                    f"set one of the two to null, e.g. batch.{micro}=null"
                )

    @property
    def pairs_per_forward(self) -> int:
        """Returns the number of pairs per forward pass in training; used if there is no token budget."""
        return self.micro or 1

    @property
    def eval_pairs_per_forward(self) -> int:
        """Returns the number of pairs per forward pass in validation; used if there is no token budget."""
        return self.eval_micro or 8

    @property
    def token_budget(self) -> int | None:
        """Returns the token budget per forward pass in training; None if ``micro`` is used or it is still "auto"."""
        return self.tokens if isinstance(self.tokens, int) else None

    @property
    def eval_token_budget(self) -> int | None:
        """Returns the token budget per forward pass in validation; None if ``eval_micro`` is used or while "auto"."""
        return self.eval_tokens if isinstance(self.eval_tokens, int) else None

    def resolve_auto(self, max_length: int) -> "BatchPlan":
        """Replaces "auto" budgets with the minimum: one padded pair of maximum length (two for validation)."""
        tokens = 2 * max_length if self.tokens == AUTO else self.tokens
        eval_tokens = 4 * max_length if self.eval_tokens == AUTO else self.eval_tokens
        return replace(self, tokens=tokens, eval_tokens=eval_tokens)

    def accumulation_steps(self, world_size: int) -> int | None:
        """Returns the number of micro-batches per optimizer step on each of ``world_size`` ranks.

        Returns None if the number depends on the lengths of the pairs.

        Raises:
            UserError: a step has fewer pairs than ranks, or ``micro`` does not divide the step evenly.
        """
        if self.tokens is not None:
            if self.pairs < world_size:
                raise UserError(f"batch.pairs={self.pairs} must be at least the number of processes, {world_size}")
            return None
        share = self.pairs_per_forward * world_size
        if self.pairs % share:
            raise UserError(
                f"batch.pairs={self.pairs} must be a multiple of batch.micro={self.pairs_per_forward} x {world_size} "
                f"processes; the nearest multiples are {max(share, self.pairs - self.pairs % share)} and "
                f"{self.pairs + share - self.pairs % share}"
            )
        return self.pairs // share
