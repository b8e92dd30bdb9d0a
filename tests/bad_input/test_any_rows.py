"""Rows of every convention with hostile content, through the whole way to a batch: every one is accounted for.

The rows are the same in every run (``derandomize``).
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from attnpo.config.compose import CONFIG_DIR
from attnpo.data.adapters import Columns, Note, Reason
from attnpo.data.base import PairSet, PairSource, pairs_from_rows
from attnpo.data.collate import collate
from attnpo.data.prepare import APART, UNREADABLE, VOID, EncodedSet, encode_pairs, prepare_examples
from attnpo.data.rules import AlignRules, LengthRules, OverlongAction
from attnpo.judge.base import LoadedJudge
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import Assembly, JudgeRules
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.layouts import padded_layout
from attnpo.schema import SIDES, PreferencePair, UserError
from attnpo.system.store import Store
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import SENTINEL, ChatFormat
from attnpo.text.traces import TraceHandling
from attnpo.weights.capture import ensure_captured
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.uniform import Uniform
from tests.bad_input.conftest import Record
from tests.text.formats import STORIES, Formats
from tests.weights.fakes import FakeJudge

EXAMPLES, ROWS = 100, 30  # batches of rows, rows in each
LAYERS = (1, 2)

# ------------------------------------------------------------------------------------------------ rows

_SNIPPETS = [
    "", " ", "\n", "\t \n", "good .", "the seat was tedious .", "a", "b", "\ud800", "x\udfffy", "\x00", "\u202eabc",
    "\u200b", "\ufeff", "👩🏽‍🔬", "e\u0301\u0323", "日本語", "\u2028", "\r\n", "</s>", "<end>", "<|end|>",
    "<bos><user>", "<|endoftext|>", "[INST]", "<unk>", "<pad>", SENTINEL, "{answer_b}", "{question}", "{{ x }}",
    "review B :\n", "which is better , A or B ?", "\n\nHuman:", "\n\nAssistant:", "\n\nHuman: Hi\n\nAssistant: Yo",
    "<think>", "</think>", "{% raw %}", "forbidden", "\\", '"', "'; --", "%s {0}",
]  # fmt: skip
_WHOLE = st.one_of(
    st.lists(st.sampled_from(_SNIPPETS), max_size=3).map("".join),
    st.text(max_size=12),
    st.tuples(st.sampled_from(["good ", "é", "日", "👩🏽‍🔬", " ", "\n", "</s>"]), st.sampled_from([60, 400])).map(
        lambda pair: pair[0] * pair[1]
    ),
)
_PLAIN = st.sampled_from(
    [
        "the seat was good .",
        "tedious",
        "<think>so",
        "<think>so</think>good .",
        "a forbidden word",
        "a {{ brace",
        "Jinja",
        "A",
        "the seat was large . " * 40,
    ]
)
_TEXT = st.one_of(_PLAIN, _WHOLE)
_JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=3), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
_ROLE = st.sampled_from(["user", "assistant"] * 4 + ["system", "tool", "human", "", "\ud800"])


def _said(text: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": text}


# As a prompt has them that attnpo.generate wrote; the last is no list.
_TOOLS = ["", '[{"name": "look"}]', '{"name": "look"}']


def _used(result: Any) -> list[dict[str, Any]]:
    """A call of a tool and its result."""
    return [{**_said(None), "tool_calls": [{"function": {"name": "look"}}]}, _said(result, "tool")]


_MESSAGE = st.one_of(
    st.builds(_said, _TEXT, _ROLE),
    st.builds(_said, _JUNK, _ROLE),
    st.dictionaries(st.sampled_from(["role", "content", "from"]), _JUNK),
)
_HISTORY = st.one_of(
    st.builds(lambda q: [_said(q, "user")], _TEXT),
    st.builds(lambda s, q: [_said(s, "system"), _said(q, "user")], _TEXT, _TEXT),
    st.builds(lambda q, a, r: [_said(q, "user"), _said(a), _said(r, "user")], _TEXT, _TEXT, _TEXT),
    st.builds(lambda q, t, r: [{**_said(q, "user"), "tools": t}, *_used(r)], _TEXT, st.sampled_from(_TOOLS), _TEXT),
    st.lists(_MESSAGE, max_size=3),
)
_LABELLED = st.builds(lambda q: f"\n\nHuman: {q}\n\nAssistant:", _TEXT)


def _conversations(history: list[Any], chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"chosen": [*history, _said(chosen)], "rejected": [*history, _said(rejected)]}


_CONVENTIONS = [
    st.builds(_conversations, _HISTORY, _TEXT, _TEXT),
    st.builds(lambda h, c, r, p: {**_conversations(h, c, r), "prompt": p}, _HISTORY, _TEXT, _TEXT, _TEXT),
    st.builds(
        lambda h, c, r: {"prompt": h, "chosen": [_said(c)], "rejected": [_said(r)]}, _HISTORY, _TEXT, _TEXT
    ),
    st.builds(lambda p, c, r: {"prompt": p, "chosen": [_said(c)], "rejected": [_said(r)]}, _TEXT, _TEXT, _TEXT),
    st.builds(lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r}, _TEXT, _TEXT, _TEXT),
    st.builds(lambda p, c, r: {"chosen": p + c, "rejected": p + r}, _LABELLED, _TEXT, _TEXT),
    st.builds(lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r}, _LABELLED, _TEXT, _TEXT),
    st.builds(lambda p, c, r: {"chosen": p + c, "rejected": p + r}, _TEXT, _TEXT, _TEXT),
    st.builds(lambda p, c, r, o: {"prompt": p, "chosen": c, "rejected": r, **o}, _JUNK, _JUNK, _JUNK,
              st.dictionaries(st.text(max_size=4), _JUNK, max_size=1)),
    st.builds(lambda row, key: {**row, key: None},
              st.builds(_conversations, _HISTORY, _PLAIN, _TEXT), st.sampled_from(["chosen", "rejected", "prompt"])),
    st.builds(lambda h, c, r: {name: str(turns) for name, turns in _conversations(h, c, r).items()},
              _HISTORY, _PLAIN, _PLAIN),
    st.builds(lambda h, g, c, r: {"chosen": [*h, _said(c)], "rejected": [*g, _said(r)]},
              _HISTORY, _HISTORY, _PLAIN, _TEXT),
    st.builds(lambda h, c, r: {"prompt": h, "chosen": [_said(c)], "rejected": _used(r)[:1]}, _HISTORY, _TEXT, _TEXT),
    st.builds(lambda p, c, r: {"prompt": p, "chosen": p + c, "rejected": p + r, "score_chosen": 1, "score_rejected": 1},
              _PLAIN, _TEXT, _TEXT),
    st.builds(lambda h, c, r: {"prompt": h, "chosen": [{**_said(c), "function_call": {"name": "look"}}],
              "rejected": [_said(r)]}, _HISTORY, st.one_of(st.none(), _PLAIN), _TEXT),
]  # fmt: skip
# A table has all its columns in every row.
_ROW = st.one_of(_CONVENTIONS).map(lambda row: {"prompt": None, "chosen": None, "rejected": None, **row})


def _with_exchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, the last of them in favour of the first with its responses exchanged, which is too rare by chance."""
    return [*rows[:-1], {**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}]


# ------------------------------------------------------------------------------------------------ tokenizers

# Refuses one word, rewrites another, renders the prompt differently after a third; turns of other roles are plain.
WILFUL = (
    "{% set ns = namespace(seen='') %}{% for m in messages %}{% set ns.seen = ns.seen + m['content'] %}"
    "{% if 'Jinja' in ns.seen %}{{ raise_exception('no Jinja here') }}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if '{{' in m['content'] and loop.last and not add_generation_prompt %}changed{% endif %} "
    "{{ m['content'] | replace('forbidden', '') }}{{ '<end>' if m['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def _testbed(template: str | None = None) -> ChatFormat:
    return ChatFormat(build_tokenizer(Grammar()), template)


def _bytes() -> ChatFormat:
    """A token per byte, blanks included."""
    core = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    return ChatFormat(tokenizer, STORIES)


LIKE_REAL = ("edge_merge", "edge_merge_untrimmed", "gpt2_chatml", "mistral")


@pytest.fixture(scope="module")
def chats() -> list[ChatFormat]:
    """Chat formats: the testbed's, also with a wilful template, bytes, and those of tokenizers like real ones."""
    formats = Formats()
    made = [_testbed(), _testbed(WILFUL), _testbed(WILFUL), _bytes(), _bytes()]
    return [*made, *(formats(name) for name in LIKE_REAL)]


# ------------------------------------------------------------------------------------------------ the account


class Account:
    """What became of all rows of all examples, by stage."""

    def __init__(self) -> None:
        self.rows = 0
        self.kept = 0
        self.reasons: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.batches = 0


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Without log lines, of which there would be thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def dropped(counts: Counter[str]) -> int:
    return sum(count for event, count in counts.items() if event.startswith("dropped: "))


def from_file(rows: list[dict[str, Any]], columns: Columns, folder: Path) -> PairSet | None:
    """The pairs that a source reads of these rows as JSON; None when the documented error says that there is none."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row, default=repr) + "\n" for row in rows))
    try:
        return PairSource(str(file), columns=columns).load("train")
    except UserError as problem:
        assert f"has no usable pairs: {len(rows)} rows read, 0 kept, {len(rows)} dropped; " in str(problem)
        return None


def encoded_or_refused(pairs: list[PreferencePair], chat: ChatFormat, rules: LengthRules) -> EncodedSet | None:
    """The encoded pairs, or None when the documented error says that none is left."""
    try:
        found = encode_pairs(pairs, chat, rules)
    except UserError as problem:
        assert str(problem).startswith(f"none of the {len(pairs)} pairs is usable (") and "\n" not in str(problem)
        return None
    assert found.read == len(pairs) == len(found.pairs) + dropped(found.tally.counts)
    for pair, sides in zip(found.pairs, found.encoded, strict=True):
        for side in SIDES:
            encoded, length = sides[side], len(pair.response(side))
            assert len(encoded.prompt_ids) <= rules.max_prompt_length
            assert 0 < len(encoded.response_ids) <= rules.max_length - len(encoded.prompt_ids)
            assert all(0 <= start <= end <= length for start, end in encoded.offsets)
    return found


def batched(found: EncodedSet, account: Account, captured: dict[str, Any] | None, align: AlignRules) -> None:
    """The pairs' examples as batches; checks their account, and that every number in them is finite."""
    source = Uniform() if captured is None else Attention(layer=1).resolve(2)
    made = prepare_examples(found, source, captured or {}, align, layers=() if captured is None else (1,))
    assert made.read == found.read == len(made.examples) + made.dropped
    assert made.dropped == dropped(made.tally.counts)
    account.events += made.tally.counts
    for start in range(0, len(made.examples), 4):
        batch = collate(made.examples[start : start + 4], padded_layout, 0, 4)
        weights = batch.main.token_weights["reward"]
        assert bool(torch.isfinite(weights).all()) and bool((weights >= 0).all())
        assert bool((weights.sum(dim=-1) <= 1 + 1e-5).all())
        assert not bool(weights[~batch.main.response_mask].any())
        account.batches += 1


def judge_rows(found: EncodedSet, prompts: JudgePromptBuilder) -> dict[str, Any]:
    """Captured weights of a judge that reads real prompts, from a store."""
    with TemporaryDirectory() as folder:
        table = (found.pairs, Attention(), LAYERS, Store(Path(folder)), prompts.fingerprint())
        load: Callable[[], object] = lambda: LoadedJudge(FakeJudge(num_layers=2), prompts)  # noqa: E731
        stored, report = ensure_captured(*table, load, verdicts=True)
        found_again, second = ensure_captured(*table, lambda: pytest.fail("all of it is stored"), verdicts=True)
        captured, again = dict(stored), dict(found_again)
    ids = {pair.pair_id for pair in found.pairs}
    assert captured.keys() == again.keys() == ids and report.computed == second.hits == len(ids)
    assert {name for name, pair in captured.items() if not pair.rounds} == {
        name for name, pair in again.items() if not pair.rounds
    }
    return captured


# By length, by what a template does, by the judge, by coverage.
EVENTS = (
    "dropped: prompt longer than lengths.max_prompt_length",
    "dropped: prompt and response longer than lengths.max_length",
    "dropped: the chat template rejects its turns",
    "dropped: the chat template omits tool calls",
    "dropped: the chat template rewrites the response",
    "dropped: the chat template renders the prompt differently when a response follows",
    UNREADABLE,
    "dropped: coverage below align.min_coverage",
    "cut: prompt to its last",
    "cut: chosen response",
    "cut: rejected response",
    "special token spelled out in the chosen response",
    "special token spelled out in the rejected response",
    "special token spelled out in the prompt",
    "dropped: both responses have the same training tokens",
    "no weighted token in the",
)


def test_every_row_is_accounted_for_at_each_stage(chats: list[ChatFormat], record: Record, tmp_path: Path) -> None:
    """Thousands of rows, among them every documented reason, note and event; nothing raises what is not documented."""
    account = Account()

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        rows=st.lists(_ROW, min_size=ROWS, max_size=ROWS).map(_with_exchanged),
        columns=st.sampled_from(
            [
                Columns(),
                Columns(traces=TraceHandling.STRIP),
                Columns(traces=TraceHandling.WEIGH_APART),
                Columns(prompt=None),
                Columns(system="prompt", prompt=None),
            ]
        ),
        chat=st.sampled_from(chats),
        rules=st.sampled_from([LengthRules(200, 150), LengthRules(80, 40), LengthRules(60, 30, OverlongAction.DROP)]),
        judge=st.builds(
            JudgeRules,
            template_file=st.just(str(CONFIG_DIR / "judge" / "testbed.txt")),
            assembly=st.sampled_from(Assembly),
            max_length=st.sampled_from([240, 512]),
            max_response_length=st.just(64),
        ),
        align=st.sampled_from([AlignRules(), AlignRules(AlignMethod.CHARACTERS), AlignRules(min_coverage=0.9)]),
    )
    def whole_way(
        rows: list[dict[str, Any]],
        columns: Columns,
        chat: ChatFormat,
        rules: LengthRules,
        judge: JudgeRules,
        align: AlignRules,
    ) -> None:
        for read in (pairs_from_rows(rows, columns), from_file(rows, columns, tmp_path)):
            assert read is None or read.read == len(rows) == read.num_kept + read.num_dropped
        if read is None:
            return
        account.rows += len(rows)
        account.kept += read.num_kept
        account.reasons += read.counts
        account.notes += read.notes
        found = encoded_or_refused(read.pairs, chat, rules)
        if found is None:
            return
        batched(found, account, None, align)
        captured = judge_rows(found, JudgePromptBuilder(judge, chat))
        batched(found, account, captured, align)

    whole_way()
    assert account.rows >= 2000
    assert account.batches > 200
    assert set(account.reasons) == {reason.value for reason in Reason}
    assert set(account.notes) == {note.value for note in Note}
    assert [event for event in EVENTS if not any(name.startswith(event) for name in account.events)] == []
    apart = [f"{side} response {APART}" for side in ("chosen", "rejected")]
    known = (*EVENTS, VOID, "judge rounds tokenised a response", *apart)
    assert [name for name in account.events if not name.startswith(known)] == []
    lost = account.reasons.total()
    assert account.rows == account.kept + lost
    summary = f"{account.rows} rows read, {account.kept} kept, {lost} dropped for {len(account.reasons)} reasons"
    record("generated rows of every convention", summary, f"{lost} of {account.rows} rows, counted")
