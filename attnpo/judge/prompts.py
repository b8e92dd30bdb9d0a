"""Judge prompts: the comparison text, its tokens, and which tokens belong to which response.

As in the paper, the judge sees both answers in both orders, without knowing which one was preferred, and is asked for a
letter. Its attention is read at the last prompt token. Spans come from the character positions at which the responses
are inserted, never from a search for delimiters, so a response may contain anything.

Differences from the official code: placeholders are substituted in one pass (the official code also replaces an
"{answer_b}" inside an answer), there is no second BOS, and strings are truncated at character boundaries and the total
length is checked again (the official code truncates tokens and re-encodes them, which can change the length and leave
U+FFFD). Spans extend to the response's last character unless SpanMode.REFERENCE selects the shorter ones.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnpo.judge.base import JudgePrompt
from attnpo.judge.settings import Assembly, JudgeRules, SpanMode, TraceRules, Turns
from attnpo.schema import SIDES, Message, PreferencePair, UserError, digest
from attnpo.text.chat import SENTINEL, ChatFormat, check_surrogates, locate_answer_in_rendered_turn, split_frame
from attnpo.text.ranges import Range, as_array, as_ranges, extend_over_gaps
from attnpo.text.traces import weighted_start

PLACEHOLDERS = ("question", "answer_a", "answer_b")


class RenderedPrompt(NamedTuple):
    """Filled-in template and the half-open character range of each placeholder's value in it."""

    text: str
    spans: dict[str, Range]


def read_text_file(path: str | Path, key: str) -> str:
    """Reads a UTF-8 text file unchanged. Raises UserError naming the file's ``key`` if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{key}: cannot read {str(path)!r} as UTF-8 text ({problem})") from problem


class JudgeTemplate:
    """Template with {question}, {answer_a} and {answer_b}, each exactly once; other braces are plain text."""

    def __init__(self, text: str) -> None:
        pieces = re.split(r"\{(" + "|".join(PLACEHOLDERS) + r")\}", text)
        self.text, self.literals, self.order = text, pieces[::2], pieces[1::2]
        if sorted(self.order) != sorted(PLACEHOLDERS):
            slots = ", ".join("{" + name + "}" for name in self.order) or "none"
            expected = ", ".join("{" + name + "}" for name in PLACEHOLDERS)
            raise UserError(
                f"judge template: expected the placeholders {expected}, each exactly once; found {slots}: "
                "correct the file given by judge.template_file"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> "JudgeTemplate":
        """Reads the template from a UTF-8 text file, unchanged. Raises UserError if it cannot be read."""
        return cls(read_text_file(path, "judge.template_file"))

    def render(self, question: str, answer_a: str, answer_b: str) -> RenderedPrompt:
        """Inserts all three values at once, so that a placeholder inside a value is not replaced."""
        values = {"question": question, "answer_a": answer_a, "answer_b": answer_b}
        parts, spans, position = [self.literals[0]], {}, len(self.literals[0])
        for name, literal in zip(self.order, self.literals[1:], strict=True):
            spans[name] = (position, position + len(values[name]))
            position = spans[name][1] + len(literal)
            parts += [values[name], literal]
        return RenderedPrompt("".join(parts), spans)

    def distance_to_closing(self, name: str, text: str | None) -> int | None:
        """Returns the number of characters from a placeholder to ``text``; None if ``text`` does not follow it.

        If ``text`` is None, measures to the next visible character.
        """
        literal = self.literals[self.order.index(name) + 1]
        if text is None:
            return len(literal) - len(literal.lstrip()) if literal.strip() else None
        place = literal.find(text)
        return place if place >= 0 else None


def allocate_tokens(room: int, question: int, sizes: Sequence[int], max_response: int) -> tuple[int, list[int]]:
    """Divides ``room`` tokens between the question and the two responses; returns how many each keeps.

    Responses keep at most ``max_response`` tokens each, and the question gets the remaining tokens (decision 10). If
    that would leave the question less than an eighth of the room (with a small judge.max_length), the question keeps an
    eighth of it (or all its tokens if it has fewer), and the responses share the rest evenly. Tokens that a short
    response does not need go to the other response.
    """
    caps = [min(size, max_response) for size in sizes]
    keep = min(question, max(room // 8, room - sum(caps)))
    left = room - keep
    if sum(caps) > left:
        half = left // 2
        caps = [min(cap, max(half, left - other)) for cap, other in zip(caps, reversed(caps), strict=True)]
    return keep, caps


def last_tokens_start(places: Sequence[Range], keep: int, length: int) -> int:
    """Returns the character index at which the last ``keep`` tokens start, after any that an earlier token shares.

    ``places`` are the tokens' half-open character ranges; ``length`` is the string's number of characters.
    """
    if keep >= len(places):
        return 0
    for index in range(len(places) - max(0, keep), len(places)):
        if places[index][0] >= places[index - 1][1]:
            return places[index][0]
    return length


def count_first_tokens(places: Sequence[Range], keep: int) -> int:
    """Returns the largest number of leading tokens, at most ``keep``, that end at a character boundary.

    If no such number exists, returns the number of tokens up to the first complete character.
    """
    if keep >= len(places):
        return len(places)
    for count in range(keep, 0, -1):
        if places[count][0] >= places[count - 1][1]:
            return count
    return next((n for n in range(keep + 1, len(places)) if n and places[n][0] >= places[n - 1][1]), len(places))


def label_token_ids(chat: ChatFormat, prompt: str, labels: Sequence[str], key: str = "judge.labels") -> tuple[int, ...]:
    """Returns the token id of each label as the model would generate it after ``prompt``, a rendered string.

    Raises UserError, naming ``key``, if a label is more than one token both there and on its own, if it is not in the
    vocabulary, or if two labels are the same token.
    """
    before, _ = chat.tokenize(prompt)
    found: list[int] = []
    for label in labels:
        whole, _ = chat.tokenize(prompt + label)
        alone, _ = chat.tokenize(label, start=False)
        if len(whole) == len(before) + 1 and whole[:-1] == before:
            alone = whole[-1:]
        if len(alone) != 1:
            raise UserError(f"{key}: {label!r} is {len(alone)} tokens {alone}, expected one: choose a different label")
        if alone[0] == chat.tokenizer.unk_token_id:
            raise UserError(
                f"{key}: {label!r} is not in the vocabulary of the judge, which reads it as "
                f"{chat.tokenizer.unk_token!r}: choose a different label"
            )
        if alone[0] in found:
            raise UserError(f"{key}: {tuple(labels)} are the same token {alone[0]}: choose different labels")
        found.append(alone[0])
    return tuple(found)


def check_prefill(chat: ChatFormat, prompt: str, prefill: str, labels: Sequence[str]) -> None:
    """Raises UserError if appending a label changes the tokens of ``prompt``, which ends with ``prefill``.

    This happens if the tokenizer drops trailing whitespace or merges the end of the prefill with the label. The label
    would then be scored after different tokens than those that precede a generated label.
    """
    before, places = chat.tokenize(prompt)
    if not prefill.strip() or not places or places[-1][1] < len(prompt):
        raise UserError(
            f"judge.prefill: the judge's tokenizer strips the end of {prefill!r}, so the verdict would not "
            "follow the prefill: remove the trailing whitespace"
        )
    for label in labels:
        whole, _ = chat.tokenize(prompt + label)
        if whole[: len(before)] != before:
            advice = f"end the prefill before the letter's token, or begin the labels with a space ({' ' + label!r})"
            if prefill[-1].isspace():
                cut = prefill.rstrip()
                advice = f"set judge.prefill={cut!r} and begin the labels with {prefill[len(cut) :]!r}"
            raise UserError(
                f"judge.prefill: the end of {prefill!r} and the label {label!r} become one token, so the verdict would "
                f"not follow the prefill: {advice}"
            )


@dataclass(frozen=True)
class TraceSuffix:
    """Token ids that follow a trace: first ``closing``, if the trace did not end by itself, and then ``prefill``."""

    closing: tuple[int, ...]
    prefill: tuple[int, ...]

    @property
    def token_count(self) -> int:
        """Returns the maximum number of tokens after a trace."""
        return len(self.closing) + len(self.prefill)


def make_trace_suffix(chat: ChatFormat, prompt: str, rules: TraceRules, prefill: str | None) -> TraceSuffix:
    """Returns the token ids that follow a trace; ``prompt`` is the rendered text up to the start of the trace.

    Raises UserError if the prefill closes a trace by itself, or if the judge's tokenizer has no tokens for ``until``.
    """
    until = rules.until
    if prefill is not None and until.strip() in prefill:
        raise UserError(
            f"judge.prefill={prefill!r} contains the end of a trace (judge.trace.until={until!r}), but the prefill "
            "already comes after the trace: remove the end of the trace from the prefill"
        )
    closing = _tokens_after(chat, prompt, until)
    if not closing or chat.tokenizer.unk_token_id in closing:
        raise UserError(
            f"judge.trace.until: the judge's tokenizer cannot encode {until!r}, so no trace would end with it: set "
            "judge.trace.until to the text that ends this judge's traces"
        )
    return TraceSuffix(tuple(closing), () if prefill is None else tuple(_tokens_after(chat, prompt + until, prefill)))


def check_trace_open(prompt: str, frame_end: str, until: str) -> None:
    """Raises UserError if the prompt closes the trace by itself, because the model would not reason after that.

    ``frame_end``: the text that the chat template inserts between the question to the judge and its reply.
    """
    if until.strip() in frame_end or prompt.rstrip().endswith(until.strip()):
        raise UserError(
            f"judge.trace: the judge's prompt ends with {prompt[-60:]!r} and already contains "
            f"judge.trace.until={until!r}, so the judge would not reason: enable thinking "
            "(judge.chat_template_kwargs), or set judge.trace=null"
        )


def _tokens_after(chat: ChatFormat, before: str, text: str) -> list[int]:
    """Returns the token ids of ``text`` after ``before``, or of ``text`` alone if the two would share a token."""
    head, whole = chat.tokenize(before)[0], chat.tokenize(before + text)[0]
    return whole[len(head) :] if whole[: len(head)] == head else chat.tokenize(text, start=False)[0]


ANSWERS = ("answer_a", "answer_b")
_ORDERS = (("chosen", "rejected"), ("rejected", "chosen"))


@dataclass(frozen=True)
class _JudgedAnswer:
    """Response as the judge sees it, from character ``start`` onwards. ``blank``: it is empty and shown as a space."""

    text: str
    start: int
    blank: bool
    tokens: tuple[list[int], list[Range]] | None = None  # under IDS: of training, ranges in the whole response

    def keep_first_tokens(self, places: list[Range], count: int) -> "_JudgedAnswer":
        """Returns the response truncated to its first ``count`` tokens; ``places``: the tokens' character ranges."""
        if count == len(places):
            return self
        if self.tokens is None:
            return replace(self, text=self.text[: places[count - 1][1]])
        return replace(self, tokens=(self.tokens[0][:count], self.tokens[1][:count]))


class _TokenizedRound(NamedTuple):
    """Token ids of a judge prompt and, for each answer slot, its token range and the response characters it covers."""

    ids: list[int]
    spans: dict[str, Range]
    offsets: dict[str, list[Range]]


def question_text(prompt: Sequence[Message]) -> str:
    """Returns the question as the judge reads it: the content of a single user turn, or "role: content" for each turn.

    Turns are separated by a blank line. System turns are shown like the others, and an assistant's tool calls as JSON.
    Tool definitions are not shown.
    """
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n\n".join(f"{turn['role']}: {_turn_text(turn)}" for turn in prompt)


def last_user_turn(prompt: Sequence[Message]) -> Sequence[Message]:
    """Returns the conversation's last user turn as a one-turn conversation. Raises UserError if there is none."""
    users = [turn for turn in prompt if turn["role"] == "user"]
    if not users:
        roles = ", ".join(dict.fromkeys(turn["role"] for turn in prompt))
        raise UserError(f"judge.turns=last needs a user turn, but the prompt has only {roles}: set judge.turns=all")
    return users[-1:]


def _turn_text(turn: Message) -> str:
    """Returns a turn's content and its tool calls as a string."""
    return "\n".join(text for text in (turn["content"], turn.get("tool_calls")) if text)


class JudgePromptBuilder:
    """Builds the judge prompts for both rounds of a pair; ``template`` replaces the one in ``rules.template_file``.

    ``chat`` formats the question to the judge; ``training`` (default: ``chat``) provides the training ids for IDS. If
    either round's prompt is too long, both rounds are truncated identically: the question loses its beginning, each
    response loses its end, and only the kept part gets weights. With ``rules.trace``, a prompt ends where the trace
    starts, and ``trace_suffix`` contains the ids that follow the trace.

    Raises UserError if the template cannot be read, lacks a placeholder, does not allow the requested spans, or exceeds
    ``rules.max_length`` even with empty values; also if the tokenizer drops the end of ``rules.prefill`` or merges it
    with a label, or if the prompt or the prefill closes the trace.
    """

    def __init__(
        self,
        rules: JudgeRules,
        chat: ChatFormat,
        template: JudgeTemplate | None = None,
        *,
        training: ChatFormat | None = None,
    ) -> None:
        self.rules, self.chat = rules, chat
        self._training = chat if training is None else training
        self.template = JudgeTemplate.from_file(rules.template_file) if template is None else template
        self._frame = split_frame(self._render_chat(SENTINEL)) if rules.chat else ("", "")
        self._parts: dict[str, tuple[list[int], list[Range]]] = {}
        self._gaps = {name: self.template.distance_to_closing(name, rules.span_closing) for name in ANSWERS}
        if rules.span is SpanMode.REFERENCE and None in self._gaps.values():
            wanted = "visible template text" if rules.span_closing is None else repr(rules.span_closing)
            raise UserError(
                f"judge.span=reference: expected {wanted} after both answers, because the spans end before it: change "
                "judge.span_closing or judge.template_file, or set judge.span=touch"
            )
        ids, _ = chat.tokenize(" ", start=False)
        self._blank = _JudgedAnswer(" ", 0, True, (ids, [(0, 0)] * len(ids)))
        bare = max(len(placed.ids) for placed in self._tokenize_rounds(" ", {side: self._blank for side in SIDES}))
        self.trace_suffix: TraceSuffix | None = None
        if rules.trace is not None:
            prompt = self._full_prompt(self.template.render("x", "x", "x").text)[0]
            check_trace_open(prompt, self._frame[1], rules.trace.until)
            self.trace_suffix = make_trace_suffix(chat, prompt, rules.trace, rules.prefill)
        # Maximum tokens of a prompt, and how many of them question and answers may use; each needs at least one.
        self._limit = rules.max_length - self._reserved_tokens()
        self._room = self._limit - 1 - (bare - 3)
        if self._room < 3:
            free = f" and judge.trace reserves {self._reserved_tokens()}" * (rules.trace is not None)
            raise UserError(
                f"judge.max_length is {rules.max_length}, but the judge template alone needs about {bare - 3} tokens"
                f"{free}: raise it or shorten judge.template_file{' or a trace' * bool(free)}"
            )
        if rules.prefill is not None:
            check_prefill(chat, self._text_before_label(), rules.prefill, rules.labels)

    def fingerprint(self) -> dict[str, object]:
        """Returns all settings that affect a prompt, a span or a label: template, rules, tokenizer, chat template."""
        rules = self.rules
        reference, spliced = rules.span is SpanMode.REFERENCE, rules.assembly is Assembly.IDS
        return {
            "template": digest(self.template.text),
            "assembly": rules.assembly.value,
            "span": [rules.span.value, rules.span_closing, rules.span_drop] if reference else rules.span.value,
            "max_length": rules.max_length,
            "max_response_length": rules.max_response_length,
            "labels": list(rules.labels),
            "strip": rules.strip,
            "chat": rules.chat,
            "tokenizer": self.chat.fingerprint(),
            # Older stored prompts have no turns, no prefill and no trace.
            **({} if rules.turns is Turns.ALL else {"turns": rules.turns.value}),
            **({} if rules.prefill is None else {"prefill": rules.prefill}),
            **({} if rules.trace is None else {"trace": rules.trace.fingerprint()}),
            # Training ids, if their chat format differs from the judge's.
            **({"training": self._training.fingerprint()} if spliced and self._training is not self.chat else {}),
        }

    @cached_property
    def label_ids(self) -> tuple[int, int]:
        """Returns the token ids of the two labels as the judge would generate them right after its prompt.

        Raises UserError if a label is more than one token both there and on its own, if it is not in the vocabulary, or
        if both are the same token.
        """
        first, second = label_token_ids(self.chat, self._text_before_label(), self.rules.labels)
        return first, second

    def _text_before_label(self) -> str:
        """Returns a prompt's text up to the label, with an empty trace if the judge reasons first."""
        before = self._full_prompt(self.template.render("x", "x", "x").text)[0]
        trace = self.rules.trace
        return before if trace is None else before + trace.until + (self.rules.prefill or "")

    def _reserved_tokens(self) -> int:
        """Returns how many of the ``rules.max_length`` tokens are reserved for a trace and the ids after it."""
        trace = self.rules.trace
        return 0 if trace is None or self.trace_suffix is None else trace.max_new_tokens + self.trace_suffix.token_count

    # ------------------------------------------------------------------------------------------ building

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Returns the two rounds: first with the chosen response as answer A, then with the rejected one.

        A token range is empty only if no part of the response reaches the judge (the tokenizer drops it, or it is
        whitespace at the end of a trimmed message). Raises UserError naming the pair if its text cannot be encoded or
        does not fit.
        """
        cut = False
        try:
            prompt = last_user_turn(pair.prompt) if self.rules.turns is Turns.LAST else pair.prompt
            question = question_text(prompt)
            check_surrogates(question, "the prompt")
            shown = {side: self._prepare_answer(pair, side) for side in SIDES}
            rounds = self._tokenize_rounds(question, shown)
            if max(len(placed.ids) for placed in rounds) >= self._limit:
                rounds, cut = self._shorten_rounds(question, shown), True
        except UserError as problem:
            raise UserError(f"pair {pair.pair_id}: {problem}") from problem
        first, second = (
            JudgePrompt(
                pair_id=pair.pair_id,
                input_ids=placed.ids,
                chosen_is_a=order[0] == "chosen",
                spans={side: placed.spans[name] for side, name in zip(order, ANSWERS, strict=True)},
                offsets={side: placed.offsets[name] for side, name in zip(order, ANSWERS, strict=True)},
                cut=cut,
            )
            for order, placed in zip(_ORDERS, rounds, strict=True)
        )
        return first, second

    def _prepare_answer(self, pair: PreferencePair, side: str) -> _JudgedAnswer:
        """Returns a response as the judge sees it, without a reasoning trace that is weighted separately."""
        response, begins = pair.response(side), weighted_start(pair, side)
        check_surrogates(response, f"the {side} response")
        if self.rules.assembly is Assembly.IDS:
            encoded = self._training.encode(pair.prompt, response)
            content = [i for i, (start, end) in enumerate(encoded.offsets) if end > max(start, begins)]
            if not content:
                return self._blank
            ids, offsets = [encoded.response_ids[i] for i in content], [encoded.offsets[i] for i in content]
            return _JudgedAnswer(response, 0, False, (ids, offsets))
        whole = response[begins:]
        text = whole.strip() if self.rules.strip else whole
        if not text:
            return _JudgedAnswer(" ", 0, True)
        return _JudgedAnswer(text, len(response) - len(whole.lstrip()) if self.rules.strip else begins, False)

    def _tokenize_rounds(self, question: str, shown: Mapping[str, _JudgedAnswer]) -> list[_TokenizedRound]:
        if self.rules.assembly is Assembly.IDS:
            return self._splice_ids(question, shown)
        return [
            self._tokenize_text(question, dict(zip(ANSWERS, (shown[a], shown[b]), strict=True))) for a, b in _ORDERS
        ]

    def _tokenize_text(self, question: str, answers: Mapping[str, _JudgedAnswer]) -> _TokenizedRound:
        """Tokenises the rendered text once (TEXT); spans are the tokens that overlap the answers' characters."""
        rendered = self.template.render(question, answers["answer_a"].text, answers["answer_b"].text)
        full, shift, low, high = self._full_prompt(rendered.text)
        ids, places = self.chat.tokenize(full)
        spans, offsets = {}, {}
        for name, view in answers.items():
            shift_back = view.start - rendered.spans[name][0] - shift
            # Excludes blanks that the chat template trimmed from the message's ends.
            begin, end = max(rendered.spans[name][0] + shift, low), min(rendered.spans[name][1] + shift, high)
            first = bisect_right(places, begin, key=itemgetter(1))
            last = max(first, bisect_left(places, end, key=itemgetter(0)))
            held = extend_over_gaps(as_array(places[first:last]), full, begin, end)
            if self.rules.span is SpanMode.REFERENCE:
                closing = bisect_left(places, end + (self._gaps[name] or 0), key=itemgetter(0))
                last = self._reference_end(first, last, closing)
            spans[name] = (first, last)
            own = np.stack([np.maximum(held[:, 0], begin), np.minimum(held[:, 1], end)], axis=1) + shift_back
            offsets[name] = as_ranges((np.zeros_like(own) if view.blank else own)[: last - first])
        return _TokenizedRound(ids, spans, offsets)

    def _splice_ids(self, question: str, shown: Mapping[str, _JudgedAnswer]) -> list[_TokenizedRound]:
        """Tokenises the template's parts separately (IDS) and inserts the answers' training ids between them."""
        rendered = self.template.render(question, "x", "x")  # visible text, so that blanks around it are not trimmed
        full, shift, _, _ = self._full_prompt(rendered.text)
        slots = [name for name in self.template.order if name in ANSWERS]
        edges = [(rendered.spans[name][0] + shift, rendered.spans[name][1] + shift) for name in slots]
        parts = [self.chat.tokenize(full[: edges[0][0]])]
        parts += [self._tokenize_part(full[edges[0][1] : edges[1][0]]), self._tokenize_part(full[edges[1][1] :])]
        rounds = []
        for order in _ORDERS:
            views = dict(zip(ANSWERS, (shown[side] for side in order), strict=True))
            placed = _TokenizedRound(list(parts[0][0]), {}, {})
            for name, (ids, places) in zip(slots, parts[1:], strict=True):
                answer, offsets = views[name].tokens or ([], [])
                first, last = len(placed.ids), len(placed.ids) + len(answer)
                if self.rules.span is SpanMode.REFERENCE:
                    closing = last + bisect_left(places, self._gaps[name] or 0, key=itemgetter(0))
                    last = self._reference_end(first, last, closing)
                placed.ids.extend([*answer, *ids])
                placed.spans[name] = (first, last)
                placed.offsets[name] = offsets[: last - first]
            rounds.append(placed)
        return rounds

    def _reference_end(self, first: int, last: int, closing: int) -> int:
        """Returns the end of the official code's span.

        It is ``span_drop`` tokens before the closing text's first token, but the span keeps at least one token.
        """
        return min(last, max(closing - self.rules.span_drop, first + 1))

    def _tokenize_part(self, text: str) -> tuple[list[int], list[Range]]:
        if text in self._parts:
            return self._parts[text]
        tokens = self.chat.tokenize(text, start=False)
        if len(self._parts) < 8:  # constant parts come first; parts with the question would fill the memory
            self._parts[text] = tokens
        return tokens

    # ------------------------------------------------------------------------------------------ the chat around it

    def _render_chat(self, text: str) -> str:
        return self.chat.render([Message(role="user", content=text)], add_generation_prompt=True)

    def _full_prompt(self, text: str) -> tuple[str, int, int, int]:
        """Returns the prompt, the offset of ``text`` in it, and the range of ``text`` that it contains."""
        prefill = (self.rules.prefill or "") if self.rules.trace is None else ""
        if not self.rules.chat:
            return text + prefill, 0, 0, len(text)
        full = self._render_chat(text)
        place = locate_answer_in_rendered_turn(full, self._frame, text)
        if place is None:
            raise UserError(
                "the chat template changes a user message beyond trimming whitespace at its ends, so the "
                "responses cannot be located in it: set model.chat_template to a different template"
            )
        return full + prefill, place[1] - place[0], place[1], place[2]

    # ------------------------------------------------------------------------------------------ length

    def _ranges_with_accents(self, text: str) -> list[Range]:
        """Returns the character ranges of a response's tokens, extended so that no cut splits off an accent."""
        places = as_array(self.chat.tokenize(text, start=False)[1])
        return as_ranges(extend_over_gaps(places, text, 0, len(text)))

    def _shorten_rounds(self, question: str, shown: Mapping[str, _JudgedAnswer]) -> list[_TokenizedRound]:
        """Returns both rounds, truncated to ``_limit``: responses keep their beginning, the question keeps its end."""
        asked = self.chat.tokenize(question, start=False)[1]
        tokens = {
            side: view.tokens[1] if view.tokens else self._ranges_with_accents(view.text)
            for side, view in shown.items()
        }
        sizes = [len(tokens[side]) for side in SIDES]
        room = self._room
        while room >= 3:
            keep, caps = allocate_tokens(room, len(asked), sizes, self.rules.max_response_length)
            begin = last_tokens_start(asked, keep, len(question))
            kept = {
                side: shown[side].keep_first_tokens(tokens[side], count_first_tokens(tokens[side], cap))
                for side, cap in zip(SIDES, caps, strict=True)
            }
            rounds = self._tokenize_rounds(question[begin:], kept)
            excess = max(len(placed.ids) for placed in rounds) - self._limit + 1
            if excess <= 0:
                return rounds
            room -= excess  # tokens at the seams: cut as many more
        raise UserError(
            f"the judge prompt cannot be truncated to judge.max_length={self.rules.max_length}: raise it or shorten "
            "judge.template_file"
        )
