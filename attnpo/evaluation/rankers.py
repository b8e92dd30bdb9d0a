"""Rankers that score answers: a judge with pairwise comparisons, a reward model, or a data column."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnpo.evaluation.chat import Grader, GradingCall
from attnpo.evaluation.local_chat import read_chat
from attnpo.evaluation.pairs import AnswerSet, ScoreRow, make_unranked_rows, score_rows
from attnpo.evaluation.pairwise import Comparison, PairwiseRules
from attnpo.evaluation.session import GradingLimits
from attnpo.judge.prompts import question_text
from attnpo.models.spec import DTYPES
from attnpo.schema import BOOKKEEPING, UserError, check_at_least, check_choice, digest
from attnpo.system.processes import rank_and_world_size
from attnpo.text.chat import ChatFormat, RefusedText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

AT_ONCE = 1024  # prompts that are compared before their scores are written
REWARDS_AT_ONCE = 64  # prompts whose rewards are computed before they are written


@dataclass(frozen=True)
class JudgeRanker:
    """Ranker that compares all pairs of answers in both orders; an answer's score is its mean win probability.

    Probabilities are computed from the logits of the two labels (see ``evaluation.pairwise``). K answers need K (K - 1)
    judge calls. Replies are stored as they arrive and never requested twice. A prompt is left unranked if any
    comparison lacks a verdict. Rerunning the command retries failed calls; with ``give_up``, they count as missing
    verdicts instead. With several processes, ``limits`` apply to each process.
    """

    grader: Grader
    pairwise: PairwiseRules = field(default_factory=PairwiseRules)
    limits: GradingLimits = field(default_factory=GradingLimits, metadata=BOOKKEEPING)
    give_up: bool = False

    def __post_init__(self) -> None:
        if self.limits.max_items is not None:
            raise UserError("ranker.limits.max_items is only for benchmarks: select rows with answers.rows instead")

    @property
    def name(self) -> str:
        """Returns "judge" followed by the name of the grader's model."""
        named = getattr(self.grader, "path", None) or getattr(self.grader, "model", None)
        return f"judge {named or type(self.grader).__name__}"

    def key(self, sets: Sequence[AnswerSet]) -> dict[str, object]:
        """Returns the grader's identity and the comparison rules."""
        if not self.limits.dry_run:
            self.grader.check_ready()
        self.limits.check_price(self.grader)
        return {"kind": "judge", "grader": self.grader.identity(), "pairwise": self.pairwise.fingerprint()}

    def scores(self, sets: Sequence[AnswerSet], device: torch.device, folder: Path) -> Iterator[list[ScoreRow]]:
        """Yields scores for sets whose comparisons all have replies; a dry run only logs a cost estimate."""
        from attnpo.evaluation.jsonl_store import ReplyStore
        from attnpo.evaluation.session import ask_all

        rank, processes = rank_and_world_size()
        own = folder / "grades" if processes == 1 else folder / f"grades-part{rank}"
        if self.limits.dry_run:
            ask_all(self._grading_calls(sets), self.grader, ReplyStore(own), self.limits)
            return
        own.mkdir(exist_ok=True)
        store = ReplyStore(own)
        for start in range(0, len(sets), AT_ONCE):
            some = sets[start : start + AT_ONCE]
            found = ask_all(self._grading_calls(some), self.grader, store, self.limits)
            lacking = {call.item for call in (*found.left, *({} if self.give_up else found.failures))}
            ready = [one for one in some if not any(item.item in lacking for item in list_comparisons(one))]
            if found.failures and not self.give_up:
                log.warning(
                    "to leave prompts with failed calls unranked and build pairs from the others, set "
                    "ranker.give_up=true"
                )
            items = [item.item for one in ready for item in list_comparisons(one)]
            verdicts = self.pairwise.preferences(items, found.replies)
            reasons = "; ".join(f"{what}: {count}" for what, count in verdicts.counts.items())
            log.info("compared %d pairs of answers in both orders%s", len(items), f"; {reasons}" if reasons else "")
            chances = dict(zip(verdicts.items, verdicts.values.tolist(), strict=True))
            yield [row for one in ready for row in _score_by_win_rate(one, chances)]

    def _grading_calls(self, sets: Sequence[AnswerSet]) -> list[GradingCall]:
        return [call for one in sets for call in self.pairwise.grading_calls("pair", 0, list_comparisons(one))]


def list_comparisons(found: AnswerSet) -> list[Comparison]:
    """Returns one comparison for each pair of answers in a set."""
    question = question_text(found.prompt)
    return [
        Comparison(f"{found.id}/{one.draw}-{other.draw}", question, one.text, other.text)
        for one, other in combinations(found.answers, 2)
    ]


def _score_by_win_rate(found: AnswerSet, chances: dict[str, float]) -> list[ScoreRow]:
    """Scores each answer by its mean win probability against the others."""
    won = {one.draw: 0.0 for one in found.answers}
    for one, other in combinations(found.answers, 2):
        chance = chances[f"{found.id}/{one.draw}-{other.draw}"]
        won[one.draw] += chance
        won[other.draw] += 1 - chance
    if any(math.isnan(value) for value in won.values()):
        return make_unranked_rows(found, "the judge gave no verdict in both orders")
    return score_rows(found, [value / (len(won) - 1) for value in won.values()])


@dataclass(frozen=True)
class RewardRanker:
    """Ranker with a reward model: a causal sequence-classification model with one output, read at the last token.

    ``chat_template``: Jinja text or path, for tokenizers without one. A prompt is left unranked if a conversation has
    more than ``max_length`` tokens or is rejected by the chat template.
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    max_length: int = 2048
    token_budget: int = field(default=16384, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        check_choice("ranker.dtype", self.dtype, DTYPES)
        check_at_least("ranker", 1, max_length=self.max_length, token_budget=self.token_budget)

    @property
    def name(self) -> str:
        """Returns "reward" followed by the model's path."""
        return f"reward {self.path}"

    def key(self, sets: Sequence[AnswerSet]) -> dict[str, object]:
        """Returns fingerprints of weights, dtype, chat format and length limit."""
        from attnpo.models.loading import weights_fingerprint

        return {
            "kind": "reward",
            "weights": weights_fingerprint(self.path, self.revision),
            "dtype": self.dtype,
            "chat": self._chat.fingerprint(),
            "max_length": self.max_length,
        }

    @cached_property
    def _chat(self) -> ChatFormat:
        return read_chat(self.path, self.revision, self.chat_template, "ranker")

    def scores(self, sets: Sequence[AnswerSet], device: torch.device, folder: Path) -> Iterator[list[ScoreRow]]:
        """Yields rewards in batches of prompts; the model is loaded only if there is a set to score."""
        from attnpo.models.loading import load_model

        if not sets:
            return
        model = load_model(self.path, dtype=self.dtype, revision=self.revision, reward=True)
        model.to(device)  # type: ignore[arg-type]
        for start in range(0, len(sets), REWARDS_AT_ONCE):
            some = sets[start : start + REWARDS_AT_ONCE]
            yield self._score_sets(model, some)
            log.info("rewards: %d of %d prompts", start + len(some), len(sets))

    def _score_sets(self, model: "PreTrainedModel", sets: Sequence[AnswerSet]) -> list[ScoreRow]:
        from attnpo.models.reward_policy import score_conversations

        rows: list[ScoreRow] = []
        shown: list[tuple[AnswerSet, list[list[int]]]] = []
        for one in sets:
            try:
                both = [self._chat.encode(one.prompt, answer.text) for answer in one.answers]
            except RefusedText as problem:
                rows += make_unranked_rows(one, problem.reason)
                continue
            ids = [item.prompt_ids + item.response_ids for item in both]
            if max(map(len, ids)) > self.max_length:
                rows += make_unranked_rows(one, f"a conversation is longer than ranker.max_length={self.max_length}")
            else:
                shown.append((one, ids))
        try:
            rewards = iter(
                score_conversations(model, [ids for _, each in shown for ids in each], self.token_budget).tolist()
            )
        except UserError as problem:
            raise UserError(str(problem).replace("model.reward=true", f"ranker.path={self.path}")) from problem
        for one, each in shown:
            values = [next(rewards) for _ in each]
            fine = all(math.isfinite(value) for value in values)
            rows += score_rows(one, values) if fine else make_unranked_rows(one, "the reward is no number")
        return rows


@dataclass(frozen=True)
class ColumnRanker:
    """Ranker that reads scores from a data column; a prompt is left unranked if an answer has no score."""

    column: str
    higher_is_better: bool = True

    @property
    def name(self) -> str:
        """Returns "column" followed by the column's name."""
        return f"column {self.column}"

    def key(self, sets: Sequence[AnswerSet]) -> dict[str, object]:
        """Returns the column's name, direction and values.

        Raises:
            UserError: no row has the column.
        """
        values = [[answer.extra.get(self.column) for answer in one.answers] for one in sets]
        if all(value is None for each in values for value in each):
            there = ", ".join(sets[0].answers[0].extra)
            raise UserError(f"ranker.column={self.column}: no answer has a value in this column; columns: {there}")
        return {
            "kind": "column",
            "column": self.column,
            "higher_is_better": self.higher_is_better,
            "values": digest([[repr(value) for value in each] for each in values]),
        }

    def scores(self, sets: Sequence[AnswerSet], device: torch.device, folder: Path) -> Iterator[list[ScoreRow]]:
        """Yields the column's values, negated if lower is better."""
        sign = 1.0 if self.higher_is_better else -1.0
        rows: list[ScoreRow] = []
        for one in sets:
            values = [_parse_number(answer.extra.get(self.column)) for answer in one.answers]
            numbers = [sign * value for value in values if value is not None]
            whole = len(numbers) == len(values)
            rows += score_rows(one, numbers) if whole else make_unranked_rows(one, f"no number in column {self.column}")
        yield rows


def _parse_number(value: object) -> float | None:
    """Converts a value, possibly text from a CSV file, to a finite number; returns None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
