"""Loads prompts for generation. Rows may contain a prompt string, messages or a preference pair.

Reads the same files, folders and hub datasets as ``PairSource``, in the same row formats. Each row is either kept or
counted as skipped or duplicate.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attnpo.data.adapters import Columns, Reason, RowError, adapt_row, check_columns
from attnpo.data.base import format_count, parse_row_range
from attnpo.data.tables import read_table
from attnpo.schema import Message, UserError, digest, prompt_identity
from attnpo.text.chat import ChatFormat

_LOG = logging.getLogger(__name__)

EMPTY = "empty prompt"
REPEATED = "duplicate of an earlier prompt"


@dataclass(frozen=True)
class PromptColumns(Columns):
    """Column names as in ``Columns``, and the ``id`` column, which contains the id of each prompt.

    Without ``id``, a digest of the messages is used as the id. ``chosen`` and ``rejected`` are used only if a table has
    both columns: each row is then a pair, and the prompt is the shared part of both conversations.
    """

    id: str | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """Prompt for generation: an id, and turns ending with a user turn."""

    id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in row order; ``left_out`` contains the row numbers of skipped rows by reason.

    Each of the ``read`` rows is a new prompt, a duplicate of an earlier prompt (``repeated``), or skipped.
    """

    prompts: list[ChatPrompt]
    read: int
    repeated: list[int]
    left_out: Mapping[str, list[int]]

    @property
    def counts(self) -> Counter[str]:
        """Returns, by reason, the number of rows without a new prompt."""
        counts = Counter({reason: len(rows) for reason, rows in self.left_out.items()})
        return counts + Counter({REPEATED: len(self.repeated)})

    def summary(self) -> str:
        """Returns one line with all counts and, for each reason, the first row numbers."""
        events = sorted({**self.left_out, **({REPEATED: self.repeated} if self.repeated else {})}.items())
        parts = [format_count(reason, len(rows), rows) for reason, rows in events]
        return "; ".join([f"{self.read} rows read, {len(self.prompts)} prompts", *parts])


def prompts_from_rows(rows: Iterable[Mapping[str, object]], columns: PromptColumns, first: int = 0) -> PromptSet:
    """Collects the prompts of ``rows``; ``first`` is the row number of the first row.

    Raises:
        UserError: two rows have the same id but different prompts, or a mapped column does not exist.
    """
    prompts: dict[str, ChatPrompt] = {}
    left_out: dict[str, list[int]] = {}
    repeated = []
    read = 0
    for number, row in enumerate(rows, start=first):
        read += 1
        try:
            prompt = parse_prompt(row, columns)
        except RowError as problem:
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
                f"row {number} has the same {columns.id} {prompt.id!r} as an earlier row but a different prompt: ids "
                "must be unique; choose a different column with data.columns.id=COLUMN, or set data.columns.id=null"
            )
    return PromptSet(list(prompts.values()), read, repeated, left_out)


def parse_prompt(row: Mapping[str, object], columns: PromptColumns) -> ChatPrompt:
    """Returns the prompt of a row.

    Raises:
        RowError: the row has no prompt.
    """
    if columns.chosen not in row or columns.rejected not in row:
        if columns.prompt is None or row.get(columns.prompt) is None:
            raise RowError(Reason.MISSING)
        # Two dummy answers turn it into a pair, so that the pair formats apply.
        row = {**row, columns.chosen: "a", columns.rejected: "b"}
    messages = adapt_row(row, columns).pair.prompt
    if columns.id is None:
        return ChatPrompt(digest(prompt_identity(messages))[:32], messages)
    if row.get(columns.id) is None:
        raise RowError(Reason.MISSING)
    return ChatPrompt(str(row[columns.id]), messages)


@dataclass(frozen=True)
class PromptSource:
    """Source of the prompts for ``attnpo.generate`` (config node ``data``).

    ``path`` is a file, a folder with one file or several shards per split, a saved dataset, or the name of a dataset on
    the hub; unless ``path`` is a file, ``split`` is the split name or file stem. ``rows`` selects rows ("500",
    "100:300", "10%"), counted before any are skipped. ``revision`` and ``subset`` apply to datasets on the hub.
    """

    path: str
    split: str = "test"
    rows: str | None = None
    columns: PromptColumns = field(default_factory=PromptColumns)
    revision: str | None = None
    subset: str | None = None

    def load(self) -> PromptSet:
        """Loads the prompts.

        Raises:
            UserError: nothing is found at ``path``, a column or split is missing, a file cannot be read, ids are not
                unique, or there are no usable rows.
        """
        table = read_table(self.path, self.split, "data.split", self.subset, self.revision)
        where = f"data.path={self.path}"
        self._check_columns(table.column_names, where)
        chosen = parse_row_range(self.rows, len(table), "data.rows")
        prompts = prompts_from_rows(table.select(chosen), self.columns, first=chosen.start)
        if not prompts.prompts:
            raise UserError(
                f"{where} has no usable prompts: {prompts.summary()}; columns found: {', '.join(table.column_names)}. "
                "Check these rows, or set the prompt column with data.columns.prompt=COLUMN"
            )
        _LOG.log(logging.WARNING if prompts.left_out else logging.INFO, "%s: %s", where, prompts.summary())
        return prompts

    def _check_columns(self, names: Sequence[str], where: str) -> None:
        columns = self.columns
        wanted = {"id": columns.id, "system": columns.system, "tools": columns.tools}
        if not {columns.chosen, columns.rejected} <= set(names):
            wanted["prompt"] = columns.prompt or "prompt"
        expected = "expected a column with prompts, or the chosen and rejected columns of pairs"
        check_columns(wanted, names, where, expected)


REFUSED = "rejected by the chat template"
NO_TOKEN = "the chat template renders no token"


@dataclass(frozen=True)
class EncodedPrompts:
    """Token ids of the usable prompts by prompt id, and the ids of skipped prompts by reason."""

    kept: dict[str, list[int]]
    left_out: dict[str, list[str]]
    refusal: UserError | None = None


def encode_prompts(
    prompts: Iterable[ChatPrompt], chat: ChatFormat | None, new_tokens: int, max_length: int | None
) -> EncodedPrompts:
    """Encodes prompts; skips those that the chat template rejects or that leave no room for ``new_tokens``.

    ``refusal`` in the result is the template's first error. If there is no chat format, all prompts are kept without
    token ids.
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
