"""Implements ``attnpo.pair``: scores the answers to each prompt and builds preference pairs from them.

Output: ``pairs.jsonl``; ``pairs.json`` with all settings and counts of prompts; ``pairs.scores.jsonl`` with one score
per answer; and the judge's replies in ``grades``. Rerunning the command continues from the scores.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import NotRequired, Protocol, runtime_checkable

import torch

from attnpo.config.compose import RUNS_ROOT, RootConfig
from attnpo.data.adapters import RowError, check_columns
from attnpo.data.base import parse_row_range
from attnpo.data.prompts import ChatPrompt, PromptColumns, parse_prompt
from attnpo.data.tables import read_table
from attnpo.evaluation.answers import AnswerRow
from attnpo.evaluation.chat import LENGTH
from attnpo.evaluation.jsonl_store import DIGEST, KEY, SUFFIX, JsonlStore, KeyedRow, read_sidecar
from attnpo.schema import BOOKKEEPING, Message, UserError, check_at_least, check_choice, digest, prompt_identity
from attnpo.system.credentials import identify
from attnpo.system.files import check_is_own_file, file_digest, find_differences, safe_filename, write_atomically
from attnpo.system.locks import folder_lock
from attnpo.system.machine import inference_device, package_versions
from attnpo.system.processes import rank_and_world_size
from attnpo.training.settings import ACCELERATORS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """One sampled answer. ``draw``: index among the answers to its prompt; ``extra``: its full data row."""

    draw: int
    text: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerSet:
    """Distinct answers to one prompt, in sampling order."""

    id: str
    prompt: tuple[Message, ...]
    answers: tuple[Candidate, ...]


class ScoreRow(KeyedRow):
    """Score of an answer (higher is better); if it could not be scored, ``score`` is None and ``reason`` says why."""

    score: float | None
    reason: NotRequired[str]


def score_rows(found: AnswerSet, scores: Sequence[float]) -> list[ScoreRow]:
    """Returns one row per answer in a set, with its score."""
    return [ScoreRow(id=found.id, draw=one.draw, score=at) for one, at in zip(found.answers, scores, strict=True)]


def make_unranked_rows(found: AnswerSet, reason: str) -> list[ScoreRow]:
    """Returns rows without scores for a set that cannot be ranked."""
    return [ScoreRow(id=found.id, draw=one.draw, score=None, reason=reason) for one in found.answers]


@runtime_checkable
class Ranker(Protocol):
    """Component that scores answers (config group ``ranker``)."""

    @property
    def name(self) -> str:
        """Returns the ranker's name as stored with every pair: its kind, and its model or column."""

    def key(self, sets: Sequence[AnswerSet]) -> dict[str, object]:
        """Returns everything that affects the scores of ``sets``, apart from the answers themselves.

        Raises:
            UserError: the ranker cannot be used with these settings.
        """

    def scores(self, sets: Sequence[AnswerSet], device: torch.device, folder: Path) -> Iterator[list[ScoreRow]]:
        """Yields each set's score rows once complete, so that they can be written before the next set is scored.

        ``folder``: where the ranker may store files. Sets that could still be scored by rerunning the command are
        omitted.
        """


REFUSED = "answers that could not be generated"
CUT = "answers cut at the token limit"
LEFT_OUT = ", left out"
NO_TEXT = "answers that are not text, left out"
EMPTY = "empty answers"
REPEATED = "answers identical to an earlier one for the same prompt"
ALONE = "prompts with a single answer"
EQUAL = "prompts whose answers are all identical"


@dataclass(frozen=True)
class AnswerSets:
    """Prompts with at least two distinct answers, and counts of excluded prompts and answers by reason.

    ``path``: path or hub name as given. ``prompts`` and ``read``: total numbers of prompts and rows. ``origin``: the
    key from the answers file's sidecar, which records how the answers were generated.
    """

    path: str
    sets: tuple[AnswerSet, ...]
    prompts: int
    read: int
    counts: Mapping[str, int]
    origin: Mapping[str, object]

    @property
    def fingerprint(self) -> str:
        """Returns a digest of all prompts and answers that can be ranked."""
        return digest(
            [
                digest([each.id, prompt_identity(each.prompt), [[one.draw, one.text] for one in each.answers]])
                for each in self.sets
            ]
        )


@dataclass(frozen=True)
class AnswerSource:
    """Source of answers (config node ``answers``) with one answer per row, e.g. the output of ``attnpo.generate``.

    ``path``: file, folder with one file per ``split``, or hub data set; ``rows`` selects rows. ``prompt``, ``answer``
    and ``id``: column names; without an ``id`` column, prompts are identified by a digest. ``keep_cut=false`` skips
    answers that were truncated at the token limit (``finish_reason`` length).
    """

    path: str
    split: str = "test"
    rows: str | None = None
    prompt: str = "prompt"
    answer: str = "answer"
    id: str = "id"
    keep_cut: bool = True

    def load(self) -> AnswerSets:
        """Reads the answers and groups them by prompt.

        Raises:
            UserError: the data cannot be read, ``attnpo.generate`` has not finished the file, the file was changed
                afterwards, a column is missing, two prompts share an id, or no prompt has two distinct answers.
        """
        origin = self._read_origin()
        try:
            table = read_table(self.path, self.split, "data.split")
            names = table.column_names
            wanted = {"prompt": self.prompt, "answer": self.answer}
            check_columns(wanted, names, f"data.path={self.path}", "expected one prompt and one answer per row")
            rows = table.select(parse_row_range(self.rows, len(table), "data.rows"))
        except UserError as problem:
            text = str(problem).replace("data.columns.", "answers.").replace("data.", "answers.")
            raise UserError(text) from problem
        columns = PromptColumns(prompt=self.prompt, id=self.id if self.id in names else None)
        return self._group_by_prompt(rows, columns, origin)

    def _read_origin(self) -> Mapping[str, object]:
        path = Path(self.path).expanduser()
        account = read_sidecar(path.with_suffix(".json")) if path.suffix == SUFFIX and path.is_file() else {}
        origin = account.get(KEY)
        if isinstance(origin, Mapping) and "answers" not in account:
            raise UserError(
                f"answers.path={self.path}: attnpo.generate has not finished this file; run its command again, then "
                "this one"
            )
        if isinstance(origin, Mapping) and DIGEST in account:
            try:
                JsonlStore[AnswerRow](path, "answers").require_finished()
            except UserError as problem:
                raise UserError(f"{problem}. If the change is intended, copy the file to a new name") from problem
        elif isinstance(origin, Mapping):
            log.warning(
                "answers.path=%s was written by an earlier version without digests, so it cannot be verified", self.path
            )
        return origin if isinstance(origin, Mapping) else {}

    def _group_by_prompt(
        self, rows: Iterable[Mapping[str, object]], columns: PromptColumns, origin: Mapping[str, object]
    ) -> AnswerSets:
        """Collects the distinct answers to each prompt and counts excluded rows."""
        counts: Counter[str] = Counter()
        prompts: dict[str, ChatPrompt] = {}
        answers: dict[str, list[Candidate]] = {}
        read = 0
        for read, row in enumerate(rows, start=1):
            try:
                prompt = parse_prompt(row, columns)
            except RowError as problem:
                counts[f"rows left out, {problem.reason.value}"] += 1
                continue
            if prompts.setdefault(prompt.id, prompt) != prompt:
                raise UserError(
                    f"answers.path={self.path}: row {read - 1} has the same {self.id} {prompt.id!r} as a different "
                    "prompt; use a different column: answers.id=COLUMN"
                )
            some = answers.setdefault(prompt.id, [])
            text = row.get(self.answer)
            cut = row.get("finish_reason") == LENGTH and not row.get("refused")
            if row.get("refused"):
                counts[REFUSED + LEFT_OUT] += 1
            elif not isinstance(text, str):
                counts[NO_TEXT] += 1
            elif cut and not self.keep_cut:
                counts[CUT + LEFT_OUT] += 1
            else:
                counts[CUT] += cut
                counts[EMPTY] += not text.strip()
                some.append(Candidate(len(some), text, row))
        sets = []
        for name, some in answers.items():
            first: dict[str, Candidate] = {}
            for one in some:
                first.setdefault(one.text.strip(), one)
            if len(some) < 2:
                counts[ALONE] += 1
            elif len(first) < 2:
                counts[EQUAL] += 1
            else:
                counts[REPEATED] += len(some) - len(first)
                sets.append(AnswerSet(name, prompts[name].messages, tuple(first.values())))
        found = {reason: count for reason, count in counts.items() if count}
        reasons = "; ".join(f"{reason}: {count}" for reason, count in found.items())
        text = f"answers.path={self.path}: {read} rows, {len(prompts)} prompts, {len(sets)} with distinct answers"
        if not sets:
            raise UserError(
                f"{text}, so no pairs can be built ({reasons or 'no rows'}): generate several answers to each prompt "
                "(attnpo.generate answers.per_prompt=4, with sampling.temperature above 0)"
            )
        log.log(logging.WARNING if EQUAL in found else logging.INFO, "%s%s", text, f"; {reasons}" if reasons else "")
        return AnswerSets(self.path, tuple(sets), len(prompts), read, found, origin)


class PairSelection(Enum):
    """Pairs to build for each prompt: best and worst answer, best and each other answer, or all combinations."""

    BEST_WORST = "best_worst"
    BEST_REST = "best_rest"
    ALL = "all"


@dataclass(frozen=True)
class PairRules:
    """Rules for building pairs from the answers to a prompt (config node ``pairs``).

    Answers with equal scores, or with scores that differ by less than ``min_gap``, never form a pair.
    """

    take: PairSelection = PairSelection.BEST_WORST
    min_gap: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("pairs", 0, min_gap=self.min_gap)


@dataclass(frozen=True)
class PairConfig(RootConfig):
    """Root configuration of ``attnpo.pair``, with one field per key of ``configs/pair.yaml``."""

    answers: AnswerSource
    ranker: Ranker
    pairs: PairRules
    trainer: dict[str, str] = field(default_factory=dict, metadata=BOOKKEEPING)
    output: str | None = field(default=None, metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        check_choice("trainer.accelerator", self.trainer.get("accelerator", "auto"), ACCELERATORS)

    @property
    def dry_run(self) -> bool:
        """Returns whether the ranker only estimates its cost (``limits.dry_run``; False for rankers without limits)."""
        return getattr(getattr(self.ranker, "limits", None), "dry_run", False) is True

    def path(self) -> Path:
        """Returns ``output``, or a default file in a folder named after the answers and the kind of ranker."""
        if self.output is not None:
            return Path(self.output).expanduser()
        answers = Path(self.answers.path)
        named = answers.parent.name if answers.stem == "answers" and answers.parent.name else answers.name.split(".")[0]
        kind = self.ranker.name.split(" ")[0]
        return RUNS_ROOT / f"pairs-{safe_filename(named.removeprefix('answers-'))}-{kind}" / "pairs.jsonl"


TIES = "ties"
NARROW = "pairs with a gap below pairs.min_gap"
UNPAIRED = "prompts without a pair, because their scores are equal or too close"
UNRANKED = "prompts left unranked"


def make_pairs(cfg: PairConfig) -> Path | None:
    """Runs ``attnpo.pair`` and returns the path of the pairs; returns None after a dry run or if scores are missing.

    With several processes, each process scores its share of the prompts, and the last process to finish writes the
    pairs.

    Raises:
        UserError: answers or ranker cannot be read; files at ``output`` belong to different answers or a different
            ranker, were changed, or come from another program; another job is writing there; or no pair can be built.
    """
    path = cfg.path()
    if path.suffix != SUFFIX:
        raise UserError(f"output={path} must end in {SUFFIX}")
    account = path.with_suffix(".json")
    written = [str(read_sidecar(account)[DIGEST])] if DIGEST in read_sidecar(account) else []
    check_is_own_file(f"output={path}", path, account, written, "attnpo.pair")
    file = JsonlStore[ScoreRow](path.with_name(f"{path.stem}.scores{SUFFIX}"), "scores", *rank_and_world_size())
    cfg.check_output_paths("output", path, account, file.path, file.sidecar)
    with folder_lock(path.parent, file=file.part.name, instead="output=FILE.jsonl"):
        found, ranker = cfg.answers.load(), cfg.ranker
        key = {"answers": found.fingerprint, "ranker": ranker.key(found.sets)}
        # A dry run writes no sidecar, which would bind later commands to its ranker.
        have = {} if cfg.dry_run and not file.sidecar.is_file() else file.open(key)
        wanted = [(one.id, answer.draw) for one in found.sets for answer in one.answers]
        share = found.sets[file.rank :: file.processes]
        lacking = [one for one in share if any((one.id, answer.draw) not in have for answer in one.answers)]
        log.info("ranking %d prompts by %s, %d of them in this process", len(found.sets), ranker.name, len(lacking))
        done = 0
        if lacking:
            for some in ranker.scores(lacking, inference_device(cfg.trainer.get("accelerator", "auto")), path.parent):
                if not cfg.dry_run:
                    file.append([row for row in some if (row["id"], row["draw"]) not in have])
                done += len({row["id"] for row in some})
        if cfg.dry_run:
            return None
        rows = file.merge(wanted)
        if rows is not None:
            file.write_sidecar(key, {"scores": len(rows)})
            return _write_pairs(path, found, key, rows, cfg.pairs, ranker.name)
        if done < len(lacking):
            log.warning(
                "%d of %d prompts have no scores yet: run the command again to retry them",
                *(len(lacking) - done, len(lacking)),
            )
        else:
            log.info("this process has finished its share; the last process to finish will write %s", path)
        return None


def _write_pairs(
    path: Path,
    found: AnswerSets,
    key: Mapping[str, object],
    rows: Sequence[ScoreRow],
    rules: PairRules,
    ranker: str,
) -> Path:
    """Builds the pairs and writes them with their sidecar.

    Raises:
        UserError: there are no pairs.
    """
    scores: dict[str, dict[int, ScoreRow]] = {}
    for row in rows:
        scores.setdefault(row["id"], {})[row["draw"]] = row
    counts: Counter[str] = Counter(found.counts)
    pairs = [pair for one in found.sets for pair in build_pairs(one, scores[one.id], rules, ranker, counts)]
    reasons = "; ".join(f"{what}: {count}" for what, count in counts.items() if count)
    if not pairs:
        raise UserError(f"no pairs can be built from the answers to {len(found.sets)} prompts: {reasons}")
    whole = json.loads(json.dumps({**identify(key), "pairs": asdict(rules) | {"take": rules.take.value}}))
    before = read_sidecar(path.with_suffix(".json")).get(KEY)
    if isinstance(before, Mapping):
        for name, was, now in find_differences(identify(before), whole):
            log.warning("%s was built with %s %s, but the current value is %s: rebuilding", path, name, was, now)
    write_atomically(path, "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
    facts = {
        KEY: whole,
        DIGEST: file_digest(path),
        "ranker": ranker,
        "answers": {"path": found.path, "rows": found.read, "prompts": found.prompts, "made_by": found.origin},
        "prompts": {"ranked": len(found.sets) - counts[UNRANKED], "paired": len({pair["id"] for pair in pairs})},
        "pairs": len(pairs),
        "counts": {what: count for what, count in sorted(counts.items()) if count},
        "versions": package_versions(),
    }
    write_atomically(path.with_suffix(".json"), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    log.info("built %d pairs from %d prompts in %s, ranked by %s; %s", len(pairs), found.prompts, path, ranker, reasons)
    return path


def build_pairs(
    found: AnswerSet, scores: Mapping[int, ScoreRow], rules: PairRules, ranker: str, counts: Counter[str]
) -> list[dict[str, object]]:
    """Builds one prompt's pairs, in the format that ``data.path`` reads, sorted by decreasing score gap.

    Updates ``counts``.
    """
    reasons = [row.get("reason", "") for row in scores.values() if row["score"] is None]
    if reasons:
        counts[UNRANKED] += 1
        counts[f"{UNRANKED}, {reasons[0]}"] += 1
        return []
    value = {draw: row["score"] or 0.0 for draw, row in scores.items()}
    # A digest breaks ties, so that no draw index is preferred.
    order = sorted(found.answers, key=lambda one: (-value[one.draw], digest([found.id, one.draw])))
    couples = {
        PairSelection.BEST_WORST: [(order[0], order[-1])],
        PairSelection.BEST_REST: [(order[0], other) for other in reversed(order[1:])],
        PairSelection.ALL: [(one, other) for place, one in enumerate(order) for other in order[place + 1 :]],
    }[rules.take]
    made = []
    for better, worse in sorted(couples, key=lambda two: value[two[1].draw] - value[two[0].draw]):
        gap = value[better.draw] - value[worse.draw]
        if gap == 0:
            counts[TIES] += 1
        elif gap < rules.min_gap:
            counts[NARROW] += 1
        else:
            made.append(
                {
                    "prompt": list(found.prompt),
                    "chosen": [Message(role="assistant", content=better.text)],
                    "rejected": [Message(role="assistant", content=worse.text)],
                    "id": found.id,
                    "ranker": ranker,
                    "chosen_score": value[better.draw],
                    "rejected_score": value[worse.draw],
                    "chosen_draw": better.draw,
                    "rejected_draw": worse.draw,
                }
            )
    counts[UNPAIRED] += not made
    return made
