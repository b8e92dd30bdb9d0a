"""Training ids of a conversation: the prompt as the template renders it, the response with its character ranges.

The ids are those of the rendered conversation, tokenised without adding special tokens; the template alone decides
about headers and the end of turn. BOS is put in front only where the tokenizer would do so and the template did not.
"""

import hashlib
import logging
import re
import signal
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from attnpo.schema import REASONING, EncodedResponse, Message, UserError
from attnpo.text.ranges import Offsets, Range, as_places, hold_every_character
from attnpo.text.template import SENTINEL as SENTINEL
from attnpo.text.template import RefusedText as RefusedText
from attnpo.text.template import RunawayTemplate as RunawayTemplate
from attnpo.text.template import (
    TokenWithoutRow,
    ToolUse,
    choose_template,
    describe_syntax,
    settable,
    tools_of,
    with_options,
    without_tools,
)
from attnpo.text.template import check_text as check_text
from attnpo.text.template import place_in_frame as place_in_frame
from attnpo.text.template import split_frame as split_frame
from attnpo.text.traces import Piece, all_in_response, has_trace, place_traced, trace_of, with_trace, without_trace

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

    Encodings = Mapping[str, Encoding]


class Overran(Exception):
    """Timeout of what ran inside ``deadline``."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises ``Overran`` in what runs inside once this thread has computed for ``seconds``.

    Time in which the process was stopped or waited for a busy machine does not count. Signals reach the main thread
    alone: in others, and where the system has no interval timers, nothing is limited. Nor is a single call into C that
    does not look for signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    began = time.thread_time()

    def ring(number: int, frame: FrameType | None) -> None:
        if time.thread_time() - began >= seconds:
            raise Overran

    before = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if left:  # another timer ran: it goes on with what was left of it
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def within(room: int) -> Iterator[None]:
    """Makes what runs inside meet a MemoryError once the process takes ``room`` bytes more than it has.

    The limit is the process's: it holds in the main thread alone, and where the system tells what a process has.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = int(file.read().split()[0])
    except OSError:
        pages = None
    if pages is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    asked = pages * resource.getpagesize() + room
    known = [limit for limit in (asked, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


log = logging.getLogger(__name__)

RENDERING = 10.0
"""Seconds of computing that a prompt and its answers may take to render; real templates take milliseconds."""
ROOM, LONGEST = 2**30, 10**7
"""Bytes of memory that a conversation may take to render, and characters that a template may add to its turns."""

AT_ONCE, CHARACTERS = 256, 2**22
"""Prompts whose texts are tokenised at once, and characters after which they are fewer."""

_NONE: "Encodings" = {}
_LEAVE_OUT = "set data.columns.traces=strip to train on the answer without its reasoning trace, or "

_UNREAD = (
    "the chat template never reads tools: the functions that the data name change nothing in its prompts; give a "
    "template that writes them as model.chat_template, or leave data.columns.tools out"
)

NOT_A_PREFIX = "prompt is not a token prefix"

# What a template can raise: its own refusals, and whatever an expression in it runs into.
_FAULTS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class TokenRows:
    """Token ids that a model has embeddings for: those below ``count``, or all where it is None.

    Logs a warning where the padding token is outside.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", count: int | None) -> None:
        self._tokenizer, self.count = tokenizer, count
        pad = tokenizer.pad_token_id
        if pad is not None and self.is_outside(pad):
            log.warning(
                "the padding token %r of %r has the id %d, and the model has %d token embeddings: rows are padded with "
                "the id %d instead, which changes no number",
                tokenizer.pad_token,
                tokenizer.name_or_path,
                pad,
                count,
                self.pad_id,
            )

    @property
    def pad_id(self) -> int:
        """Returns the id for padding positions: the tokenizer's, or where that is outside EOS's, or 0."""
        known = (self._tokenizer.pad_token_id or 0, self._tokenizer.eos_token_id, 0)
        return next(index for index in known if index is not None and not self.is_outside(index))

    def is_outside(self, token: int) -> bool:
        """Tells whether the model has no embedding for a token."""
        return self.count is not None and token >= self.count

    def require(self, ids: Sequence[int]) -> None:
        """Raises TokenWithoutRow where one of ``ids`` is outside."""
        last = max(ids, default=0)
        if self.is_outside(last):
            raise TokenWithoutRow(
                "a token that the model has no embedding for",
                f"the token {self._tokenizer.convert_ids_to_tokens(last)!r} of {self._tokenizer.name_or_path!r} has "
                f"the id {last}, and the model has {self.count} token embeddings (vocab_size in its config.json): take "
                "it out of the chat template (model.chat_template gives another) or of the text, or give a model whose "
                "embeddings were resized to its tokenizer (resize_token_embeddings)",
            )


class EncodedAnswers(NamedTuple):
    """Responses to one prompt up to the first refused one, whose ``problem`` it is.

    ``apart``: whether each was tokenised on its own, as its first characters merge with the prompt's last token.
    """

    encoded: list[EncodedResponse]
    apart: list[bool]
    problem: RefusedText | None = None


class _Conversation(NamedTuple):
    """Rendered conversation: the length of its prompt as rendered, and where its response stands in it."""

    full: str
    before: int
    pieces: list[Piece]
    response: str

    @property
    def begin(self) -> int:
        """Returns where the response begins, the template's text around a trace included."""
        return self.before if len(self.pieces) > 1 else self.pieces[0].start

    @property
    def head(self) -> str:
        """Returns what the template writes between its generation prompt and the response; empty for mere blanks."""
        head = self.full[self.before : self.begin]
        return head if head.strip() else ""

    @property
    def prompt(self) -> str:
        """Returns the text whose ids are the prompt's."""
        return self.full[: self.before] + self.head.rstrip()


class _Rendered(NamedTuple):
    """Conversations of one prompt up to the first that failed, whose ``problem`` it is."""

    conversations: list[_Conversation]
    problem: UserError | None
    unread: bool

    @property
    def texts(self) -> list[str]:
        """Returns what of them is tokenised."""
        return [text for one in self.conversations for text in (one.full, one.prompt)]


class ChatFormat:
    """Tokenizer and a chat template as one function from messages to ids.

    ``chat_template`` replaces the tokenizer's own template text, ``fallback`` stands in where there is none; ``chosen``
    says which of them it is. ``kwargs`` are values of variables that the template reads (``enable_thinking``);
    ``fold_system`` puts a system turn's text in front of the first user turn, a blank line between. Both stand in front
    of ``chat_template`` from then on, so in every rendering, in the fingerprint and in what is exported; ``part`` is
    the config node that they belong to. ``rows``: the token embeddings of the model that the ids are for, None where
    they are not known; no id lies outside them. ``counts`` has "prompt is not a token prefix" for responses whose first
    characters merge with the prompt's last token and were therefore tokenised on their own.

    Raises UserError for a tokenizer without a template, for one that gives no character ranges (not "fast"), for
    ``kwargs`` that the template never reads, for a template that does not come to an end, and for one that writes a
    token that the model has no row for.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        *,
        fallback: str | None = None,
        kwargs: Mapping[str, object] | None = None,
        fold_system: bool = False,
        part: str = "model",
        rows: int | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path!r} gives no character offsets ({type(tokenizer).__name__}, "
                "not a fast tokenizer); spans and alignment need them: use a model folder with a tokenizer.json"
            )
        self.chosen = choose_template(tokenizer, chat_template, fallback, part)
        self.chat_template = with_options(self.chosen.text, tokenizer, kwargs, fold_system, part)
        self._part, self._folds, self.rows = part, fold_system, TokenRows(tokenizer, rows)
        if "strftime_now" in self.chat_template:
            log.warning("the chat template writes today's date: prompts, and what is stored for them, change every day")
        self.tokenizer = tokenizer
        self.counts: Counter[str] = Counter()
        self._plain: Tokenizer | None = None
        self._special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special |= {index for index in tokenizer.all_special_ids if index is not None}
        self._spelling = {index: str(tokenizer.convert_ids_to_tokens(index)).strip() for index in self._special}
        spelled = sorted(map(re.escape, filter(None, self._spelling.values())), key=len, reverse=True)
        self._spelled = re.compile("|".join(spelled) or r"(?!)")  # without any, it matches nowhere
        self._bos: int | None = tokenizer.bos_token_id if self._adds_bos(tokenizer.bos_token_id) else None
        self._eos: int | None = tokenizer.eos_token_id
        self._ends: set[int] = set() if self._eos is None else {self._eos}
        self._probed = False
        self._frame: tuple[str, str] | None = None
        self._last_prompt: tuple[str, list[int], list[Range]] | None = None
        self._fingerprint: dict[str, object] | None = None
        self._runaway: RunawayTemplate | None = None
        self._said: set[str] = set()
        self._tools = ToolUse(self.chat_template)
        self._try_template()

    def _try_template(self) -> None:
        """Refuses a template that runs away, or writes a token without a row. What else it refuses is told on use."""
        prompt, answer = [Message(role="user", content="a")], Message(role="assistant", content="a")
        for turns in (prompt, [*prompt, answer]):
            try:
                self.tokenize(self.render(turns, add_generation_prompt=turns is prompt))
            except (RunawayTemplate, TokenWithoutRow):
                raise
            except UserError as problem:
                log.debug("the chat template refuses %d turns: %s", len(turns), problem)

    @property
    def _backend(self) -> "Tokenizer":
        """Returns the tokenizer's backend, or a copy where its file or last caller has it pad, cut or split."""
        own: Tokenizer = self.tokenizer.backend_tokenizer
        split = self.tokenizer.split_special_tokens
        if own.padding is None and own.truncation is None and own.encode_special_tokens == split:
            return own
        if self._plain is None:
            self._plain = deepcopy(own)
            self._plain.no_padding()
            self._plain.no_truncation()
            self._plain.encode_special_tokens = split
        return self._plain

    def _adds_bos(self, bos: int | None) -> bool:
        return bos is not None and self._backend.encode("a", add_special_tokens=True).ids[:1] == [bos]

    # ------------------------------------------------------------------------------------------ text and ids

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, template: str | None = None) -> str:
        """Returns the conversation as text; ``template`` is used in place of the format's own.

        Raises UserError with the template's own words when it refuses the messages, and when it runs away: after
        RENDERING seconds the first time, at once from then on.
        """
        if self._leaves_tools(messages):
            self._say(logging.WARNING, _UNREAD)
        with self._limit_rendering():
            return self._render(messages, add_generation_prompt, template)

    @contextmanager
    def _limit_rendering(self) -> Iterator[None]:
        """Stops what is rendered inside at its limits, then and from then on."""
        try:
            with deadline(RENDERING), within(ROOM):
                yield
        except (Overran, MemoryError) as problem:
            spent = f"computed for {RENDERING:g} seconds" if isinstance(problem, Overran) else "wrote without end"
            self._runaway = RunawayTemplate(
                "the chat template (model.chat_template where that is set, else that of "
                f"{self.tokenizer.name_or_path!r}) {spent} over one conversation and was stopped; give another "
                "template as model.chat_template"
            )
            raise self._runaway from problem

    def _leaves_tools(self, messages: Sequence[Message]) -> bool:
        return self._runaway is None and tools_of(messages) is not None and not self._tools.reads

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, template: str | None = None) -> str:
        if self._runaway is not None:
            raise self._runaway
        turns, tools = without_tools(messages), tools_of(messages)
        text = self._written(turns, tools, add_generation_prompt, template)
        self._tools.check(turns, lambda marked: self._written(marked, tools, add_generation_prompt, template))
        return text

    def _written(
        self,
        turns: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template: str | None,
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(turns),
                tools=tools,  # type: ignore[arg-type]
                chat_template=template or self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
            if len(text) > LONGEST + sum(len(turn["content"]) for turn in turns):
                raise MemoryError
        except TemplateSyntaxError as problem:
            raise UserError(describe_syntax(problem)) from problem
        except OverflowError as problem:  # Jinja's sandbox limits range(), and floats end
            raise RefusedText(
                "the chat template computes too large a number",
                f"the chat template computes a number that is too large ({problem}); give another template as "
                "model.chat_template",
            ) from problem
        except _FAULTS as problem:
            roles = ", ".join(turn["role"] for turn in turns)
            fold = ", set model.fold_system=true to put a system turn's text in front of the first user turn,"
            system = self._part == "model" and not self._folds and "system" in roles.split(", ")
            raise RefusedText(
                "the chat template refuses its turns",
                f"the chat template refuses a conversation with the roles [{roles}]: {problem}; change the data's "
                f"roles{fold * system} or give another template as model.chat_template",
            ) from problem
        return str(text)

    def tokenize(self, text: str, start: bool = True) -> tuple[list[int], list[Range]]:
        """Returns ids of rendered text and the half-open character range of each; no special tokens are added.

        The exception is one BOS, with the range (0, 0), when ``start`` says that the text begins a sequence, the
        tokenizer would add it and the text has none. Raises UserError for text with lone surrogates, and for a token
        that the model has no row for.
        """
        check_text(text, "the rendered text")
        return self._read(self._backend.encode(text, add_special_tokens=False), start)

    def _read(self, encoding: "Encoding", start: bool = True) -> tuple[list[int], list[Range]]:
        ids: list[int] = encoding.ids
        offsets: list[Range] = encoding.offsets
        if start and self._bos is not None and ids[:1] != [self._bos]:
            ids, offsets = [self._bos, *ids], [(0, 0), *offsets]
        self.rows.require(ids)
        return ids, offsets

    def prompt_ids(self, prompt: Sequence[Message]) -> list[int]:
        """Returns ids of the prompt and the generation prompt, with exactly one BOS where the tokenizer has one.

        Raises UserError when the template refuses the messages or the text cannot be encoded.
        """
        return list(self._prompt(self.render(prompt, add_generation_prompt=True))[0])

    def inference_template(self) -> str:
        """Returns the chat template whose text alone gives ``prompt_ids``: with a BOS where training puts one in front.

        Libraries for generation tokenise what the template renders and add no special token. Where no template with or
        without a BOS gives the ids of training, which is logged, it is the format's own.
        """
        probes = []
        for roles in (["user"], ["system", "user"]):
            turns = [Message(role=role, content="a") for role in roles]
            try:
                probes.append((turns, self.prompt_ids(turns)))
            except UserError as problem:
                log.debug("no prompt of the roles %s: %s", roles, problem)
        for start in ("", "{{ bos_token }}", "{{ bos_token }} "):
            template = start + self.chat_template
            texts = [self.render(turns, add_generation_prompt=True, template=template) for turns, _ in probes]
            plain = [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
            if plain == [ids for _, ids in probes]:
                return template
        log.warning("libraries that generate begin a prompt with other tokens than training does; check the template")
        return self.chat_template

    def _prompt(self, text: str, known: "Encodings" = _NONE) -> tuple[list[int], list[Range]]:
        if self._last_prompt is None or self._last_prompt[0] != text:  # both responses of a pair share it
            self._last_prompt = (text, *self._tokens(text, known))
        return self._last_prompt[1], self._last_prompt[2]

    def _tokens(self, text: str, known: "Encodings") -> tuple[list[int], list[Range]]:
        return self._read(known[text]) if text in known else self.tokenize(text)

    # ------------------------------------------------------------------------------------------ responses

    def encode(self, prompt: Sequence[Message], response: str) -> EncodedResponse:
        """Returns prompt ids, response ids up to and with the end-of-turn token, and the response tokens' characters.

        Visible text that the template puts between its generation prompt and the response (an empty thought) is part of
        the prompt; a blank there is not, as the response's first token mostly holds it.
        Ranges are half open in ``response`` as given, also when the template trims it; tokens that hold none of its
        characters (text the template puts around the response, the end of turn) have (len, len). A turn that the
        template does not close with a special token gets the tokenizer's EOS. An empty response is the end token alone.

        Raises UserError when the template rewrites the prompt or the response, when there is no token to end the turn
        with, and for text with lone surrogates.
        """
        found = self.encode_answers(prompt, [response])
        if found.problem is not None:
            raise found.problem
        return found.encoded[0]

    def encode_answers(self, prompt: Sequence[Message], responses: Sequence[str]) -> EncodedAnswers:
        """Returns what ``encode`` gives for responses to one prompt, up to the first that is refused."""
        return self._finish(self._place(prompt, responses), _NONE)

    def encode_many(self, conversations: Iterable[tuple[Sequence[Message], Sequence[str]]]) -> Iterator[EncodedAnswers]:
        """Yields for each prompt with its responses what ``encode_answers`` gives.

        AT_ONCE of them are tokenised together, on all cores, while this thread renders the next ones (only the main
        thread can hold templates to their limits). Raises what else ``encode`` raises where it is met.
        """
        rest, merged = iter(conversations), self.counts[NOT_A_PREFIX]
        with ThreadPoolExecutor(1) as pool:
            batch, job = self._begin(rest, pool)
            job.result()  # the tokenizer's threads start while no template's memory is limited
            while batch:
                after = self._begin(rest, pool)
                yield from map(partial(self._finish, known=job.result()), batch)
                batch, job = after
        log.debug("%d responses were tokenised again, on their own", self.counts[NOT_A_PREFIX] - merged)

    def _begin(
        self, rest: Iterator[tuple[Sequence[Message], Sequence[str]]], pool: ThreadPoolExecutor
    ) -> "tuple[list[_Rendered], Future[Encodings]]":
        batch: list[_Rendered] = []
        size = 0
        while len(batch) < AT_ONCE and size < CHARACTERS and (one := next(rest, None)) is not None:
            batch.append(self._place(*one))
            size += sum(map(len, batch[-1].texts))
        texts = list(dict.fromkeys(text for rendered in batch for text in rendered.texts))
        tokenize = partial(self._backend.encode_batch, texts, add_special_tokens=False)
        return batch, pool.submit(lambda: dict(zip(texts, tokenize(), strict=True)))

    def _place(self, prompt: Sequence[Message], responses: Sequence[str]) -> _Rendered:
        placed: list[_Conversation] = []
        unread, before, problem = False, None, None
        try:
            with self._limit_rendering():
                for response in responses:
                    check_text(response, "the response")
                    if before is None:
                        unread = self._leaves_tools(prompt)
                        before = self._render(prompt, add_generation_prompt=True)
                    full = self._with_response(prompt, before, response)
                    pieces = self._locate(prompt, before, full, response)
                    check_text(full, "the rendered text")
                    placed.append(_Conversation(full, len(before), pieces, response))
        except UserError as error:
            problem = error
        return _Rendered(placed, problem, unread)

    def _finish(self, rendered: _Rendered, known: "Encodings") -> EncodedAnswers:
        found = EncodedAnswers([], [])
        if rendered.unread:
            self._say(logging.WARNING, _UNREAD)
        try:
            for conversation in rendered.conversations:
                encoded, is_prefix = self._divide(conversation, known)
                if not is_prefix:
                    self.counts[NOT_A_PREFIX] += 1
                found.encoded.append(encoded)
                found.apart.append(not is_prefix)
            if rendered.problem is not None:
                raise rendered.problem
        except RefusedText as problem:
            return found._replace(problem=problem)
        return found

    def _divide(self, conversation: _Conversation, known: "Encodings") -> tuple[EncodedResponse, bool]:
        full, begin, head = conversation.full, conversation.begin, conversation.head
        ids, offsets = self._tokens(full, known)
        if head:
            self._say(
                logging.INFO,
                f"the chat template writes {head!r} in front of an answer: it counts as part of the prompt",
            )
        prompt_ids, prompt_offsets = self._prompt(conversation.prompt, known)
        count = len(prompt_ids)
        is_prefix = ids[:count] == prompt_ids and offsets[:count] == prompt_offsets
        if is_prefix:
            while head and count < len(ids) and offsets[count][1] <= begin:
                count += 1  # a blank on its own; one that the response's first token holds stays there
            prompt_ids, ids, offsets = ids[:count], ids[count:], offsets[count:]
        else:
            seam = begin if head else conversation.before
            prompt_ids, _ = self._prompt(full[:seam])
            ids, offsets = self.tokenize(full[seam:], start=False)
            offsets = [(start + seam, stop + seam) for start, stop in offsets]
        end = conversation.pieces[-1].end
        ids, offsets = self._close(ids, offsets, end)
        places = hold_every_character(as_places(offsets), full, begin, end)
        places = all_in_response(places, conversation.pieces, len(conversation.response))
        return EncodedResponse(list(prompt_ids), ids, Offsets(places)), is_prefix

    def _say(self, level: int, text: str) -> None:
        """Logs ``text`` once."""
        if text not in self._said:
            self._said.add(text)
            log.log(level, "%s", text)

    def _answer(self, response: str) -> Message:
        """Returns the assistant's turn; a trace stands in a variable of its own where the template reads one."""
        apart = trace_of(response) if REASONING in self.chat_template else None
        if apart is None:
            return Message(role="assistant", content=response)
        answer = without_trace(response)
        return Message(role="assistant", content=answer, reasoning_content=apart)

    def _with_response(self, prompt: Sequence[Message], before: str, response: str) -> str:
        full = self._render([*prompt, self._answer(response)], add_generation_prompt=False)
        if full.startswith(before):
            return full
        place = next((i for i, (a, b) in enumerate(zip(before, full, strict=False)) if a != b), len(full))
        read = ", ".join(settable(self.chat_template, self.tokenizer))
        options = f"set {self._part}.chat_template_kwargs (the template reads {read}), or " if read else ""
        raise RefusedText(
            "the chat template renders its prompt differently once an answer follows",
            "the chat template renders the prompt differently once an assistant turn follows: at character "
            f"{place} the prompt alone has {before[place : place + 40]!r}, the conversation has "
            f"{full[place : place + 40]!r}; training needs the prompt to be the beginning of the conversation: "
            f"{_LEAVE_OUT * has_trace(response)}{options}give a template that keeps it as model.chat_template",
        )

    def _locate(self, prompt: Sequence[Message], before: str, full: str, response: str) -> list[Piece]:
        """Returns where the response stands in ``full``: in one piece, or tags, trace and answer apart."""
        for learn in (False, True):
            if learn or self._frame is None:
                self._frame = self._learn_frame(prompt, before, has_trace(response))
            place = place_in_frame(full[len(before) :], self._frame, response)
            if place is not None:
                return [Piece(place[1] + len(before), place[2] + len(before), place[0])]
            body = full[len(before) : len(full) - len(self._frame[1])]
            traced = place_traced(body, response) if full.endswith(self._frame[1]) else None
            if traced is not None:
                return [Piece(start + len(before), stop + len(before), at) for start, stop, at in traced]
        raise RefusedText(
            "the chat template rewrites its response",
            "the chat template changes the text of an assistant turn beyond trimming blanks at its ends: the response "
            f"{response[:60]!r} became {full[len(before) :][:80]!r}; "
            f"{_LEAVE_OUT * has_trace(response)}give another template as model.chat_template",
        )

    def _learn_frame(self, prompt: Sequence[Message], before: str, traced: bool) -> tuple[str, str]:
        """Returns the text around an answer, which may have to follow a trace to be one that follows this prompt."""
        try:
            probe = self._with_response(prompt, before, SENTINEL)
        except RefusedText:
            if not traced:
                raise
            probe = self._with_response(prompt, before, with_trace("a", SENTINEL))
        return split_frame(probe[len(before) :])

    def _close(self, ids: list[int], offsets: list[Range], end: int) -> tuple[list[int], list[Range]]:
        """Returns tokens up to the first special one after the content's last character, or all of them and EOS."""
        # A special token written inside the response ends at or before ``end``, so it is never taken for the end.
        for index in range(bisect_right(offsets, end, key=lambda place: place[1]), len(ids)):
            if ids[index] in self._special:
                self._ends.add(ids[index])
                return ids[: index + 1], [*offsets[:index], (end, end)]
        if self._eos is None:
            raise UserError(
                "the chat template does not end an assistant turn with a special token and the tokenizer has no EOS "
                "token: give a tokenizer with one, or a template that closes the turn as model.chat_template"
            )
        self.rows.require([self._eos])
        return [*ids, self._eos], [*offsets, (end, end)]

    def special_inside(self, encoded: EncodedResponse, response: str) -> int:
        """Returns how many special tokens of ``encoded`` are spelled out in ``response`` itself (a literal "</s>")."""
        if self._special.isdisjoint(encoded.response_ids[:-1]):  # the last one mostly is the end of turn
            places = zip(encoded.response_ids[-1:], encoded.offsets[-1:], strict=True)
        else:
            places = zip(encoded.response_ids, encoded.offsets, strict=True)
        return sum(
            response[start:end].strip().startswith(self._spelling[token])
            for token, (start, end) in places
            if token in self._special and end > start
        )

    def spells_special(self, prompt: Sequence[Message]) -> bool:
        """Tells whether a message of ``prompt`` spells out a special token, as a prompt rendered already does."""
        return any(self._spelled.search(turn["content"]) for turn in prompt)

    @property
    def end_ids(self) -> frozenset[int]:
        """Returns ids that end an assistant turn: EOS and the end-of-turn tokens the template was seen to write."""
        if not self._probed:
            self._probed, counts, self.counts = True, self.counts, Counter()
            try:
                self.encode([Message(role="user", content="a")], "a")
            except UserError as problem:  # a template for prompts only is still good for judging and generation
                log.debug("no end-of-turn token learnt from the template: %s", problem)
            self.counts = counts
        return frozenset(self._ends)

    def _head(self) -> str:
        """Returns the text between generation prompt and answer; empty where the template refuses one turn."""
        try:
            turns = [Message(role="user", content="a")]
            with self._limit_rendering():
                before = self._render(turns, add_generation_prompt=True)
                return split_frame(self._with_response(turns, before, SENTINEL)[len(before) :])[0]
        except UserError as problem:
            log.debug("the template's text in front of an answer is not known: %s", problem)
            return ""

    def fingerprint(self) -> dict[str, object]:
        """Digests of the tokenizer (vocabulary, merges, normaliser, added tokens) and of the template text."""
        if self._fingerprint is None:
            head = self._head()
            self._fingerprint = {
                "tokenizer": hashlib.sha256(self._backend.to_str().encode()).hexdigest(),
                "chat_template": hashlib.sha256(self.chat_template.encode()).hexdigest(),
                "special_ids": sorted(self._special),
                "bos_token": self.tokenizer.bos_token,
                "bos_added": self._bos,
                "eos": self._eos,
                **({"part_of_the_prompt": head} if head.strip() else {}),
            }
        return dict(self._fingerprint)
