"""Moving weights between tokenisations: golden cases of the reference, identity, conservation of mass."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.text.alignment import AlignMethod, align

METHODS = list(AlignMethod)


def places(count):
    return [(i, i + 1) for i in range(count)]


def golden_align(record, target):
    source, weights = record["judge_ids"], torch.tensor(record["weights"], dtype=torch.float64)
    return align(source, places(len(source)), weights, target, places(len(target)), AlignMethod.LEVENSHTEIN)


def loss_records(vectors):
    records = json.loads((vectors / "losses.json").read_text())["records"]
    return [record for record in records if record["name"] == "attnpo_align"]


def test_the_reference_alignment_records(vectors: Path) -> None:
    records = loss_records(vectors)
    assert len(records) == 7
    for record in records:
        given_ids = record["inputs"]["training_token_ids"]
        case = {"judge_ids": record["inputs"]["judge_token_ids"], "weights": record["inputs"]["judge_weights"]}
        ours = golden_align(case, given_ids)
        if record["inputs"]["kind"] == "single_space_response":
            # The reference edits the training ids (its judge token 33 goes in front); ours stay, without any weight.
            assert record["expected"]["training_token_ids_after"] == [33, *given_ids]
            assert ours.weights.tolist() == [0.0]
            assert ours.source_coverage == 0.0
            continue
        times_count = ours.weights * len(case["judge_ids"])
        expected = record["expected"]["aligned_weights_times_judge_count"]
        torch.testing.assert_close(times_count, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)
        assert ours.source_coverage == pytest.approx(record["expected"]["matched_fraction_of_judge_tokens"])


def test_the_extraction_unit_cases(golden: Path) -> None:
    cases = json.loads((golden / "unit_cases.json").read_text())["alignment"]
    checked = {"exact": 0, "bounds": 0, "prepended": 0}
    for case in cases:
        if len(case["weights"]) != len(case["judge_ids"]):  # refused here, see test_lengths_that_do_not_fit
            continue
        target = [*case["completion_ids"], case["eos_id"]]
        times_count = (golden_align(case, target).weights * len(case["judge_ids"])).tolist()
        expected = case["expected_weights"]
        if case["ids_changed"]:  # the reference puts the lone judge token in front; without that place nothing is left
            checked["prepended"] += 1
            assert times_count == expected[1:] == [0.0] * len(target)
        elif case["unique_alignment"]:
            checked["exact"] += 1
            assert times_count == pytest.approx(expected, rel=1e-12, abs=0)
        else:  # several best alignments: kept weights are some of the source's, in order
            checked["bounds"] += 1
            kept = [value for value in times_count if value]
            allowed = iter([weight * len(case["judge_ids"]) for weight in case["weights"]])
            assert kept and all(any(math.isclose(value, other) for other in allowed) for value in kept), case["name"]
    assert checked["exact"] >= 8 and checked["bounds"] >= 1 and checked["prepended"] >= 1, checked


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \(3,\) for the source tokens"):
        align([1, 2, 3], places(3), torch.ones(2), [1], places(1))
    with pytest.raises(ValueError, match="target: 2 token ids but 1 character ranges"):
        align([1], places(1), torch.ones(1), [1, 2], places(1))


def test_levenshtein_takes_tensors_as_it_takes_lists() -> None:
    """[7, 1, 2, 3] against [1, 2, 9, 3, 0]: 1, 2 and 3 are kept; 7 has no partner, 9 and 0 get nothing."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    source, target = [7, 1, 2, 3], [1, 2, 9, 3, 0]
    target_places = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]
    for wrap in (list, torch.tensor):
        found = align(wrap(source), torch.tensor(places(4)), weights, wrap(target), wrap(target_places))
        assert found.weights.tolist() == pytest.approx([0.2, 0.3, 0.0, 0.4, 0.0])
        assert found.matched.tolist() == [True, True, False, True, False]
        assert found.coverage == 3 / 4  # the last target token holds no character
        assert found.source_coverage == 3 / 4


@pytest.mark.parametrize(
    ("source", "target", "place"),
    [([1, 2, 1], [2, 2, 2, 3], 2), ([1, 2, 3], [2, 3, 3, 1], 2), ([1, 2, 1], [3, 2, 2, 3], 2)],
)
def test_ties_go_as_in_the_reference(source: list[int], target: list[int], place: int) -> None:
    """Of several best alignments, the one of edit_distance 1.0.9 with the completion first (recorded from it)."""
    found = align(source, places(3), torch.tensor([0.2, 0.3, 0.5]), target, places(4))
    assert found.matched.nonzero().flatten().tolist() == [place]


def test_characters_by_hand() -> None:
    """Text "abcdef". Source: ab (.2) | cde (.6) | f (.2). Target: ab | c | de | f under another id | end.

    "ab" is equal and carries .2. "cde" gives .2 to each character: c .2, de .4. f goes by its character.
    """
    found = align(
        [1, 2, 3],
        [(0, 2), (2, 5), (5, 6)],
        torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64),
        [1, 8, 9, 30, 0],
        [(0, 2), (2, 3), (3, 5), (5, 6), (6, 6)],
        AlignMethod.CHARACTERS,
    )
    assert found.weights.tolist() == pytest.approx([0.2, 0.2, 0.4, 0.2, 0.0], abs=1e-15)
    assert found.coverage == found.source_coverage == 1.0
    assert found.matched.tolist() == [True, True, True, True, False]


def test_characters_the_target_lost_lose_their_weight() -> None:
    """The training side was truncated after "ab": of "bc" (.6) half stays, of "d" (.1) nothing."""
    found = align(
        [1, 2, 3],
        [(0, 1), (1, 3), (3, 4)],
        torch.tensor([0.3, 0.6, 0.1]),
        [1, 5],
        [(0, 1), (1, 2)],
        AlignMethod.CHARACTERS,
    )
    assert found.weights.tolist() == pytest.approx([0.3, 0.3])
    assert found.source_coverage == pytest.approx(2 / 3)
    assert found.coverage == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_nothing_on_either_side(method: AlignMethod) -> None:
    empty = align([], [], torch.zeros(0), [5], [(0, 0)], method)
    assert empty.weights.tolist() == [0.0] and empty.coverage == 1.0 and empty.source_coverage == 1.0
    cut = align([5], [(0, 3)], torch.ones(1), [], [], method)
    assert cut.weights.tolist() == [] and cut.source_coverage == 0.0 and cut.matched.tolist() == []


@st.composite
def tokenisations(draw, length=None):
    """Ids and ranges of a text of ``length`` characters: consecutive tokens, some characters in several tokens."""
    length = draw(st.integers(1, 12)) if length is None else length
    ids, ranges, start = [], [], 0
    while start < length:
        end = draw(st.integers(start + 1, min(length, start + 4)))
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])) if end == start + 1 else 1):
            ids.append(draw(st.integers(0, 5)))
            ranges.append((start, end))
        start = end
    if draw(st.booleans()):  # an end token
        ids.append(99)
        ranges.append((length, length))
    return length, ids, ranges


def random_weights(count):
    return torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30)
@given(tokens=tokenisations(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_identical_input_comes_back_exactly(method, tokens, dtype) -> None:
    _, ids, ranges = tokens
    weights = random_weights(len(ids)).to(dtype)
    found = align(ids, ranges, weights, ids, ranges, method)
    assert torch.equal(found.weights, weights) and found.weights.dtype == dtype
    assert found.coverage == found.source_coverage == 1.0 and bool(found.matched.all())


def plainly(source, target, weights) -> list[float]:
    """CHARACTERS by its definition, one character after the other; ``source`` and ``target`` are (ids, ranges)."""
    tokens, found = list(zip(*target, strict=True)), [0.0] * len(target[0])
    free, rest = list(range(len(tokens))), []
    for key, weight in zip(zip(*source, strict=True), weights.tolist(), strict=True):
        same = next((j for j in free if tokens[j] == key), None)
        if same is not None:
            free.remove(same)
            found[same] = weight
        elif key[1][1] > key[1][0]:
            rest.append((range(*key[1]), weight))
    holders: dict[int, list[int]] = {}
    for j, (_, place) in enumerate(tokens):
        for at in range(*place):
            holders.setdefault(at, []).append(j)
    inner = range(min(holders, default=0), max(holders, default=0))
    gaps = {at: max(one for one in holders if one < at) for at in inner if at not in holders}
    for characters, weight in rest:
        kept = [at for at in characters if at not in gaps] or [gaps[at] for at in characters]
        for at in kept:
            here = holders.get(at, [])
            for j in [one for one in here if one in free] or here:
                found[j] += weight / len(kept) / len([one for one in here if one in free] or here)
    return found


@given(data=st.data())
def test_characters_keep_the_mass_of_shared_characters(data) -> None:
    """Both sides hold all characters, so the total is kept; a part of the target, cut or with gaps, gets no more."""
    length, ids, ranges = data.draw(tokenisations())
    _, target, target_ranges = data.draw(tokenisations(length))
    weights = random_weights(len(ids)) * torch.tensor([end > start for start, end in ranges])
    found = align(ids, ranges, weights, target, target_ranges, AlignMethod.CHARACTERS)
    assert found.weights.sum().item() == pytest.approx(weights.sum().item(), rel=1e-12)
    # Of several tokens on one character some may go without a partner, of one character's tokens never all.
    met = {
        place for place, hit in zip(target_ranges, found.matched.tolist(), strict=True) if hit and place[1] > place[0]
    }
    assert met == {place for place in target_ranges if place[1] > place[0]}
    kept = [place for place in range(len(target)) if data.draw(st.booleans())]
    some, places_of = [target[place] for place in kept], [target_ranges[place] for place in kept]
    part = align(ids, ranges, weights, some, places_of, AlignMethod.CHARACTERS)
    assert part.weights.tolist() == pytest.approx(plainly((ids, ranges), (some, places_of), weights), rel=1e-12)
    assert part.weights.sum().item() <= weights.sum().item() * (1 + 1e-12)
    assert (part.weights >= 0).all()


@settings(max_examples=30)
@given(data=st.data())
def test_levenshtein_carries_source_weights_in_order(data) -> None:
    source = data.draw(st.lists(st.integers(0, 4), max_size=12))
    target = data.draw(st.lists(st.integers(0, 4), max_size=12))
    weights = torch.arange(1, len(source) + 1, dtype=torch.float64)
    found = align(source, places(len(source)), weights, target, places(len(target)))
    carried = [int(value) for value in found.weights.tolist() if value]
    assert carried == sorted(set(carried))
    assert all(source[int(w) - 1] == target[j] for j, w in enumerate(found.weights.tolist()) if w)
    assert (found.weights > 0).tolist() == found.matched.tolist()
    assert len(carried) == round(found.source_coverage * len(source)) or not source
