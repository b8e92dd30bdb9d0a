"""Answers of a model, written as they come into a file that a repeated command continues.

``attnpo.generate`` answers prompts; what does not fit is named. The questions of a benchmark have one or more turns and
a file per round: every first turn is answered before any second one, which is asked on top of the model's own answer.
No question is ever left out, since benchmarks count by position: an answer that cannot be made is an empty text.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import NotRequired

from attnpo.config.compose import RUNS_ROOT, RootConfig
from attnpo.data.prompts import AnswerPrompt, EncodedPrompts, PromptSource, encode_prompts
from attnpo.evaluation.base import ModelAnswer, Question
from attnpo.evaluation.chat import LENGTH, Answerer, AnsweringBackend, ChatRequest, Reply
from attnpo.evaluation.jsonl_store import JsonlStore, KeyedRow, Name
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError, check_at_least, check_choice
from attnpo.system.locks import folder_lock
from attnpo.system.machine import inference_device, package_versions
from attnpo.system.processes import rank_and_world_size
from attnpo.training.settings import ACCELERATORS

log = logging.getLogger(__name__)


class AnswerRow(KeyedRow):
    """One answer in a file. ``draw`` counts the answers to one prompt, or the turns of a question from 0.

    ``finish_reason`` and ``refused`` are those of the reply. ``temperature``: that of the question, where it has one of
    its own.
    """

    prompt: list[Message]
    answer: str
    finish_reason: str
    tokens: int
    refused: NotRequired[str]
    temperature: NotRequired[float]


@dataclass(frozen=True)
class AnswerRules:
    """Number of answers: ``per_prompt`` are drawn for each prompt."""

    per_prompt: int = 1

    def __post_init__(self) -> None:
        check_at_least("answers", 1, **asdict(self))


@dataclass(frozen=True)
class AnswerConfig(RootConfig):
    """Root configuration of ``attnpo.generate``."""

    model: ModelSpec
    data: PromptSource
    sampling: Sampling
    answers: AnswerRules
    answering: AnsweringBackend
    trainer: dict[str, str]
    output: str | None = None

    def __post_init__(self) -> None:
        check_choice("trainer.accelerator", self.trainer.get("accelerator", "auto"), ACCELERATORS)


# Raised by hand with every change of the code that moves a benchmark's answer.
VERSION = "1"
OUTPUT = "output=FOLDER"
NAMED = 3  # ids named in the log per reason
LOG_EVERY = 10.0  # seconds between two lines on the progress


# ------------------------------------------------------------------------------------------------ the command


def answer_prompts(cfg: AnswerConfig) -> Path:
    """Returns the file with the answers that a config of ``attnpo.generate`` asks for; has those it lacks made.

    In a job of several processes each answers its share into a part; the last one merges them.

    Raises:
        UserError: model or prompts cannot be read, nothing can be answered, or the file holds answers of another model
            or sampling, or another job is writing into it.
    """
    from attnpo.data.prepare import (
        warn_about_special_tokens,  # transformers waits until the configuration is known to be sound
    )

    model, data, per_prompt, sampling = cfg.model, cfg.data, cfg.answers.per_prompt, cfg.sampling
    if per_prompt > 1 and sampling.temperature == 0:
        raise UserError(
            f"answers.per_prompt={per_prompt} with sampling.temperature=0 gives one answer {per_prompt} times: set a "
            "temperature above 0"
        )
    path = default_path(model.path, data) if cfg.output is None else Path(cfg.output).expanduser()
    file = JsonlStore[AnswerRow](path, "answers", *rank_and_world_size())
    cfg.check_output_paths("output", path, file.sidecar)
    with folder_lock(path.parent, file=file.part.name, instead="output=FILE.jsonl"):
        answerer = cfg.answering.open(model, inference_device(cfg.trainer.get("accelerator", "auto")))
        found = data.load()
        if answerer.limit is not None and sampling.max_new_tokens >= answerer.limit:
            raise UserError(
                f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt: the model has "
                f"{answerer.limit} positions, or answering.max_length says so"
            )
        encoded = encode_prompts(found.prompts, answerer.chat, sampling.max_new_tokens, answerer.limit)
        unanswered = encoded.left_out
        for reason, ids in unanswered.items():
            log.warning("left out, %s: %d of %d prompts (%s)", reason, len(ids), len(found.prompts), _first(ids))
        if encoded.refusal is not None:
            log.warning("the first refusal: %s", encoded.refusal)
        _require_some(encoded, len(found.prompts), "prompts")
        if answerer.chat is not None:
            rendered = [prompt.id for prompt in found.prompts if answerer.chat.has_special_tokens(prompt.messages)]
            warn_about_special_tokens(len(rendered), len(found.prompts), rendered)
        key = key_of(answerer, sampling)
        have = file.open(key)
        wanted = [(prompt, draw) for prompt in encoded.kept for draw in range(per_prompt)]
        turns = {prompt.id: prompt for prompt in found.prompts}
        for (name, _), row in have.items():
            if name in turns and row["prompt"] != list(turns[name].messages):
                raise UserError(
                    f"{path} holds an answer to another prompt under the id {name!r}: give another output=FILE.jsonl, "
                    "or ids that are unique (data.columns.id)"
                )
        share = wanted[file.rank :: file.processes]
        lacking = {
            (name, draw): ChatRequest(turns[name].messages, tuple(encoded.kept[name]), draw)
            for name, draw in share
            if (name, draw) not in have
        }
        log.info("%d answers wanted, %d are in %s, %d to compute here", len(wanted), len(have), file.path, len(lacking))
        began = time.perf_counter()
        for some in fill(answerer, lacking, sampling):
            file.append(some)
        rows = file.merge(wanted)
        if rows is None:
            log.info("this process's share is done; the last process to finish merges the parts into %s", file.path)
        else:
            facts = {
                "versions": package_versions(),
                "model": {"path": model.path, "revision": model.revision},
                "data": {"path": data.path, "split": data.split, "rows": data.rows, "read": found.read},
                "prompts": {"answered": len(encoded.kept), "rows_left_out": found.left_out, "left_out": unanswered},
                "repeated_rows": found.repeated,
                "answers": len(rows),
                "tokens": sum(row["tokens"] for row in rows),
                "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
                "refused": count_refused(rows),
                "seconds": round(time.perf_counter() - began, 2),
            }
            file.account(key, facts)
            log.info("%d answers in %s; %s", len(rows), file.path, facts["finish_reasons"])
    return path


def default_path(model: str, source: PromptSource) -> Path:
    """Returns where the answers lie without ``output``: a file in a folder named after the model and the prompts."""
    data = Path(source.path)
    # RUN/best and organisation/model: the last part alone does not say which.
    parts = [*(part for part in Path(model).parts[-2:] if part.strip("./~")), data.name.partition(".")[0]]
    if not data.suffix:  # a folder or a hub name, which hold several splits
        parts.append(source.split)
    named = "-".join([*parts, *([] if source.rows is None else [re.sub(r"[^0-9%]+", "_", source.rows)])])
    return RUNS_ROOT / f"answers-{named}" / "answers.jsonl"


def key_of(answerer: Answerer, sampling: Sampling) -> dict[str, object]:
    """Returns what decides the answer to a given prompt."""
    return {**answerer.key(), "sampling": sampling.fingerprint()}


# ------------------------------------------------------------------------------------------------ its steps


def fill(answerer: Answerer, lacking: Mapping[Name, ChatRequest], sampling: Sampling) -> Iterator[list[AnswerRow]]:
    """Yields the rows of what is lacking, as they come: to be written before the next are asked for."""
    names, asked = list(lacking), list(lacking.values())
    began = said = time.perf_counter()
    done = tokens = 0
    for replies in answerer.answer(asked, sampling):
        yield [row_of(names[index], asked[index], reply) for index, reply in replies.items()]
        done += len(replies)
        tokens += sum(reply.tokens for reply in replies.values())
        now = time.perf_counter()
        if now - said > LOG_EVERY or done == len(names):
            said = now
            log.info("answers: %d of %d, %.0f tokens/s", done, len(names), tokens / max(now - began, 1e-9))


def row_of(name: Name, asked: ChatRequest, reply: Reply) -> AnswerRow:
    """Returns the row of a reply."""
    row = AnswerRow(
        id=name[0],
        draw=name[1],
        prompt=list(asked.messages),
        answer=reply.text,
        finish_reason=reply.finish_reason,
        tokens=reply.tokens,
    )
    if reply.refused is not None:
        row["refused"] = reply.refused
    return row


def _require_some(encoded: EncodedPrompts, count: int, noun: str) -> None:
    """Raises UserError where none of ``count`` prompts, if there are any, can be answered."""
    if count and not encoded.kept:
        reasons = [*encoded.left_out] if encoded.refusal is None else [str(encoded.refusal), *encoded.left_out]
        raise UserError(
            f"none of the {count} {noun} can be answered: {'; '.join(reasons)}. Where they are too long, lower "
            "sampling.max_new_tokens or raise answering.max_length"
        )


def count_refused(rows: Iterable[AnswerRow]) -> dict[str, int]:
    """Returns how many answers are empty because there could be none, by reason; warns of each, with the first ids."""
    ids: dict[str, list[str]] = {}
    for row in rows:
        if "refused" in row:
            ids.setdefault(row["refused"], []).append(row["id"])
    for reason, named in ids.items():
        log.warning("empty answers, %s: %d (%s)", reason, len(named), _first(list(dict.fromkeys(named))))
    return {reason: len(named) for reason, named in sorted(ids.items())}


def _first(ids: Sequence[str]) -> str:
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")


# ------------------------------------------------------------------------------------------------ rounds of a benchmark


@dataclass(frozen=True)
class RoundStatistics:
    """Lengths of the answers of a round, and what is wrong with them.

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
    """Answers of one round, by question in the questions' order.

    ``greedy``: the questions whose answers are the same in every round, since they are not drawn.
    """

    answers: dict[str, ModelAnswer]
    statistics: RoundStatistics
    greedy: frozenset[str]


def round_path(folder: Path, round_: int) -> Path:
    """Returns where the answers of a round lie."""
    return folder / f"answers-round{round_}.jsonl"


def answer_questions(
    questions: Sequence[Question], sampling: Sampling, answerer: Answerer, folder: Path, round_: int = 0
) -> RoundAnswers:
    """Returns the answers of round ``round_``, from its file in ``folder`` and, where it lacks some, from ``answerer``.

    The round's seed is ``sampling.seed + round_``. Greedy answers of a later round are copied from round 0, where that
    has them.

    Raises:
        UserError: two questions have one id or one has no turns; no question can be answered; the file holds answers
            of another model or sampling or to other questions; another job writes into it; the backend cannot answer.
    """
    by_id: dict[str, Question] = {}
    for question in questions:
        if question.id in by_id:
            raise UserError(f"two questions have the id {question.id!r}: ids must be unique")
        if not question.turns:
            raise UserError(f"question {question.id!r} has no turn: expected at least one text of the user")
        by_id[question.id] = question
    file = _round_file(folder, round_)
    with folder_lock(folder, file=file.part.name, instead=OUTPUT):
        return _Round(by_id, sampling, answerer, file, round_).run()


def _round_file(folder: Path, round_: int) -> JsonlStore[AnswerRow]:
    return JsonlStore(round_path(folder, round_), "answers", instead=OUTPUT)


@dataclass
class _Round:
    """Work of one round on its file."""

    questions: Mapping[str, Question]
    base: Sampling
    answerer: Answerer
    file: JsonlStore[AnswerRow]
    round: int
    rows: dict[Name, AnswerRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sampling = replace(self.base, seed=self.base.seed + self.round)
        self.greedy = {
            name
            for name, question in self.questions.items()
            if (self.base.temperature if question.temperature is None else question.temperature) == 0
        }

    def run(self) -> RoundAnswers:
        """Copies, answers, puts in order and accounts."""
        key = self._key(self.sampling)
        self.rows = self.file.open(key)
        if not self.rows:
            firsts = [AnswerPrompt(name, self._messages(question, 0)) for name, question in self.questions.items()]
            _require_some(self._encode(firsts), len(firsts), "questions")
        self._copy_greedy()
        for turn in range(max((len(question.turns) for question in self.questions.values()), default=0)):
            self._answer_turn([question for question in self.questions.values() if len(question.turns) > turn], turn)
        order = [(name, turn) for name, question in self.questions.items() for turn in range(len(question.turns))]
        rows = self.file.merge(order) or []
        answers = {}
        for name, turns in groupby(rows, lambda row: row["id"]):
            of = list(turns)
            texts, tokens = tuple(row["answer"] for row in of), tuple(row["tokens"] for row in of)
            answers[name] = ModelAnswer(name, texts, tokens, tuple(row["finish_reason"] for row in of))
        told = self._statistics(rows)
        self.file.account(key, {"statistics": dict(vars(told)), "greedy": sorted(self.greedy)})
        log.info(
            "%d answers in %s: %.0f tokens and %.0f characters a question, %.1f %% cut, %d empty",
            *(told.turns, self.file.path, told.tokens, told.characters, 100 * told.cut, told.empty),
        )
        return RoundAnswers(answers, told, frozenset(self.greedy))

    def _key(self, sampling: Sampling) -> dict[str, object]:
        # The limit decides what is answered at all, and here what is not answered is a row as well.
        return {**key_of(self.answerer, sampling), "max_length": self.answerer.limit, "code": VERSION}

    def _encode(self, prompts: Sequence[AnswerPrompt]) -> EncodedPrompts:
        return encode_prompts(prompts, self.answerer.chat, self.sampling.max_new_tokens, self.answerer.limit)

    def _copy_greedy(self) -> None:
        """Takes the greedy answers that round 0 has: they would come out the same."""
        first = _round_file(self.file.path.parent, 0)
        wanted = [
            (name, turn)
            for name, question in self.questions.items()
            for turn in range(len(question.turns))
            if name in self.greedy and (name, turn) not in self.rows
        ]
        if self.round == 0 or not wanted or not first.sidecar.is_file():
            return
        have = first.open(self._key(self.base))
        copied = {name: have[name] for name in wanted if name in have}
        if copied:
            self.file.append(copied.values())
            self.rows |= copied
            log.info("%d greedy answers are those of round 0", len(copied))

    def _answer_turn(self, questions: Sequence[Question], turn: int) -> None:
        prompts = [AnswerPrompt(question.id, self._messages(question, turn)) for question in questions]
        lacking = {prompt.id: prompt for prompt in prompts if self._lacks(self.questions[prompt.id], prompt, turn)}
        if not lacking:
            return
        encoded = self._encode(list(lacking.values()))
        asked = {name: ChatRequest(lacking[name].messages, tuple(ids)) for name, ids in encoded.kept.items()}
        left_out = [
            row_of((name, turn), ChatRequest(lacking[name].messages), Reply("", 0, LENGTH, refused=reason))
            for reason, names in encoded.left_out.items()
            for name in names
        ]
        if left_out:
            self._add(left_out)
        for temperature in dict.fromkeys(self.questions[name].temperature for name in asked):
            sampling = self.sampling if temperature is None else replace(self.sampling, temperature=temperature)
            some = {name: one for name, one in asked.items() if self.questions[name].temperature == temperature}
            for rows in fill(self.answerer, {(name, turn): one for name, one in some.items()}, sampling):
                self._add(rows)

    def _add(self, rows: Sequence[AnswerRow]) -> None:
        for row in rows:
            temperature = self.questions[row["id"]].temperature
            if temperature is not None:
                row["temperature"] = temperature
        self.file.append(rows)
        self.rows |= {(row["id"], row["draw"]): row for row in rows}

    def _messages(self, question: Question, turn: int) -> tuple[Message, ...]:
        """Returns the conversation up to the user's turn ``turn``, with the answers that the file has."""
        messages = [] if question.system is None else [Message(role="system", content=question.system)]
        for at, text in enumerate(question.turns[: turn + 1]):
            messages.append(Message(role="user", content=text))
            if at < turn:
                messages.append(Message(role="assistant", content=self.rows[question.id, at]["answer"]))
        return tuple(messages)

    def _lacks(self, question: Question, prompt: AnswerPrompt, turn: int) -> bool:
        """Returns whether a turn has to be answered. UserError where the file has an answer to something else."""
        row = self.rows.get((question.id, turn))
        if row is None:
            return True
        warm = row.get("temperature") == question.temperature
        if row["prompt"] == list(prompt.messages) and warm:
            return False
        ours = [message for message in prompt.messages if message["role"] != "assistant"]
        same = [message for message in row["prompt"] if message["role"] != "assistant"] == ours
        if same and warm:
            log.warning("question %s: an earlier turn was answered anew, so turn %d is too", question.id, turn + 1)
            return True
        what = "with another temperature" if same else "to another text"
        raise UserError(
            f"{self.file.path} holds an answer {what} under the question {question.id!r}: give another {OUTPUT}, or "
            "move the file away"
        )

    def _statistics(self, rows: Sequence[AnswerRow]) -> RoundStatistics:
        count, turns = max(1, len(self.questions)), max(1, len(rows))
        return RoundStatistics(
            questions=len(self.questions),
            turns=len(rows),
            tokens=sum(row["tokens"] for row in rows) / count,
            characters=sum(len(row["answer"]) for row in rows) / count,
            cut=sum(row["finish_reason"] == LENGTH and "refused" not in row for row in rows) / turns,
            empty=sum(not row["answer"].strip() for row in rows),
            refused=count_refused(rows),
            counted_by=self.answerer.counted_by,
        )
