"""Converts conversations to training ids: the rendered prompt, and the response with character ranges.

The rendered conversation is tokenised without adding special tokens, so only the template determines turn headers and
end-of-turn tokens. A BOS is prepended only if the tokenizer would add one and the template has not.
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
from attnpo.text.ranges import Offsets, Range, as_array, extend_over_gaps
from attnpo.text.template import SENTINEL as SENTINEL
from attnpo.text.template import RefusedText as RefusedText
from attnpo.text.template import RunawayTemplate as RunawayTemplate
from attnpo.text.template import (
    TokenWithoutEmbedding,
    ToolSupport,
    choose_template,
    describe_syntax_error,
    get_tools,
    prepend_options,
    settable_variables,
    to_template_turns,
)
from attnpo.text.template import check_surrogates as check_surrogates
from attnpo.text.template import locate_answer_in_rendered_turn as locate_answer_in_rendered_turn
from attnpo.text.template import split_frame as split_frame
from attnpo.text.traces import TextSpan, add_trace, get_trace, has_trace, locate_trace, strip_trace, to_response_ranges

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

    Encodings = Mapping[str, Encoding]


class DeadlineExceeded(Exception):
    """Raised when code exceeds the time limit of ``deadline``."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises ``DeadlineExceeded`` inside the context once this thread has used ``seconds`` of CPU time.

    Time in which the process is stopped or waiting does not count. The limit is not enforced outside the main thread
    (other threads receive no signals), on systems without interval timers, or during a single call into C code that
    does not check for signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    began = time.thread_time()

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if time.thread_time() - began >= seconds:
            raise DeadlineExceeded

    before = signal.signal(signal.SIGALRM, on_alarm)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if left:  # another timer was running: restart it with its remaining time
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def limit_memory(room: int) -> Iterator[None]:
    """Raises MemoryError inside the context once the process uses ``room`` bytes more than at the start.

    The limit applies to the whole process and is set only if /proc reports the memory that the process uses.
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
"""CPU seconds allowed for rendering one prompt with all responses; real templates take milliseconds."""
ROOM, LONGEST = 2**30, 10**7
"""Maximum memory in bytes for rendering a conversation, and maximum number of characters that a template may add."""

AT_ONCE, CHARACTERS = 256, 2**22
"""Maximum number of prompts, and of characters, that are tokenised together."""

_NONE: "Encodings" = {}
_LEAVE_OUT = "set data.columns.traces=strip to train on the answer without its reasoning trace, or "

_UNREAD = (
    "the chat template never reads tools, so the functions in the data do not appear in the prompts; set "
    "model.chat_template to a template that uses them, or remove data.columns.tools"
)

NOT_A_PREFIX = "prompt is not a token prefix"

# Errors that rendering a template can raise: its own, and those of its expressions.
_FAULTS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class EmbeddedIds:
    """Ids that have an embedding in the model: ids below ``count``, or all ids if ``count`` is None.

    Logs a warning if the padding token has no embedding.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", count: int | None) -> None:
        self._tokenizer, self.count = tokenizer, count
        pad = tokenizer.pad_token_id
        if pad is not None and self.is_out_of_range(pad):
            log.warning(
                "the padding token %r of %r has the id %d, but the model has only %d token embeddings: rows are padded "
                "with the id %d instead, which does not change results",
                tokenizer.pad_token,
                tokenizer.name_or_path,
                pad,
                count,
                self.pad_id,
            )

    @property
    def pad_id(self) -> int:
        """Returns the id used for padding: the first of padding token, EOS token and 0 that has an embedding."""
        known = (self._tokenizer.pad_token_id or 0, self._tokenizer.eos_token_id, 0)
        return next(index for index in known if index is not None and not self.is_out_of_range(index))

    def is_out_of_range(self, token: int) -> bool:
        """Returns whether the model has no embedding for ``token``."""
        return self.count is not None and token >= self.count

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises TokenWithoutEmbedding if the model has no embedding for one of ``ids``."""
        last = max(ids, default=0)
        if self.is_out_of_range(last):
            raise TokenWithoutEmbedding(
                "a token that the model has no embedding for",
                f"the token {self._tokenizer.convert_ids_to_tokens(last)!r} of {self._tokenizer.name_or_path!r} has "
                f"the id {last}, but the model has {self.count} token embeddings (vocab_size in its config.json): "
                "remove it from the chat template (set model.chat_template) or from the text, or use a model whose "
                "embeddings were resized to its tokenizer (resize_token_embeddings)",
            )


class EncodedResponses(NamedTuple):
    """Encoded responses to one prompt, up to the first response that was rejected with ``problem``.

    ``apart``: for each response, whether it was tokenised separately because its first characters merge with the
    prompt's last token.
    """

    encoded: list[EncodedResponse]
    apart: list[bool]
    problem: RefusedText | None = None


class _Conversation(NamedTuple):
    """Rendered conversation, with the length of the rendered prompt and the position of the response."""

    full: str
    before: int
    pieces: list[TextSpan]
    response: str

    @property
    def response_start(self) -> int:
        """Returns the start of the response, or of the template's text before the trace if the response has one."""
        return self.before if len(self.pieces) > 1 else self.pieces[0].start

    @property
    def response_prefix(self) -> str:
        """Returns the text between generation prompt and response; "" if there is only whitespace."""
        head = self.full[self.before : self.response_start]
        return head if head.strip() else ""

    @property
    def prompt_text(self) -> str:
        """Returns the text that is tokenised as the prompt."""
        return self.full[: self.before] + self.response_prefix.rstrip()


class _Rendered(NamedTuple):
    """Rendered conversations of one prompt, up to the first conversation that failed with ``problem``."""

    conversations: list[_Conversation]
    problem: UserError | None
    unread: bool

    @property
    def texts_to_tokenize(self) -> list[str]:
        """Returns the texts to tokenise."""
        return [text for one in self.conversations for text in (one.full, one.prompt_text)]


class ChatFormat:
    """Converts messages to token ids with a tokenizer and a chat template.

    ``chat_template`` replaces the tokenizer's template; ``fallback`` is used if neither exists; ``chosen`` is the
    template in use. ``kwargs`` sets variables of the template (e.g. ``enable_thinking``); ``fold_system`` prepends a
    system turn's text to the first user turn, separated by an empty line. Both options are prepended to
    ``chat_template`` as code, and so apply to every rendering, the fingerprint and exports. ``part``: config node of
    the options. ``rows``: number of token embeddings of the model, None if unknown; all ids are below it.
    ``counts["prompt is not a token prefix"]`` counts responses that were tokenised separately because their first
    characters merge with the prompt's last token.

    Raises:
        UserError: the tokenizer has no template or no character ranges (is not "fast"), ``kwargs`` has variables
            that the template never reads, or the template does not terminate or outputs a token without an embedding.
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
                f"the tokenizer {tokenizer.name_or_path!r} provides no character offsets ({type(tokenizer).__name__}, "
                "not a fast tokenizer), which alignment needs: use a model folder with a tokenizer.json"
            )
        self.chosen = choose_template(tokenizer, chat_template, fallback, part)
        self.chat_template = prepend_options(self.chosen.text, tokenizer, kwargs, fold_system, part)
        self._part, self._folds, self.rows = part, fold_system, EmbeddedIds(tokenizer, rows)
        if "strftime_now" in self.chat_template:
            log.warning(
                "the chat template inserts today's date, so prompts and the results stored for them change every day"
            )
        self.tokenizer = tokenizer
        self.counts: Counter[str] = Counter()
        self._plain: Tokenizer | None = None
        self._special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special |= {index for index in tokenizer.all_special_ids if index is not None}
        self._spelling = {index: str(tokenizer.convert_ids_to_tokens(index)).strip() for index in self._special}
        spelled = sorted(map(re.escape, filter(None, self._spelling.values())), key=len, reverse=True)
        self._spelled = re.compile("|".join(spelled) or r"(?!)")  # matches nothing if there are none
        self._bos: int | None = tokenizer.bos_token_id if self._should_add_bos(tokenizer.bos_token_id) else None
        self._eos: int | None = tokenizer.eos_token_id
        self._ends: set[int] = set() if self._eos is None else {self._eos}
        self._probed = False
        self._frame: tuple[str, str] | None = None
        self._last_prompt: tuple[str, list[int], list[Range]] | None = None
        self._fingerprint: dict[str, object] | None = None
        self._runaway: RunawayTemplate | None = None
        self._said: set[str] = set()
        self._tools = ToolSupport(self.chat_template)
        self._try_template()

    def _try_template(self) -> None:
        """Raises if the template does not terminate or outputs a token without an embedding; only logs other errors."""
        prompt, answer = [Message(role="user", content="a")], Message(role="assistant", content="a")
        for turns in (prompt, [*prompt, answer]):
            try:
                self.tokenize(self.render(turns, add_generation_prompt=turns is prompt))
            except (RunawayTemplate, TokenWithoutEmbedding):
                raise
            except UserError as problem:
                log.debug("the chat template rejects a conversation of %d turns: %s", len(turns), problem)

    @property
    def _backend(self) -> "Tokenizer":
        """Returns the tokenizer's backend, or a copy without padding, truncation or splitting of special tokens."""
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

    def _should_add_bos(self, bos: int | None) -> bool:
        return bos is not None and self._backend.encode("a", add_special_tokens=True).ids[:1] == [bos]

    # ------------------------------------------------------------------------------------------ text and ids

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, template: str | None = None) -> str:
        """Renders a conversation as text, using ``template`` instead of the format's own template if given.

        Raises:
            UserError: the template rejects the messages (its own error message is included) or does not terminate
                within RENDERING seconds; after a timeout, further calls raise immediately.
        """
        if self._ignores_tools(messages):
            self._log_once(logging.WARNING, _UNREAD)
        with self._limit_rendering():
            return self._render(messages, add_generation_prompt, template)

    @contextmanager
    def _limit_rendering(self) -> Iterator[None]:
        """Limits time and memory of rendering inside the context; after a limit is exceeded, all later calls fail."""
        try:
            with deadline(RENDERING), limit_memory(ROOM):
                yield
        except (DeadlineExceeded, MemoryError) as problem:
            spent = (
                f"computed for {RENDERING:g} seconds" if isinstance(problem, DeadlineExceeded) else "ran out of memory"
            )
            self._runaway = RunawayTemplate(
                "the chat template (model.chat_template if set, else that of "
                f"{self.tokenizer.name_or_path!r}) {spent} on one conversation and was stopped; set "
                "model.chat_template to a different template"
            )
            raise self._runaway from problem

    def _ignores_tools(self, messages: Sequence[Message]) -> bool:
        return self._runaway is None and get_tools(messages) is not None and not self._tools.has_tools_variable

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, template: str | None = None) -> str:
        if self._runaway is not None:
            raise self._runaway
        turns, tools = to_template_turns(messages), get_tools(messages)
        text = self._apply_template(turns, tools, add_generation_prompt, template)
        self._tools.check(turns, lambda marked: self._apply_template(marked, tools, add_generation_prompt, template))
        return text

    def _apply_template(
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
            raise UserError(describe_syntax_error(problem)) from problem
        except OverflowError as problem:  # Jinja's sandbox limits range(), and floats overflow
            raise RefusedText(
                "the chat template computes a number that is too large",
                f"the chat template computes a number that is too large ({problem}); set model.chat_template to "
                "a different template",
            ) from problem
        except _FAULTS as problem:
            roles = ", ".join(turn["role"] for turn in turns)
            fold = ", set model.fold_system=true to move a system turn's text into the first user turn,"
            system = self._part == "model" and not self._folds and "system" in roles.split(", ")
            raise RefusedText(
                "the chat template rejects its turns",
                f"the chat template rejects a conversation with the roles [{roles}]: {problem}; change the data's "
                f"roles{fold * system} or set model.chat_template to a different template",
            ) from problem
        return str(text)

    def tokenize(self, text: str, start: bool = True) -> tuple[list[int], list[Range]]:
        """Tokenises rendered text; returns the token ids and their half-open character ranges.

        No special tokens are added, except for a BOS with the range (0, 0). It is added if ``start`` is set (the text
        begins a sequence), the tokenizer would add a BOS and the text has none.

        Raises:
            UserError: the text has lone surrogates, or the model has no embedding for a token.
        """
        check_surrogates(text, "the rendered text")
        return self._read_encoding(self._backend.encode(text, add_special_tokens=False), start)

    def _read_encoding(self, encoding: "Encoding", start: bool = True) -> tuple[list[int], list[Range]]:
        ids: list[int] = encoding.ids
        offsets: list[Range] = encoding.offsets
        if start and self._bos is not None and ids[:1] != [self._bos]:
            ids, offsets = [self._bos, *ids], [(0, 0), *offsets]
        self.rows.check_ids(ids)
        return ids, offsets

    def prompt_ids(self, prompt: Sequence[Message]) -> list[int]:
        """Returns the ids of prompt and generation prompt, with exactly one BOS if the tokenizer adds a BOS.

        Raises:
            UserError: the template rejects the messages, or the text cannot be encoded.
        """
        return list(self._tokenize_prompt(self.render(prompt, add_generation_prompt=True))[0])

    def inference_template(self) -> str:
        """Returns a chat template whose rendered text yields ``prompt_ids``, including a BOS if training prepends one.

        Generation libraries tokenise the rendered text without adding special tokens. If the template does not
        reproduce the training ids, either with or without a BOS, a warning is logged and the format's own template is
        returned.
        """
        probes = []
        for roles in (["user"], ["system", "user"]):
            turns = [Message(role=role, content="a") for role in roles]
            try:
                probes.append((turns, self.prompt_ids(turns)))
            except UserError as problem:
                log.debug("cannot encode a prompt with the roles %s: %s", roles, problem)
        for start in ("", "{{ bos_token }}", "{{ bos_token }} "):
            template = start + self.chat_template
            texts = [self.render(turns, add_generation_prompt=True, template=template) for turns, _ in probes]
            plain = [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
            if plain == [ids for _, ids in probes]:
                return template
        log.warning(
            "prompts start with different tokens in training and in generation libraries; check the chat template"
        )
        return self.chat_template

    def _tokenize_prompt(self, text: str, known: "Encodings" = _NONE) -> tuple[list[int], list[Range]]:
        if self._last_prompt is None or self._last_prompt[0] != text:  # shared by both responses of a pair
            self._last_prompt = (text, *self._tokenize_known(text, known))
        return self._last_prompt[1], self._last_prompt[2]

    def _tokenize_known(self, text: str, known: "Encodings") -> tuple[list[int], list[Range]]:
        return self._read_encoding(known[text]) if text in known else self.tokenize(text)

    # ------------------------------------------------------------------------------------------ responses

    def encode(self, prompt: Sequence[Message], response: str) -> EncodedResponse:
        """Returns prompt ids, response ids including the end-of-turn token, and the response tokens' character ranges.

        Visible text that the template writes between generation prompt and response (e.g. an empty thought) belongs to
        the prompt. Whitespace there belongs to the response, as it is usually part of the response's first token.
        Ranges are half open and refer to ``response`` as given, even if the template trims it; tokens that contain no
        response text (template text, end of turn) have the range (len, len). If the template does not end the turn with
        a special token, the tokenizer's EOS is added. An empty response consists of just the end-of-turn token.

        Raises:
            UserError: the template rewrites the prompt or the response, no token can end the turn, or the text has lone
                surrogates.
        """
        found = self.encode_responses(prompt, [response])
        if found.problem is not None:
            raise found.problem
        return found.encoded[0]

    def encode_responses(self, prompt: Sequence[Message], responses: Sequence[str]) -> EncodedResponses:
        """Encodes several responses to one prompt, up to the first response that is rejected."""
        return self._encode_rendered(self._render_responses(prompt, responses), _NONE)

    def encode_many(
        self, conversations: Iterable[tuple[Sequence[Message], Sequence[str]]]
    ) -> Iterator[EncodedResponses]:
        """Yields the result of ``encode_responses`` for each pair of a prompt and a list of responses.

        AT_ONCE prompts are tokenised together on all cores while this thread renders the next ones (rendering limits
        only work in the main thread). Other errors of ``encode`` are raised when they occur.
        """
        rest, merged = iter(conversations), self.counts[NOT_A_PREFIX]
        with ThreadPoolExecutor(1) as pool:
            batch, job = self._start_batch(rest, pool)
            job.result()  # start the tokenizer's threads before any memory limit is set
            while batch:
                after = self._start_batch(rest, pool)
                yield from map(partial(self._encode_rendered, known=job.result()), batch)
                batch, job = after
        log.debug("%d responses were tokenised again, separately from the prompt", self.counts[NOT_A_PREFIX] - merged)

    def _start_batch(
        self, rest: Iterator[tuple[Sequence[Message], Sequence[str]]], pool: ThreadPoolExecutor
    ) -> "tuple[list[_Rendered], Future[Encodings]]":
        batch: list[_Rendered] = []
        size = 0
        while len(batch) < AT_ONCE and size < CHARACTERS and (one := next(rest, None)) is not None:
            batch.append(self._render_responses(*one))
            size += sum(map(len, batch[-1].texts_to_tokenize))
        texts = list(dict.fromkeys(text for rendered in batch for text in rendered.texts_to_tokenize))
        tokenize = partial(self._backend.encode_batch, texts, add_special_tokens=False)
        return batch, pool.submit(lambda: dict(zip(texts, tokenize(), strict=True)))

    def _render_responses(self, prompt: Sequence[Message], responses: Sequence[str]) -> _Rendered:
        placed: list[_Conversation] = []
        unread, before, problem = False, None, None
        try:
            with self._limit_rendering():
                for response in responses:
                    check_surrogates(response, "the response")
                    if before is None:
                        unread = self._ignores_tools(prompt)
                        before = self._render(prompt, add_generation_prompt=True)
                    full = self._render_with_response(prompt, before, response)
                    pieces = self._locate_response(prompt, before, full, response)
                    check_surrogates(full, "the rendered text")
                    placed.append(_Conversation(full, len(before), pieces, response))
        except UserError as error:
            problem = error
        return _Rendered(placed, problem, unread)

    def _encode_rendered(self, rendered: _Rendered, known: "Encodings") -> EncodedResponses:
        found = EncodedResponses([], [])
        if rendered.unread:
            self._log_once(logging.WARNING, _UNREAD)
        try:
            for conversation in rendered.conversations:
                encoded, is_prefix = self._split_prompt_response(conversation, known)
                if not is_prefix:
                    self.counts[NOT_A_PREFIX] += 1
                found.encoded.append(encoded)
                found.apart.append(not is_prefix)
            if rendered.problem is not None:
                raise rendered.problem
        except RefusedText as problem:
            return found._replace(problem=problem)
        return found

    def _split_prompt_response(self, conversation: _Conversation, known: "Encodings") -> tuple[EncodedResponse, bool]:
        full, begin, head = conversation.full, conversation.response_start, conversation.response_prefix
        ids, offsets = self._tokenize_known(full, known)
        if head:
            self._log_once(
                logging.INFO,
                f"the chat template inserts {head!r} before a response; this text counts as part of the prompt",
            )
        prompt_ids, prompt_offsets = self._tokenize_prompt(conversation.prompt_text, known)
        count = len(prompt_ids)
        is_prefix = ids[:count] == prompt_ids and offsets[:count] == prompt_offsets
        if is_prefix:
            while head and count < len(ids) and offsets[count][1] <= begin:
                count += 1  # a separate blank token; a blank within the response's first token stays there
            prompt_ids, ids, offsets = ids[:count], ids[count:], offsets[count:]
        else:
            seam = begin if head else conversation.before
            prompt_ids, _ = self._tokenize_prompt(full[:seam])
            ids, offsets = self.tokenize(full[seam:], start=False)
            offsets = [(start + seam, stop + seam) for start, stop in offsets]
        end = conversation.pieces[-1].end
        ids, offsets = self._cut_after_end_token(ids, offsets, end)
        places = extend_over_gaps(as_array(offsets), full, begin, end)
        places = to_response_ranges(places, conversation.pieces, len(conversation.response))
        return EncodedResponse(list(prompt_ids), ids, Offsets(places)), is_prefix

    def _log_once(self, level: int, text: str) -> None:
        """Logs ``text`` unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            log.log(level, "%s", text)

    def _assistant_turn(self, response: str) -> Message:
        """Returns the assistant turn, with the trace in a separate field if the template reads that field."""
        apart = get_trace(response) if REASONING in self.chat_template else None
        if apart is None:
            return Message(role="assistant", content=response)
        answer = strip_trace(response)
        return Message(role="assistant", content=answer, reasoning_content=apart)

    def _render_with_response(self, prompt: Sequence[Message], before: str, response: str) -> str:
        full = self._render([*prompt, self._assistant_turn(response)], add_generation_prompt=False)
        if full.startswith(before):
            return full
        place = next((i for i, (a, b) in enumerate(zip(before, full, strict=False)) if a != b), len(full))
        read = ", ".join(settable_variables(self.chat_template, self.tokenizer))
        options = f"set {self._part}.chat_template_kwargs (the template reads {read}), or " if read else ""
        raise RefusedText(
            "the chat template renders the prompt differently when a response follows",
            "the chat template renders the prompt differently when an assistant turn follows: at character "
            f"{place} the prompt alone has {before[place : place + 40]!r}, but the conversation has "
            f"{full[place : place + 40]!r}; for training, the conversation must begin with the prompt: "
            f"{_LEAVE_OUT * has_trace(response)}{options}set model.chat_template to a template that keeps the prompt",
        )

    def _locate_response(self, prompt: Sequence[Message], before: str, full: str, response: str) -> list[TextSpan]:
        """Locates the response in ``full``: as one span, or as separate spans for tags, trace and answer."""
        for learn in (False, True):
            if learn or self._frame is None:
                self._frame = self._find_answer_frame(prompt, before, has_trace(response))
            place = locate_answer_in_rendered_turn(full[len(before) :], self._frame, response)
            if place is not None:
                return [TextSpan(place[1] + len(before), place[2] + len(before), place[0])]
            body = full[len(before) : len(full) - len(self._frame[1])]
            traced = locate_trace(body, response) if full.endswith(self._frame[1]) else None
            if traced is not None:
                return [TextSpan(start + len(before), stop + len(before), at) for start, stop, at in traced]
        raise RefusedText(
            "the chat template rewrites the response",
            "the chat template changes the text of an assistant turn beyond trimming surrounding whitespace: the "
            f"response {response[:60]!r} became {full[len(before) :][:80]!r}; "
            f"{_LEAVE_OUT * has_trace(response)}set model.chat_template to a different template",
        )

    def _find_answer_frame(self, prompt: Sequence[Message], before: str, traced: bool) -> tuple[str, str]:
        """Returns the text before and after an answer, rendered with a trace if the template fails without one."""
        try:
            probe = self._render_with_response(prompt, before, SENTINEL)
        except RefusedText:
            if not traced:
                raise
            probe = self._render_with_response(prompt, before, add_trace("a", SENTINEL))
        return split_frame(probe[len(before) :])

    def _cut_after_end_token(self, ids: list[int], offsets: list[Range], end: int) -> tuple[list[int], list[Range]]:
        """Truncates after the first special token that follows the content, or appends EOS if there is none."""
        # A special token within the response ends at or before ``end``, so it is never mistaken for the end token.
        for index in range(bisect_right(offsets, end, key=lambda place: place[1]), len(ids)):
            if ids[index] in self._special:
                self._ends.add(ids[index])
                return ids[: index + 1], [*offsets[:index], (end, end)]
        if self._eos is None:
            raise UserError(
                "the chat template does not end an assistant turn with a special token and the tokenizer has no EOS "
                "token: use a tokenizer with an EOS token, or set model.chat_template to a template that ends the turn"
            )
        self.rows.check_ids([self._eos])
        return [*ids, self._eos], [*offsets, (end, end)]

    def count_special_inside(self, encoded: EncodedResponse, response: str) -> int:
        """Counts special tokens in ``encoded`` that come from text in ``response``, e.g. a literal "</s>"."""
        if self._special.isdisjoint(encoded.response_ids[:-1]):  # the last one is usually the end of turn
            places = zip(encoded.response_ids[-1:], encoded.offsets[-1:], strict=True)
        else:
            places = zip(encoded.response_ids, encoded.offsets, strict=True)
        return sum(
            response[start:end].strip().startswith(self._spelling[token])
            for token, (start, end) in places
            if token in self._special and end > start
        )

    def has_special_tokens(self, prompt: Sequence[Message]) -> bool:
        """Returns whether a message of ``prompt`` contains a special token as text, as in already rendered prompts."""
        return any(self._spelled.search(turn["content"]) for turn in prompt)

    @property
    def end_ids(self) -> frozenset[int]:
        """Returns the ids that end an assistant turn: EOS and end-of-turn tokens seen in the template's output."""
        if not self._probed:
            self._probed, counts, self.counts = True, self.counts, Counter()
            try:
                self.encode([Message(role="user", content="a")], "a")
            except UserError as problem:  # a template for prompts only can still be used for judging and generation
                log.debug("cannot determine an end-of-turn token from the template: %s", problem)
            self.counts = counts
        return frozenset(self._ends)

    def _answer_prefix(self) -> str:
        """Returns the template's text between generation prompt and answer; "" if it rejects a single turn."""
        try:
            turns = [Message(role="user", content="a")]
            with self._limit_rendering():
                before = self._render(turns, add_generation_prompt=True)
                return split_frame(self._render_with_response(turns, before, SENTINEL)[len(before) :])[0]
        except UserError as problem:
            log.debug("cannot determine the template's text before an answer: %s", problem)
            return ""

    def fingerprint(self) -> dict[str, object]:
        """Returns digests of the tokenizer (vocabulary, merges, normaliser, added tokens) and of the template."""
        if self._fingerprint is None:
            head = self._answer_prefix()
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
