"""A judge that thinks first, through the commands: what is read after its traces, what is kept, what is refused."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo import show, weigh
from attnpo.cli.entry import run_entry
from attnpo.judge import traces as judge_traces
from attnpo.judge.base import JudgePrompt, ReasoningTrace
from attnpo.judge.settings import TraceRules
from attnpo.judge.traces import TraceGenerator, trace_key
from attnpo.run.input_summary import example_statistics
from attnpo.run.resolve import resolve
from attnpo.schema import PairWeights, PreferencePair
from attnpo.system.store import Store
from attnpo.weigher import Weigher
from attnpo.weights.capture import load_captured
from tests.run.made import make_inputs
from tests.run.worlds import TRAIN, VAL, World, build_world

MOST = 6
PAIRS = TRAIN + VAL
PREFILL = "the better review is"


@dataclass(frozen=True)
class Thinking:
    """A tiny world, the word that ends its judge's traces, and by prompt the ids that greedy decoding writes."""

    world: World
    until: str
    greedy: Mapping[tuple[int, ...], list[int]]

    @property
    def words(self) -> list[str]:
        """The judge's options."""
        return [f"judge.trace={{max_new_tokens: {MOST}, until: {self.until}}}", f"judge.prefill={PREFILL}",
                "judge.labels=[' A',' B']"]  # fmt: skip

    def with_store(self, store: Path) -> World:
        return World(self.world.model, self.world.data, store)


def weighs(world: World, *more: str) -> int:
    words = [word for word in world.overrides(*more) if not word.startswith(("callbacks.", "batch."))]
    return run_entry(weigh.main, "weigh", words, "", "", complete=lambda cfg: cfg.prepare is None)


def continued(model: Any, ids: Sequence[int], ends: set[int]) -> list[int]:
    """What the model writes, one forward of the whole sequence a token; the id that ends it is the last."""
    written: list[int] = []
    while len(written) < MOST and not (written and written[-1] in ends):
        with torch.no_grad():
            written.append(int(model(input_ids=torch.tensor([[*ids, *written]])).logits[0, -1].argmax()))
    return written


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Thinking:
    """The world with a word that the judge writes in about half of its traces."""
    world = build_world(tmp_path_factory.mktemp("thinking"))
    model = AutoModelForCausalLM.from_pretrained(world.model, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    judge = resolve(world.config("weights=attention")).readers.make_judge()
    prompts = [prompt for pair in pairs_of(world) for prompt in judge.prompts.build(pair)]
    greedy = {
        tuple(prompt.input_ids): continued(model, prompt.input_ids, {tokenizer.eos_token_id}) for prompt in prompts
    }
    # A trace ends with a text, so one that no other word holds.
    spelled = {token: tokenizer.decode([token]).strip() for token in range(len(tokenizer))}
    ordinary = [
        token
        for token, word in spelled.items()
        if token not in tokenizer.all_special_ids and sum(word in other for other in [*spelled.values(), PREFILL]) == 1
    ]
    counts = {token: sum(token in written[:-1] for written in greedy.values()) for token in ordinary}
    best = min(counts, key=lambda token: (abs(counts[token] - len(greedy) / 2), token))
    assert 0 < counts[best] < len(greedy)
    return Thinking(world, tokenizer.decode([best]).strip(), greedy)


def pairs_of(world: World) -> list[PreferencePair]:
    source = world.config().data
    return [pair for split in ("train", "val") for pair in source.load(split).pairs]


def prompts_of(world: World, words: Sequence[str]) -> tuple[Any, dict[str, tuple[JudgePrompt, JudgePrompt]]]:
    judge = resolve(world.config("weights=attention", *words)).readers.make_judge()
    return judge, {pair.pair_id: judge.prompts.build(pair) for pair in pairs_of(world)}


def captured(world: World, ids: Sequence[str]) -> dict[str, PairWeights]:
    (key,) = world.store.glob("weights/*/key.json")
    table = Store(world.store).table("weights", json.loads(key.read_text()))
    return load_captured(table, list(ids), (1, 2))


def load_traces(world: World) -> dict[str, ReasoningTrace]:
    (key,) = world.store.glob("traces/*/key.json")
    table = Store(world.store).table("traces", json.loads(key.read_text()))
    names = [name for entry in key.parent.glob("*.json") if entry != key
             for name in json.loads(entry.read_text())["pairs"]]  # fmt: skip
    return judge_traces.TraceCache(table).find_traces(names)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of prompts of every call of the generator."""
    counts: list[int] = []
    original = TraceGenerator.generate

    def generate(self: TraceGenerator, prompts: Sequence[Sequence[int]]) -> Iterator[dict[int, ReasoningTrace]]:
        counts.append(len(prompts))
        yield from original(self, prompts)

    monkeypatch.setattr(TraceGenerator, "generate", generate)
    return counts


# ------------------------------------------------------------------------------------------------ what is read


def test_rows_verdicts_and_label_mass_are_those_after_the_trace(
    thinking: Thinking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By eager attention on the ids one after another: prompt, trace by greedy decoding, closing, prefill."""
    world = thinking.with_store(tmp_path)
    assert weighs(world, *thinking.words) == 0
    model = AutoModelForCausalLM.from_pretrained(world.model, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    (end,) = tokenizer.convert_tokens_to_ids([thinking.until])
    labels, prefill = tokenizer.convert_tokens_to_ids(["A", "B"]), tokenizer.convert_tokens_to_ids(PREFILL.split())
    _, prompts = prompts_of(world, thinking.words)
    stored, traces = captured(world, list(prompts)), load_traces(world)
    masses, cut, lengths = [], 0, []
    for pair_id, both in prompts.items():
        for prompt, found in zip(both, stored[pair_id].rounds, strict=True):
            written = thinking.greedy[tuple(prompt.input_ids)]
            closed = end in written
            ids = written[: written.index(end) + 1] if closed else [i for i in written if i != tokenizer.eos_token_id]
            assert traces[trace_key(prompt.input_ids)] == (tuple(ids), tokenizer.decode(ids), closed)
            assert found.trace == (len(ids), closed)
            whole = [*prompt.input_ids, *ids, *([] if closed else [end]), *prefill]
            with torch.no_grad():
                output = model(input_ids=torch.tensor([whole]), output_attentions=True)
            rows = torch.stack([layer[0, :, -1].mean(0) for layer in output.attentions])
            logits = output.logits[0, -1]
            for side in ("chosen", "rejected"):
                start, stop = prompt.spans[side]
                assert torch.allclose(found.side(side).weights, rows[:, start:stop], atol=1e-6)
            assert found.verdict_logits is not None
            assert torch.allclose(found.verdict_logits, logits[labels], atol=1e-5)
            masses.append(float(logits.softmax(-1)[labels].sum()))
            lengths.append(len(ids))
            cut += not closed
    measured = json.loads(next(tmp_path.glob("label_mass/*.json")).read_text())
    assert measured["share"] == pytest.approx(sum(masses[:32]) / 32, rel=1e-4)
    assert 0 < cut < 2 * PAIRS
    assert f"at most {2 * PAIRS * MOST} tokens in total (judge.trace.max_new_tokens={MOST})" in caplog.text
    mean = sum(lengths) / len(lengths)
    assert f"judge: {2 * PAIRS} traces with {mean:.1f} tokens on average, at most {max(lengths)}" in caplog.text
    (warned,) = [record for record in caplog.records if "judge's trace was cut" in record.getMessage()]
    assert warned.levelname == "WARNING" and f"cut: {cut} of {2 * PAIRS} " in warned.getMessage()


def test_python_reads_the_same(thinking: Thinking, tmp_path: Path) -> None:
    world = thinking.with_store(tmp_path)
    assert weighs(world, *thinking.words, "data.train_rows=0:2", "data.val_rows=0:1") == 0
    pair = pairs_of(world)[0]
    weigher = Weigher(
        world.model,
        template="judge/testbed.txt",
        max_length=512,
        prefill=PREFILL,
        labels=(" A", " B"),
        trace=TraceRules(MOST, thinking.until),
        device="cpu",
    )
    raw = weigher(pair.prompt[0]["content"], pair.chosen, pair.rejected).captured
    assert raw is not None
    for mine, theirs in zip(raw.rounds, captured(world, [pair.pair_id])[pair.pair_id].rounds, strict=True):
        assert mine.trace == theirs.trace
        assert torch.allclose(mine.chosen.weights, theirs.chosen.weights, atol=1e-6)


# ------------------------------------------------------------------------------------------------ what is kept


def test_an_interrupted_pass_goes_on_and_other_weights_write_nothing(
    thinking: Thinking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    world = thinking.with_store(tmp_path)
    monkeypatch.setattr(judge_traces, "AT_ONCE", 4)
    words = [*thinking.words, "judge.token_budget=200"]
    original = judge_traces.TraceCache.add_traces

    def keep(self: judge_traces.TraceCache, traces: Mapping[str, ReasoningTrace]) -> None:
        original(self, traces)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(judge_traces.TraceCache, "add_traces", keep)
        assert weighs(world, *words) != 0
    first = len(load_traces(world))
    assert 4 <= first < 32 and asked == [32]
    assert weighs(world, *words) == 0
    assert asked == [32, 32 - first, 2 * PAIRS - 32]
    assert weighs(world, *words, "weights=rollout") == 0
    assert len(asked) == 3, "other weights by the same judge"
    assert weighs(world, *thinking.words[1:], f"judge.trace={{max_new_tokens: 3, until: {thinking.until}}}") == 0
    assert asked[3:] == [32, 2 * PAIRS - 32], "another setting, other traces"


def test_the_account_of_a_run_and_show_has_them(
    thinking: Thinking, tmp_path: Path, asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    world = thinking.with_store(tmp_path)
    account = example_statistics(make_inputs(world.config("weights=attention", *thinking.words)))["judge_traces"]
    traces, calls = load_traces(world), len(asked)
    assert account["traces"] == len(traces) == 2 * PAIRS
    assert account["cut"] == sum(not trace.closed for trace in traces.values())
    assert account["mean"] == pytest.approx(sum(len(trace.ids) for trace in traces.values()) / len(traces), abs=0.01)
    words = [word for word in world.overrides(*thinking.words) if not word.startswith(("callbacks.", "batch.", "tra"))]
    assert show.run_show([*words, "rows=1"]) == 0
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    _, prompts = prompts_of(world, thinking.words)
    for number, prompt in enumerate(prompts[pairs_of(world)[0].pair_id], 1):
        text = re.sub(r"\s+", " ", traces[trace_key(prompt.input_ids)].text)
        assert f"the judge's reasoning trace in round {number}: {text}" in told
    assert f"after the judge's trace and '{PREFILL}'" in told and len(asked) == calls


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_model_that_cannot_write_is_refused_before_the_pass(
    thinking: Thinking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = thinking.with_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.LlamaForCausalLM.can_generate", classmethod(lambda cls: False))
        assert weighs(world, *thinking.words) == 2
    assert "judge.trace: LlamaForCausalLM cannot generate a trace" in capsys.readouterr().err

    def broken(*given: object, **named: object) -> None:
        raise IndexError("no cache")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.LlamaForCausalLM.generate", broken)
        assert weighs(world, *thinking.words) == 2
    assert "cannot generate a trace (IndexError: no cache)" in capsys.readouterr().err
    assert not list(tmp_path.glob("weights/*/*.parquet"))


def test_settings_that_cannot_be(thinking: Thinking, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = thinking.with_store(tmp_path)
    for given, told in (
        ("{max_new_tokens: 8, until: ' '}", "judge.trace: until: expected the text that ends a trace"),
        ("{max_new_tokens: 8}", "judge.trace.until: the judge's tokenizer cannot encode '</think>'"),
        (f"{{max_new_tokens: 500, until: {thinking.until}}}", "judge.trace reserves 501"),
        ("{until: good}", "judge.trace.max_new_tokens: required"),
    ):
        assert weighs(world, f"judge.trace={given}") == 2
        assert told in capsys.readouterr().err
