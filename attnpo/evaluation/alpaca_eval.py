"""AlpacaEval 2: a judge compares a model's answer to each instruction with GPT-4's; win rates with length controlled.

The library ``alpaca_eval`` is the definition (Dubois et al. 2024, "Length-Controlled AlpacaEval"): prompts, order of
the answers, meaning of a reply and win rates are its own. Questions are asked and kept by the runner of all benchmarks.
"""

import logging
from collections import Counter
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
from attnpo.evaluation.base import Graded, ModelAnswer, Question, Replies, match_answers
from attnpo.evaluation.chat import GradingCall
from attnpo.schema import Sampling, UserError
from attnpo.system.files import file_digest, parse_json, shortened

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
class Reference:
    """The reference set: instructions with the baseline's answers, in the order that is their key."""

    questions: tuple[Question, ...]
    outputs: tuple[str, ...]
    generator: str
    digest: str


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
        return self._reference.questions

    def baseline_answers(self) -> Mapping[str, str]:
        """Returns the baseline's output of each row, by the question's id."""
        return dict(zip((question.id for question in self.questions()), self._reference.outputs, strict=True))

    def versions(self) -> dict[str, object]:
        """Returns what decides calls and rates beside the answers."""
        rates = {} if self._auxiliary is None else {"scikit-learn": version("scikit-learn")}
        return {
            "reference": self._reference.digest,
            "baseline": self._reference.generator,
            "annotator": self._annotator.name,
            "annotator_digest": self._annotator.digest,
            "alpaca_eval": version("alpaca_eval"),
            "auxiliary": None if self._auxiliary is None else file_digest(self._auxiliary),
            **rates,
        }

    def calls(self, answers: Mapping[str, ModelAnswer], round_: int) -> Sequence[GradingCall]:
        """Returns a call for each row whose two answers differ; two equal ones are a tie, as the library has it."""
        asked = self._annotator
        return [
            GradingCall(
                benchmark=self.name,
                item=question.id,
                part="",
                round=round_,
                messages=alpaca_library.messages(prompt),
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_logprobs=asked.top_logprobs,
                labels=asked.labels,
            )
            for question, prompt in zip(
                self.questions(), alpaca_library.prompts(asked.name, self._compared(answers)), strict=True
            )
            if prompt is not None
        ]

    def grade(self, answers: Mapping[str, ModelAnswer], replies: Replies) -> Graded:
        """Returns the library's win rates over the answers that have a reply or are a tie; one without a verdict is
        left out.

        ``answers`` may be to some questions only: nothing is said of the others.

        Raises:
            ValueError: a reply is to another prompt than its question has here.
        """
        here = [place for place, question in enumerate(self.questions()) if question.id in answers]
        compared = self._compared(answers, here)
        ids = [self.questions()[place].id for place in here]
        items = {call.item for call in replies}
        kept = [number for number, row in enumerate(compared) if row.same or ids[number] in items]
        rows = [compared[number] for number in kept]
        preferences = alpaca_library.preferences(self._annotator.name, rows, replies) if rows else np.zeros(0)
        rates = alpaca_library.win_rates(rows, preferences, self._auxiliary, [here[number] for number in kept])
        counts = Counter(
            {
                NO_REPLY: len(compared) - len(rows),
                NO_VERDICT: int(np.isnan(preferences).sum()),
                TEXT_ONLY: sum(reply.logprobs is None for reply in replies.values()) if self._annotator.labels else 0,
                SAME: sum(row.same for row in compared),
                NO_LENGTHS: int(rates.lengths_equal),
            }
        )
        return Graded(
            questions=tuple(ids[number] for number in kept),
            scores=rates.scores,
            values=rates.values,
            weights={name: np.isfinite(values).astype(float) for name, values in rates.values.items()},
            counts=dict(+counts),
            errors=rates.errors,
        )

    # -------------------------------------------------------------------------------------------- what it stands on

    @cached_property
    def _reference(self) -> Reference:
        return read_reference(self.reference_outputs, self.rows)

    @cached_property
    def _annotator(self) -> Annotator:
        return alpaca_library.annotator(self.annotator)

    @cached_property
    def _auxiliary(self) -> Path | None:
        """Returns the auxiliary file; None without length control, or where the file cannot be had, which
        is said once.
        """
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

    def _compared(self, answers: Mapping[str, ModelAnswer], places: Sequence[int] | None = None) -> list[Compared]:
        """Rows with both answers, in the order of the reference set: all, or those at ``places``.

        UserError for answers that do not fit the set.
        """
        wanted = range(len(self.questions())) if places is None else places
        questions = [self.questions()[place] for place in wanted]
        return [
            Compared(question.turns[0], self._reference.outputs[place], answer.turns[0])
            for place, question, answer in zip(
                wanted, questions, match_answers(self.name, questions, answers), strict=True
            )
        ]


# ------------------------------------------------------------------------------------------------ files


def read_reference(path: str | None, rows: int = ROWS) -> Reference:
    """Returns the reference set under ``benchmark.reference_outputs``; None takes it from the hub or its cache.

    UserError where the file cannot be had, is not of the library's form, has another number of rows than ``rows``, or
    answers of several generators.
    """
    place = from_hub(REFERENCE) if path is None else path
    if path is None and isinstance(place, str):
        raise UserError(
            f"benchmark.reference_outputs is not given, and the hub does not give {REFERENCE} ({place}): name a file; "
            f"expected {HOW_TO_GET_REFERENCE}"
        )
    named = f"benchmark.reference_outputs={place}"
    file = Path(place).expanduser()
    found = _read_rows(file, named, HOW_TO_GET_REFERENCE)
    if len(found) != rows:
        raise UserError(
            f"{named} has {len(found)} rows, expected {rows}: a row's position is its key, so the set must be whole; "
            f"benchmark.rows={len(found)} takes a set of that size (AlpacaEval 2: {HOW_TO_GET_REFERENCE})"
        )
    generators = sorted({str(row.get("generator")) for _, row in found})
    if len(generators) != 1:
        raise UserError(
            f"{named} has answers of {len(generators)} generators ({', '.join(generators[:5])}), expected one baseline"
        )
    return Reference(
        questions=tuple(
            Question(id=str(place), turns=(text,), category=str(row.get("dataset") or ""))
            for place, (text, row) in enumerate(found)
        ),
        outputs=tuple(str(row["output"]) for _, row in found),
        generator=generators[0],
        digest=file_digest(file),
    )


def _read_rows(path: Path, named: str, wanted: str) -> list[tuple[str, dict[str, object]]]:
    """Instruction and row of each row of a file in the library's form: a JSON list of objects."""
    if not path.is_file():
        raise UserError(f"{named}: there is no such file (looked from {Path.cwd()}); expected {wanted}")
    try:
        rows = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{named} is not JSON in UTF-8 ({error}); expected {wanted}") from error
    if not isinstance(rows, list):
        raise UserError(f"{named} holds {type(rows).__name__}, expected a list of objects: {wanted}")
    for place, row in enumerate(rows):
        texts = row if isinstance(row, dict) else {}
        if lacking := [key for key in ("instruction", "output") if not isinstance(texts.get(key), str)]:
            raise UserError(f"{named}, row {place} has no text {lacking[0]!r}: {shortened(row)}; expected {wanted}")
    return [(row["instruction"], row) for row in rows]
