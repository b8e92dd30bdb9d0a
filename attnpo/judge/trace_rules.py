"""A judge that reasons before its verdict: how its trace is written, how it ends, and which tokens follow it."""

from dataclasses import dataclass

from attnpo.schema import Sampling, UserError
from attnpo.text.chat import ChatFormat
from attnpo.text.traces import CLOSE

# Raised by hand with every change of the code that moves a trace, or what is read after one.
TRACE_VERSION = "1"


@dataclass(frozen=True)
class TraceRules:
    """How a judge writes what it thinks before its verdict (config node ``judge.trace``).

    A trace ends with the text ``until``. One that has none after ``max_new_tokens`` tokens, or where the model ends its
    turn, is closed with that text and counts as cut. ``temperature`` 0 is greedy decoding; draws are keyed by ``seed``
    and by the prompt, so by the pair and the order of its answers.
    """

    max_new_tokens: int
    until: str = CLOSE
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.sampling()
        if not self.until.strip():
            raise UserError(f"until: expected the text that ends a trace, such as {CLOSE}, got {self.until!r}")

    def sampling(self) -> Sampling:
        """Returns the decoding settings."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)

    def unread(self) -> dict[str, str]:
        """Keys without effect: greedy decoding draws nothing."""
        return dict.fromkeys(("top_p", "top_k", "seed"), "judge.trace.temperature=0") if self.temperature == 0 else {}

    def fingerprint(self) -> dict[str, object]:
        """Returns every setting that changes a trace."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        return {
            "max_new_tokens": self.max_new_tokens,
            "until": self.until,
            **(drawn if self.temperature > 0 else {}),
            "code": TRACE_VERSION,
        }


@dataclass(frozen=True)
class AfterTrace:
    """The ids that follow a trace: ``closing`` after one that did not end by itself, then always ``prefill``."""

    closing: tuple[int, ...]
    prefill: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns tokens that may follow a trace."""
        return len(self.closing) + len(self.prefill)


def after_trace(chat: ChatFormat, prompt: str, rules: TraceRules, prefill: str | None) -> AfterTrace:
    """Returns the ids after a trace to ``prompt``, a rendered text that ends where the judge begins to write.

    UserError for a prompt or a prefill that closes a trace by itself, and for an ``until`` that the judge's tokenizer
    has no tokens for.
    """
    until = rules.until
    if prefill is not None and until.strip() in prefill:
        raise UserError(
            f"judge.prefill={prefill!r} closes a trace by itself: it is written after the trace and after "
            f"judge.trace.until={until!r}, so leave that out of it"
        )
    closing = _following(chat, prompt, until)
    if not closing or chat.tokenizer.unk_token_id in closing:
        raise UserError(
            f"judge.trace.until: the judge's tokenizer cannot write {until!r}, so no trace would end with it: give the "
            "text that ends a trace of this judge"
        )
    return AfterTrace(tuple(closing), () if prefill is None else tuple(_following(chat, prompt + until, prefill)))


def require_open(prompt: str, frame_end: str, until: str) -> None:
    """Raises UserError where the prompt closes the trace by itself: a model does not think after that.

    ``frame_end``: what the chat template writes between the question to the judge and its reply.
    """
    if until.strip() in frame_end or prompt.rstrip().endswith(until.strip()):
        raise UserError(
            f"judge.trace: the judge's prompt ends in {prompt[-60:]!r}, which has judge.trace.until={until!r} already, "
            "so the judge would not think: switch its thinking on (judge.chat_template_kwargs), or set judge.trace=null"
        )


def _following(chat: ChatFormat, before: str, text: str) -> list[int]:
    """Returns the ids of ``text`` after ``before``; on its own where both would merge into one token."""
    head, whole = chat.tokenize(before)[0], chat.tokenize(before + text)[0]
    return whole[len(head) :] if whole[: len(head)] == head else chat.tokenize(text, start=False)[0]
