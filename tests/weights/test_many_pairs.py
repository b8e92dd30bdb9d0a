"""Weights of many pairs at once are, to the bit, those that each pair gets by itself (``training_weights``)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnpo.data import prepare
from attnpo.data.prepare import EncodedSet, ExampleSet, Tally, fit_transforms, prepare_examples
from attnpo.data.rules import AlignRules
from attnpo.judge.layers import StoredRow
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, Kind, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.system.store import Store
from attnpo.text.alignment import AlignMethod
from attnpo.text.traces import answer_start
from attnpo.weights.base import ScorerModel, WeightSource
from attnpo.weights.capture import WEIGHTS, UnreadablePair, load_captured, store_captured
from attnpo.weights.pipeline import (
    PairInputs,
    TrainingWeights,
    apply_transform,
    compute_source_weights,
    training_weights,
)
from attnpo.weights.postprocess import EndToken, Postprocess, RoundOrder
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.contrast import TISDPO, Contrast
from attnpo.weights.sources.decay import Decay
from attnpo.weights.sources.edits import Edits
from attnpo.weights.sources.reward_attention import RewardAttention
from attnpo.weights.sources.rollout import Rollout
from attnpo.weights.sources.selection import Selection
from attnpo.weights.sources.uniform import Uniform
from attnpo.weights.sources.verbalized import Verbalized
from attnpo.weights.transforms import CrossPair, Mixture, Sharpness, Shuffled, WeightTransform

CHUNK = 14
EOS, TRACE = 99, "<think>\nab\n</think>\n\n"
METHODS = tuple(AlignMethod)
LAYERS: tuple[StoredRow, ...] = (1, 2)
Tokens = tuple[list[int], list[tuple[int, int]]]


def tokens(rng: np.random.Generator, text: str) -> Tokens:
    """A tokenisation of ``text`` into pieces of one to five characters, their ids from few."""
    ends = [*sorted(set(np.cumsum(rng.integers(1, 6, len(text))).tolist()) & set(range(1, len(text)))), len(text)]
    return rng.integers(0, 12, len(ends)).tolist(), list(zip([0, *ends[:-1]], ends, strict=True))


def merge_tokens(rng: np.random.Generator, given: Tokens) -> Tokens:
    """The same text with some tokens joined to the next one."""
    ids, places = list(given[0]), list(given[1])
    for at in sorted(rng.choice(len(ids), size=min(2, len(ids)), replace=False).tolist(), reverse=True):
        if at + 1 < len(ids):
            ids[at : at + 2] = [int(rng.integers(0, 12))]
            places[at : at + 2] = [(places[at][0], places[at + 1][1])]
    return ids, places


@dataclass
class World:
    """Pairs of every sort, and what a source of two layers has stored about them."""

    seed: int
    rounds: int = 2
    traced: bool = False
    train: bool = False
    odd: bool = True
    set: EncodedSet = field(default_factory=lambda: EncodedSet([], [], Tally(), 0))
    captured: dict[str, PairWeights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for number in range(CHUNK + 10):
            self._add(rng, number)
        self.set = replace(self.set, read=len(self.set.pairs) + 1)

    def _add(self, rng: np.random.Generator, number: int) -> None:
        sort = number % 12 if self.odd else 0
        apart = self.traced and number % 3 == 0
        texts = {side: TRACE * apart + "".join(rng.choice(list("abcd "), int(rng.integers(1, 130)))) for side in SIDES}
        pair = PreferencePair.from_texts([{"role": "user", "content": f"{number}"}], *texts.values(), apart=apart)
        encoded, rounds = {}, [dict[str, TokenWeights]() for _ in range(self.rounds)]
        for side, text in texts.items():
            ids, places = tokens(rng, text)
            end = [(len(text), len(text))]
            cut = int(rng.integers(1, len(ids) + 1)) if sort == 1 else len(ids)
            encoded[side] = EncodedResponse(
                [1], ids[:cut] + [EOS] * (cut == len(ids)), places[:cut] + end * (cut == len(ids))
            )
            own: Tokens = ([*ids, EOS], [*places, *end]) if self.train else (ids, places)
            if apart and not self.train:
                begins = answer_start(text)
                first = next(at for at, (_, stop) in enumerate(places) if stop > begins)
                own = (ids[first:], places[first:])
            if sort == 2 and not self.train:
                own = merge_tokens(rng, own)
            for at, one in enumerate(rounds):
                here = merge_tokens(rng, own) if sort == 3 and at and not self.train else own
                one[side] = TokenWeights(
                    torch.tensor(here[0]), torch.tensor(here[1]).reshape(-1, 2), self._rows(rng, len(here[0]), sort, at)
                )
        if sort == 4:
            self.captured[pair.pair_id] = UnreadablePair(pair.pair_id, (), "too long", "a story")
        else:
            made = tuple(JudgeRound(at == 0, one["chosen"], one["rejected"]) for at, one in enumerate(rounds))
            self.captured[pair.pair_id] = PairWeights(pair.pair_id, made)
        self.set.pairs.append(pair)
        self.set.encoded.append(encoded)

    def _rows(self, rng: np.random.Generator, count: int, sort: int, round_: int) -> torch.Tensor:
        rows = torch.from_numpy(rng.lognormal(0, 2, (2, count)).astype(np.float32))
        if sort == 5 or (sort == 6 and round_ == 0):
            rows.zero_()
        if sort == 7:
            rows[:, 1:] = 0  # all of it on the sink
        if sort == 8:
            rows *= torch.from_numpy(rng.integers(0, 2, (2, count)))
        if sort == 9:
            rows *= 1e-38
        if sort == 10:
            rows *= -0.0
        return rows


def outcome(work: Callable[[], ExampleSet]) -> tuple[Any, ...]:
    """The examples as bytes with the whole account, or the error's words."""
    try:
        made = work()
    except (UserError, ValueError) as problem:
        return type(problem), str(problem)
    rows = [
        (*(row.dtype for row in one.weights), *(row.numpy().tobytes() for row in one.weights), one.pair_id, one.lengths,
         one.coverage, one.source_coverage, one.kept_mass, one.pair_weight, one.factors)
        for one in made.examples
    ]  # fmt: skip
    return rows, made.tally, made.read, made.dropped, made.content_tokens, made.unmatched_tokens


def one_by_one(
    source: WeightSource,
    pairs: Iterable[PairInputs],
    method: AlignMethod,
    transforms: Any,
    *,
    layers: tuple[StoredRow, ...],
) -> Iterator[TrainingWeights]:
    """Computes weights pair by pair, the standard for ``iterate_training_weights``; test_pipeline has one by hand."""
    for raw, encoded, pair in pairs:
        yield training_weights(source, raw, encoded, method, transforms, layers=layers, pair=pair)


def both_ways(
    world: World,
    source: WeightSource,
    align: AlignRules,
    layers: tuple[StoredRow, ...] = LAYERS,
    transforms: Sequence[WeightTransform] = (),
) -> Any:
    """Returns the outcome of many at once, which is that of one by one."""
    captured: Mapping[str, PairWeights] = world.captured if source.requires else {}

    def work() -> ExampleSet:
        return prepare_examples(world.set, source, captured, align, layers, transforms)

    now = outcome(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "iterate_training_weights", one_by_one)
        then = outcome(work)
    for mine, other in zip(now[0], then[0], strict=True) if isinstance(now[0], list) else ():
        assert mine == other
    assert now == then
    assert now[0]
    return now


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnpo.weights.pipeline.CHUNK", CHUNK, raising=False)
    monkeypatch.setattr("attnpo.weights.capture.UNPACKED", CHUNK, raising=False)


A, B = ScorerModel("a"), ScorerModel("b")
CAPTURED: dict[str, WeightSource] = {
    "attention": Attention(2),
    "mean of layers": Attention(2, layers=(2, 1)),
    "no sink, mean at the end": Attention(1, postprocess=Postprocess(sink_tokens=0, end_token=EndToken.MEAN)),
    "long sink": Attention(1, postprocess=Postprocess(RoundOrder.NORMALIZE_THEN_MEAN, 7, 3, EndToken.MEAN)),
    "normalised first": Attention(2, postprocess=Postprocess(RoundOrder.NORMALIZE_THEN_MEAN)),
    "reward": RewardAttention(2, path="model"),
}
ONE_ROW: dict[str, WeightSource] = {
    "rollout": Rollout(),
    "verbalized": Verbalized(min_coverage=0.3),
    "verbalized, normalised first": Verbalized(
        Postprocess(RoundOrder.NORMALIZE_THEN_MEAN, 0, end_token=EndToken.MEAN), 0.3
    ),
}
ON_TRAINING_TOKENS: dict[str, WeightSource] = {
    "contrast": Contrast(A, B, TISDPO()),
    "selection": Selection(A, B),
    "uniform": Uniform(),
    "decay": Decay(),
    "edits": Edits(),
}


made = cache(World)


@pytest.mark.parametrize(("rounds", "method"), [(1, METHODS[0]), (2, METHODS[0]), (2, METHODS[1]), (3, METHODS[1])])
@pytest.mark.parametrize("name", CAPTURED)
def test_layers_of_a_judge(name: str, rounds: int, method: AlignMethod) -> None:
    both_ways(made(rounds, rounds), CAPTURED[name], AlignRules(method, 0.9 if rounds == 1 else None))


def of_one_layer(world: World) -> World:
    for pair_id, stored in world.captured.items():
        rounds = [
            replace(
                item,
                **{side: replace(item.side(side), weights=item.side(side).weights[1:].contiguous()) for side in SIDES},
            )
            for item in stored.rounds
        ]
        world.captured[pair_id] = replace(stored, rounds=tuple(rounds))
    return world


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["attention", *ONE_ROW])
def test_one_row(name: str, method: AlignMethod) -> None:
    """Also a source that may be silent about tokens."""
    source = {**CAPTURED, **ONE_ROW}[name]
    both_ways(of_one_layer(World(4)), source, AlignRules(method), source.rows_to_read())


@pytest.mark.parametrize("name", ON_TRAINING_TOKENS)
def test_weights_that_stand_on_training_tokens(name: str) -> None:
    source = ON_TRAINING_TOKENS[name]
    both_ways(of_one_layer(World(5, 1, train=True)), source, AlignRules(), (0,))


@pytest.mark.parametrize("method", METHODS)
def test_factors_of_other_tokens(method: AlignMethod) -> None:
    """A user's own source: factors without post-processing, on the judge's tokens."""

    class Factors(Rollout):
        kind = Kind.FACTOR
        postprocess = None  # type: ignore[assignment]

        def __init__(self) -> None:
            """Without the parent's field."""

    both_ways(of_one_layer(World(6)), Factors(), AlignRules(method), (0,), transforms=[Mixture()])


@pytest.mark.parametrize("method", METHODS)
def test_reasoning_traces_that_are_weighed_apart(method: AlignMethod) -> None:
    both_ways(World(7, traced=True), Attention(2), AlignRules(method))


def test_transforms_learn_and_change_the_same() -> None:
    world = World(8)
    chosen: list[WeightTransform] = [Sharpness(), CrossPair(), Shuffled()]
    fitted = fit_transforms(chosen, world.set, Attention(2), world.captured, LAYERS, AlignRules())
    both_ways(world, Attention(2), AlignRules(), transforms=fitted)
    rows = {
        pair.pair_id: compute_source_weights(
            Attention(2), world.captured[pair.pair_id], sides, layers=LAYERS, pair=pair
        )
        for pair, sides in zip(world.set.pairs, world.set.encoded, strict=True)
        if world.captured[pair.pair_id].rounds
    }
    pool = fitted[1].pool["chosen"]  # type: ignore[attr-defined]
    expected = apply_transform(Sharpness(), rows[pool[0][0]], pool[0][0])["chosen"].weights
    assert len(pool) == len(rows)
    assert torch.equal(pool[0][1], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("at", [3, CHUNK + 5])
def test_the_first_bad_pair_is_the_one_that_is_named(bad: float, at: int) -> None:
    """Whatever is wrong with later ones."""
    world = World(9, odd=False)
    for place, worse in ((at, bad), (at + 2, float("nan"))):
        stored = world.captured[world.set.pairs[place].pair_id]
        stored.rounds[1].rejected.weights[:, -1] = worse
    last = world.set.pairs[at + 1].pair_id
    world.captured[last] = replace(world.captured[last], rounds=())
    now = both_ways(world, Attention(2), AlignRules())
    assert f"pair {world.set.pairs[at].pair_id}, rejected" in now[1]


def test_what_a_transform_refuses_comes_before_what_is_wrong_with_later_pairs() -> None:
    world = World(10, odd=False)

    @dataclass(frozen=True)
    class Refuses(Mixture):
        def __call__(self, row: Any) -> torch.Tensor:
            weights = super().__call__(row)
            return weights / 0 if row.pair_id == world.set.pairs[5].pair_id else weights

    world.captured[world.set.pairs[9].pair_id].rounds[0].chosen.weights[:] = -1
    now = both_ways(world, Attention(2), AlignRules(), transforms=[Refuses()])
    assert "after Refuses" in now[1]


@pytest.mark.parametrize("layers", [(2,), (1, 2)])
def test_rows_come_out_of_the_store_as_they_went_in(tmp_path: Path, layers: tuple[StoredRow, ...]) -> None:
    world = World(11)
    table = Store(tmp_path).table(WEIGHTS, {"judge": "a"})
    store_captured(table, list(world.captured.values()), LAYERS)
    found = load_captured(table, list(world.captured), layers)
    assert list(found) == list(world.captured)
    for pair_id, stored in world.captured.items():
        assert len(found[pair_id].rounds) == len(stored.rounds)
        for one, other in zip(found[pair_id].rounds, stored.rounds, strict=True):
            for side in SIDES:
                assert torch.equal(one.side(side).token_ids, other.side(side).token_ids)
                assert torch.equal(one.side(side).offsets, other.side(side).offsets)
                rows = other.side(side).weights[[LAYERS.index(layer) for layer in layers]]
                assert one.side(side).weights.is_contiguous()
                assert one.side(side).weights.numpy().tobytes() == rows.numpy().tobytes()
