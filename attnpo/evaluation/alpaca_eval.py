"""AlpacaEval 2: win rate against GPT-4's answers as judged by an LLM, raw and length-controlled.

The library ``alpaca_eval`` defines the benchmark (Dubois et al. 2024, "Length-Controlled AlpacaEval"): it supplies the
prompts, the answer order, the reply parser and the win rates. Judge calls are made and stored by code shared by all
benchmarks.
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
    AlpacaRow,
    Annotator,
    download_data_file,
    download_hint,
)
from attnpo.evaluation.base import ModelAnswer, Question, Replies, RoundScores, match_answers, select_answered_questions
from attnpo.evaluation.chat import GradingCall
from attnpo.evaluation.checkout import Checkout
from attnpo.schema import Sampling, UserError
from attnpo.system.files import file_digest

ROWS = 805
REFERENCE = "alpaca_eval_gpt4_baseline.json"
HOW_TO_GET_REFERENCE = (
    f"{download_hint(REFERENCE)}, or results/gpt4_1106_preview/model_outputs.json of a checkout of "
    "github.com/tatsu-lab/alpaca_eval"
)
HOW_TO_GET_AUXILIARY = f"{download_hint(AUXILIARY)}, then set benchmark.auxiliary=PATH"
# Why a row has no preference, or one that did not come from the judge; used as keys of a result's counts.
NO_REPLY = "no reply"
NO_VERDICT = "no verdict in the reply"
TEXT_ONLY = "verdict from the text, no log-probabilities"
SAME = "answer identical to the baseline's (a tie, not sent to the judge)"
NO_LENGTHS = "no length-controlled rate: all length differences are equal"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlpacaEval:
    """AlpacaEval 2 as a benchmark; configs/benchmark/alpaca_eval.yaml documents each key."""

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
                f"benchmark.auxiliary={self.auxiliary} is only used for the length-controlled win rate, which "
                "benchmark.length_controlled=false turns off: remove one of the two"
            )

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the win rates; the length-controlled one comes first, if available."""
        return (LENGTH_CONTROLLED, RAW, DISCRETE) if self._auxiliary else (RAW, DISCRETE)

    def questions(self) -> Sequence[Question]:
        """Returns the instructions as questions; the id of each is its position in the reference set."""
        return self._questions

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's answer to each question, by question id."""
        return {str(place): row["output"] for place, row in enumerate(self._rows)}

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that affects calls or win rates, apart from the answers."""
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

    def grading_calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns one call per row, skipping rows with identical answers, which the library counts as ties."""
        annotator = self._annotator
        prompts, _ = alpaca_library.annotate(annotator.name, self._pair_answers(answers, self.questions()), {})
        return [
            GradingCall(self.name, question.id, "", round_, messages, **annotator.settings)
            for question, messages in zip(self.questions(), prompts, strict=True)
            if messages is not None
        ]

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> RoundScores:
        """Computes the library's win rates over all answers that have a verdict or are identical to the baseline's.

        ``answers`` may cover only some of the questions; the other questions are ignored.

        Raises:
            ValueError: a reply belongs to a prompt that does not match any of the questions.
        """
        questions = select_answered_questions(self.questions(), answers)
        compared = dict(
            zip((question.id for question in questions), self._pair_answers(answers, questions), strict=True)
        )
        items = {call.item for call in replies}
        kept = {name: row for name, row in compared.items() if row.is_tie or name in items}
        rows = list(kept.values())
        _, preferences = alpaca_library.annotate(self._annotator.name, rows, replies) if rows else ([], np.zeros(0))
        rates = alpaca_library.win_rates(rows, preferences, self._auxiliary, list(map(int, kept)))
        without = [reply for reply in replies.values() if reply.logprobs is None and self._annotator.settings["labels"]]
        counts = {
            NO_REPLY: len(compared) - len(rows),
            NO_VERDICT: int(np.isnan(preferences).sum()),
            TEXT_ONLY: len(without),
            SAME: sum(row.is_tie for row in rows),
            NO_LENGTHS: int(rates.lengths_equal),
        }
        return RoundScores(
            questions=tuple(kept),
            scores=rates.scores,
            values=rates.values,
            weights={name: np.isfinite(values).astype(float) for name, values in rates.values.items()},
            counts={reason: count for reason, count in counts.items() if count},
            errors=rates.errors,
        )

    # -------------------------------------------------------------------------------------------- files and annotator

    @cached_property
    def _reference_file(self) -> Path:
        file = (
            download_data_file(REFERENCE)
            if self.reference_outputs is None
            else Path(self.reference_outputs).expanduser()
        )
        if isinstance(file, str):
            raise UserError(
                f"benchmark.reference_outputs is not set, and {REFERENCE} cannot be downloaded ({file}): set "
                f"benchmark.reference_outputs to {HOW_TO_GET_REFERENCE}"
            )
        return file

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        """Reads the reference set.

        Raises:
            UserError: the file has an unexpected format, or contains answers from several generators.
        """
        file = self._reference_file
        given = self.reference_outputs or str(file)
        source = Checkout(file.parent, "benchmark.reference_outputs", given, f"Expected {HOW_TO_GET_REFERENCE}")
        found: list[dict[str, str]] = source.read_json(file.name, [{"instruction": str, "output": str}])
        if len(found) != self.rows:
            source.fail(
                file.name,
                f"has {len(found)} rows, expected {self.rows}: rows are identified by position, so the set must be "
                f"complete; if this is the whole set, set benchmark.rows={len(found)}",
            )
        generators = sorted({str(row.get("generator")) for row in found})
        if len(generators) != 1:
            listed = ", ".join(generators[:5])
            source.fail(file.name, f"has answers from {len(generators)} generators ({listed}), expected one baseline")
        return found

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        return tuple(
            Question(id=str(place), turns=(row["instruction"],), category=str(row.get("dataset") or ""))
            for place, row in enumerate(self._rows)
        )

    @cached_property
    def _annotator(self) -> Annotator:
        return alpaca_library.load_annotator(self.annotator)

    @cached_property
    def _auxiliary(self) -> Path | None:
        """Finds the auxiliary file.

        Returns None if length control is off. If the file is unavailable, logs a warning and returns None.
        """
        if not self.length_controlled:
            return None
        if self.auxiliary is not None:
            file, named = Path(self.auxiliary).expanduser(), f"benchmark.auxiliary={self.auxiliary}"
            return alpaca_library.check_auxiliary(file, self.rows, named)
        found = download_data_file(AUXILIARY)
        if isinstance(found, Path):
            return alpaca_library.check_auxiliary(found, self.rows, str(found))
        _log.warning(
            "%s: reporting only raw win rates, because the file for length control is missing: get %s (%s)",
            *(self.name, HOW_TO_GET_AUXILIARY, found),
        )
        return None

    def _pair_answers(self, answers: Mapping[str, ModelAnswer], questions: Sequence[Question]) -> list[AlpacaRow]:
        """Matches each answer with the baseline's answer to the same question.

        Raises:
            UserError: the answers do not match the questions.
        """
        baselines = self.baseline_answers()
        return [
            AlpacaRow(question.turns[0], baselines[question.id], answer.turns[0])
            for question, answer in zip(questions, match_answers(self.name, questions, answers), strict=True)
        ]
