"""``attnpo.generate``: answers of a model to prompts, batch by batch into a file; what does not fit is named."""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NotRequired

from attnpo.config.compose import RUNS_ROOT, Root
from attnpo.data.prompts import EncodedPrompts, Prompt, PromptSet, PromptSource, encode_prompts
from attnpo.evaluation.chat import Answerer, AnsweringBackend, Asked, Reply
from attnpo.evaluation.jsonl_store import JsonlStore, Name, Row
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError, check_choice, check_least
from attnpo.system.locks import locked
from attnpo.system.machine import device_of, versions
from attnpo.system.processes import process
from attnpo.training.settings import ACCELERATORS

log = logging.getLogger(__name__)


class AnswerRow(Row):
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
        check_least("answers", 1, **asdict(self))


@dataclass(frozen=True)
class AnswerConfig(Root):
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
    model, data, rules, sampling = cfg.model, cfg.data, cfg.answers, cfg.sampling
    if rules.per_prompt > 1 and sampling.temperature == 0:
        raise UserError(
            f"answers.per_prompt={rules.per_prompt} with sampling.temperature=0 gives one answer {rules.per_prompt} "
            "times: set a temperature above 0"
        )
    path = default_path(model.path, data) if cfg.output is None else Path(cfg.output).expanduser()
    file = JsonlStore[AnswerRow](path, "answers", *process())
    cfg.require_unread("output", path, file.sidecar)
    with locked(path.parent, file=file.part.name, instead="output=FILE.jsonl"):
        answerer = cfg.answering.open(model, device_of(cfg.trainer.get("accelerator", "auto")))
        found = data.load()
        origin = {
            "model": {"path": model.path, "revision": model.revision},
            "data": {"path": data.path, "split": data.split, "rows": data.rows, "read": found.read},
        }
        _answer(answerer, found, sampling, rules.per_prompt, file, origin)
    return path


def _answer(
    answerer: Answerer,
    found: PromptSet,
    sampling: Sampling,
    per_prompt: int,
    file: JsonlStore[AnswerRow],
    origin: Mapping[str, object],
) -> None:
    """Makes the answers that ``file`` lacks, and its account, which has ``origin`` among its facts."""
    from attnpo.data.prepare import warn_of_rendered  # transformers waits until the configuration is known to be sound

    if answerer.limit is not None and sampling.max_new_tokens >= answerer.limit:
        raise UserError(
            f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt: the model has "
            f"{answerer.limit} positions, or answering.max_length says so"
        )
    encoded = encode_prompts(found.prompts, answerer.chat, sampling.max_new_tokens, answerer.limit)
    _report_left_out(encoded, found)
    if answerer.chat is not None:
        rendered = [prompt.id for prompt in found.prompts if answerer.chat.spells_special(prompt.messages)]
        warn_of_rendered(len(rendered), len(found.prompts), rendered)
    key = key_of(answerer, sampling)
    have = file.open(key)
    wanted = [(prompt, draw) for prompt in encoded.kept for draw in range(per_prompt)]
    turns = {prompt.id: prompt for prompt in found.prompts}
    _check_same_prompts(have, turns, file.path)
    share = wanted[file.rank :: file.processes]
    lacking = {
        (name, draw): Asked(turns[name].messages, tuple(encoded.kept[name]), draw)
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
        facts = _facts(origin, found, encoded, rows) | {"seconds": round(time.perf_counter() - began, 2)}
        file.account(key, facts)
        log.info("%d answers in %s; %s", len(rows), file.path, facts["finish_reasons"])


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


def fill(answerer: Answerer, lacking: Mapping[Name, Asked], sampling: Sampling) -> Iterator[list[AnswerRow]]:
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


def row_of(name: Name, asked: Asked, reply: Reply) -> AnswerRow:
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


def _check_same_prompts(have: Mapping[Name, AnswerRow], turns: Mapping[str, Prompt], path: Path) -> None:
    """Refuses a file begun with other prompts: ids from a column could name something else than they did then."""
    for (name, _), row in have.items():
        if name in turns and row["prompt"] != list(turns[name].messages):
            raise UserError(
                f"{path} holds an answer to another prompt under the id {name!r}: give another output=FILE.jsonl, or "
                "ids that are unique (data.columns.id)"
            )


def _report_left_out(encoded: EncodedPrompts, found: PromptSet) -> None:
    """Names what is left out. UserError when nothing remains."""
    for reason, ids in encoded.left_out.items():
        named = ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")
        log.warning("left out, %s: %d of %d prompts (%s)", reason, len(ids), len(found.prompts), named)
    if encoded.refusal is not None:
        log.warning("the first refusal: %s", encoded.refusal)
    if encoded.kept:
        return
    if encoded.refusal is not None:
        raise encoded.refusal
    raise UserError(
        f"none of the {len(found.prompts)} prompts can be answered: {'; '.join(encoded.left_out)}. Where they are too "
        "long, lower sampling.max_new_tokens or raise answering.max_length"
    )


def _facts(
    origin: Mapping[str, object], found: PromptSet, encoded: EncodedPrompts, rows: Sequence[AnswerRow]
) -> dict[str, object]:
    """Returns the account beside the answers."""
    return {
        "versions": versions(),
        **origin,
        "prompts": {"answered": len(encoded.kept), "rows_left_out": found.left_out, "left_out": encoded.left_out},
        "repeated_rows": found.repeated,
        "answers": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
        "refused": refused(rows),
    }


def refused(rows: Iterable[AnswerRow]) -> dict[str, int]:
    """Returns how many answers are empty because there could be none, by reason; said once, with the first ids."""
    ids: dict[str, list[str]] = {}
    for row in rows:
        if "refused" in row:
            ids.setdefault(row["refused"], []).append(row["id"])
    for reason, named in ids.items():
        distinct = list(dict.fromkeys(named))
        some = ", ".join(distinct[:NAMED]) + (", ..." if len(distinct) > NAMED else "")
        log.warning("empty answers, %s: %d (%s)", reason, len(named), some)
    return {reason: len(named) for reason, named in sorted(ids.items())}
