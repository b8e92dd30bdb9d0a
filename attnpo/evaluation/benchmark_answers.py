"""A model's answers to questions of one or more turns: a file per round that a repeated command continues.

Turn by turn: every first turn is answered before any second one, which is asked on top of the model's own answer.
No question is ever left out, since benchmarks count by position: an answer that cannot be made is an empty text.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnpo.data.prompts import Prompt, encode_prompts
from attnpo.evaluation.answers import AnswerRow, fill, key_of, refused, row_of
from attnpo.evaluation.base import ModelAnswer, Question
from attnpo.evaluation.chat import LENGTH, Answerer, Asked, Reply
from attnpo.evaluation.jsonl_store import JsonlStore, Name
from attnpo.schema import Message, Sampling, UserError
from attnpo.system.locks import locked

log = logging.getLogger(__name__)

# Raised by hand with every change of the code that moves an answer.
VERSION = "1"
OUTPUT = "output=FOLDER"


@dataclass(frozen=True)
class AnswerStatistics:
    """How long the answers of a round are, and what is wrong with them.

    ``tokens`` and ``characters``: means over questions, all turns of one together. ``cut``: the share of turns whose
    answer ended at the most tokens. ``empty``: turns without a text (blanks are none); those among them that could not
    be answered stand by reason in ``refused``. ``counted_by``: whose tokens they are.
    """

    questions: int
    turns: int
    tokens: float
    characters: float
    cut: float
    empty: int
    refused: Mapping[str, int]
    counted_by: str


@dataclass(frozen=True)
class RoundAnswers:
    """The answers of one round, by question in the questions' order.

    ``greedy``: the questions whose answers are the same in every round, since they are not drawn.
    """

    answers: dict[str, ModelAnswer]
    statistics: AnswerStatistics
    greedy: frozenset[str]


def round_path(folder: Path, round_: int) -> Path:
    """Returns where the answers of a round lie."""
    return folder / f"answers-round{round_}.jsonl"


def answer_questions(
    questions: Sequence[Question], sampling: Sampling, answerer: Answerer, folder: Path, round_: int = 0
) -> RoundAnswers:
    """Returns the answers of round ``round_``, from its file in ``folder`` and, where that lacks some, from
    ``answerer``.

    The round's seed is ``sampling.seed + round_``. Greedy answers of a later round are copied from round 0, where that
    has them.

    Raises:
        UserError: two questions have one id or one has no turns; no question can be answered; the file holds answers
            of another model or sampling or to other questions; another job writes into it; the backend cannot answer.
    """
    _check(questions)
    file = _file(folder, round_)
    with locked(folder, file=file.part.name, instead=OUTPUT):
        return _Round(questions, sampling, answerer, file, round_).run()


def _file(folder: Path, round_: int) -> JsonlStore[AnswerRow]:
    return JsonlStore(round_path(folder, round_), "answers", instead=OUTPUT)


class _Round:
    """One round's work on its file."""

    def __init__(
        self,
        questions: Sequence[Question],
        sampling: Sampling,
        answerer: Answerer,
        file: JsonlStore[AnswerRow],
        round_: int,
    ) -> None:
        self.questions, self.answerer, self.file, self.round = questions, answerer, file, round_
        self.base, self.sampling = sampling, replace(sampling, seed=sampling.seed + round_)
        self.rows: dict[Name, AnswerRow] = {}

    def run(self) -> RoundAnswers:
        """Copies, answers, puts in order and accounts."""
        key = self._key(self.sampling)
        self.rows = self.file.open(key)
        if not self.rows:
            self._require_some()
        self._copy_greedy()
        for turn in range(max((len(question.turns) for question in self.questions), default=0)):
            self._answer_turn([question for question in self.questions if len(question.turns) > turn], turn)
        rows = self.file.merge(
            [(question.id, turn) for question in self.questions for turn in range(len(question.turns))]
        )
        found = self._result(rows or [])
        told = found.statistics
        self.file.account(key, {"statistics": dict(vars(told)), "greedy": sorted(found.greedy)})
        log.info(
            "%d answers in %s: %.0f tokens and %.0f characters a question, %.1f %% cut, %d empty",
            *(told.turns, self.file.path, told.tokens, told.characters, 100 * told.cut, told.empty),
        )
        return found

    def _key(self, sampling: Sampling) -> dict[str, object]:
        # The limit decides what is answered at all, and here what is not answered is a row as well.
        return {**key_of(self.answerer, sampling), "max_length": self.answerer.limit, "code": VERSION}

    # ------------------------------------------------------------------------------------------ greedy answers

    def _copy_greedy(self) -> None:
        """Takes the greedy answers that round 0 has: they would come out the same."""
        first = _file(self.file.path.parent, 0)
        wanted = [
            (question.id, turn)
            for question in self.questions
            if is_greedy(question, self.sampling)
            for turn in range(len(question.turns))
            if (question.id, turn) not in self.rows
        ]
        if self.round == 0 or not wanted or not first.sidecar.is_file():
            return
        have = first.open(self._key(self.base))
        copied = {name: have[name] for name in wanted if name in have}
        if copied:
            self.file.append(copied.values())
            self.rows |= copied
            log.info("%d greedy answers are those of round 0", len(copied))

    # ------------------------------------------------------------------------------------------ one turn

    def _answer_turn(self, questions: Sequence[Question], turn: int) -> None:
        prompts = [Prompt(question.id, self._messages(question, turn)) for question in questions]
        by_id = {question.id: question for question in questions}
        lacking = [prompt for prompt in prompts if self._lacks(by_id[prompt.id], prompt, turn)]
        if not lacking:
            return
        chat, limit = self.answerer.chat, self.answerer.limit
        encoded = encode_prompts(lacking, chat, self.sampling.max_new_tokens, limit)
        messages = {prompt.id: prompt.messages for prompt in lacking}
        asked = {name: Asked(messages[name], tuple(ids)) for name, ids in encoded.kept.items()}
        left_out = [
            row_of((name, turn), Asked(messages[name]), Reply("", 0, LENGTH, refused=reason))
            for reason, names in encoded.left_out.items()
            for name in names
        ]
        if left_out:
            self._keep(left_out, by_id)
        for temperature in dict.fromkeys(by_id[name].temperature for name in asked):
            sampling = self.sampling if temperature is None else replace(self.sampling, temperature=temperature)
            some = {(name, turn): one for name, one in asked.items() if by_id[name].temperature == temperature}
            for rows in fill(self.answerer, some, sampling):
                self._keep(rows, by_id)

    def _keep(self, rows: Sequence[AnswerRow], questions: Mapping[str, Question]) -> None:
        for row in rows:
            temperature = questions[row["id"]].temperature
            if temperature is not None:
                row["temperature"] = temperature
        self.file.append(rows)
        self.rows |= {(row["id"], row["draw"]): row for row in rows}

    def _messages(self, question: Question, turn: int) -> tuple[Message, ...]:
        """Returns the conversation up to the user's turn ``turn``, counted from 0, with the answers that
        the file has.
        """
        messages = [] if question.system is None else [Message(role="system", content=question.system)]
        for at, text in enumerate(question.turns[: turn + 1]):
            messages.append(Message(role="user", content=text))
            if at < turn:
                messages.append(Message(role="assistant", content=self.rows[question.id, at]["answer"]))
        return tuple(messages)

    def _lacks(self, question: Question, prompt: Prompt, turn: int) -> bool:
        """Returns whether a turn has to be answered. UserError where the file has an answer to something else."""
        row = self.rows.get((question.id, turn))
        if row is None:
            return True
        if row["prompt"] == list(prompt.messages) and row.get("temperature") == question.temperature:
            return False
        ours = [message for message in prompt.messages if message["role"] != "assistant"]
        same = [message for message in row["prompt"] if message["role"] != "assistant"] == ours
        if same and row.get("temperature") == question.temperature:
            log.warning("question %s: an earlier turn was answered anew, so turn %d is too", question.id, turn + 1)
            return True
        what = "with another temperature" if same else "to another text"
        raise UserError(
            f"{self.file.path} holds an answer {what} under the question {question.id!r}: give another {OUTPUT}, or "
            "move the file away"
        )

    def _require_some(self) -> None:
        """UserError where no first turn can be answered: there would be nothing but empty texts."""
        reasons: list[str] = []
        for question in self.questions:
            prompt = Prompt(question.id, self._messages(question, 0))
            one = encode_prompts([prompt], self.answerer.chat, self.sampling.max_new_tokens, self.answerer.limit)
            if one.kept:
                return
            reasons += [str(one.refusal)] if one.refusal is not None else one.left_out
        if reasons:
            raise UserError(
                f"none of the {len(self.questions)} questions can be answered: {'; '.join(dict.fromkeys(reasons))}. "
                "Where they are too long, lower sampling.max_new_tokens or raise answering.max_length"
            )

    # ------------------------------------------------------------------------------------------ what comes of it

    def _result(self, rows: Iterable[AnswerRow]) -> RoundAnswers:
        turns: dict[str, list[AnswerRow]] = {}
        for row in rows:
            turns.setdefault(row["id"], []).append(row)
        answers = {
            name: ModelAnswer(
                question=name,
                turns=tuple(row["answer"] for row in of),
                tokens=tuple(row["tokens"] for row in of),
                finish_reasons=tuple(row["finish_reason"] for row in of),
            )
            for name, of in turns.items()
        }
        greedy = frozenset(question.id for question in self.questions if is_greedy(question, self.sampling))
        every = [row for of in turns.values() for row in of]
        return RoundAnswers(answers, _statistics(answers.values(), every, self.answerer.counted_by), greedy)


def is_greedy(question: Question, sampling: Sampling) -> bool:
    """Returns whether a question is answered without drawing, the same in every round."""
    return (sampling.temperature if question.temperature is None else question.temperature) == 0


def _statistics(answers: Iterable[ModelAnswer], rows: Sequence[AnswerRow], counted_by: str) -> AnswerStatistics:
    every = list(answers)
    count, turns = max(1, len(every)), max(1, len(rows))
    return AnswerStatistics(
        questions=len(every),
        turns=len(rows),
        tokens=sum(sum(answer.tokens) for answer in every) / count,
        characters=sum(len(text) for answer in every for text in answer.turns) / count,
        cut=sum(row["finish_reason"] == LENGTH and "refused" not in row for row in rows) / turns,
        empty=sum(not row["answer"].strip() for row in rows),
        refused=refused(rows),
        counted_by=counted_by,
    )


def _check(questions: Sequence[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(f"two questions have the id {question.id!r}: ids must be unique")
        if not question.turns:
            raise UserError(f"question {question.id!r} has no turn: expected at least one text of the user")
        seen.add(question.id)
