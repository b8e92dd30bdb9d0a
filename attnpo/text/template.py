"""Reading of chat templates: which one is used, its options, tools, a content's frame, and refusals.

Options are written in front of a template: values of its variables, a folded system turn. A template with its options
is a template again, so whatever renders, stores or exports it keeps them. A prompt's tools travel with its first turn,
as the JSON text of a list of function schemas.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from attnpo.schema import Message, UserError
from attnpo.system.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RefusedText(UserError):
    """Text that cannot become training ids; ``reason`` says why in words that fit every such text."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class TokenWithoutRow(RefusedText):
    """Refusal of a text with a token that the model has no embedding for."""


class RunawayTemplate(UserError):
    """Chat template that does not come to an end within its limits."""


def check_text(text: str, what: str) -> None:
    """Raises UserError naming ``what`` when the text holds a lone surrogate, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RefusedText(
            "its text holds a lone surrogate",
            f"{what} holds the lone surrogate U+{ord(text[problem.start]):04X} at character {problem.start}, which "
            "cannot be encoded: repair the text or drop the row",
        ) from problem


SENTINEL = "ATTNPOPLACEHOLDER"
"""Stands for a message's content where only the text around it is wanted."""


def split_frame(rendered: str) -> tuple[str, str]:
    """Returns the text before and after the sentinel, which must stand there exactly once (else UserError)."""
    before, sentinel, after = rendered.partition(SENTINEL)
    if not sentinel or SENTINEL in after:
        raise UserError(
            f"the chat template writes a message's content {rendered.count(SENTINEL)} times, expected exactly once: "
            "give another template as model.chat_template"
        )
    return before, after


def place_in_frame(rendered: str, frame: tuple[str, str], content: str) -> tuple[int, int, int] | None:
    """Returns how ``content`` stands between the two texts of ``frame``; None when ``rendered`` is anything else.

    The leading characters of the content that were trimmed away, and the half-open range of what is left in
    ``rendered``. Only blanks at either end may be missing.
    """
    head, tail = frame
    body = rendered[len(head) : len(rendered) - len(tail)]
    if rendered != head + body + tail:
        return None
    trimmed = 0
    if body != content:
        if body.strip() != content.strip():
            return None
        trimmed = (len(content) - len(content.lstrip())) - (len(body) - len(body.lstrip()))
        if trimmed < 0 or content[trimmed : trimmed + len(body)] != body:
            return None
    return trimmed, len(head), len(head) + len(body)


log = logging.getLogger(__name__)

_PASSED = "messages tools documents add_generation_prompt raise_exception strftime_now"
_PARAMETERS = (  # of the renderer itself
    "conversation chat_template continue_final_message tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs sanitize_control_tokens"
)
SUPPLIED = frozenset((_PASSED + " " + _PARAMETERS).split())
"""Names that a template is given by ``apply_chat_template``; a user sets none of them."""

# A blank line between the system turn's text and the first user turn, as Gemma's own template has it.
FOLD = (
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% if messages[1:] and messages[1]['role'] == 'user' %}"
    "{% set messages = [dict(messages[1], content=messages[0]['content'] + '\\n\\n' + messages[1]['content'])]"
    " + messages[2:] %}"
    "{% else %}{% set messages = [dict(messages[0], role='user')] + messages[1:] %}{% endif %}{% endif %}\n"
)


class ChosenTemplate(NamedTuple):
    """Text of a chat template, where it comes from, and a warning where that is not the tokenizer itself."""

    text: str
    origin: str
    warning: str | None = None


def choose_template(
    tokenizer: "PreTrainedTokenizerBase", given: str | None, fallback: str | None = None, part: str = "model"
) -> ChosenTemplate:
    """Returns ``given``, else the tokenizer's own template, else, for a tokenizer that brings none, ``fallback``.

    Logs the warning once. ``part`` is the config node that ``given`` belongs to. Raises UserError where there is none.
    """
    name, own = tokenizer.name_or_path, tokenizer.chat_template
    if isinstance(own, dict):  # several by name
        own = own.get("default")
    if given is not None:
        warning = "chat_template replaces the tokenizer's own chat template"
        chosen = ChosenTemplate(given, f"{part}.chat_template", warning if own not in (None, given) else None)
    elif own is not None:
        chosen = ChosenTemplate(own, "the tokenizer's own")
    elif fallback is not None and not tokenizer.chat_template:
        warning = "the tokenizer has no chat template; model.fallback_template is used instead"
        chosen = ChosenTemplate(fallback, "model.fallback_template", warning)
    else:
        raise UserError(
            f"the tokenizer {name!r} has no chat template to use: set {part}.chat_template (chat_template= in Python) "
            "to the template's text, to a file that holds it, or to model/plain_chat.jinja, a plain one that comes "
            "with attnpo"
        )
    if chosen.warning is not None:
        _warn_once(f"{name}: {chosen.warning}")
    return chosen


def with_default(tokenizer: "PreTrainedTokenizerBase", template: str) -> str | dict[str, str]:
    """Returns a tokenizer's chat templates with ``template`` as the one in use; those that it has by name stay."""
    own = tokenizer.chat_template
    return {**own, "default": template} if isinstance(own, dict) else template


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


class _Generation(Extension):
    """Tag pair that marks an assistant's text in templates of transformers; it renders its body."""

    tags = {"generation"}  # noqa: RUF012  the base class has it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def variables(template: str) -> frozenset[str]:
    """Returns the names that a chat template looks up from outside, functions of Jinja not among them.

    Raises UserError for text that is not valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError as problem:
        raise UserError(describe_syntax(problem)) from problem


def describe_syntax(problem: TemplateSyntaxError) -> str:
    """Returns the message of an error for a chat template that is not valid Jinja."""
    return (
        f"the chat template is not valid Jinja: {problem.message} (line {problem.lineno}); correct model.chat_template "
        "or the chat template in the model folder"
    )


def settable(template: str, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the variables that a chat template reads and its user may set. UserError for invalid Jinja."""
    return sorted(variables(template) - SUPPLIED - set(tokenizer.special_tokens_map))


def with_options(
    template: str,
    tokenizer: "PreTrainedTokenizerBase",
    kwargs: Mapping[str, object] | None = None,
    fold_system: bool = False,
    part: str = "model",
) -> str:
    """Returns ``template`` with ``kwargs`` and, with ``fold_system``, the system turn in the first user turn.

    A value holds where the caller of the template gives none. Without options the template is returned as it is.
    ``part``: the config node the options belong to, for errors.

    Raises UserError for a name that the template never reads or that the renderer supplies, and for a value that is
    no plain data.
    """
    kwargs = kwargs or {}
    supplied = SUPPLIED | set(tokenizer.special_tokens_map)
    read = settable(template, tokenizer) if kwargs else []
    named = ", ".join(read) or "none that can be set"
    lines = []
    for name, value in kwargs.items():
        key = f"{part}.chat_template_kwargs.{name}"
        if name in supplied:
            raise UserError(f"{key}: the renderer itself supplies {name}; variables of this chat template: {named}")
        if name not in read:
            raise UserError(
                f"{key}: the chat template never reads {name}, so it would change nothing; variables it reads: "
                f"{named}: correct the name or leave it out"
            )
        lines.append(f"{{% if {name} is not defined %}}{{% set {name} = {literal(value, key)} %}}{{% endif %}}\n")
    return "".join(lines) + FOLD * fold_system + template  # a newline after a block is dropped by the renderer


def literal(value: object, key: str) -> str:
    """Returns plain data as a Jinja expression. UserError naming ``key`` for any other value."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item, key) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(str(name), key)}: {literal(item, key)}' for name, item in value.items())}}}"
    raise UserError(f"{key}: expected a number, a text, true, false, null, a list or a mapping, got {value!r}")


TOOL = "tool"
"""Role of a turn that holds a call's result."""


def written(functions: object) -> str | None:
    """Returns the JSON text of a list of mappings, or of a JSON text of one, its keys in their order.

    None for an empty value.

    Outside JSON text a key with the value None is left out: tables write it where another row has that key.
    Raises ValueError for anything else.
    """
    if functions is None or (isinstance(functions, str) and not functions.strip()):
        return None
    try:
        parsed = parse_json(functions) if isinstance(functions, str) else _present(functions)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem
    if not isinstance(parsed, list) or not all(isinstance(one, Mapping) for one in parsed):
        raise ValueError("expected a list of mappings")
    try:
        return json.dumps(parsed, ensure_ascii=False) if parsed else None
    except TypeError as problem:
        raise ValueError(str(problem)) from problem


def _present(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _present(one) for key, one in value.items() if one is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_present(one) for one in value]
    return value


def tools_of(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    """Returns the tools of a conversation, as chat templates and servers take them; None without any."""
    text = messages[0].get("tools") if messages else None
    return None if text is None else cast("list[dict[str, Any]]", parse_json(text))


def without_tools(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the turns as chat templates and servers take them: calls as mappings, and no turn with tools."""
    turns = []
    for message in messages:
        turn: dict[str, Any] = {name: str(value) for name, value in message.items() if name != "tools"}
        if "tool_calls" in message:
            turn["tool_calls"] = parse_json(message["tool_calls"])
        turns.append(turn)
    return turns


class ToolUse:
    """Use that a chat template makes of tools, found out with the first conversation that has them.

    ``render`` gives the text of turns. A template that would leave calls or results out refuses its conversation.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._shows_results: bool | None = None
        self._reads: bool | None = None

    @property
    def reads(self) -> bool:
        """Returns whether the template reads the variable ``tools``."""
        if self._reads is None:
            self._reads = "tools" in variables(self._template)
        return self._reads

    def check(self, turns: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
        """Raises RefusedText for calls and results that the template would not write."""
        if "tool_calls" not in self._template and any(turn.get("tool_calls") for turn in turns):
            raise RefusedText(
                "the chat template writes no tool calls",
                "the chat template never reads tool_calls, so that it would leave a turn's calls out; give a template "
                "that writes them as model.chat_template",
            )
        if self._shows_results is None and any(turn["role"] == TOOL for turn in turns):
            marked = [{**turn, **({"content": SENTINEL} if turn["role"] == TOOL else {})} for turn in turns]
            self._shows_results = SENTINEL in render(marked)
        if self._shows_results is False and any(turn["role"] == TOOL for turn in turns):
            raise RefusedText(
                "the chat template writes no results of tools",
                f"the chat template leaves turns of the role {TOOL} out; give a template that writes them as "
                "model.chat_template",
            )
