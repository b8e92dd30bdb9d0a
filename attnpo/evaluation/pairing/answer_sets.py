"""Rows with an answer each, grouped by their prompts: what ``attnpo.generate`` wrote, or a table of that shape."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnpo.data.adapters import RowProblem, require_columns
from attnpo.data.base import row_range
from attnpo.data.prompts import Prompt, PromptColumns, prompt_of
from attnpo.data.tables import read_table
from attnpo.evaluation.answers.base import LENGTH, AnswerRow
from attnpo.evaluation.jsonl_store import DIGEST, KEY, SUFFIX, JsonlStore, read_account
from attnpo.evaluation.pairing.base import AnswerSet, Candidate
from attnpo.schema import UserError, digest

log = logging.getLogger(__name__)

REFUSED = "answers that could not be made"
CUT = "answers cut at their most tokens"
LEFT_OUT = ", left out"
NO_TEXT = "answers that are no text, left out"
EMPTY = "empty answers"
REPEATED = "answers equal to an earlier one of their prompt"
ALONE = "prompts with a single answer"
EQUAL = "prompts whose answers are all equal"


@dataclass(frozen=True)
class AnswerSets:
    """The prompts with two different answers or more, and what became of the others, by reason.

    ``path``: where they were read, as the command names it. ``prompts`` and ``read``: all prompts and rows.
    ``origin``: what the file beside the answers says they are from.
    """

    path: str
    sets: tuple[AnswerSet, ...]
    prompts: int
    read: int
    counts: Mapping[str, int]
    origin: Mapping[str, object]

    @property
    def fingerprint(self) -> str:
        """Digest of all prompts and answers that can be ranked."""
        return digest([one.fingerprint() for one in self.sets])


@dataclass(frozen=True)
class AnswerSource:
    """Where the answers are (config node ``answers``): an answer per row, as ``attnpo.generate`` writes them.

    ``path`` is a file, a folder with a file per ``split``, or the name of a data set on the hub; ``rows`` chooses rows.
    ``prompt``, ``answer`` and ``id`` are columns; without a column ``id`` a digest of the prompt names it. With
    ``keep_cut`` false, answers that ended at the most tokens (``finish_reason`` length) are left out.
    """

    path: str
    split: str = "test"
    rows: str | None = None
    prompt: str = "prompt"
    answer: str = "answer"
    id: str = "id"
    keep_cut: bool = True

    def load(self) -> AnswerSets:
        """Returns the answers by prompt.

        Raises:
            UserError: nothing can be read, ``attnpo.generate`` has not finished the file or it was changed since, a
                column is missing, two prompts have one id, or no prompt has two answers.
        """
        origin = self._origin()
        try:
            table = read_table(self.path, self.split, "data.split")
            names = table.column_names
            wanted = {"prompt": self.prompt, "answer": self.answer}
            require_columns(wanted, names, f"data.path={self.path}", "expected a prompt and an answer per row")
            rows = table.select(row_range(self.rows, len(table), "data.rows"))
        except UserError as problem:
            text = str(problem).replace("data.columns.", "answers.").replace("data.", "answers.")
            raise UserError(text) from problem
        columns = PromptColumns(prompt=self.prompt, id=self.id if self.id in names else None)
        return self._grouped(rows, columns, origin)

    def _origin(self) -> Mapping[str, object]:
        path = Path(self.path).expanduser()
        account = read_account(path.with_suffix(".json")) if path.suffix == SUFFIX and path.is_file() else {}
        origin = account.get(KEY)
        if isinstance(origin, Mapping) and "answers" not in account:
            raise UserError(
                f"answers.path={self.path}: attnpo.generate has not finished it; give its command again, then this one"
            )
        if isinstance(origin, Mapping) and DIGEST in account:
            try:
                JsonlStore[AnswerRow](path, "answers").require_finished()
            except UserError as problem:
                raise UserError(f"{problem}. Where that is on purpose, copy it to a name of your own") from problem
        elif isinstance(origin, Mapping):
            log.warning(
                "answers.path=%s: an earlier version wrote it without digests, so it is taken as it is", self.path
            )
        return origin if isinstance(origin, Mapping) else {}

    def _grouped(
        self, rows: Iterable[Mapping[str, object]], columns: PromptColumns, origin: Mapping[str, object]
    ) -> AnswerSets:
        counts: Counter[str] = Counter()
        prompts: dict[str, Prompt] = {}
        answers: dict[str, list[Candidate]] = {}
        read = 0
        for read, row in enumerate(rows, start=1):
            try:
                prompt = prompt_of(row, columns)
            except RowProblem as problem:
                counts[f"rows left out, {problem.reason.value}"] += 1
                continue
            if prompts.setdefault(prompt.id, prompt) != prompt:
                raise UserError(
                    f"answers.path={self.path}: row {read - 1} has the {self.id} {prompt.id!r} of another prompt; name "
                    "another column with answers.id=COLUMN"
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
        return self._different(prompts, answers, counts, read, origin)

    def _different(
        self,
        prompts: Mapping[str, Prompt],
        answers: Mapping[str, list[Candidate]],
        counts: Counter[str],
        read: int,
        origin: Mapping[str, object],
    ) -> AnswerSets:
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
        told = "; ".join(f"{reason}: {count}" for reason, count in found.items())
        text = f"answers.path={self.path}: {read} rows, {len(prompts)} prompts, {len(sets)} with different answers"
        if not sets:
            raise UserError(
                f"{text}, so there is no pair to make ({told or 'no row'}): draw several answers to each prompt "
                "(attnpo.generate answers.per_prompt=4, with sampling.temperature above 0)"
            )
        log.log(logging.WARNING if EQUAL in found else logging.INFO, "%s%s", text, f"; {told}" if told else "")
        return AnswerSets(self.path, tuple(sets), len(prompts), read, found, origin)
