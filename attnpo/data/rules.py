"""Rules of a run's data as plain, checked numbers: lengths, alignment, how a step is cut into micro-batches."""

from dataclasses import dataclass, field, replace
from enum import Enum

from attnpo.schema import BOOKKEEPING, UserError, check_at_least
from attnpo.text.alignment import AlignMethod

AUTO = "auto"


class Overlong(Enum):
    """Rule for a pair with a branch past ``max_length``."""

    CUT = "cut"
    DROP = "drop"


class Keep(Enum):
    """End of prompt and response that stays where both are longer than ``max_length``."""

    START = "start"
    END = "end"


@dataclass(frozen=True)
class LengthRules:
    """Training lengths in tokens (paper appendix: 2048 and 1800).

    The prompt keeps its last ``max_prompt_length`` tokens. Of prompt and response together ``keep`` says which
    ``max_length`` tokens stay: the first, so that the response loses its end, or the last, so that the prompt loses its
    beginning and, where that is not enough, the response too (``truncation_mode`` keep_start and keep_end of TRL; the
    authors' run had keep_end). With ``overlong: drop`` a pair that would be cut is dropped instead. Either way it is
    counted.
    """

    max_length: int = 2048
    max_prompt_length: int = 1800
    overlong: Overlong = Overlong.CUT
    keep: Keep = Keep.START

    def __post_init__(self) -> None:
        if not 0 < self.max_prompt_length < self.max_length:
            raise UserError(
                f"lengths.max_prompt_length must lie between 1 and lengths.max_length - 1 = {self.max_length - 1}, "
                f"got {self.max_prompt_length}"
            )


@dataclass(frozen=True)
class AlignRules:
    """Rules that carry weights from the source's tokens to the training tokens, and the coverage a pair needs.

    ``min_coverage`` is the least share of a response's content tokens with a partner; a pair with a side below it is
    dropped and counted. None: the source's own (paper: 0.9 for verbalised weights, no limit for attention).
    """

    method: AlignMethod = AlignMethod.LEVENSHTEIN
    min_coverage: float | None = None

    def __post_init__(self) -> None:
        if self.min_coverage is not None and not 0 <= self.min_coverage <= 1:
            raise UserError(f"align.min_coverage must lie in [0, 1], got {self.min_coverage}")


@dataclass(frozen=True)
class BatchPlan:
    """``pairs`` per optimiser step over all ranks, computed ``micro`` pairs at a time on each (paper: 32 and 1).

    With ``tokens`` instead of ``micro``, the pairs of a step are sorted by length and put together so that a forward of
    one process holds at most so many tokens, padding included. ``eval_micro`` (8 where neither is given) and
    ``eval_tokens`` are the same for validation. A budget may be "auto", as many tokens as the memory estimate has room
    for, which gives way to a number of pairs. None of the four changes a number beyond rounding, only memory and speed.
    Without ``shuffle`` every epoch has the training pairs in the order of their rows.
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
                    f"batch.{micro} {given[micro]} and batch.{tokens} {given[tokens]} both say what a forward holds: "
                    f"set one of them to null, such as batch.{micro}=null"
                )

    @property
    def per_forward(self) -> int:
        """Returns the number of pairs per forward of training where no budget of tokens decides."""
        return self.micro or 1

    @property
    def eval_per_forward(self) -> int:
        """Returns the number of pairs per forward of validation where no budget of tokens decides."""
        return self.eval_micro or 8

    @property
    def budget(self) -> int | None:
        """Returns tokens per forward of training; None where pairs are counted, or nothing is decided yet."""
        return self.tokens if isinstance(self.tokens, int) else None

    @property
    def eval_budget(self) -> int | None:
        """Returns the same of validation."""
        return self.eval_tokens if isinstance(self.eval_tokens, int) else None

    def decide(self, max_length: int) -> "BatchPlan":
        """Returns the plan with every ``auto`` at its least: the longest pair, padded; in validation two of them."""
        tokens = 2 * max_length if self.tokens == AUTO else self.tokens
        eval_tokens = 4 * max_length if self.eval_tokens == AUTO else self.eval_tokens
        return replace(self, tokens=tokens, eval_tokens=eval_tokens)

    def accumulation(self, world_size: int) -> int | None:
        """Returns the number of micro-batches per optimiser step on each of ``world_size`` ranks.

        None where the pairs' lengths decide.

        Raises:
            UserError: a step cannot be shared over the ranks, or not evenly where ``micro`` counts.
        """
        if self.tokens is not None:
            if self.pairs < world_size:
                raise UserError(f"batch.pairs must be at least 1 for each of {world_size} processes, got {self.pairs}")
            return None
        share = self.per_forward * world_size
        if self.pairs % share:
            raise UserError(
                f"batch.pairs {self.pairs} must be a multiple of batch.micro {self.per_forward} x {world_size} "
                f"processes; the nearest that are: {max(share, self.pairs - self.pairs % share)} and "
                f"{self.pairs + share - self.pairs % share}"
            )
        return self.pairs // share
