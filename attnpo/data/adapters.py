"""From a row of a dataset, in any of the usual conventions, to a ``PreferencePair``.

Owns the conventions and the words for what is wrong with a row; knows nothing of files. The conventions:

=========================  =====================================================================================
full conversations         ``chosen``, ``rejected`` = all messages, the last one is the response; ``prompt`` is
                           absent, or a text that stands in the shared messages (HuggingFaceH4/ultrafeedback_binarized)
prompt as messages         ``prompt`` = messages, ``chosen``, ``rejected`` = the turns after it (or all messages)
prompt beside answers      ``prompt`` = text, ``chosen``, ``rejected`` = messages that begin with the assistant
plain text                 ``prompt``, ``chosen``, ``rejected`` = texts; the prompt becomes one user turn
labelled dialogue          texts with "Human:" and "Assistant:" labels, with or without a ``prompt`` text
plain text, shared start   ``chosen``, ``rejected`` = texts without labels; what both begin with becomes one user turn
=========================  =====================================================================================

Everywhere the content of a message may also be a list of parts; parts that are all text are joined to one text.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from attnpo.schema import REASONING, Message, PreferencePair, UserError, copy_message
from attnpo.system.files import shorten
from attnpo.text.template import TOOL, written
from attnpo.text.traces import Traces, has_trace, is_unclosed, with_trace, without_trace


class Reason(StrEnum):
    """Reason that a row cannot become a pair."""

    MISSING = "value is missing"
    NOT_TEXT = "content is not text"
    UNICODE = "text is not valid Unicode"
    MALFORMED = "malformed conversation"
    HISTORIES = "histories differ"
    PROMPT = "prompt is not in the conversation"
    WRITTEN = "messages are written as one text"
    NO_PROMPT = "no prompt"
    IDENTICAL = "identical responses"
    UNCLOSED = "reasoning trace is not closed"
    TOOLS = "tools are not a list of functions"
    CALLS = "answer calls a tool"
    LEGACY = "function_call in place of text (tool_calls are read)"


class Note(StrEnum):
    """Note on a row that was kept."""

    EMPTY = "empty response kept"
    STRIPPED = "reasoning trace stripped"
    APART = "reasoning trace weighed apart"
    UNASKED = "empty prompt kept"
    SPLIT = "prompt cut from the shared start of both texts"
    DUPLICATE = "duplicate pair kept"
    EXCHANGED = "pair kept that also stands there with chosen and rejected exchanged"
    REPEATS = "both responses repeat the prompt at their beginning"
    SCORES = "score of the chosen response is not above that of the rejected one"
    LEGACY = "function_call beside text is not read (tool_calls are)"


class RowProblem(Exception):
    """Row that cannot become a pair; ``reason`` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True)
class Columns:
    """Names of a dataset's columns, and of a message's keys.

    ``prompt``: None says that there is none; the default name may also be absent from the data. ``system``: column
    with the text of a system message, blank or missing where a row has none. ``input``: column with a text that
    continues a prompt text on a new line (Alpaca's), blank or missing where a row has none. ``tools``: column with the
    functions that may be called, a list of their schemas or its JSON text, missing or empty where a row has none.
    ``role`` and ``content`` are the keys of one message ("from" and "value" in ShareGPT files, whose role names "human"
    and "gpt" are understood). ``traces`` says what becomes of a reasoning trace: the assistant's ``reasoning_content``
    or ``<think>...</think>`` at the beginning of a response.
    """

    prompt: str | None = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    system: str | None = None
    input: str | None = None
    tools: str | None = None
    role: str = "role"
    content: str = "content"
    traces: Traces = Traces.KEEP

    def unused(self, names: Iterable[str]) -> list[str]:
        """Returns the columns among ``names`` that no option maps, in their order."""
        mapped = {self.prompt, self.chosen, self.rejected, self.system, self.input, self.tools}
        return [name for name in names if name not in mapped]

    def check(self, present: Iterable[str], where: str = "the row") -> None:
        """Checks that the columns named here are among those ``present``.

        Raises:
            UserError: one is not; the text lists the columns present, those expected, and the options that map them.
        """
        names = ("chosen", "rejected", "system", "input", "tools")
        wanted: dict[str, str | None] = {name: getattr(self, name) for name in names}
        if self.prompt != Columns.prompt:
            wanted["prompt"] = self.prompt
        expected = "expected: a chosen and a rejected column, and a prompt column unless they hold the prompt too"
        require_columns(wanted, present, where, expected)


def require_columns(wanted: Mapping[str, str | None], present: Iterable[str], where: str, expected: str) -> None:
    """Raises UserError where a ``wanted`` column (by its key of ``Columns``) is not among those ``present``."""
    names = sorted(present)
    missing = [key for key, name in wanted.items() if name is not None and name not in names]
    if missing:
        absent = ", ".join(f'"{wanted[key]}"' for key in missing)
        options = " ".join(f"data.columns.{key}=COLUMN" for key in missing)
        unpaired = "chosen" in missing and {"completion", "label"} <= set(names)
        remark = " These are single answers with a label, as KTO reads them: put two of one prompt in a row." * unpaired
        raise UserError(
            f"{where} has no column {absent}; columns found: {', '.join(map(shorten, names)) or 'none'}; {expected}."
            f"{remark} Name them with {options}"
        )


@dataclass(frozen=True)
class AdaptedRow:
    """Pair and what was noticed on the way."""

    pair: PreferencePair
    notes: tuple[Note, ...] = ()


def adapt(row: Mapping[str, object], columns: Columns) -> AdaptedRow:
    """Returns the pair of a row in any convention (table in the module docstring), with notes.

    Columns that are neither mapped nor lists of messages go to ``extra``.

    Raises:
        RowProblem: the row is no usable pair, with one of the fixed reasons.
        UserError: a mapped column does not exist.
    """
    columns.check(row)
    chosen, rejected = row[columns.chosen], row[columns.rejected]
    prompt = None if columns.prompt is None else row.get(columns.prompt)
    if chosen is None or rejected is None:
        raise RowProblem(Reason.MISSING)
    good, bad = _cell(chosen, columns), _cell(rejected, columns)
    context = None if prompt is None else _cell(prompt, columns)
    more = None if columns.input is None else row.get(columns.input)
    if more is not None and (added := _text(more)).strip():
        if not isinstance(context, str):
            raise RowProblem(Reason.MALFORMED)
        context = f"{context}\n{added}"
    split = False
    if isinstance(good, str) and isinstance(bad, str):
        if _WRITTEN.match(good) and _WRITTEN.match(bad):
            raise RowProblem(Reason.WRITTEN)
        turns, split = _from_texts(context, good, bad)
    elif isinstance(good, str) or isinstance(bad, str):
        raise RowProblem(Reason.MALFORMED)
    else:
        turns = _from_messages(context, good, bad)
    system = None if columns.system is None else row.get(columns.system)
    if system is not None and (said := _text(system)).strip():
        turns = _Turns([Message(role="system", content=said), *turns.history], turns.chosen, turns.rejected)
    _check_history(turns.history)
    if columns.tools is not None and (tools := _functions(row.get(columns.tools), Reason.TOOLS)) is not None:
        turns.history[0] = copy_message({**turns.history[0], "tools": tools})
    turns, noted = _apply_trace_rule(turns, columns.traces)
    blank = [not text.strip() for text in (turns.chosen, turns.rejected)]
    if turns.chosen == turns.rejected or all(blank):
        raise RowProblem(Reason.IDENTICAL)
    last = turns.history[-1]
    unasked = last["role"] == "user" and not last["content"].strip()
    noticed = [(any(blank), Note.EMPTY), (unasked, Note.UNASKED), (split, Note.SPLIT)]
    noticed += [(_repeats(turns), Note.REPEATS), (_is_misscored(row, columns), Note.SCORES)]
    noticed += [(_calls_functions(row, columns), Note.LEGACY)]
    apart = noted is Note.APART
    extra = {key: row[key] for key in columns.unused(row) if not _is_messages(row[key], columns)}
    pair = PreferencePair.from_texts(turns.history, turns.chosen, turns.rejected, extra, apart)
    return AdaptedRow(pair, (*(note for holds, note in noticed if holds), *([] if noted is None else [noted])))


@dataclass(frozen=True)
class _Turns:
    history: list[Message]
    chosen: str
    rejected: str


# ------------------------------------------------------------------------------------------------ what is noticed


def _repeats(turns: _Turns) -> bool:
    """Tells whether both responses begin with the last turn's text, if it has two words or more."""
    asked = turns.history[-1]["content"].strip()
    return " " in asked and all(text.lstrip().startswith(asked) for text in (turns.chosen, turns.rejected))


def _is_misscored(row: Mapping[str, object], columns: Columns) -> bool:
    """Tells whether the row scores its chosen response (score_chosen, chosen_score, ...) no higher than the other."""
    for name in ("score_{}", "{}_score"):
        chosen, rejected = (row.get(name.format(side)) for side in (columns.chosen, columns.rejected))
        if isinstance(chosen, int | float) and isinstance(rejected, int | float) and chosen <= rejected:
            return True
    return False


def _calls_functions(row: Mapping[str, object], columns: Columns) -> bool:
    cells = [row.get(name) for name in (columns.prompt, columns.chosen, columns.rejected) if name is not None]
    turns = [turn for cell in cells if isinstance(cell, Sequence) and not isinstance(cell, str) for turn in cell]
    return any(isinstance(turn, Mapping) and turn.get("function_call") for turn in turns)


# ------------------------------------------------------------------------------------------------ single values


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RowProblem(Reason.NOT_TEXT)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(Reason.UNICODE) from error
    return value


# ShareGPT's names for the two speakers; every other name has to be the Hugging Face one.
_ROLES = {"human": "user", "gpt": "assistant"}


def _join_text_parts(content: object) -> object:
    """Returns the text of a list of text parts, as multimodal chats write a content; anything else as it is."""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else ()
    if not parts or not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return content
    return "".join(_text(part.get("text")) for part in parts)


def _messages(value: object, columns: Columns) -> list[Message]:
    """Returns the messages of a cell: a list of mappings, or one mapping."""
    cells = [value] if isinstance(value, Mapping) else value
    if not isinstance(cells, Sequence) or isinstance(cells, str | bytes):
        raise RowProblem(Reason.NOT_TEXT)
    if not all(isinstance(cell, Mapping) and isinstance(cell.get(columns.role), str) for cell in cells):
        raise RowProblem(Reason.MALFORMED)
    roles: list[str] = [cell[columns.role] for cell in cells]
    return [_turn(_ROLES.get(role, role), cell, columns) for role, cell in zip(roles, cells, strict=True)]


def _turn(role: str, cell: Mapping[str, object], columns: Columns) -> Message:
    """Returns one message; the content of one that only calls tools may be missing."""
    content, of_assistant = cell.get(columns.content), role == "assistant"
    calls = _functions(cell.get("tool_calls"), Reason.MALFORMED) if of_assistant else None
    if content is None and of_assistant and not calls and cell.get("function_call"):
        raise RowProblem(Reason.LEGACY)
    turn = Message(role=role, content="" if calls and content is None else _text(_join_text_parts(content)))
    if of_assistant and (trace := cell.get(REASONING)) is not None and _text(trace).strip():
        turn["reasoning_content"] = _text(trace)
    if calls:
        turn["tool_calls"] = calls
    if role == TOOL and isinstance(named := cell.get("tool_call_id"), str):
        turn["tool_call_id"] = named
    if role == TOOL and isinstance(named := cell.get("name"), str):
        turn["name"] = named
    if isinstance(tools := cell.get("tools"), str) and (known := _functions(tools, Reason.TOOLS)) is not None:
        turn["tools"] = known  # as attnpo.generate and attnpo.pair write a prompt that has some
    return turn


def _functions(value: object, reason: Reason) -> str | None:
    """Functions or calls of them as JSON text; None for none. RowProblem with ``reason`` for anything else."""
    try:
        text = written(value)
    except ValueError as problem:
        raise RowProblem(reason) from problem
    return None if text is None else _text(text)


def _cell(value: object, columns: Columns) -> str | list[Message]:
    """Returns what a cell of the table holds: a text, or messages."""
    return _text(value) if isinstance(value, str) else _messages(value, columns)


def _is_messages(value: object, columns: Columns) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(cell, Mapping) and columns.role in cell for cell in value)
    )


# ------------------------------------------------------------------------------------------------ conversations


def _from_messages(prompt: str | list[Message] | None, chosen: list[Message], rejected: list[Message]) -> _Turns:
    """Returns the history and responses of two message lists.

    The lists win over a prompt text that only repeats a turn.
    """
    if not chosen or not rejected:
        raise RowProblem(Reason.MALFORMED)
    if isinstance(prompt, str) and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = [Message(role="user", content=prompt)]
    if isinstance(prompt, list):
        chosen, rejected = _after(prompt, chosen), _after(prompt, rejected)
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        raise RowProblem(Reason.MALFORMED)
    if chosen[:-1] != rejected[:-1]:
        raise RowProblem(Reason.HISTORIES)
    history = chosen[:-1]
    if isinstance(prompt, str) and not any(prompt.strip() in turn["content"] for turn in history):
        raise RowProblem(Reason.PROMPT)
    return _Turns(history, _answer(chosen[-1]), _answer(rejected[-1]))


def _answer(turn: Message) -> str:
    if turn.get("tool_calls"):
        raise RowProblem(Reason.CALLS)
    trace = turn.get("reasoning_content")
    return turn["content"] if trace is None else with_trace(trace, turn["content"])


def _apply_trace_rule(turns: _Turns, traces: Traces) -> tuple[_Turns, Note | None]:
    """Returns the turns under the rule for traces, and what was done to a response's."""
    both = (turns.chosen, turns.rejected)
    if any(map(is_unclosed, both)):
        raise RowProblem(Reason.UNCLOSED)
    traced = any(map(has_trace, both))
    if traces is not Traces.STRIP:
        return turns, Note.APART if traced and traces is Traces.WEIGH_APART else None
    history = [copy_message({**turn, "reasoning_content": ""}) for turn in turns.history]
    return _Turns(history, *map(without_trace, both)), Note.STRIPPED if traced else None


def _after(prompt: list[Message], turns: list[Message]) -> list[Message]:
    """Returns the whole conversation, whether ``turns`` repeats the prompt or not."""
    return turns if prompt and turns[: len(prompt)] == prompt else [*prompt, *turns]


# Whose turns may stand behind whose; "call": an assistant's that calls tools.
_FOLLOWS = {"assistant": ("user",), "user": ("assistant",), "call": (TOOL,), TOOL: (TOOL, "assistant")}


def _check_history(history: Sequence[Message]) -> None:
    """Raises RowProblem unless turns alternate behind a system turn and end with the user's or a tool's result."""
    turns = history[1:] if history and history[0]["role"] == "system" else history
    if not turns:
        raise RowProblem(Reason.NO_PROMPT)
    last = "assistant"
    for turn in turns:
        if turn["role"] not in _FOLLOWS.get(last, ()):
            raise RowProblem(Reason.MALFORMED)
        last = "call" if turn.get("tool_calls") else turn["role"]
    if last not in ("user", TOOL):
        raise RowProblem(Reason.MALFORMED)


# ------------------------------------------------------------------------------------------------ plain texts

# A list of messages that was turned into its text, as a table of texts alone keeps it.
_WRITTEN = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")

# The two labels of hh-rlhf transcripts, at the start of the text or after a blank line.
_LABEL = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def _from_texts(prompt: str | list[Message] | None, chosen: str, rejected: str) -> tuple[_Turns, bool]:
    """Returns the history and responses of two texts, and whether their shared start had to stand for the prompt."""
    if isinstance(prompt, list):
        return _Turns(prompt, chosen, rejected), False
    if prompt is not None and not _opens_answer(prompt):
        return _Turns([Message(role="user", content=prompt)], chosen, rejected), False
    whole = [(prompt or "") + text for text in (chosen, rejected)]
    if all(_is_dialogue(text) for text in whole):
        return _from_messages(None, _dialogue(whole[0]), _dialogue(whole[1])), False
    cut = _shared_start(chosen, rejected)
    shared = chosen[:cut].strip()
    if not shared:
        raise RowProblem(Reason.IDENTICAL if chosen == rejected else Reason.NO_PROMPT)
    return _Turns([Message(role="user", content=shared)], chosen[cut:].lstrip(), rejected[cut:].lstrip()), True


def _opens_answer(text: str) -> bool:
    """Returns whether ``text`` is a labelled dialogue that ends with the label of the assistant."""
    return _is_dialogue(text) and text.rstrip().endswith("\n\nAssistant:")


def _is_dialogue(text: str) -> bool:
    labels = list(_LABEL.finditer(text))
    return bool(labels) and labels[0].start() == 0 and any(label[1] == "Assistant" for label in labels)


def _dialogue(text: str) -> list[Message]:
    """Returns the turns of a labelled dialogue, surrounding blanks removed."""
    labels = list(_LABEL.finditer(text))
    ends = [*(label.start() for label in labels[1:]), len(text)]
    return [
        Message(role=_SPEAKERS[label[1]], content=text[label.end() : end].strip())
        for label, end in zip(labels, ends, strict=True)
    ]


def _shared_start(first: str, second: str) -> int:
    """Returns the length of the common prefix, backed up so that it cuts no word of either text."""
    differs = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    cut = next(differs, min(len(first), len(second)))
    while cut > 0 and (_inside_word(first, cut) or _inside_word(second, cut)):
        cut -= 1
    return cut


def _inside_word(text: str, index: int) -> bool:
    return 0 < index < len(text) and _word_part(text[index - 1]) and _word_part(text[index])


def _word_part(character: str) -> bool:
    # Letters, marks and digits; a combining mark belongs to the letter before it.
    return unicodedata.category(character)[0] in "LMN" or character == "_"
