"""Converts dataset rows in any of the usual formats to ``PreferencePair``.

Defines the formats and the reasons for rejecting a row; reads no files. Supported formats:

=========================  =====================================================================================
full conversations         ``chosen``, ``rejected`` = all messages, the last of which is the response; ``prompt``
                           is absent or repeats one of the shared messages (HuggingFaceH4/ultrafeedback_binarized)
prompt as messages         ``prompt`` = messages, ``chosen``, ``rejected`` = the turns that follow (or all)
text prompt, messages      ``prompt`` = string; ``chosen``, ``rejected`` = messages, the first from the assistant
plain text                 ``prompt``, ``chosen``, ``rejected`` = strings; the prompt becomes one user turn
labelled dialogue          strings with "Human:" and "Assistant:" labels, with or without a ``prompt`` string
plain text, shared start   ``chosen``, ``rejected`` = unlabelled strings; their common prefix becomes a user turn
=========================  =====================================================================================

In any format, a message's content may also be a list of parts; if all parts are text, they are joined into one string.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from attnpo.schema import REASONING, Message, PreferencePair, UserError, copy_message
from attnpo.system.files import shorten
from attnpo.text.template import TOOL, functions_to_json
from attnpo.text.traces import TraceHandling, add_trace, has_trace, is_unclosed, strip_trace


class Reason(StrEnum):
    """Reason why a row cannot be converted to a pair."""

    MISSING = "value is missing"
    NOT_TEXT = "content is not text"
    UNICODE = "text is not valid Unicode"
    MALFORMED = "malformed conversation"
    HISTORIES = "histories differ"
    PROMPT = "prompt is not in the conversation"
    WRITTEN = "messages are stored as one string"
    NO_PROMPT = "no prompt"
    IDENTICAL = "identical responses"
    UNCLOSED = "reasoning trace is not closed"
    TOOLS = "tools are not a list of functions"
    CALLS = "response calls a tool"
    LEGACY = "function_call instead of text (use tool_calls)"


class Note(StrEnum):
    """Remark about a row that was kept as a pair."""

    EMPTY = "empty response kept"
    STRIPPED = "reasoning trace stripped"
    APART = "reasoning trace excluded from weighting"
    UNASKED = "empty prompt kept"
    SPLIT = "prompt taken from the common prefix of both texts"
    DUPLICATE = "duplicate pair kept"
    EXCHANGED = "pair kept that also occurs with chosen and rejected swapped"
    REPEATS = "both responses begin with the prompt"
    SCORES = "chosen response does not have the higher score"
    LEGACY = "function_call next to text is ignored (use tool_calls)"


class RowError(Exception):
    """Raised when a row cannot be converted to a pair; ``reason`` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True)
class Columns:
    """Column names of a dataset, and the key names within a message.

    ``prompt``: prompt column, or None if the data have none. The default prompt column may also be missing. ``system``:
    column with the system message as text; may be empty or missing in a row. ``input``: column with text that is
    appended to a text prompt on a new line (Alpaca's format); may be empty or missing. ``tools``: column with the
    functions that the assistant may call, as a list of schemas or as JSON; may be empty or missing in a row. ``role``
    and ``content``: keys of a message (ShareGPT files use "from" and "value"; the ShareGPT roles "human" and "gpt" are
    recognised). ``traces``: handling of reasoning traces, i.e. the assistant's ``reasoning_content`` or
    ``<think>...</think>`` at the beginning of a response.
    """

    prompt: str | None = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    system: str | None = None
    input: str | None = None
    tools: str | None = None
    role: str = "role"
    content: str = "content"
    traces: TraceHandling = TraceHandling.KEEP

    def find_unmapped(self, names: Iterable[str]) -> list[str]:
        """Returns the columns in ``names`` that are not mapped by any option, in their original order."""
        mapped = {self.prompt, self.chosen, self.rejected, self.system, self.input, self.tools}
        return [name for name in names if name not in mapped]

    def check(self, present: Iterable[str], where: str = "the row") -> None:
        """Checks that the mapped columns exist.

        Raises:
            UserError: a column is missing; the message lists the columns found, the columns expected and the options
                that map columns.
        """
        names = ("chosen", "rejected", "system", "input", "tools")
        wanted: dict[str, str | None] = {name: getattr(self, name) for name in names}
        if self.prompt != Columns.prompt:
            wanted["prompt"] = self.prompt
        expected = "expected: a chosen and a rejected column, and a prompt column unless these include the prompt"
        check_columns(wanted, present, where, expected)


def check_columns(wanted: Mapping[str, str | None], present: Iterable[str], where: str, expected: str) -> None:
    """Checks that all ``wanted`` columns are ``present``; ``wanted`` maps keys of ``Columns`` to column names.

    Raises:
        UserError: a column is missing.
    """
    names = sorted(present)
    missing = [key for key, name in wanted.items() if name is not None and name not in names]
    if missing:
        absent = ", ".join(f'"{wanted[key]}"' for key in missing)
        options = " ".join(f"data.columns.{key}=COLUMN" for key in missing)
        unpaired = "chosen" in missing and {"completion", "label"} <= set(names)
        remark = (
            " These are single labelled responses, as in KTO: put two responses to the same prompt in each row."
            * unpaired
        )
        raise UserError(
            f"{where} has no column {absent}; columns found: {', '.join(map(shorten, names)) or 'none'}; {expected}."
            f"{remark} Set the column names with {options}"
        )


@dataclass(frozen=True)
class AdaptedRow:
    """Pair made from one row, with notes about anything unusual in the row."""

    pair: PreferencePair
    notes: tuple[Note, ...] = ()


def adapt_row(row: Mapping[str, object], columns: Columns) -> AdaptedRow:
    """Converts a row in any supported format (see the module docstring) to a pair with notes.

    Columns that are neither mapped nor lists of messages are stored in ``extra``.

    Raises:
        RowError: the row is not a usable pair; ``reason`` says why.
        UserError: a mapped column does not exist.
    """
    columns.check(row)
    chosen, rejected = row[columns.chosen], row[columns.rejected]
    prompt = None if columns.prompt is None else row.get(columns.prompt)
    if chosen is None or rejected is None:
        raise RowError(Reason.MISSING)
    good, bad = _parse_cell(chosen, columns), _parse_cell(rejected, columns)
    context = None if prompt is None else _parse_cell(prompt, columns)
    more = None if columns.input is None else row.get(columns.input)
    if more is not None and (added := _check_text(more)).strip():
        if not isinstance(context, str):
            raise RowError(Reason.MALFORMED)
        context = f"{context}\n{added}"
    split = False
    if isinstance(good, str) and isinstance(bad, str):
        if _WRITTEN.match(good) and _WRITTEN.match(bad):
            raise RowError(Reason.WRITTEN)
        turns, split = _turns_from_texts(context, good, bad)
    elif isinstance(good, str) or isinstance(bad, str):
        raise RowError(Reason.MALFORMED)
    else:
        turns = _turns_from_messages(context, good, bad)
    system = None if columns.system is None else row.get(columns.system)
    if system is not None and (said := _check_text(system)).strip():
        turns = _Turns([Message(role="system", content=said), *turns.history], turns.chosen, turns.rejected)
    _check_history(turns.history)
    if columns.tools is not None and (tools := _parse_functions(row.get(columns.tools), Reason.TOOLS)) is not None:
        turns.history[0] = copy_message({**turns.history[0], "tools": tools})
    turns, noted = _apply_trace_rule(turns, columns.traces)
    blank = [not text.strip() for text in (turns.chosen, turns.rejected)]
    if turns.chosen == turns.rejected or all(blank):
        raise RowError(Reason.IDENTICAL)
    last = turns.history[-1]
    unasked = last["role"] == "user" and not last["content"].strip()
    noticed = [(any(blank), Note.EMPTY), (unasked, Note.UNASKED), (split, Note.SPLIT)]
    noticed += [(_is_prompt_repeated(turns), Note.REPEATS), (_is_misscored(row, columns), Note.SCORES)]
    noticed += [(_has_function_call(row, columns), Note.LEGACY)]
    apart = noted is Note.APART
    extra = {key: row[key] for key in columns.find_unmapped(row) if not _is_message_list(row[key], columns)}
    pair = PreferencePair.from_texts(turns.history, turns.chosen, turns.rejected, extra, apart)
    return AdaptedRow(pair, (*(note for holds, note in noticed if holds), *([] if noted is None else [noted])))


@dataclass(frozen=True)
class _Turns:
    history: list[Message]
    chosen: str
    rejected: str


# ------------------------------------------------------------------------------------------------ notes on rows


def _is_prompt_repeated(turns: _Turns) -> bool:
    """Returns whether the last prompt turn has at least two words and both responses begin with its text."""
    asked = turns.history[-1]["content"].strip()
    return " " in asked and all(text.lstrip().startswith(asked) for text in (turns.chosen, turns.rejected))


def _is_misscored(row: Mapping[str, object], columns: Columns) -> bool:
    """Returns whether the row's scores (score_chosen, chosen_score, ...) fail to rank the chosen response higher."""
    for name in ("score_{}", "{}_score"):
        chosen, rejected = (row.get(name.format(side)) for side in (columns.chosen, columns.rejected))
        if isinstance(chosen, int | float) and isinstance(rejected, int | float) and chosen <= rejected:
            return True
    return False


def _has_function_call(row: Mapping[str, object], columns: Columns) -> bool:
    cells = [row.get(name) for name in (columns.prompt, columns.chosen, columns.rejected) if name is not None]
    turns = [turn for cell in cells if isinstance(cell, Sequence) and not isinstance(cell, str) for turn in cell]
    return any(isinstance(turn, Mapping) and turn.get("function_call") for turn in turns)


# ------------------------------------------------------------------------------------------------ single values


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise RowError(Reason.NOT_TEXT)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(Reason.UNICODE) from error
    return value


# ShareGPT's names for the two speakers; all other names must be the Hugging Face ones.
_ROLES = {"human": "user", "gpt": "assistant"}


def _join_text_parts(content: object) -> object:
    """Joins a list of text parts, as in multimodal chats, into one string; returns anything else unchanged."""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else ()
    if not parts or not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return content
    return "".join(_check_text(part.get("text")) for part in parts)


def _parse_messages(value: object, columns: Columns) -> list[Message]:
    """Parses the messages in a cell, given as a list of mappings or a single mapping."""
    cells = [value] if isinstance(value, Mapping) else value
    if not isinstance(cells, Sequence) or isinstance(cells, str | bytes):
        raise RowError(Reason.NOT_TEXT)
    if not all(isinstance(cell, Mapping) and isinstance(cell.get(columns.role), str) for cell in cells):
        raise RowError(Reason.MALFORMED)
    roles: list[str] = [cell[columns.role] for cell in cells]
    return [_parse_turn(_ROLES.get(role, role), cell, columns) for role, cell in zip(roles, cells, strict=True)]


def _parse_turn(role: str, cell: Mapping[str, object], columns: Columns) -> Message:
    """Parses one message, whose content may be missing if the message only calls tools."""
    content, of_assistant = cell.get(columns.content), role == "assistant"
    calls = _parse_functions(cell.get("tool_calls"), Reason.MALFORMED) if of_assistant else None
    if content is None and of_assistant and not calls and cell.get("function_call"):
        raise RowError(Reason.LEGACY)
    turn = Message(role=role, content="" if calls and content is None else _check_text(_join_text_parts(content)))
    if of_assistant and (trace := cell.get(REASONING)) is not None and _check_text(trace).strip():
        turn["reasoning_content"] = _check_text(trace)
    if calls:
        turn["tool_calls"] = calls
    if role == TOOL and isinstance(named := cell.get("tool_call_id"), str):
        turn["tool_call_id"] = named
    if role == TOOL and isinstance(named := cell.get("name"), str):
        turn["name"] = named
    if isinstance(tools := cell.get("tools"), str) and (known := _parse_functions(tools, Reason.TOOLS)) is not None:
        turn["tools"] = known  # format of prompts with tools written by attnpo.generate and attnpo.pair
    return turn


def _parse_functions(value: object, reason: Reason) -> str | None:
    """Returns functions or function calls as JSON; None if empty. Raises RowError(``reason``) if malformed."""
    try:
        text = functions_to_json(value)
    except ValueError as problem:
        raise RowError(reason) from problem
    return None if text is None else _check_text(text)


def _parse_cell(value: object, columns: Columns) -> str | list[Message]:
    """Parses a table cell that contains a string or messages."""
    return _check_text(value) if isinstance(value, str) else _parse_messages(value, columns)


def _is_message_list(value: object, columns: Columns) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(cell, Mapping) and columns.role in cell for cell in value)
    )


# ------------------------------------------------------------------------------------------------ conversations


def _turns_from_messages(prompt: str | list[Message] | None, chosen: list[Message], rejected: list[Message]) -> _Turns:
    """Splits two message lists into the shared history and the two responses.

    A text prompt that only repeats one of the turns is ignored.
    """
    if not chosen or not rejected:
        raise RowError(Reason.MALFORMED)
    if isinstance(prompt, str) and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = [Message(role="user", content=prompt)]
    if isinstance(prompt, list):
        chosen, rejected = _full_conversation(prompt, chosen), _full_conversation(prompt, rejected)
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        raise RowError(Reason.MALFORMED)
    if chosen[:-1] != rejected[:-1]:
        raise RowError(Reason.HISTORIES)
    history = chosen[:-1]
    if isinstance(prompt, str) and not any(prompt.strip() in turn["content"] for turn in history):
        raise RowError(Reason.PROMPT)
    return _Turns(history, _response_text(chosen[-1]), _response_text(rejected[-1]))


def _response_text(turn: Message) -> str:
    if turn.get("tool_calls"):
        raise RowError(Reason.CALLS)
    trace = turn.get("reasoning_content")
    return turn["content"] if trace is None else add_trace(trace, turn["content"])


def _apply_trace_rule(turns: _Turns, traces: TraceHandling) -> tuple[_Turns, Note | None]:
    """Applies ``columns.traces`` to the responses; also returns a note if a response had a reasoning trace."""
    both = (turns.chosen, turns.rejected)
    if any(map(is_unclosed, both)):
        raise RowError(Reason.UNCLOSED)
    traced = any(map(has_trace, both))
    if traces is not TraceHandling.STRIP:
        return turns, Note.APART if traced and traces is TraceHandling.WEIGH_APART else None
    history = [copy_message({**turn, "reasoning_content": ""}) for turn in turns.history]
    return _Turns(history, *map(strip_trace, both)), Note.STRIPPED if traced else None


def _full_conversation(prompt: list[Message], turns: list[Message]) -> list[Message]:
    """Returns ``turns``, with the prompt prepended unless they already begin with it."""
    return turns if prompt and turns[: len(prompt)] == prompt else [*prompt, *turns]


# Roles that may follow each role; "call": an assistant turn that calls tools.
_FOLLOWS = {"assistant": ("user",), "user": ("assistant",), "call": (TOOL,), TOOL: (TOOL, "assistant")}


def _check_history(history: Sequence[Message]) -> None:
    """Raises RowError unless turns alternate (after any system turn) and the last is a user turn or tool result."""
    turns = history[1:] if history and history[0]["role"] == "system" else history
    if not turns:
        raise RowError(Reason.NO_PROMPT)
    last = "assistant"
    for turn in turns:
        if turn["role"] not in _FOLLOWS.get(last, ()):
            raise RowError(Reason.MALFORMED)
        last = "call" if turn.get("tool_calls") else turn["role"]
    if last not in ("user", TOOL):
        raise RowError(Reason.MALFORMED)


# ------------------------------------------------------------------------------------------------ plain texts

# A list of messages that was converted to its string representation.
_WRITTEN = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")

# Labels of hh-rlhf transcripts, at the start of the text or after a blank line.
_LABEL = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def _turns_from_texts(prompt: str | list[Message] | None, chosen: str, rejected: str) -> tuple[_Turns, bool]:
    """Splits two strings into history and responses; also returns whether the shared prefix became the prompt."""
    if isinstance(prompt, list):
        return _Turns(prompt, chosen, rejected), False
    if prompt is not None and not _ends_with_assistant_label(prompt):
        return _Turns([Message(role="user", content=prompt)], chosen, rejected), False
    whole = [(prompt or "") + text for text in (chosen, rejected)]
    if all(_is_dialogue(text) for text in whole):
        return _turns_from_messages(None, _parse_dialogue(whole[0]), _parse_dialogue(whole[1])), False
    cut = _shared_prefix_length(chosen, rejected)
    shared = chosen[:cut].strip()
    if not shared:
        raise RowError(Reason.IDENTICAL if chosen == rejected else Reason.NO_PROMPT)
    return _Turns([Message(role="user", content=shared)], chosen[cut:].lstrip(), rejected[cut:].lstrip()), True


def _ends_with_assistant_label(text: str) -> bool:
    """Returns whether ``text`` is a labelled dialogue that ends with the assistant's label."""
    return _is_dialogue(text) and text.rstrip().endswith("\n\nAssistant:")


def _is_dialogue(text: str) -> bool:
    labels = list(_LABEL.finditer(text))
    return bool(labels) and labels[0].start() == 0 and any(label[1] == "Assistant" for label in labels)


def _parse_dialogue(text: str) -> list[Message]:
    """Returns the turns of a labelled dialogue, without surrounding whitespace."""
    labels = list(_LABEL.finditer(text))
    ends = [*(label.start() for label in labels[1:]), len(text)]
    return [
        Message(role=_SPEAKERS[label[1]], content=text[label.end() : end].strip())
        for label, end in zip(labels, ends, strict=True)
    ]


def _shared_prefix_length(first: str, second: str) -> int:
    """Returns the length of the common prefix, shortened so that the prefix ends at a word boundary."""
    differs = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    cut = next(differs, min(len(first), len(second)))
    while cut > 0 and (_is_inside_word(first, cut) or _is_inside_word(second, cut)):
        cut -= 1
    return cut


def _is_inside_word(text: str, index: int) -> bool:
    return 0 < index < len(text) and _is_word_character(text[index - 1]) and _is_word_character(text[index])


def _is_word_character(character: str) -> bool:
    # Letters, marks and digits; a combining mark belongs to the letter before it.
    return unicodedata.category(character)[0] in "LMN" or character == "_"
