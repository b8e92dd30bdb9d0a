"""Handles chat templates: selection, options, tools, the text around a message, and errors.

Options (values of variables, folding of the system turn) are prepended to a template as code. The result is itself a
template, so the options apply wherever it is rendered, stored or exported. A prompt's tools are stored in the prompt's
first turn, as JSON of a list of function schemas.
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
    """Raised when text cannot be encoded as training ids; ``reason`` is the kind of problem, for counting."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class TokenWithoutEmbedding(RefusedText):
    """Raised when text contains a token that the model has no embedding for."""


class RunawayTemplate(UserError):
    """Raised when a chat template exceeds the time or memory limit for rendering."""


def check_surrogates(text: str, what: str) -> None:
    """Raises UserError if ``text`` has a lone surrogate, which cannot be encoded; the message names ``what``."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RefusedText(
            "the text contains a lone surrogate",
            f"{what} contains the lone surrogate U+{ord(text[problem.start]):04X} at character {problem.start}, which "
            "cannot be encoded: repair the text or drop the row",
        ) from problem


SENTINEL = "ATTNPOPLACEHOLDER"
"""Placeholder for a message's content, used to find the text around it."""


def split_frame(rendered: str) -> tuple[str, str]:
    """Returns the text before and the text after the sentinel.

    Raises:
        UserError: the sentinel does not occur exactly once.
    """
    before, sentinel, after = rendered.partition(SENTINEL)
    if not sentinel or SENTINEL in after:
        raise UserError(
            f"the chat template inserts a message's content {rendered.count(SENTINEL)} times instead of exactly once: "
            "set model.chat_template to a different template"
        )
    return before, after


def locate_answer_in_rendered_turn(rendered: str, frame: tuple[str, str], content: str) -> tuple[int, int, int] | None:
    """Locates ``content`` in ``rendered`` between the two strings of ``frame``; returns None if it is not there.

    Returns the number of leading characters trimmed from the content, and the half-open range of the rest in
    ``rendered``. Only surrounding whitespace may be missing.
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
_PARAMETERS = (  # parameters of the renderer itself
    "conversation chat_template continue_final_message tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs sanitize_control_tokens"
)
SUPPLIED = frozenset((_PASSED + " " + _PARAMETERS).split())
"""Names that ``apply_chat_template`` passes to a template; users cannot set them."""

# Puts a blank line between the system text and the first user turn, like Gemma's own template.
FOLD = (
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% if messages[1:] and messages[1]['role'] == 'user' %}"
    "{% set messages = [dict(messages[1], content=messages[0]['content'] + '\\n\\n' + messages[1]['content'])]"
    " + messages[2:] %}"
    "{% else %}{% set messages = [dict(messages[0], role='user')] + messages[1:] %}{% endif %}{% endif %}\n"
)


class ChosenTemplate(NamedTuple):
    """Text and origin of a chat template, and a warning if the template is not the tokenizer's own."""

    text: str
    origin: str
    warning: str | None = None


def choose_template(
    tokenizer: "PreTrainedTokenizerBase", given: str | None, fallback: str | None = None, part: str = "model"
) -> ChosenTemplate:
    """Returns ``given`` if it is set, otherwise the tokenizer's own template, otherwise ``fallback``.

    Logs the result's warning once. ``part``: config node of ``given``.

    Raises:
        UserError: none of the three exists.
    """
    name, own = tokenizer.name_or_path, tokenizer.chat_template
    if isinstance(own, dict):  # several named templates
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
            f"the tokenizer {name!r} has no chat template: set {part}.chat_template (chat_template= in Python) to the "
            "template's text, to a template file, or to model/plain_chat.jinja, a plain template included in "
            "attnpo"
        )
    if chosen.warning is not None:
        _warn_once(f"{name}: {chosen.warning}")
    return chosen


def with_default_template(tokenizer: "PreTrainedTokenizerBase", template: str) -> str | dict[str, str]:
    """Returns a tokenizer's chat templates with ``template`` as the default; keeps other named templates."""
    own = tokenizer.chat_template
    return {**own, "default": template} if isinstance(own, dict) else template


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


class _Generation(Extension):
    """Template tag that marks the assistant's text in transformers' templates; only the tag's body is rendered."""

    tags = {"generation"}  # noqa: RUF012  an instance attribute in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_variables(template: str) -> frozenset[str]:
    """Returns the undefined names in a chat template, excluding Jinja's own functions.

    Raises:
        UserError: the text is not valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError as problem:
        raise UserError(describe_syntax_error(problem)) from problem


def describe_syntax_error(problem: TemplateSyntaxError) -> str:
    """Returns an error message for a chat template that is not valid Jinja."""
    return (
        f"the chat template is not valid Jinja: {problem.message} (line {problem.lineno}); correct model.chat_template "
        "or the chat template in the model folder"
    )


def settable_variables(template: str, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the variables of a chat template that users may set.

    Raises:
        UserError: the text is not valid Jinja.
    """
    return sorted(template_variables(template) - SUPPLIED - set(tokenizer.special_tokens_map))


def prepend_options(
    template: str,
    tokenizer: "PreTrainedTokenizerBase",
    kwargs: Mapping[str, object] | None = None,
    fold_system: bool = False,
    part: str = "model",
) -> str:
    """Prepends code to ``template``: the values in ``kwargs`` and, if ``fold_system``, folding of the system turn.

    A value applies unless the caller of the template passes a different one. Without options, returns the template
    unchanged. ``part``: config node of the options, for error messages.

    Raises:
        UserError: a name in ``kwargs`` is never read by the template or is supplied by the renderer, or a value is not
            plain data.
    """
    kwargs = kwargs or {}
    supplied = SUPPLIED | set(tokenizer.special_tokens_map)
    read = settable_variables(template, tokenizer) if kwargs else []
    named = ", ".join(read) or "none that can be set"
    lines = []
    for name, value in kwargs.items():
        key = f"{part}.chat_template_kwargs.{name}"
        if name in supplied:
            raise UserError(f"{key}: {name} is already set by the renderer; variables of this chat template: {named}")
        if name not in read:
            raise UserError(
                f"{key}: the chat template never reads {name}, so it would have no effect; correct the name or "
                f"remove it; variables of this template: {named}"
            )
        lines.append(f"{{% if {name} is not defined %}}{{% set {name} = {jinja_literal(value, key)} %}}{{% endif %}}\n")
    return "".join(lines) + FOLD * fold_system + template  # the renderer drops a newline after a block


def jinja_literal(value: object, key: str) -> str:
    """Formats plain data as a Jinja expression.

    Raises:
        UserError: ``value`` is not plain data; the message names ``key``.
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(jinja_literal(item, key) for item in value)}]"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{jinja_literal(str(name), key)}: {jinja_literal(one, key)}" for name, one in value.items())
            + "}"
        )
    raise UserError(f"{key}: expected a number, a string, true, false, null, a list or a mapping, got {value!r}")


TOOL = "tool"
"""Role of a turn that contains the result of a function call."""


def functions_to_json(functions: object) -> str | None:
    """Converts a list of mappings, or its JSON representation, to JSON, preserving key order.

    Returns None for an empty value. Unless the list is given as JSON, keys with the value None are dropped, since
    tables add each key to all rows if any row has it.

    Raises:
        ValueError: the value is neither of these.
    """
    if functions is None or (isinstance(functions, str) and not functions.strip()):
        return None
    try:
        parsed = parse_json(functions) if isinstance(functions, str) else _drop_none(functions)
    except RecursionError as problem:
        raise ValueError("the value is nested too deeply") from problem
    if not isinstance(parsed, list) or not all(isinstance(one, Mapping) for one in parsed):
        raise ValueError("expected a list of mappings")
    try:
        return json.dumps(parsed, ensure_ascii=False) if parsed else None
    except TypeError as problem:
        raise ValueError(str(problem)) from problem


def _drop_none(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _drop_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_drop_none(one) for one in value]
    return value


def get_tools(messages: Sequence[Message]) -> list[dict[str, Any]] | None:
    """Returns the tools of a conversation, as chat templates and servers expect them; None if there are none."""
    text = messages[0].get("tools") if messages else None
    return None if text is None else cast("list[dict[str, Any]]", parse_json(text))


def to_template_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Converts turns for chat templates and servers: tool calls become mappings, and tool schemas are removed."""
    turns = []
    for message in messages:
        turn: dict[str, Any] = {name: str(value) for name, value in message.items() if name != "tools"}
        if "tool_calls" in message:
            turn["tool_calls"] = parse_json(message["tool_calls"])
        turns.append(turn)
    return turns


class ToolSupport:
    """Tool support of a chat template, determined from the first conversation that has tools.

    ``render`` returns rendered turns. Conversations with tool calls or results that the template would omit are
    rejected.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._shows_results: bool | None = None
        self._reads: bool | None = None

    @property
    def has_tools_variable(self) -> bool:
        """Returns whether the template reads the variable ``tools``."""
        if self._reads is None:
            self._reads = "tools" in template_variables(self._template)
        return self._reads

    def check(self, turns: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
        """Raises RefusedText if the template would omit tool calls or tool results."""
        if "tool_calls" not in self._template and any(turn.get("tool_calls") for turn in turns):
            raise RefusedText(
                "the chat template omits tool calls",
                "the chat template never reads tool_calls, so it would omit them; set model.chat_template to a "
                "template that includes them",
            )
        if self._shows_results is None and any(turn["role"] == TOOL for turn in turns):
            marked = [{**turn, **({"content": SENTINEL} if turn["role"] == TOOL else {})} for turn in turns]
            self._shows_results = SENTINEL in render(marked)
        if self._shows_results is False and any(turn["role"] == TOOL for turn in turns):
            raise RefusedText(
                "the chat template omits tool results",
                f"the chat template omits turns with the role {TOOL}; set model.chat_template to a template that "
                "includes them",
            )
