"""What each control keeps and destroys, on rows with known values."""

import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.config.compose import CONFIG_DIR, compose, load, validate
from attnpo.schema import UserError, digest
from attnpo.weights.pipeline import check_transforms
from attnpo.weights.sources.decay import Decay
from attnpo.weights.transforms import (
    Branched,
    CrossPair,
    Inverse,
    Mixture,
    OneSide,
    PositionProfile,
    Sharpness,
    Shuffled,
    Smeared,
    TailCut,
    TokenProfile,
    UniformOnSupport,
    WeightRow,
    WeightTransform,
    resample,
)


def row(values: list[float], ids: list[int] | None = None, pair: str = "p", side: str = "chosen") -> WeightRow:
    weights = torch.tensor(values, dtype=torch.float64)
    tokens = torch.tensor(ids if ids is not None else range(len(values)), dtype=torch.long)
    return WeightRow(weights, tokens, pair, side, 3)


def random_rows(count: int, seed: int = 0) -> list[WeightRow]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        values = torch.rand(length, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 9, (length,), generator=generator)
        made.append(WeightRow(values / values.sum(), ids, f"pair{i // 2}", ("chosen", "rejected")[i % 2], 5))
    return made


TRANSFORMS: list[WeightTransform] = [
    UniformOnSupport(),
    Shuffled(),
    Inverse(),
    Mixture(0.3),
    Sharpness(2.0),
    Smeared(0.7),
    OneSide("rejected"),
    CrossPair(),
    PositionProfile(),
    TokenProfile(),
    TokenProfile(position=True),
    Branched(2),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda item: type(item).__name__)
def test_total_and_length_are_kept_and_nothing_is_negative(transform: WeightTransform) -> None:
    rows = random_rows(40)
    fitted = transform.fit(rows)
    assert transform.needs_fit == (fitted is not transform)
    for one in rows:
        new = fitted(one)
        assert new.shape == one.weights.shape and new.dtype == one.weights.dtype
        assert float(new.sum()) == pytest.approx(1.0, abs=1e-12)
        assert bool((new >= 0).all())


@pytest.mark.parametrize("kind", [Shuffled, Inverse])
def test_random_orders_keep_the_values_and_depend_on_seed_pair_and_side_alone(kind: type[Shuffled | Inverse]) -> None:
    values = [0.25] * 4 + [0.0] * 20
    first = kind(1)(row(values))
    assert torch.equal(first, kind(1)(row(values)))
    for other in (kind(2)(row(values)), kind(1)(row(values, pair="q")), kind(1)(row(values, side="rejected"))):
        assert Counter(other.tolist()) == Counter(values) and not torch.equal(first, other)


def test_branched_weights_lie_on_the_least_settled_word_within_reach() -> None:
    """After 1 come 2 and 3 alike (ln 2), after 2 and 3 always 4, and 1 begins: the choice is the second word."""
    rows = [row([0.2, 0.3, 0.5], [1, 2, 4]), row([0.2, 0.3, 0.5], [1, 3, 4], "q")]
    made = Branched(reach=1).fit(rows)
    assert isinstance(made, Branched)
    assert made.entropies == pytest.approx({-1: 0.0, 1: math.log(2), 2: 0.0, 3: 0.0})
    assert made(row([0.2, 0.3, 0.5], [1, 2, 4])).tolist() == pytest.approx([0.2, 0.8, 0.0])
    assert Branched(2).fit(rows)(row([0.1, 0.2, 0.3, 0.4], [1, 3, 4, 9])).tolist() == pytest.approx(
        [0.1, 0.9, 0.0, 0.0]
    ), "two places back, no farther"
    assert made(row([0.4, 0.6], [8, 9])).tolist() == pytest.approx([0.4, 0.6]), "words never seen keep their weights"
    with pytest.raises(UserError, match="no training row"):
        Branched().fit([row([])])


def test_smeared_weights_lie_on_their_token_and_those_before() -> None:
    # Decay 1/2: the third token leaves 4/7, the one before gets 2/7 and the first 1/7; the first keeps what it has.
    assert Smeared(0.5)(row([0.3, 0.0, 0.7])).tolist() == pytest.approx([0.4, 0.2, 0.4])
    assert Smeared(0.0)(row([0.3, 0.0, 0.7])).tolist() == pytest.approx([0.3, 0.0, 0.7])
    assert Smeared(0.5)(row([])).shape == (0,)


def test_inverse_hands_the_values_out_the_other_way_round() -> None:
    assert Inverse()(row([0.5, 0.1, 0.3, 0.15])).tolist() == [0.1, 0.5, 0.15, 0.3]
    tied = Inverse()(row([0.5, 0.1, 0.3, 0.1])).tolist()
    assert tied in ([0.1, 0.5, 0.1, 0.3], [0.1, 0.3, 0.1, 0.5])


def test_the_inverse_of_few_equal_weights_prefers_no_place() -> None:
    """3 of 12 tokens hold all the weight: over many pairs, every other token gets it equally often."""
    values = [1 / 3 if place in (1, 5, 6) else 0.0 for place in range(12)]
    pairs = 600
    total = sum(Inverse()(row(values, pair=f"pair{i}")) for i in range(pairs))
    assert isinstance(total, torch.Tensor)
    assert total[[1, 5, 6]].tolist() == [0.0] * 3
    others = total[[place for place in range(12) if place not in (1, 5, 6)]] * 3 / pairs
    assert others.tolist() == pytest.approx([1 / 3] * 9, abs=0.08)  # four standard errors of 600 draws


def test_mixture_sharpness_and_tail_are_the_formulas() -> None:
    values = [0.5, 0.25, 0.25, 0.0]
    assert Mixture(0.2)(row(values)).tolist() == pytest.approx([0.3, 0.25, 0.25, 0.2])
    assert Sharpness(2.0)(row(values)).tolist() == pytest.approx([4 / 6, 1 / 6, 1 / 6, 0.0])
    assert Sharpness(0.0)(row(values)).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert TailCut(0.5)(row([0.2] * 5)).tolist() == pytest.approx([0.2, 0.2, 0.2, 0.1, 0.1])


def test_one_side_leaves_the_other_flat() -> None:
    values = [0.7, 0.2, 0.1]
    assert OneSide("chosen")(row(values)).tolist() == values
    assert OneSide("chosen")(row(values, side="rejected")).tolist() == pytest.approx([1 / 3] * 3)


def test_resampling_moves_mass_without_losing_any() -> None:
    weights = torch.tensor([0.6, 0.4], dtype=torch.float64)
    assert resample(weights, 4).tolist() == pytest.approx([0.3, 0.3, 0.2, 0.2])
    assert resample(weights, 1).tolist() == pytest.approx([1.0])
    assert resample(weights, 3).tolist() == pytest.approx([0.4, 0.2 + 0.4 / 3, 0.8 / 3])


def test_cross_pair_never_uses_the_row_s_own_pair_and_keeps_the_side() -> None:
    rows = [
        row([1.0, 0.0], pair="a"),
        row([0.0, 1.0], pair="b"),
        row([0.5, 0.5], pair="a", side="rejected"),
        row([0.25, 0.75], pair="b", side="rejected"),
    ]
    fitted = CrossPair().fit(rows)
    assert fitted(row([0.9, 0.1], pair="a")).tolist() == [0.0, 1.0]
    assert fitted(row([0.9, 0.1], pair="b", side="rejected")).tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match="at least two training pairs"):
        CrossPair().fit(rows[:1])(row([1.0], pair="a"))


def test_cross_pair_draws_the_donor_that_a_list_of_all_donors_gives() -> None:
    """Duplicate pair ids, several rows of one side, ids in no order: to the bit, for both sides and two seeds."""
    rows = random_rows(60)
    rows += [replace(one, pair_id="pair3", weights=one.weights.flip(0)) for one in rows[10:14]]
    rows = [rows[place] for place in torch.randperm(len(rows), generator=torch.Generator().manual_seed(5)).tolist()]
    ordered = sorted(rows, key=lambda one: (one.pair_id, one.side))
    unknown = [replace(one, pair_id="zz") for one in rows[:2]]
    for seed in (0, 7):
        fitted = CrossPair(seed).fit(rows)
        for one in [*rows, *unknown]:
            donors = [other.weights for other in ordered if other.side == one.side and other.pair_id != one.pair_id]
            generator = torch.Generator().manual_seed(int(digest([seed, one.pair_id, one.side])[:15], 16))
            donor = donors[int(torch.randint(len(donors), (1,), generator=generator))]
            resampled = resample(donor, one.weights.numel())
            assert torch.equal(fitted(one), resampled * (one.weights.sum() / resampled.sum()))


class CountedId(str):
    """Pair id that counts how often it is compared with another."""

    compared = 0

    def count_comparisons(name: str) -> Any:
        def compare(self: str, other: str) -> bool:
            CountedId.compared += 1
            return bool(getattr(str, name)(self, other))

        return compare

    __lt__, __gt__, __ne__, __eq__ = map(count_comparisons, ("__lt__", "__gt__", "__ne__", "__eq__"))
    __hash__ = str.__hash__


def test_cross_pair_does_not_look_at_every_donor_for_every_row() -> None:
    pairs, read = 512, 16
    rows = [WeightRow(torch.ones(2), torch.zeros(2).long(), CountedId(f"{i}"), "chosen", 2) for i in range(pairs)]
    fitted = CrossPair().fit(rows)
    CountedId.compared = 0
    for one in rows[:read]:
        fitted(one)
    assert CountedId.compared <= read * 2 * (math.log2(pairs) + 1)


@pytest.mark.parametrize("file", sorted((CONFIG_DIR / "transform").glob("*.yaml")), ids=lambda file: file.stem)
def test_what_a_transform_learns_is_no_key_of_a_configuration(file: Path) -> None:
    """Takes the keys that its option shows alone; what is learnt comes from rows."""
    asked = ["setting=real_smoke", "model.path=M", "data.path=D", f"transform={file.stem}"]
    (transform,) = load("fit", asked).transforms.values()
    shown = [line.partition(":")[0] for line in file.read_text().splitlines() if not line.startswith(("#", "_"))]
    assert sorted(item.name for item in fields(transform) if item.init) == sorted(name for name in shown if name)
    for item in (item for item in fields(transform) if not item.init):
        with pytest.raises(UserError, match=rf"transforms\.{file.stem}\.{item.name}: unknown key"):
            validate(compose("fit", [*asked, f"+transforms.{file.stem}.{item.name}={{1: 2.0}}"]))


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda item: type(item).__name__)
def test_a_fitted_transform_takes_the_weights_that_it_took_before(transform: WeightTransform) -> None:
    """Factors are no shares of a whole, whatever a profile has learnt of them."""

    def taken(asked: WeightTransform) -> bool:
        try:
            check_transforms(Decay(), [asked])
        except UserError:
            return False
        return True

    assert taken(transform.fit(random_rows(8))) == bool(getattr(type(transform), "factors", False))


def test_profiles_recover_the_rule_that_made_the_weights() -> None:
    """Weights that are a function of position (or of the word) are reproduced; the other profile cannot."""
    ids = [[3, 1, 2, 1], [1, 2, 3, 3], [2, 2, 1, 3]]
    by_place = [row([0.4, 0.3, 0.2, 0.1], one, pair=str(i)) for i, one in enumerate(ids)]
    assert PositionProfile(4).fit(by_place)(by_place[1]).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    factor = {1: 1.0, 2: 3.0, 3: 5.0}
    totals = [sum(factor[token] for token in one) for one in ids]
    by_word = [
        row([factor[token] / total for token in one], one, pair=str(i))
        for i, (one, total) in enumerate(zip(ids, totals, strict=True))
    ]
    fitted = TokenProfile().fit(by_word)
    new = fitted(by_word[0])
    assert new[1] == new[3] and float(new[0]) > float(new[2]) > float(new[1])
    assert not torch.allclose(PositionProfile(4).fit(by_word)(by_word[0]), by_word[0].weights)
    assert fitted(row([0.5, 0.5], [77, 78])).tolist() == pytest.approx([0.5, 0.5])


def test_settings_out_of_range_are_refused() -> None:
    kinds = (Mixture, 1.5), (Sharpness, -1.0), (Smeared, 1.0), (Branched, 0), (OneSide, "left"), (TailCut, 2.0)
    for kind, value in (*kinds, (PositionProfile, 0)):
        with pytest.raises(UserError, match="transform "):
            kind(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be fitted"):
        PositionProfile()(row([1.0]))
