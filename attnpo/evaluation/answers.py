"""Generates a model's answers and writes them to a file as they arrive; rerunning the command adds missing ones.

``attnpo.generate`` answers prompts and lists those that are too long. Benchmark questions have one or more turns, and
each round has its own file. All first turns are answered before any second turn, which follows the model's own first
answer. Benchmarks identify questions by position, so no question is ever skipped: if an answer cannot be generated, an
empty string is stored.
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
from attnpo.data.prompts import ChatPrompt, EncodedPrompts, PromptSource, encode_prompts
from attnpo.evaluation.base import ModelAnswer, Question
from attnpo.evaluation.chat import LENGTH, AnsweringBackend, ChatModel, ChatRequest, Reply
from attnpo.evaluation.jsonl_store import JsonlStore, KeyedRow, Name
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError, check_at_least, check_choice
from attnpo.system.locks import folder_lock
from attnpo.system.machine import inference_device, package_versions
from attnpo.system.processes import rank_and_world_size
from attnpo.training.settings import ACCELERATORS

log = logging.getLogger(__name__)


class AnswerRow(KeyedRow):
    """One answer in a file.

    ``draw``: index among the answers to the same prompt; for a benchmark question, the index of the turn.

    ``finish_reason`` and ``refused`` are copied from the reply; ``temperature`` is set if the question overrides it.
    """

    prompt: list[Message]
    answer: str
    finish_reason: str
    tokens: int
    refused: NotRequired[str]
    temperature: NotRequired[float]


@dataclass(frozen=True)
class AnswerRules:
    """Number of answers to generate for each prompt."""

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


# Increase with every code change that changes a benchmark's answers.
VERSION = "1"
OUTPUT = "output=FOLDER"
NAMED = 3  # ids listed in the log per reason
LOG_EVERY = 10.0  # seconds between progress lines


# ------------------------------------------------------------------------------------------------ the command


def answer_prompts(cfg: AnswerConfig) -> Path:
    """Runs ``attnpo.generate``: generates all missing answers and returns the path of the answers file.

    With several processes, each process writes its share to a part file, and the last process to finish merges the
    parts.

    Raises:
        UserError: model or prompts cannot be read, no prompt can be answered, the file contains answers from a
            different model or different sampling settings, or another job is writing to it.
    """
    from attnpo.data.prepare import (
        warn_about_special_tokens,  # imports transformers, so only after the config was checked
    )

    model, data, per_prompt, sampling = cfg.model, cfg.data, cfg.answers.per_prompt, cfg.sampling
    if per_prompt > 1 and sampling.temperature == 0:
        raise UserError(
            f"answers.per_prompt={per_prompt} with sampling.temperature=0 gives the same answer {per_prompt} times: "
            "set a temperature above 0"
        )
    path = default_path(model.path, data) if cfg.output is None else Path(cfg.output).expanduser()
    file = JsonlStore[AnswerRow](path, "answers", *rank_and_world_size())
    cfg.check_output_paths("output", path, file.sidecar)
    with folder_lock(path.parent, file=file.part.name, instead="output=FILE.jsonl"):
        chat_model = cfg.answering.open(model, inference_device(cfg.trainer.get("accelerator", "auto")))
        found = data.load()
        if chat_model.limit is not None and sampling.max_new_tokens >= chat_model.limit:
            raise UserError(
                f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt: the limit is "
                f"{chat_model.limit} tokens (answering.max_length, or the model's number of positions)"
            )
        encoded = encode_prompts(found.prompts, chat_model.chat, sampling.max_new_tokens, chat_model.limit)
        unanswered = encoded.left_out
        for reason, ids in unanswered.items():
            log.warning("skipped %d of %d prompts: %s (%s)", len(ids), len(found.prompts), reason, _list_ids(ids))
        if encoded.refusal is not None:
            log.warning("first chat template error: %s", encoded.refusal)
        _require_answerable(encoded, len(found.prompts), "prompts")
        if chat_model.chat is not None:
            rendered = [prompt.id for prompt in found.prompts if chat_model.chat.has_special_tokens(prompt.messages)]
            warn_about_special_tokens(len(rendered), len(found.prompts), rendered)
        key = answer_key(chat_model, sampling)
        have = file.open(key)
        wanted = [(prompt, draw) for prompt in encoded.kept for draw in range(per_prompt)]
        turns = {prompt.id: prompt for prompt in found.prompts}
        for (name, _), row in have.items():
            if name in turns and row["prompt"] != list(turns[name].messages):
                raise UserError(
                    f"{path} already has an answer to a different prompt under the id {name!r}: set a different "
                    "output=FILE.jsonl, or use unique ids (data.columns.id)"
                )
        share = wanted[file.rank :: file.processes]
        lacking = {
            (name, draw): ChatRequest(turns[name].messages, tuple(encoded.kept[name]), draw)
            for name, draw in share
            if (name, draw) not in have
        }
        log.info(
            "%d answers requested: %d are already in %s, %d will be generated by this process",
            *(len(wanted), len(have), file.path, len(lacking)),
        )
        began = time.perf_counter()
        for some in generate_rows(chat_model, lacking, sampling):
            file.append(some)
        rows = file.merge(wanted)
        if rows is None:
            log.info(
                "this process has finished its share; the last process to finish will merge all parts into %s",
                file.path,
            )
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
            file.write_sidecar(key, facts)
            log.info("%d answers in %s; %s", len(rows), file.path, facts["finish_reasons"])
    return path


def default_path(model: str, source: PromptSource) -> Path:
    """Returns the default path of the answers file, in a folder named after the model and the prompts."""
    data = Path(source.path)
    # Both parts of RUN/best and organisation/model: the last part alone is ambiguous.
    parts = [*(part for part in Path(model).parts[-2:] if part.strip("./~")), data.name.partition(".")[0]]
    if not data.suffix:  # a folder or a hub name, which may hold several splits
        parts.append(source.split)
    named = "-".join([*parts, *([] if source.rows is None else [re.sub(r"[^0-9%]+", "_", source.rows)])])
    return RUNS_ROOT / f"answers-{named}" / "answers.jsonl"


def answer_key(chat_model: ChatModel, sampling: Sampling) -> dict[str, object]:
    """Returns the settings and versions that determine the answer to a given prompt."""
    return {**chat_model.key(), "sampling": sampling.fingerprint()}


# ------------------------------------------------------------------------------------------------ generating


def generate_rows(
    chat_model: ChatModel, requests: Mapping[Name, ChatRequest], sampling: Sampling
) -> Iterator[list[AnswerRow]]:
    """Generates answers and yields rows as they arrive, so that a batch can be written before the next starts."""
    names, asked = list(requests), list(requests.values())
    began = logged = time.perf_counter()
    done = tokens = 0
    for replies in chat_model.answer(asked, sampling):
        yield [make_answer_row(names[index], asked[index], reply) for index, reply in replies.items()]
        done += len(replies)
        tokens += sum(reply.tokens for reply in replies.values())
        now = time.perf_counter()
        if now - logged > LOG_EVERY or done == len(names):
            logged = now
            log.info("answers: %d of %d, %.0f tokens/s", done, len(names), tokens / max(now - began, 1e-9))


def make_answer_row(name: Name, asked: ChatRequest, reply: Reply) -> AnswerRow:
    """Builds the row in which a reply is stored."""
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


def _require_answerable(encoded: EncodedPrompts, count: int, noun: str) -> None:
    """Raises a UserError if there are prompts but none of them can be answered."""
    if count and not encoded.kept:
        reasons = [*encoded.left_out] if encoded.refusal is None else [str(encoded.refusal), *encoded.left_out]
        raise UserError(
            f"none of the {count} {noun} can be answered: {'; '.join(reasons)}. If they are too long, lower "
            "sampling.max_new_tokens or raise answering.max_length"
        )


def count_refused(rows: Iterable[AnswerRow]) -> dict[str, int]:
    """Counts unanswered items by reason, and logs a warning with the first ids for each reason."""
    ids: dict[str, list[str]] = {}
    for row in rows:
        if "refused" in row:
            ids.setdefault(row["refused"], []).append(row["id"])
    for reason, named in ids.items():
        log.warning("%d empty answers: %s (%s)", len(named), reason, _list_ids(list(dict.fromkeys(named))))
    return {reason: len(named) for reason, named in sorted(ids.items())}


def _list_ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")


# ------------------------------------------------------------------------------------------------ rounds of a benchmark


@dataclass(frozen=True)
class RoundStatistics:
    """Answer lengths in one round, and counts of unusable answers.

    ``tokens`` and ``characters``: means over questions, summed over the turns of a question. ``cut``: share of turns
    whose answer was truncated at the token limit. ``empty``: number of turns with an empty or whitespace-only answer.
    ``refused``: number of turns that could not be answered, by reason. ``counted_by``: the tokenizer that counted the
    tokens.
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
    """Answers of one round by question, in the order of the questions.

    ``greedy``: questions answered at temperature 0, whose answers are the same in every round.
    """

    answers: dict[str, ModelAnswer]
    statistics: RoundStatistics
    greedy: frozenset[str]


def round_path(folder: Path, round_: int) -> Path:
    """Returns the path of a round's answers file."""
    return folder / f"answers-round{round_}.jsonl"


def answer_questions(
    questions: Sequence[Question], sampling: Sampling, chat_model: ChatModel, folder: Path, round_: int = 0
) -> RoundAnswers:
    """Returns a round's answers: reads existing ones from the round's file in ``folder`` and generates the rest.

    The round's seed is ``sampling.seed + round_``. Later rounds copy greedy answers from round 0, if it has them.

    Raises:
        UserError: two questions share an id, or one has no turns; no question can be answered; the file contains
            answers from a different model, different sampling settings or different questions; another job is writing
            to it; the backend cannot answer.
    """
    by_id: dict[str, Question] = {}
    for question in questions:
        if question.id in by_id:
            raise UserError(f"two questions have the id {question.id!r}: ids must be unique")
        if not question.turns:
            raise UserError(f"question {question.id!r} has no turns: expected at least one user turn")
        by_id[question.id] = question
    file = _round_file(folder, round_)
    with folder_lock(folder, file=file.part.name, instead=OUTPUT):
        return _RoundWriter(by_id, sampling, chat_model, file, round_).run()


def _round_file(folder: Path, round_: int) -> JsonlStore[AnswerRow]:
    return JsonlStore(round_path(folder, round_), "answers", instead=OUTPUT)


@dataclass
class _RoundWriter:
    """Completes the answers file for one round."""

    questions: Mapping[str, Question]
    base: Sampling
    chat_model: ChatModel
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
        """Copies greedy answers, generates missing ones, merges the file's parts and writes its statistics."""
        key = self._key(self.sampling)
        self.rows = self.file.open(key)
        if not self.rows:
            firsts = [ChatPrompt(name, self._conversation(question, 0)) for name, question in self.questions.items()]
            _require_answerable(self._encode(firsts), len(firsts), "questions")
        self._copy_greedy()
        for turn in range(max((len(question.turns) for question in self.questions.values()), default=0)):
            self._answer_turn([question for question in self.questions.values() if len(question.turns) > turn], turn)
        order = [(name, turn) for name, question in self.questions.items() for turn in range(len(question.turns))]
        rows = self.file.merge(order) or []
        answers = {}
        for name, turns in groupby(rows, lambda row: row["id"]):
            own = list(turns)
            texts, tokens = tuple(row["answer"] for row in own), tuple(row["tokens"] for row in own)
            answers[name] = ModelAnswer(name, texts, tokens, tuple(row["finish_reason"] for row in own))
        statistics = self._compute_statistics(rows)
        self.file.write_sidecar(key, {"statistics": dict(vars(statistics)), "greedy": sorted(self.greedy)})
        log.info(
            "%d answers in %s: %.0f tokens and %.0f characters per question, %.1f %% truncated at the token limit, "
            "%d empty",
            *(statistics.turns, self.file.path, statistics.tokens, statistics.characters),
            *(100 * statistics.cut, statistics.empty),
        )
        return RoundAnswers(answers, statistics, frozenset(self.greedy))

    def _key(self, sampling: Sampling) -> dict[str, object]:
        # The limit decides which questions can be answered, and unanswered ones are stored as rows too.
        return {**answer_key(self.chat_model, sampling), "max_length": self.chat_model.limit, "code": VERSION}

    def _encode(self, prompts: Sequence[ChatPrompt]) -> EncodedPrompts:
        return encode_prompts(prompts, self.chat_model.chat, self.sampling.max_new_tokens, self.chat_model.limit)

    def _copy_greedy(self) -> None:
        """Copies greedy answers from round 0, since generating them again would yield the same text."""
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
            log.info("copied %d greedy answers from round 0", len(copied))

    def _answer_turn(self, questions: Sequence[Question], turn: int) -> None:
        prompts = [ChatPrompt(question.id, self._conversation(question, turn)) for question in questions]
        lacking = {prompt.id: prompt for prompt in prompts if self._is_missing(self.questions[prompt.id], prompt, turn)}
        if not lacking:
            return
        encoded = self._encode(list(lacking.values()))
        asked = {name: ChatRequest(lacking[name].messages, tuple(ids)) for name, ids in encoded.kept.items()}
        left_out = [
            make_answer_row((name, turn), ChatRequest(lacking[name].messages), Reply("", 0, LENGTH, refused=reason))
            for reason, names in encoded.left_out.items()
            for name in names
        ]
        if left_out:
            self._append_rows(left_out)
        for temperature in dict.fromkeys(self.questions[name].temperature for name in asked):
            sampling = self.sampling if temperature is None else replace(self.sampling, temperature=temperature)
            some = {name: one for name, one in asked.items() if self.questions[name].temperature == temperature}
            for rows in generate_rows(self.chat_model, {(name, turn): one for name, one in some.items()}, sampling):
                self._append_rows(rows)

    def _append_rows(self, rows: Sequence[AnswerRow]) -> None:
        for row in rows:
            temperature = self.questions[row["id"]].temperature
            if temperature is not None:
                row["temperature"] = temperature
        self.file.append(rows)
        self.rows |= {(row["id"], row["draw"]): row for row in rows}

    def _conversation(self, question: Question, turn: int) -> tuple[Message, ...]:
        """Returns the conversation up to user turn ``turn``, with the model's earlier answers from the file."""
        messages = [] if question.system is None else [Message(role="system", content=question.system)]
        for at, text in enumerate(question.turns[: turn + 1]):
            messages.append(Message(role="user", content=text))
            if at < turn:
                messages.append(Message(role="assistant", content=self.rows[question.id, at]["answer"]))
        return tuple(messages)

    def _is_missing(self, question: Question, prompt: ChatPrompt, turn: int) -> bool:
        """Returns whether a turn still needs an answer.

        Raises:
            UserError: the file contains an answer to a different prompt, or one sampled at a different temperature.
        """
        row = self.rows.get((question.id, turn))
        if row is None:
            return True
        warm = row.get("temperature") == question.temperature
        if row["prompt"] == list(prompt.messages) and warm:
            return False
        ours = [message for message in prompt.messages if message["role"] != "assistant"]
        same = [message for message in row["prompt"] if message["role"] != "assistant"] == ours
        if same and warm:
            log.warning("question %s: answering turn %d again because an earlier answer changed", question.id, turn + 1)
            return True
        what = "sampled at a different temperature" if same else "to a different prompt"
        raise UserError(
            f"{self.file.path} contains an answer {what} for question {question.id!r}: set a different "
            f"{OUTPUT}, or move the file elsewhere"
        )

    def _compute_statistics(self, rows: Sequence[AnswerRow]) -> RoundStatistics:
        count, turns = max(1, len(self.questions)), max(1, len(rows))
        return RoundStatistics(
            questions=len(self.questions),
            turns=len(rows),
            tokens=sum(row["tokens"] for row in rows) / count,
            characters=sum(len(row["answer"]) for row in rows) / count,
            cut=sum(row["finish_reason"] == LENGTH and "refused" not in row for row in rows) / turns,
            empty=sum(not row["answer"].strip() for row in rows),
            refused=count_refused(rows),
            counted_by=self.chat_model.counted_by,
        )
