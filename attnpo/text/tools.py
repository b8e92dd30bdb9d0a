"""Tools in conversations: the functions a model may call, its calls, their results, and what a template makes of them.

A prompt's tools travel with its first turn, as the JSON text of a list of function schemas.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from attnpo.schema import Message
from attnpo.system.files import parse_json
from attnpo.text.frames import SENTINEL
from attnpo.text.refusals import RefusedText
from attnpo.text.template_options import variables

TOOL = "tool"
"""The role of a turn that holds a call's result."""


def written(functions: object) -> str | None:
    """Returns the JSON text of a list of mappings, or of a JSON text of one, its keys in their order; None for an empty
    value.

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
    """What a chat template makes of tools, found out with the first conversation that has them.

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
