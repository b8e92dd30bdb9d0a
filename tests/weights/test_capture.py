"""Captured weights and reference log-probabilities in the store."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.judge.base import JudgePrompt, LoadedJudge
from attnpo.schema import PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import RefusedText
from attnpo.weights.capture import (
    REFUSED,
    CaptureReport,
    UnreadablePair,
    ensure_captured,
    estimate_bytes,
    load_captured,
    load_logps,
    reference_key,
    store_captured,
    store_logps,
    unreadable_pairs,
    weights_key,
)
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout
from tests.weights.fakes import FakeJudge, FakePrompts, HeadJudge, make_pair

PAIRS = [make_pair(number, "some words of an answer", "few") for number in range(7)]
LAYERS = (1, 2, 3, 4)


class Choosy(FakePrompts):
    """Prompts of all pairs but those whose question is in ``refuses``: for its text, or (odd numbers) as too long."""

    refuses: tuple[int, ...] = ()

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        number = int(pair.prompt[0]["content"].removeprefix("question "))
        if number not in self.refuses:
            return super().build(pair)
        problem = UserError("no room") if number % 2 else RefusedText("its text is odd", f"odd at character {number}")
        raise UserError(f"pair {pair.pair_id}: {problem}") from problem


@dataclass
class Bench:
    """One store, and a judge that is made on demand."""

    root: Path
    judge: FakeJudge = field(default_factory=FakeJudge)
    made: int = 0
    verdict: bool = True
    refuses: tuple[int, ...] = ()
    progress: list[tuple[int, int]] = field(default_factory=list)

    def load(self) -> LoadedJudge:
        self.made += 1
        prompts = Choosy()
        prompts.refuses = self.refuses
        return LoadedJudge(self.judge, prompts, self.verdict)

    def seen(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def run(
        self, pairs: list[PreferencePair], layers: tuple[int, ...] = LAYERS, **options: Any
    ) -> tuple[dict[str, PairWeights], CaptureReport]:
        source = Attention()
        key = weights_key(source, FakeJudge().fingerprint(), FakePrompts().fingerprint())
        return ensure_captured(pairs, source, layers, Store(self.root), key, self.load, progress=self.seen, **options)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def fresh_capture(
    pairs: list[PreferencePair], layers: tuple[int, ...] = LAYERS, verdict: bool = True
) -> list[PairWeights]:
    return Attention().capture(pairs, LoadedJudge(FakeJudge(), FakePrompts(), verdict), layers)


def bits(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes())


def same(one: PairWeights, two: PairWeights) -> bool:
    """Equal to the last bit, types included."""
    first, second = (
        [
            (repr((item.chosen_is_a, item.verdict_token)), *map(bits, (item.verdict_logits, *vars(side).values())))
            for item in pair.rounds
            for side in (item.chosen, item.rejected)
        ]
        for pair in (one, two)
    )
    return one.pair_id == two.pair_id and first == second


def size_of(table: StoreTable) -> int:
    return sum(path.stat().st_size for path in table.folder.glob("*.parquet"))


def a_table(root: Path) -> StoreTable:
    return Store(root).table("weights", {"any": 1})


@pytest.mark.parametrize("verdict", [True, False])
def test_captured_pairs_come_back_bit_for_bit(tmp_path: Path, verdict: bool) -> None:
    captured = fresh_capture(PAIRS, verdict=verdict)
    assert all((item.verdict_logits is not None) == verdict for one in captured for item in one.rounds)
    store_captured(a_table(tmp_path), captured, LAYERS)
    back = load_captured(a_table(tmp_path), [pair.pair_id for pair in PAIRS], LAYERS)
    assert list(back) == [pair.pair_id for pair in PAIRS]
    assert all(same(back[one.pair_id], one) for one in captured)


def test_layers_come_back_in_the_order_asked(tmp_path: Path) -> None:
    store_captured(a_table(tmp_path), fresh_capture(PAIRS[:1]), LAYERS)
    back = load_captured(a_table(tmp_path), [PAIRS[0].pair_id], (3, 1))
    assert same(back[PAIRS[0].pair_id], fresh_capture(PAIRS[:1], (3, 1))[0])


def test_a_verdict_without_a_recorded_token(tmp_path: Path) -> None:
    captured = fresh_capture(PAIRS[:1])[0]
    captured = replace(captured, rounds=tuple(replace(item, verdict_token=None) for item in captured.rounds))
    store_captured(a_table(tmp_path), [captured], LAYERS)
    assert same(load_captured(a_table(tmp_path), [captured.pair_id], LAYERS)[captured.pair_id], captured)


def test_rows_wider_than_float32_are_refused(tmp_path: Path) -> None:
    pair = fresh_capture(PAIRS[:1], (1,))[0]
    first = pair.rounds[0]
    wide = replace(first, chosen=replace(first.chosen, weights=first.chosen.weights.double()))
    with pytest.raises(ValueError, match="float32 or narrower"):
        store_captured(a_table(tmp_path), [replace(pair, rounds=(wide,))], (1,))


def test_shards_that_do_not_belong_together_are_noticed(tmp_path: Path) -> None:
    table = a_table(tmp_path)
    store_captured(table, fresh_capture(PAIRS[:1], (1,)), (1,))
    table.append({PAIRS[0].pair_id: {"L02": torch.ones(3)}})
    with pytest.raises(UserError, match=rf"pair {PAIRS[0].pair_id} has 3 weights for 12 tokens"):
        load_captured(table, [PAIRS[0].pair_id], (2,))


def test_the_judge_is_loaded_once_and_never_for_a_full_store(bench: Bench) -> None:
    captured, report = bench.run([*PAIRS, PAIRS[0]], chunk_pairs=3)
    assert (report.hits, report.computed, report.difference) == (0, 7, None)
    assert bench.judge.calls == [(6, LAYERS), (6, LAYERS), (2, LAYERS)]
    assert bench.progress == [(3, 7), (6, 7), (7, 7)]
    assert all(same(captured[one.pair_id], one) for one in fresh_capture(PAIRS))
    again, report = bench.run(PAIRS)
    assert (report.hits, report.computed, bench.made) == (7, 0, 1)
    assert all(same(again[name], captured[name]) for name in captured)


def test_an_interrupted_capture_goes_on_where_it_stopped(bench: Bench) -> None:
    bench.judge.fail_at = 2
    with pytest.raises(KeyboardInterrupt):
        bench.run(PAIRS, chunk_pairs=2)
    bench.judge = FakeJudge()
    captured, report = bench.run(PAIRS, chunk_pairs=2)
    assert (report.hits, report.computed) == (4, 3)
    assert bench.judge.calls == [(4, LAYERS), (2, LAYERS)]
    assert all(same(captured[one.pair_id], one) for one in fresh_capture(PAIRS))


def reasons(captured: dict[str, PairWeights]) -> list[tuple[str, str] | None]:
    """Why a pair has no rounds, in the order of the pairs; None for those that have some."""
    return [(pair.reason, pair.story) if isinstance(pair, UnreadablePair) else None for pair in captured.values()]


def test_pairs_the_judge_cannot_be_shown_are_stored_with_the_reason(bench: Bench) -> None:
    bench.refuses = (1, 4)
    why = [None, ("no room", "no room"), None, None, ("its text is odd", "odd at character 4"), None, None]
    captured, report = bench.run(PAIRS, chunk_pairs=3)
    assert (reasons(captured), report.computed, bench.progress) == (why, 7, [(3, 7), (6, 7), (7, 7)])
    again, report = bench.run(PAIRS, verdicts=True)
    assert (reasons(again), report.hits, bench.made) == (why, 7, 1)
    assert all(same(again[one.pair_id], one) for one in fresh_capture([PAIRS[0], PAIRS[6]]))


def test_unreadable_pairs_alone_do_not_block_a_store(bench: Bench) -> None:
    """One unreadable pair beside a filled store, or a share of unreadable pairs only, is stored like any other."""
    bench.run(PAIRS[:3])
    bench.refuses = (3, 4)
    bench.judge.calls.clear()
    captured, report = bench.run(PAIRS[:5], chunk_pairs=1)
    assert (report.hits, report.computed, bench.judge.calls) == (3, 2, [])
    assert [why is None for why in reasons(captured)] == [True, True, True, False, False]
    assert bench.run(PAIRS[:5])[1].hits == 5
    assert reasons(bench.run(PAIRS[3:5])[0]) == [("no room", "no room"), ("its text is odd", "odd at character 4")]


def test_unreadable_pairs_of_an_interrupted_capture_are_kept(bench: Bench) -> None:
    """They are stored with their own chunk, so that what is left to do is what comes after."""
    bench.refuses, bench.judge.fail_at = (0, 1), 1
    with pytest.raises(KeyboardInterrupt):
        bench.run(PAIRS, chunk_pairs=3)
    table = Store(bench.root).table(
        "weights", weights_key(Attention(), FakeJudge().fingerprint(), FakePrompts().fingerprint())
    )
    assert list(unreadable_pairs(table, [pair.pair_id for pair in PAIRS])) == [pair.pair_id for pair in PAIRS[:2]]
    bench.judge = FakeJudge()
    assert bench.run(PAIRS)[1].hits == 3


def test_rows_of_readable_pairs_have_no_further_column(tmp_path: Path) -> None:
    table = a_table(tmp_path)
    store_captured(table, [*fresh_capture(PAIRS[:1]), UnreadablePair(PAIRS[1].pair_id, (), "why", "how")], LAYERS)
    usual = {"tokens", "verdicts", "L01", "L02", "L03", "L04"}
    present = table.columns_present([pair.pair_id for pair in PAIRS[:3]])
    assert list(present.values()) == [usual, {*usual, REFUSED}, set()]


def test_an_empty_row_without_a_reason_is_still_read(tmp_path: Path) -> None:
    """As stores before this column have them."""
    store_captured(a_table(tmp_path), [PairWeights(PAIRS[0].pair_id, ())], LAYERS)
    back = load_captured(a_table(tmp_path), [PAIRS[0].pair_id], LAYERS)
    assert back == {PAIRS[0].pair_id: PairWeights(PAIRS[0].pair_id, ())}


def test_only_missing_layers_are_computed(bench: Bench) -> None:
    bench.run(PAIRS[:2], (4,))
    bench.run(PAIRS[2:3], (2,))
    bench.judge.calls.clear()
    captured, report = bench.run(PAIRS[:4])
    assert (report.hits, report.computed) == (0, 4)
    assert bench.judge.calls == [(4, (1, 2, 3)), (2, (1, 3, 4)), (2, LAYERS)]
    assert all(same(captured[one.pair_id], one) for one in fresh_capture(PAIRS[:4]))


def test_missing_verdicts_are_read_on_request(bench: Bench) -> None:
    bench.verdict = False
    bench.run(PAIRS[:2])
    bench.verdict = True
    captured, report = bench.run(PAIRS[:2], verdicts=True)
    assert report.computed == 2
    assert all(same(captured[one.pair_id], one) for one in fresh_capture(PAIRS[:2]))


def test_the_report_names_what_differs_from_the_nearest_store(tmp_path: Path) -> None:
    Bench(tmp_path).run(PAIRS[:1])
    source = Attention()
    judge = {**FakeJudge().fingerprint(), "dtype": "bfloat16"}
    key = weights_key(source, judge, FakePrompts().fingerprint())
    bench = Bench(tmp_path)
    _, report = ensure_captured(PAIRS[:1], source, (1,), Store(tmp_path), key, bench.load)
    assert report.difference == "judge.dtype: stored float32, requested bfloat16"


def test_every_part_of_the_weights_key_changes_the_folder(tmp_path: Path) -> None:
    class OtherSource(Attention):
        def capture_fingerprint(self) -> dict[str, Any]:
            return {**super().capture_fingerprint(), "heads": "max"}

    source, judge, prompts = Attention(), FakeJudge().fingerprint(), FakePrompts().fingerprint()
    keys = [
        *(weights_key(*asked) for asked in ((source, judge, prompts), (OtherSource(), judge, prompts))),
        *(weights_key(source, {**judge, name: "other"}, prompts) for name in judge),
        *(weights_key(source, judge, {**prompts, name: "other"}) for name in prompts),
        *(weights_key(*asked) for asked in ((source, None, prompts), (source, judge, None))),
    ]
    assert len({Store(tmp_path).table("weights", key).folder for key in keys}) == len(keys)


USUAL_REFERENCE: dict[str, Any] = {
    "model": {"weights": "w", "dtype": "float32", "kernel": "sdpa"},
    "chat": {"tokenizer": "t", "template": "c"},
    "max_prompt_length": 1800,
    "max_length": 2048,
}


def test_every_part_of_the_reference_key_changes_the_folder(tmp_path: Path) -> None:
    """Tables from before truncation could keep the end are those of the beginning."""
    model, chat = USUAL_REFERENCE["model"], USUAL_REFERENCE["chat"]
    changes: list[dict[str, Any]] = [
        {},
        *({"model": {**model, name: "other"}} for name in model),
        *({"chat": {**chat, name: "other"}} for name in chat),
        *({"max_prompt_length": 7}, {"max_length": 7}, {"keep": "end"}),
    ]
    keys = [reference_key(**{**USUAL_REFERENCE, **change}) for change in changes]
    assert len({Store(tmp_path).table("reference", key).folder for key in keys}) == len(keys)
    assert reference_key(**USUAL_REFERENCE, keep="start") == keys[0]


def test_the_versions_of_the_code_are_in_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[dict[str, object]]:
        return [
            weights_key(Attention(), FakeJudge().fingerprint(), FakePrompts().fingerprint()),
            reference_key(**USUAL_REFERENCE),
        ]

    before = keys()
    for name in ("CAPTURE_VERSION", "REFERENCE_VERSION"):
        monkeypatch.setattr(f"attnpo.weights.capture.{name}", "next")
    assert keys() == [{**key, "code": "next"} for key in before]


def test_log_probabilities_come_back_bit_for_bit(tmp_path: Path) -> None:
    table = Store(tmp_path).table("reference", reference_key(**USUAL_REFERENCE))
    logps = {"p": (torch.randn(4), torch.randn(6)), "q": (torch.randn(1), torch.randn(2))}
    store_logps(table, logps)
    back = load_logps(table, ["q", "p"], {"p": (4, 6), "q": (1, 2)})
    for name, rows in logps.items():
        assert all(torch.equal(a, b) for a, b in zip(back[name], rows, strict=True))
    with pytest.raises(UserError, match=r"pair p has log-probabilities for 4 and 6 tokens, expected \(4, 5\)"):
        load_logps(table, ["p"], {"p": (4, 5)})
    with pytest.raises(UserError, match="first: r"):
        load_logps(table, ["r"])


# --------------------------------------------------------------------------------------------- single heads


def weigh_heads(
    root: Path, judge: HeadJudge, pairs: list[PreferencePair], source: Attention, **options: Any
) -> tuple[dict[str, PairWeights], CaptureReport]:
    source = source.resolve(judge.num_layers)
    rows = source.rows_to_store(judge.num_layers, lambda: judge.num_heads)
    key = weights_key(source, FakeJudge().fingerprint(), FakePrompts().fingerprint())
    options = {"load_layers": source.rows_to_read(), **options}
    return ensure_captured(pairs, source, rows, Store(root), key, lambda: LoadedJudge(judge, FakePrompts()), **options)


def test_every_head_is_stored_once_and_any_choice_is_a_re_read(tmp_path: Path) -> None:
    judge = HeadJudge(num_layers=2)
    pair_id = PAIRS[0].pair_id
    for source, computed in (
        (Attention(1, heads=(2,)), 7),
        (Attention("last", heads=(3, 1)), 0),
        (Attention(layers=(1, 2), heads=(1, 2, 3)), 0),
    ):
        captured, report = weigh_heads(tmp_path, judge, PAIRS, source)
        assert report.computed == computed
        rows = source.resolve(2).rows_to_read()
        fresh = source.resolve(2).capture(PAIRS[:1], LoadedJudge(HeadJudge(num_layers=2), FakePrompts()), rows)
        assert same(captured[pair_id], fresh[0])
    assert judge.calls == [(14, (1, 2))], "one pass over both layers, both orders of seven pairs"


def test_head_means_and_single_heads_do_not_share_a_folder(tmp_path: Path) -> None:
    judge = HeadJudge(num_layers=2)
    weigh_heads(tmp_path, judge, PAIRS, Attention(1))
    _, report = weigh_heads(tmp_path, judge, PAIRS, Attention(1, heads=(1,)))
    assert report.computed == 7
    assert report.difference is not None and "source.heads" in report.difference
    assert weigh_heads(tmp_path, judge, PAIRS, Attention(2))[1].computed == 0
    assert judge.per_head_calls == [False, True]


def test_only_the_wanted_layer_is_stored_with_all_its_heads(tmp_path: Path) -> None:
    judge = HeadJudge(num_layers=2)
    for layer, heads, computed in ((1, (1,), 1), (1, (2, 3), 0), (2, (1,), 1)):
        source = Attention(layer, heads=heads, store_layers="selected")
        assert weigh_heads(tmp_path, judge, PAIRS[:1], source)[1].computed == computed
    assert judge.calls == [(2, (1,)), (2, (2,))]


def test_the_number_of_heads_is_asked_for_only_when_some_are_chosen() -> None:
    def never() -> int:
        pytest.fail("the judge's heads were asked for")

    assert Attention().rows_to_store(2, never) == (1, 2)
    assert Rollout().rows_to_store(2, never) == (0,)
    assert len(Attention(heads=(1,)).rows_to_store(2, lambda: 5)) == 10


def test_many_rows_make_smaller_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnpo.weights.capture.CHUNK_ROWS", 12)
    judge = HeadJudge(num_layers=2)
    captured, report = weigh_heads(tmp_path, judge, PAIRS, Attention(1, heads=(1,)))
    assert [prompts for prompts, _ in judge.calls] == [4, 4, 4, 2], "two pairs of six rows at a time"
    assert len(captured) == report.computed == 7


@pytest.mark.parametrize("heads", [(), (1,)])
def test_the_estimate_bounds_the_disk_space_of_real_rows(tmp_path: Path, heads: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = Attention(heads=heads).rows_to_store(4, lambda: 8)

    def noise(weights: TokenWeights) -> TokenWeights:
        count = 400
        return TokenWeights(
            torch.randint(0, 100_000, (count,), generator=generator),
            torch.stack([torch.arange(count), torch.arange(count) + 1], dim=1) * 5,
            torch.rand(len(rows), count, generator=generator),
        )

    noisy = [
        replace(one, rounds=tuple(replace(r, chosen=noise(r.chosen), rejected=noise(r.rejected)) for r in one.rounds))
        for one in fresh_capture(PAIRS)
    ]
    table = a_table(tmp_path)
    store_captured(table, noisy, rows)
    estimate = estimate_bytes(sum(r.chosen.token_ids.numel() * 2 for one in noisy for r in one.rounds), len(rows))
    assert 0.5 * estimate < size_of(table) < 1.1 * estimate
