"""AlpacaEval 2: a judge compares a model's answer to each instruction with GPT-4's; win rates with length controlled.

The library ``alpaca_eval`` is the definition (Dubois et al. 2024, "Length-Controlled AlpacaEval"): prompts, order of
the answers, meaning of a reply and win rates are its own. Questions are asked and kept by the runner of all benchmarks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np

from attnpo.evaluation import alpaca_library
from attnpo.evaluation.alpaca_library import (
    AUXILIARY,
    DISCRETE,
    LENGTH_CONTROLLED,
    RAW,
    Annotator,
    Compared,
    from_hub,
    how_to_get,
)
from attnpo.evaluation.base import Graded, ModelAnswer, Question, Replies, match_answers, select_answered
from attnpo.evaluation.chat import GradingCall
from attnpo.evaluation.checkout import Checkout
from attnpo.schema import Sampling, UserError
from attnpo.system.files import file_digest

ROWS = 805
REFERENCE = "alpaca_eval_gpt4_baseline.json"
HOW_TO_GET_REFERENCE = (
    f"{how_to_get(REFERENCE)}, or results/gpt4_1106_preview/model_outputs.json of a checkout of "
    "github.com/tatsu-lab/alpaca_eval"
)
HOW_TO_GET_AUXILIARY = f"{how_to_get(AUXILIARY)}, then benchmark.auxiliary=PATH here"
# Why a row has no preference, or one that no judge gave; the counts of a result.
NO_REPLY = "no reply"
NO_VERDICT = "no verdict in the reply"
TEXT_ONLY = "verdict from the text, no log-probabilities"
SAME = "answer equal to the baseline's (a tie, not asked)"
NO_LENGTHS = "no length-controlled rate: length differences are all the same"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlpacaEval:
    """AlpacaEval 2 as a benchmark; configs/benchmark/alpaca_eval.yaml says what each key means."""

    sampling: Sampling
    reference_outputs: str | None = None
    annotator: str = "weighted_alpaca_eval_gpt-4o-mini-2024-07-18"
    length_controlled: bool = True
    auxiliary: str | None = None
    rows: int = ROWS
    name: str = "alpaca_eval"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"benchmark.rows must be at least 1, got {self.rows}")
        if self.auxiliary is not None and not self.length_controlled:
            raise UserError(
                f"benchmark.auxiliary={self.auxiliary} is for the length-controlled win rate, which "
                "benchmark.length_controlled=false turns off: leave one of the two out"
            )

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the length-controlled win rate first, where its auxiliary file can be had."""
        return (LENGTH_CONTROLLED, RAW, DISCRETE) if self._auxiliary else (RAW, DISCRETE)

    def questions(self) -> Sequence[Question]:
        """Returns the instructions; a question's id is its position in the reference set."""
        return self._questions

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's output of each row, by the question's id."""
        return {str(place): row["output"] for place, row in enumerate(self._rows)}

    def versions(self) -> dict[str, object]:
        """Returns what decides calls and rates beside the answers."""
        rates = {} if self._auxiliary is None else {"scikit-learn": version("scikit-learn")}
        return {
            "reference": file_digest(self._reference_file),
            "baseline": str(self._rows[0].get("generator")),
            "annotator": self._annotator.name,
            "annotator_digest": self._annotator.digest,
            "alpaca_eval": version("alpaca_eval"),
            "auxiliary": None if self._auxiliary is None else file_digest(self._auxiliary),
            **rates,
        }

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns a call for each row whose two answers differ; two equal ones are a tie, as the library has it."""
        asked = self._annotator
        prompts, _ = alpaca_library.annotate(asked.name, self._pair_answers(answers, self.questions()), {})
        return [
            GradingCall(self.name, question.id, "", round_, messages, **asked.settings)
            for question, messages in zip(self.questions(), prompts, strict=True)
            if messages is not None
        ]

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the library's win rates over the answers that have a reply or are a tie.

        One without a verdict is left out.

        ``answers`` may be to some questions only: nothing is said of the others.

        Raises:
            ValueError: a reply is to another prompt than its question has here.
        """
        questions = select_answered(self.questions(), answers)
        compared = dict(
            zip((question.id for question in questions), self._pair_answers(answers, questions), strict=True)
        )
        items = {call.item for call in replies}
        kept = {name: row for name, row in compared.items() if row.same or name in items}
        rows = list(kept.values())
        _, preferences = alpaca_library.annotate(self._annotator.name, rows, replies) if rows else ([], np.zeros(0))
        rates = alpaca_library.win_rates(rows, preferences, self._auxiliary, list(map(int, kept)))
        without = [reply for reply in replies.values() if reply.logprobs is None and self._annotator.settings["labels"]]
        counts = {
            NO_REPLY: len(compared) - len(rows),
            NO_VERDICT: int(np.isnan(preferences).sum()),
            TEXT_ONLY: len(without),
            SAME: sum(row.same for row in rows),
            NO_LENGTHS: int(rates.lengths_equal),
        }
        return Graded(
            questions=tuple(kept),
            scores=rates.scores,
            values=rates.values,
            weights={name: np.isfinite(values).astype(float) for name, values in rates.values.items()},
            counts={reason: count for reason, count in counts.items() if count},
            errors=rates.errors,
        )

    # -------------------------------------------------------------------------------------------- what it stands on

    @cached_property
    def _reference_file(self) -> Path:
        place = from_hub(REFERENCE) if self.reference_outputs is None else Path(self.reference_outputs).expanduser()
        if isinstance(place, str):
            raise UserError(
                f"benchmark.reference_outputs is not given, and the hub does not give {REFERENCE} ({place}): name a "
                f"file; expected {HOW_TO_GET_REFERENCE}"
            )
        return place

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        """Returns the rows of the reference set. UserError for a file of another form, or of several generators."""
        file = self._reference_file
        given = self.reference_outputs or str(file)
        source = Checkout(file.parent, "benchmark.reference_outputs", given, f"Expected {HOW_TO_GET_REFERENCE}")
        found: list[dict[str, str]] = source.json(file.name, [{"instruction": str, "output": str}])
        if len(found) != self.rows:
            source.refuse(
                file.name,
                f"has {len(found)} rows, expected {self.rows}: a row's position is its key, so the set must be whole; "
                f"benchmark.rows={len(found)} takes a set of that size",
            )
        generators = sorted({str(row.get("generator")) for row in found})
        if len(generators) != 1:
            told = ", ".join(generators[:5])
            source.refuse(file.name, f"has answers of {len(generators)} generators ({told}), expected one baseline")
        return found

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        return tuple(
            Question(id=str(place), turns=(row["instruction"],), category=str(row.get("dataset") or ""))
            for place, row in enumerate(self._rows)
        )

    @cached_property
    def _annotator(self) -> Annotator:
        return alpaca_library.annotator(self.annotator)

    @cached_property
    def _auxiliary(self) -> Path | None:
        """Returns the auxiliary file; None without length control, or, with a warning, where it cannot be had."""
        if not self.length_controlled:
            return None
        if self.auxiliary is not None:
            file, named = Path(self.auxiliary).expanduser(), f"benchmark.auxiliary={self.auxiliary}"
            return alpaca_library.read_auxiliary(file, self.rows, named)
        found = from_hub(AUXILIARY)
        if isinstance(found, Path):
            return alpaca_library.read_auxiliary(found, self.rows, str(found))
        _log.warning(
            "%s: only raw win rates, no length-controlled one: %s (%s)", self.name, HOW_TO_GET_AUXILIARY, found
        )
        return None

    def _pair_answers(self, answers: Mapping[str, ModelAnswer], questions: Sequence[Question]) -> list[Compared]:
        """Returns the rows of ``questions`` with both answers. UserError for answers that do not fit them."""
        rivals = self.baseline_answers()
        return [
            Compared(question.turns[0], rivals[question.id], answer.turns[0])
            for question, answer in zip(questions, match_answers(self.name, questions, answers), strict=True)
        ]
