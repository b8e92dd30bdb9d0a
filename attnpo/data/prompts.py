"""Prompts to be answered: rows with a prompt text or messages, or the prompts of preference pairs, each accounted for.

Reads the same files, folders and hub names as ``PairSource``, under the same conventions for what a row holds.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attnpo.data.adapters import Columns, Reason, RowProblem, adapt, require_columns
from attnpo.data.base import format_count, row_range
from attnpo.data.tables import read_table
from attnpo.schema import Message, UserError, digest, prompt_identity
from attnpo.text.chat import ChatFormat

_LOG = logging.getLogger(__name__)

EMPTY = "empty prompt"
REPEATED = "prompt repeated, answered once"


@dataclass(frozen=True)
class PromptColumns(Columns):
    """``Columns`` with one more: ``id`` names each prompt (None: a digest of its messages does).

    ``chosen`` and ``rejected`` matter only where a table has both: its rows are pairs then, and the prompt is what
    both conversations share.
    """

    id: str | None = None


@dataclass(frozen=True)
class AnswerPrompt:
    """Prompt to answer: an id, and turns that end with the user's."""

    id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their rows; ``left_out`` has the row numbers of what could not be used, by reason.

    Every row looked at (``read``) is a prompt, a repetition of an earlier one (``repeated``), or left out.
    """

    prompts: list[AnswerPrompt]
    read: int
    repeated: list[int]
    left_out: Mapping[str, list[int]]

    @property
    def counts(self) -> Counter[str]:
        """Returns how many rows gave no new prompt, by reason."""
        counts = Counter({reason: len(rows) for reason, rows in self.left_out.items()})
        return counts + Counter({REPEATED: len(self.repeated)})

    def summary(self) -> str:
        """Returns one line with all counts and the first row numbers of each."""
        events = sorted({**self.left_out, **({REPEATED: self.repeated} if self.repeated else {})}.items())
        parts = [format_count(reason, len(rows), rows) for reason, rows in events]
        return "; ".join([f"{self.read} rows read, {len(self.prompts)} prompts", *parts])


def prompts_from_rows(rows: Iterable[Mapping[str, object]], columns: PromptColumns, first: int = 0) -> PromptSet:
    """Returns the prompts of an iterable of rows; ``first`` is the number of the first row.

    Raises:
        UserError: two rows have the same id but ask different things, or a mapped column does not exist.
    """
    prompts: dict[str, AnswerPrompt] = {}
    left_out: dict[str, list[int]] = {}
    repeated = []
    read = 0
    for number, row in enumerate(rows, start=first):
        read += 1
        try:
            prompt = prompt_of(row, columns)
        except RowProblem as problem:
            left_out.setdefault(problem.reason.value, []).append(number)
            continue
        if not prompt.messages[-1]["content"].strip():
            left_out.setdefault(EMPTY, []).append(number)
        elif prompt.id not in prompts:
            prompts[prompt.id] = prompt
        elif prompts[prompt.id] == prompt:
            repeated.append(number)
        else:
            raise UserError(
                f"row {number} has the {columns.id} {prompt.id!r} of an earlier row but asks something else: ids must "
                "be unique; name another column with data.columns.id=COLUMN, or leave it out (data.columns.id=null)"
            )
    return PromptSet(list(prompts.values()), read, repeated, left_out)


def prompt_of(row: Mapping[str, object], columns: PromptColumns) -> AnswerPrompt:
    """Returns the prompt of a row. RowProblem for one that holds none."""
    if columns.chosen not in row or columns.rejected not in row:
        if columns.prompt is None or row.get(columns.prompt) is None:
            raise RowProblem(Reason.MISSING)
        # Two answers of a letter each make it a pair, so that the conventions for pairs read it.
        row = {**row, columns.chosen: "a", columns.rejected: "b"}
    messages = adapt(row, columns).pair.prompt
    if columns.id is None:
        return AnswerPrompt(digest(prompt_identity(messages))[:32], messages)
    if row.get(columns.id) is None:
        raise RowProblem(Reason.MISSING)
    return AnswerPrompt(str(row[columns.id]), messages)


@dataclass(frozen=True)
class PromptSource:
    """Where the prompts of ``attnpo.generate`` come from (config node ``data``).

    ``path`` is a file, a folder with a file or shards per split or a saved data set, or the name of a dataset on the
    hub; ``split`` names the split, or the stem of its file, in the last two. ``rows`` chooses rows ("500", "100:300",
    "10%"), counted before any is left out. ``revision`` and ``subset`` are for the hub.
    """

    path: str
    split: str = "test"
    rows: str | None = None
    columns: PromptColumns = field(default_factory=PromptColumns)
    revision: str | None = None
    subset: str | None = None

    def load(self) -> PromptSet:
        """Returns the prompts.

        Raises:
            UserError: nothing is found at ``path``, a column or split is missing, a file cannot be read, ids are not
                unique, or no row is usable.
        """
        table = read_table(self.path, self.split, "data.split", self.subset, self.revision)
        where = f"data.path={self.path}"
        self._check(table.column_names, where)
        chosen = row_range(self.rows, len(table), "data.rows")
        prompts = prompts_from_rows(table.select(chosen), self.columns, first=chosen.start)
        if not prompts.prompts:
            raise UserError(
                f"{where} has no usable prompt: {prompts.summary()}; columns found: {', '.join(table.column_names)}. "
                "Look at these rows, or name the column of the prompts with data.columns.prompt=COLUMN"
            )
        _LOG.log(logging.WARNING if prompts.left_out else logging.INFO, "%s: %s", where, prompts.summary())
        return prompts

    def _check(self, names: Sequence[str], where: str) -> None:
        columns = self.columns
        wanted = {"id": columns.id, "system": columns.system, "tools": columns.tools}
        if not {columns.chosen, columns.rejected} <= set(names):
            wanted["prompt"] = columns.prompt or "prompt"
        expected = "expected a column with prompts, or the chosen and rejected columns of pairs"
        require_columns(wanted, names, where, expected)


REFUSED = "refused by the chat template"
NO_TOKEN = "no token in the chat template's words"


@dataclass(frozen=True)
class EncodedPrompts:
    """Ids of the prompts that can be answered, by id, and the ids of those left out, by reason."""

    kept: dict[str, list[int]]
    left_out: dict[str, list[str]]
    refusal: UserError | None = None


def encode_prompts(
    prompts: Iterable[AnswerPrompt], chat: ChatFormat | None, new_tokens: int, max_length: int | None
) -> EncodedPrompts:
    """Returns the prompts' ids; left out is what the chat template refuses and what leaves no room for ``new_tokens``.

    ``refusal`` is the template's first one. Without a chat format all are kept and have no ids.
    """
    kept: dict[str, list[int]] = {}
    left_out: dict[str, list[str]] = {}
    refusal = None
    for prompt in prompts:
        try:
            ids = [] if chat is None else chat.prompt_ids(prompt.messages)
        except UserError as problem:
            refusal = refusal or problem
            left_out.setdefault(REFUSED, []).append(prompt.id)
            continue
        if chat is not None and not ids:
            left_out.setdefault(NO_TOKEN, []).append(prompt.id)
        elif max_length is not None and len(ids) + new_tokens > max_length:
            reason = f"too long: prompt and {new_tokens} new tokens exceed {max_length}"
            left_out.setdefault(reason, []).append(prompt.id)
        else:
            kept[prompt.id] = ids
    return EncodedPrompts(kept, left_out, refusal)
