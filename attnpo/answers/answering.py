"""Answers of a model to prompts: batch by batch into a file; what does not fit is counted and named."""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging as quiet

from attnpo.answers.answer_config import AnswerConfig, AnswerRules
from attnpo.answers.answer_file import AnswerFile, AnswerRow, Name
from attnpo.config import RUNS_ROOT
from attnpo.config_files import read_template
from attnpo.console import process
from attnpo.data.prompts import Prompt, PromptSet, PromptSource
from attnpo.locks import locked
from attnpo.machine import device_of, versions
from attnpo.models.generate import Answer, HFGenerator, Request, longest_sequence
from attnpo.models.loading import attention_of, load_model, load_tokenizer, weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.schema import Sampling, UserError
from attnpo.text.chat import ChatFormat

log = logging.getLogger(__name__)


REFUSED = "refused by the chat template"
NAMED = 3  # ids named in the log per reason
LOG_EVERY = 10.0  # seconds between two lines on the progress


@dataclass(frozen=True)
class EncodedPrompts:
    """Ids of the prompts that can be answered, by id, and the ids of those left out, by reason."""

    kept: dict[str, list[int]]
    left_out: dict[str, list[str]]
    refusal: UserError | None = None


def encode_prompts(
    prompts: Iterable[Prompt], chat: ChatFormat, new_tokens: int, max_length: int | None
) -> EncodedPrompts:
    """The prompts' ids; left out is what the chat template refuses and what leaves no room for ``new_tokens``.

    ``refusal`` is the template's first one.
    """
    kept: dict[str, list[int]] = {}
    left_out: dict[str, list[str]] = {}
    refusal = None
    for prompt in prompts:
        try:
            ids = chat.prompt_ids(prompt.messages)
        except UserError as problem:
            refusal = refusal or problem
            left_out.setdefault(REFUSED, []).append(prompt.id)
            continue
        if max_length is not None and len(ids) + new_tokens > max_length:
            reason = f"too long: prompt and {new_tokens} new tokens exceed {max_length}"
            left_out.setdefault(reason, []).append(prompt.id)
        else:
            kept[prompt.id] = ids
    return EncodedPrompts(kept, left_out, refusal)


def chat_generator(
    model: PreTrainedModel,
    chat: ChatFormat,
    batch_size: int = AnswerRules.batch_size,
    token_budget: int | None = AnswerRules.token_budget,
) -> HFGenerator:
    """The generator that answers in a chat format: its prompts, its ends of turn."""
    return HFGenerator(
        model,
        chat.tokenizer,
        chat.prompt_ids,
        batch_size=batch_size,
        token_budget=token_budget,
        end_ids=sorted(chat.end_ids),
    )


# ------------------------------------------------------------------------------------------------ the command


def answer_prompts(cfg: AnswerConfig) -> Path:
    """The file with the answers that a config of ``attnpo.generate`` asks for; computes those it lacks.

    In a job of several processes each answers its share into a part; the last one merges them.

    Raises:
        UserError: model or prompts cannot be read, nothing can be answered, or the file holds answers of another model
            or sampling, or another job is writing into it.
    """
    rules, sampling, source = cfg.answers, cfg.sampling, cfg.data
    if rules.per_prompt > 1 and sampling.temperature == 0:
        raise UserError(
            f"answers.per_prompt={rules.per_prompt} with sampling.temperature=0 gives one answer {rules.per_prompt} "
            "times: set a temperature above 0"
        )
    file = AnswerFile(output_path(cfg), *process())
    with locked(file.path.parent, file=file.part.name, instead="output=FILE.jsonl"):
        return _answer(cfg, rules, sampling, source, file)


def _answer(cfg: AnswerConfig, rules: AnswerRules, sampling: Sampling, source: PromptSource, file: AnswerFile) -> Path:
    model, chat = _open_model(cfg)
    found = source.load()
    limit = _limit(model, rules, sampling)
    encoded = encode_prompts(found.prompts, chat, sampling.max_new_tokens, limit)
    _report_left_out(encoded, found)
    key = _key(model, chat, sampling)
    have = file.open(key)
    wanted = [(prompt, draw) for prompt in encoded.kept for draw in range(rules.per_prompt)]
    turns = {prompt.id: prompt for prompt in found.prompts}
    _check_same_prompts(have, turns, file.path)
    share = wanted[file.rank :: file.processes]
    lacking = {name: Request(encoded.kept[name[0]], name[1]) for name in share if name not in have}
    log.info("%d answers wanted, %d are in %s, %d to compute here", len(wanted), len(have), file.path, len(lacking))
    began = time.perf_counter()
    if lacking:
        generator = chat_generator(_load(cfg, model), chat, rules.batch_size, rules.token_budget)
        _fill(file, generator, lacking, turns, sampling)
    rows = file.merge(wanted)
    if rows is None:
        log.info("this process's share is done; the last process to finish merges the parts into %s", file.path)
    else:
        facts = _facts(model, source, found, encoded, rows) | {"seconds": round(time.perf_counter() - began, 2)}
        file.account(key, facts)
        log.info("%d answers in %s; %s", len(rows), file.path, facts["finish_reasons"])
    return file.path


def output_path(cfg: AnswerConfig) -> Path:
    """``output``, or a file in a folder named after the model and the prompts."""
    if cfg.output is not None:
        return Path(cfg.output).expanduser()
    model, data = Path(cfg.model.path), Path(cfg.data.path)
    # RUN/best and organisation/model: the last part alone does not say which.
    parts = [*(part for part in model.parts[-2:] if part.strip("./~")), data.name.partition(".")[0]]
    if not data.suffix:  # a folder or a hub name, which hold several splits
        parts.append(cfg.data.split)
    named = "-".join([*parts, *([] if cfg.data.rows is None else [re.sub(r"[^0-9%]+", "_", cfg.data.rows)])])
    return RUNS_ROOT / f"answers-{named}" / "answers.jsonl"


def _open_model(cfg: AnswerConfig) -> tuple[ModelSpec, ChatFormat]:
    """The model's description and chat format; no weights are read."""
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    if cfg.model.lora is not None:
        raise UserError("model.lora is for training; a run's best/ and last/ have its adapters merged in: leave it out")
    model = cfg.model
    folder = Path(model.path).expanduser()
    inside = [name for name in ("best", "last") if (folder / name / "config.json").is_file()]
    if inside and not (folder / "config.json").is_file():
        raise UserError(
            f"model.path={model.path} is a run folder: name the model in it, model.path={folder / inside[0]}"
        )
    model = replace(model, chat_template=read_template(model.chat_template))
    return model, ChatFormat(load_tokenizer(model.path, model.revision, model.chat_template))


def _limit(model: ModelSpec, rules: AnswerRules, sampling: Sampling) -> int | None:
    """The longest sequence: answers.max_length, or the model's positions."""
    limit = longest_sequence(model.path, model.revision, "answers.max_length", rules.max_length)
    if rules.max_length is None and limit is not None and sampling.max_new_tokens >= limit:
        raise UserError(
            f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt: the model has {limit} "
            "positions"
        )
    return limit


def _key(model: ModelSpec, chat: ChatFormat, sampling: Sampling) -> dict[str, object]:
    """What decides the answer to a given prompt."""
    return {
        "model": weights_fingerprint(model.path, model.revision),
        "model.dtype": model.dtype,
        "model.attn_implementation": attention_of(model.path, model.revision, model.attn_implementation),
        "sampling": asdict(sampling),
        "chat": chat.fingerprint(),
    }


def _load(cfg: AnswerConfig, model: ModelSpec) -> PreTrainedModel:
    loaded = load_model(
        model.path, dtype=model.dtype, attn_implementation=model.attn_implementation, revision=model.revision
    )
    loaded.to(device_of(cfg.trainer.get("accelerator", "auto")))  # type: ignore[arg-type]
    return loaded


# ------------------------------------------------------------------------------------------------ its steps


def _fill(
    file: AnswerFile,
    generator: HFGenerator,
    lacking: Mapping[Name, Request],
    turns: Mapping[str, Prompt],
    sampling: Sampling,
) -> None:
    """Answers what is lacking, each batch written before the next begins."""
    names, requests = list(lacking), list(lacking.values())
    began = said = time.perf_counter()
    done = tokens = 0
    for batch in generator.batches(requests, sampling):
        answers = generator.answer([requests[index] for index in batch], sampling)
        file.append(_row(names[index], turns, answer) for index, answer in zip(batch, answers, strict=True))
        done += len(batch)
        tokens += sum(answer.tokens for answer in answers)
        now = time.perf_counter()
        if now - said > LOG_EVERY or done == len(names):
            said = now
            log.info("answers: %d of %d, %.0f tokens/s", done, len(names), tokens / max(now - began, 1e-9))


def _row(name: Name, turns: Mapping[str, Prompt], answer: Answer) -> AnswerRow:
    return AnswerRow(
        id=name[0],
        draw=name[1],
        prompt=list(turns[name[0]].messages),
        answer=answer.text,
        finish_reason="stop" if answer.ended else "length",
        tokens=answer.tokens,
    )


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
        f"none of the {len(found.prompts)} prompts can be answered: {'; '.join(encoded.left_out)} tokens; lower "
        "sampling.max_new_tokens, or raise answers.max_length as far as the model allows"
    )


def _facts(
    model: ModelSpec, source: PromptSource, found: PromptSet, encoded: EncodedPrompts, rows: Sequence[AnswerRow]
) -> dict[str, object]:
    """The account beside the answers."""
    return {
        "versions": versions(),
        "model": {"path": model.path, "revision": model.revision},
        "data": {"path": source.path, "split": source.split, "rows": source.rows, "read": found.read},
        "prompts": {"answered": len(encoded.kept), "rows_left_out": found.left_out, "left_out": encoded.left_out},
        "repeated_rows": found.repeated,
        "answers": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
    }
