"""Choice of a chat template, and its options, written in front of it: values of its variables, a folded system turn.

A template with its options is a template again, so whatever renders, stores or exports it keeps them.
"""

import json
import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from attnpo.schema import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """The tag pair that marks an assistant's text in templates of transformers; it renders its body."""

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
        raise UserError(
            f"the chat template is not valid Jinja: {problem.message} (line {problem.lineno}); correct "
            "model.chat_template or the chat template in the model folder"
        ) from problem


def settable(template: str, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the variables that a chat template reads and its user may set. Raises UserError for text that is not
    Jinja.
    """
    return sorted(variables(template) - SUPPLIED - set(tokenizer.special_tokens_map))


def with_options(
    template: str,
    tokenizer: "PreTrainedTokenizerBase",
    kwargs: Mapping[str, object] | None = None,
    fold_system: bool = False,
    part: str = "model",
) -> str:
    """``template`` with the values of ``kwargs`` and, with ``fold_system``, the system turn in the first user turn.

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
    """Plain data as a Jinja expression. UserError naming ``key`` for any other value."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item, key) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(str(name), key)}: {literal(item, key)}' for name, item in value.items())}}}"
    raise UserError(f"{key}: expected a number, a text, true, false, null, a list or a mapping, got {value!r}")
