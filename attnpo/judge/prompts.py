"""Judge prompts: the comparison text, its tokens, and which of them belong to which response.

Paper: the judge sees both answers in both orders with hidden labels and is asked for a letter; its attention is read
at the last prompt token. Spans come from characters known while rendering, never from a search for delimiters, so a
response may contain anything.

Differs from the official code: one-pass substitution (there an answer's own "{answer_b}" is replaced), no second BOS,
cuts at character boundaries with the total checked again (there tokens are cut, decoded and encoded anew, which can
change the length and leave U+FFFD), and spans that reach the response's last character unless SpanMode.REFERENCE asks
for the shorter ones.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from attnpo.judge.base import JudgePrompt
from attnpo.judge.labels import check_prefill, label_tokens
from attnpo.judge.prompt_lengths import first_tokens, last_tokens, share_room
from attnpo.judge.trace_rules import AfterTrace, TraceRules, after_trace, require_open
from attnpo.judge.wording import JudgeTemplate
from attnpo.schema import SIDES, Message, PreferencePair, UserError, check_least, digest
from attnpo.text.chat import SENTINEL, ChatFormat, check_text, place_in_frame, split_frame
from attnpo.text.ranges import Range, as_places, as_ranges, hold_every_character
from attnpo.text.traces import start_apart

ANSWERS = ("answer_a", "answer_b")
_ORDERS = (("chosen", "rejected"), ("rejected", "chosen"))
QUESTION_CUT = "judge prompt cut"
RESPONSE_CUT = "response cut for the judge"
BLANK = "empty response shown as one space"


class Assembly(Enum):
    """TEXT tokenises the rendered text (paper); IDS splices the training-side ids between template parts."""

    TEXT = "text"
    IDS = "ids"


class SpanMode(Enum):
    """TOUCH: all tokens that hold a character of the response. REFERENCE: the official code's shorter span."""

    TOUCH = "touch"
    REFERENCE = "reference"


@dataclass(frozen=True)
class JudgeRules:
    """How the judge is asked.

    template_file: text file with the wording. assembly, span: see the enums. span_closing, span_drop: a reference span
    ends so many tokens before the first token of this text, which follows both answers in the wording (None: before the
    first visible character there). max_length: a prompt of this many tokens
    or more is cut. max_response_length: tokens a response keeps then. labels: the letters of the first and the second
    answer. strip: show responses without blanks at their ends (official code; under IDS the training ids decide).
    chat: the text is one user message of the chat template; otherwise it is the whole prompt. prefill: the beginning of
    the judge's reply up to the letter, written after all of that (None: nothing). trace: how the judge thinks before it
    replies (None: not at all); prompt, trace and prefill together keep max_length.
    """

    template_file: str
    assembly: Assembly = Assembly.TEXT
    span: SpanMode = SpanMode.TOUCH
    span_closing: str | None = None
    span_drop: int = 2
    max_length: int = 2048
    max_response_length: int = 768
    labels: tuple[str, str] = ("A", "B")
    strip: bool = True
    chat: bool = True
    prefill: str | None = None
    trace: TraceRules | None = None

    def __post_init__(self) -> None:
        check_least("judge", 1, max_length=self.max_length, max_response_length=self.max_response_length)
        check_least("judge", 0, span_drop=self.span_drop)
        if self.span_closing == "":
            raise UserError("judge.span_closing: expected text that follows both answers, or null, got an empty one")
        if self.prefill == "":
            raise UserError("judge.prefill: expected the beginning of a reply, or null for none, got an empty text")
        if self.labels[0] == self.labels[1]:
            raise UserError(f"judge.labels: expected two that differ, got {self.labels[0]} twice")


@dataclass(frozen=True)
class _Shown:
    """A response as the judge sees it: ``text``, which begins at character ``start`` of the pair's response.

    ``tokens`` are the training-side content tokens under IDS (ranges in the pair's response). A ``blank`` one is the
    space that stands for an empty response; none of its characters exist in the pair.
    """

    text: str
    start: int
    blank: bool
    tokens: tuple[list[int], list[Range]] | None = None

    def first(self, places: list[Range], count: int) -> "_Shown":
        """Returns the response cut after its first ``count`` tokens, whose characters in the shown text are
        ``places``.
        """
        if count == len(places):
            return self
        if self.tokens is None:
            return replace(self, text=self.text[: places[count - 1][1]])
        return replace(self, tokens=(self.tokens[0][:count], self.tokens[1][:count]))


class _Placed(NamedTuple):
    """A judge prompt's ids, and per answer slot the token range with the characters (of the response) it covers."""

    ids: list[int]
    spans: dict[str, Range]
    offsets: dict[str, list[Range]]


def question_text(prompt: Sequence[Message]) -> str:
    """Returns the question as the judge reads it: the content of a lone user turn, else "role: content" per turn.

    Turns are separated by a blank line; system turns are shown like the others, an assistant's calls of tools as JSON.
    The tools themselves are not shown.
    """
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n\n".join(f"{turn['role']}: {_said(turn)}" for turn in prompt)


def _said(turn: Message) -> str:
    """Returns a turn's content, and the calls it makes as they are written down."""
    return "\n".join(text for text in (turn["content"], turn.get("tool_calls")) if text)


class JudgePrompts:
    """Builds both rounds of a pair under fixed rules; ``template`` is the wording in place of the rules' file.

    ``chat`` frames the question to the judge; ``training`` (None: the same) gives the ids of training under IDS.
    A prompt too long in either round is cut the same way in both, so that both rounds see the same text. ``counts`` has
    "judge prompt cut" (pairs whose question lost its beginning), "response cut for the judge" (responses that lost
    their end; weights exist for the kept part only) and "empty response shown as one space" (responses).

    With ``rules.trace`` a prompt ends where the trace begins, and ``after_trace`` has the ids that follow the trace.

    Raises UserError when the template cannot be read, lacks a placeholder, cannot give the asked spans, or does not
    fit into ``rules.max_length`` even without texts, and when the tokenizer drops the end of ``rules.prefill`` or
    merges it with a label, or something else than the judge closes its trace.
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
        self.counts: Counter[str] = Counter()
        self._frame = split_frame(self._rendered(SENTINEL)) if rules.chat else ("", "")
        self._parts: dict[str, tuple[list[int], list[Range]]] = {}
        self._gaps = {name: self.template.closing(name, rules.span_closing) for name in ANSWERS}
        if rules.span is SpanMode.REFERENCE and None in self._gaps.values():
            wanted = "visible template text" if rules.span_closing is None else repr(rules.span_closing)
            raise UserError(
                f"judge.span: reference needs {wanted} after both answers, since spans end before it: change "
                "judge.span_closing or judge.template_file, or take judge.span: touch"
            )
        ids, _ = chat.tokenize(" ", start=False)
        self._blank = _Shown(" ", 0, True, (ids, [(0, 0)] * len(ids)))
        bare = max(len(placed.ids) for placed in self._place_both(" ", {side: self._blank for side in SIDES}))
        self.after_trace: AfterTrace | None = None
        if rules.trace is not None:
            prompt = self._full(self.template.render("x", "x", "x").text)[0]
            require_open(prompt, self._frame[1], rules.trace.until)
            self.after_trace = after_trace(chat, prompt, rules.trace, rules.prefill)
        # Tokens that a prompt has at most, and what of them the question and the two answers may use; one each is the
        # least.
        self._limit = rules.max_length - self._kept_free()
        self._room = self._limit - 1 - (bare - 3)
        if self._room < 3:
            free = f" and judge.trace keeps {self._kept_free()} free" * (rules.trace is not None)
            raise UserError(
                f"judge.max_length is {rules.max_length}, but the judge template alone takes about {bare - 3} tokens"
                f"{free}: raise it or shorten judge.template_file{' or a trace' * bool(free)}"
            )
        if rules.prefill is not None:
            check_prefill(chat, self._to_label(), rules.prefill, rules.labels)

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that changes a prompt, a span or a label: wording, rules, tokenizer and chat template."""
        rules = self.rules
        reference = rules.span is SpanMode.REFERENCE
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
            # Stored prompts from before there was a prefill, or a trace, are those without one.
            **({} if rules.prefill is None else {"prefill": rules.prefill}),
            **({} if rules.trace is None else {"trace": rules.trace.fingerprint()}),
            **self._of_training(),
        }

    def _of_training(self) -> dict[str, object]:
        """Returns what identifies the ids of training where another chat format gives them than the judge's."""
        other = self.rules.assembly is Assembly.IDS and self._training is not self.chat
        return {"training": self._training.fingerprint()} if other else {}

    @cached_property
    def label_ids(self) -> tuple[int, int]:
        """Returns ids of the two labels as the judge would write them right after its prompt.

        Raises UserError when a label is more than one token there and also on its own, when it is not in the
        vocabulary, or when both are the same token.
        """
        first, second = label_tokens(self.chat, self._to_label(), self.rules.labels)
        return first, second

    def _to_label(self) -> str:
        """Returns a prompt as text, to where a label follows it; after an empty trace, if there is one."""
        before = self._full(self.template.render("x", "x", "x").text)[0]
        trace = self.rules.trace
        return before if trace is None else before + trace.until + (self.rules.prefill or "")

    def _kept_free(self) -> int:
        """Returns tokens of ``rules.max_length`` that a trace and what follows it may take."""
        trace = self.rules.trace
        return 0 if trace is None or self.after_trace is None else trace.max_new_tokens + self.after_trace.size

    # ------------------------------------------------------------------------------------------ building

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Returns the two rounds: first with chosen as answer A, then with rejected as answer A.

        A token range is empty only when nothing of a response reaches the judge (dropped by the tokenizer, or blank at
        the end of a trimmed message). Raises UserError naming the pair for text that cannot be encoded or fitted.
        """
        question, cut = question_text(pair.prompt), False
        try:
            check_text(question, "the prompt")
            shown = {side: self._show(pair, side) for side in SIDES}
            rounds = self._place_both(question, shown)
            if max(len(placed.ids) for placed in rounds) >= self._limit:
                rounds, cut = self._shortened(question, shown), True
        except UserError as problem:
            raise UserError(f"pair {pair.pair_id}: {problem}") from problem
        self.counts += Counter({BLANK: sum(view.blank for view in shown.values())})
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

    def _show(self, pair: PreferencePair, side: str) -> _Shown:
        """Returns a response as the judge sees it, without a trace that is weighed apart."""
        response, begins = pair.response(side), start_apart(pair, side)
        check_text(response, f"the {side} response")
        if self.rules.assembly is Assembly.IDS:
            encoded = self._training.encode(pair.prompt, response)
            content = [i for i, (start, end) in enumerate(encoded.offsets) if end > max(start, begins)]
            if not content:
                return self._blank
            ids, offsets = [encoded.response_ids[i] for i in content], [encoded.offsets[i] for i in content]
            return _Shown(response, 0, False, (ids, offsets))
        whole = response[begins:]
        text = whole.strip() if self.rules.strip else whole
        if not text:
            return _Shown(" ", 0, True)
        return _Shown(text, len(response) - len(whole.lstrip()) if self.rules.strip else begins, False)

    def _place_both(self, question: str, shown: Mapping[str, _Shown]) -> list[_Placed]:
        if self.rules.assembly is Assembly.IDS:
            return self._spliced(question, shown)
        return [self._tokenized(question, dict(zip(ANSWERS, (shown[a], shown[b]), strict=True))) for a, b in _ORDERS]

    def _tokenized(self, question: str, answers: Mapping[str, _Shown]) -> _Placed:
        """TEXT: the rendered text tokenised once, spans by overlap with the answers' characters."""
        rendered = self.template.render(question, answers["answer_a"].text, answers["answer_b"].text)
        full, shift, low, high = self._full(rendered.text)
        ids, places = self.chat.tokenize(full)
        spans, offsets = {}, {}
        for name, view in answers.items():
            shift_back = view.start - rendered.spans[name][0] - shift
            # Blanks that the chat template trimmed from the message's ends are not there to be covered.
            begin, end = max(rendered.spans[name][0] + shift, low), min(rendered.spans[name][1] + shift, high)
            first = bisect_right(places, begin, key=itemgetter(1))
            last = max(first, bisect_left(places, end, key=itemgetter(0)))
            held = hold_every_character(as_places(places[first:last]), full, begin, end)
            if self.rules.span is SpanMode.REFERENCE:
                closing = bisect_left(places, end + (self._gaps[name] or 0), key=itemgetter(0))
                last = self._reference_end(first, last, closing)
            spans[name] = (first, last)
            own = np.stack([np.maximum(held[:, 0], begin), np.minimum(held[:, 1], end)], axis=1) + shift_back
            offsets[name] = as_ranges((np.zeros_like(own) if view.blank else own)[: last - first])
        return _Placed(ids, spans, offsets)

    def _spliced(self, question: str, shown: Mapping[str, _Shown]) -> list[_Placed]:
        """IDS: template parts tokenised on their own, the answers' training-side ids between them."""
        rendered = self.template.render(question, "x", "x")  # any visible text keeps blanks around it from trimming
        full, shift, _, _ = self._full(rendered.text)
        slots = [name for name in self.template.order if name in ANSWERS]
        edges = [(rendered.spans[name][0] + shift, rendered.spans[name][1] + shift) for name in slots]
        parts = [self.chat.tokenize(full[: edges[0][0]])]
        parts += [self._part(full[edges[0][1] : edges[1][0]]), self._part(full[edges[1][1] :])]
        rounds = []
        for order in _ORDERS:
            views = dict(zip(ANSWERS, (shown[side] for side in order), strict=True))
            placed = _Placed(list(parts[0][0]), {}, {})
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
        """End of the official code's span: so many tokens before the closing text's first one, at least one token."""
        return min(last, max(closing - self.rules.span_drop, first + 1))

    def _part(self, text: str) -> tuple[list[int], list[Range]]:
        if text in self._parts:
            return self._parts[text]
        tokens = self.chat.tokenize(text, start=False)
        if len(self._parts) < 8:  # constant parts come first; a template with the question in between must not pile up
            self._parts[text] = tokens
        return tokens

    # ------------------------------------------------------------------------------------------ the chat around it

    def _rendered(self, text: str) -> str:
        return self.chat.render([Message(role="user", content=text)], add_generation_prompt=True)

    def _full(self, text: str) -> tuple[str, int, int, int]:
        """Returns the whole prompt, what to add to a position in ``text`` to find it there, and the range
        ``text`` has.
        """
        prefill = (self.rules.prefill or "") if self.rules.trace is None else ""
        if not self.rules.chat:
            return text + prefill, 0, 0, len(text)
        full = self._rendered(text)
        place = place_in_frame(full, self._frame, text)
        if place is None:
            raise UserError(
                "the chat template changes a user message beyond trimming blanks at its ends, so the responses cannot "
                "be found in it: give another template as model.chat_template"
            )
        return full + prefill, place[1] - place[0], place[1], place[2]

    # ------------------------------------------------------------------------------------------ length

    def _whole_ranges(self, text: str) -> list[Range]:
        """Returns the ranges of a response's tokens, so that no cut behind one parts an accent from its letter."""
        places = as_places(self.chat.tokenize(text, start=False)[1])
        return as_ranges(hold_every_character(places, text, 0, len(text)))

    def _shortened(self, question: str, shown: Mapping[str, _Shown]) -> list[_Placed]:
        """Returns both rounds with fewer than ``_limit`` tokens: responses keep their beginning, the
        question its end.
        """
        asked = self.chat.tokenize(question, start=False)[1]
        tokens = {
            side: view.tokens[1] if view.tokens else self._whole_ranges(view.text) for side, view in shown.items()
        }
        sizes = [len(tokens[side]) for side in SIDES]
        room = self._room
        while room >= 3:
            keep, caps = share_room(room, len(asked), sizes, self.rules.max_response_length)
            begin = last_tokens(asked, keep, len(question))
            kept = {
                side: shown[side].first(tokens[side], first_tokens(tokens[side], cap))
                for side, cap in zip(SIDES, caps, strict=True)
            }
            rounds = self._place_both(question[begin:], kept)
            excess = max(len(placed.ids) for placed in rounds) - self._limit + 1
            if excess <= 0:
                cut_responses = sum(kept[side] != shown[side] for side in SIDES)
                self.counts += Counter({QUESTION_CUT: int(begin > 0), RESPONSE_CUT: cut_responses})
                return rounds
            room -= excess  # tokens at the seams: cut that much more
        raise UserError(
            f"the judge prompt cannot be cut below judge.max_length {self.rules.max_length}: raise it or shorten "
            "judge.template_file"
        )
