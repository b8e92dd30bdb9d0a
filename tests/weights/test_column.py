"""Weights that the data bring: both forms by hand, cut responses, what is refused, and whole runs on such data."""

import json
import math
import re
from pathlib import Path

import pytest

from attnpo.config.named_files import digest_named_functions
from attnpo.data.prepare import make_example
from attnpo.run.other_pairs import weigh_other_pairs
from attnpo.run.resume import digest_contents
from attnpo.run.run import run
from attnpo.schema import SIDES, EncodedResponse, Kind, PreferencePair, UserError
from attnpo.weights.pipeline import training_weights
from attnpo.weights.sources.column import Column, ColumnForm
from tests.run.made import Made, make
from tests.run.worlds import World, build_world

TEXT = "aabbcc"
# Three tokens of two characters and the end of turn.
WHOLE = EncodedResponse([1], [5, 6, 7, 99], [(0, 2), (2, 4), (4, 6), (6, 6)])
SPANS = Column(form=ColumnForm.SPANS)


def pair_with(cell: object, rejected: object = (1.0,)) -> PreferencePair:
    return PreferencePair.from_texts(
        [{"role": "user", "content": "q"}], TEXT, "xx", {"chosen_weights": cell, "rejected_weights": rejected}
    )


def weighed(source: Column, cell: object, encoded: EncodedResponse = WHOLE) -> list[float]:
    return source.weigh(pair_with(cell), "chosen", encoded).tolist()


# ------------------------------------------------------------------------------------------------ by token


def test_numbers_stand_on_the_tokens_that_hold_characters() -> None:
    assert weighed(Column(), [0.5, 2, 0]) == [0.5, 2, 0, 0]
    assert weighed(Column(), [True, False, True]) == [1, 0, 1, 0]
    assert weighed(Column(end_token=1.5), [0.5, 2, 0]) == [0.5, 2, 0, 1.5]
    assert weighed(Column(end_token=None), [0.5, 2, 0, 3]) == [0.5, 2, 0, 3]
    assert weighed(Column(signed=True), [-0.5, 2, 0]) == [-0.5, 2, 0, 0]


def test_a_distribution_is_normalised_over_the_training_tokens() -> None:
    source = Column(kind=Kind.DISTRIBUTION)
    assert weighed(source, [1, 2, 1]) == [0.25, 0.5, 0.25, 0]
    assert weighed(Column(kind=Kind.DISTRIBUTION, end_token=4.0), [1, 2, 1]) == [0.125, 0.25, 0.125, 0.5]
    assert weighed(source, [1, 2, 1], EncodedResponse([], [5], [(0, 2)])) == [1.0]


def test_a_cut_response_takes_the_numbers_of_what_is_left() -> None:
    end = EncodedResponse([1], [5, 6], [(0, 2), (2, 4)])
    front = EncodedResponse([], [7, 99], [(4, 6), (6, 6)])
    only_end_lost = EncodedResponse([1], [5, 6, 7], [(0, 2), (2, 4), (4, 6)])
    for source, numbers in ((Column(), [1, 2, 3]), (Column(end_token=None), [1, 2, 3, 4])):
        assert weighed(source, numbers, end) == [1, 2]
        assert weighed(source, numbers, only_end_lost) == [1, 2, 3]
        assert weighed(source, numbers, front) == [3, 4 if source.end_token is None else 0]
        with pytest.raises(UserError, match="expected at least 2 numbers"):
            weighed(source, [1], end)


def test_a_template_that_strips_the_response_cuts_nothing() -> None:
    pair = PreferencePair.from_texts([{"role": "user", "content": "q"}], " ab ", "x", {"chosen_weights": [1, 2]})
    row = EncodedResponse([1], [5, 6, 99], [(1, 2), (2, 3), (4, 4)])
    assert Column().weigh(pair, "chosen", row).tolist() == [1, 2, 0]
    with pytest.raises(UserError, match="expected 1 numbers"):
        Column().weigh(pair, "chosen", EncodedResponse([1], [5], [(1, 3)]))


@pytest.mark.parametrize(
    ("source", "cell", "message"),
    [
        (
            Column(),
            [1, 2],
            r"expected 3 numbers, one for each of this run's training tokens that contain text, got 2",
        ),
        (Column(), [1, 2, 3, 4], r"expected 3 numbers.*got 4; .*weights\.form=spans"),
        (Column(), [], r"expected 3 numbers.*got 0"),
        (Column(end_token=None), [1, 2, 3], r"expected 4 numbers, .* training tokens including end tokens, got 3"),
        (Column(), [1, math.nan, 3], r"entry 1: expected a finite number, got nan"),
        (Column(), [1, "2", 3], r"entry 1: expected a finite number, got '2'"),
        (Column(), None, r"expected a list, got None; every row needs weights"),
        (Column(), "123", r"expected a list, got '123'"),
        (Column(), [1, -2, 3], r"entry 1: expected at least 0 with weights\.kind=factor, got -2; .*weights\.signed"),
        (Column(kind=Kind.DISTRIBUTION), [1, -2, 3], r"expected at least 0 with weights\.kind=distribution, got -2"),
        (
            Column(kind=Kind.DISTRIBUTION),
            [0, 0, 0],
            r"on at least one training token, but all 4 weights are 0",
        ),
    ],
)
def test_numbers_that_are_no_weights_name_pair_side_and_column(source: Column, cell: object, message: str) -> None:
    pair = pair_with(cell)
    with pytest.raises(UserError, match=rf"^pair {pair.pair_id}, chosen, column 'chosen_weights'.*{message}"):
        source.weigh(pair, "chosen", WHOLE)


def test_a_column_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(
        UserError,
        match=r"rejected, column 'mask': the data has no such column; columns besides prompt and responses: "
        r"chosen_weights, rejected_weights\. Choose one with weights\.rejected=COLUMN",
    ):
        Column(rejected="mask").weigh(pair_with([1]), "rejected", WHOLE)


# ------------------------------------------------------------------------------------------------ by span


def test_a_token_has_the_mean_over_its_characters() -> None:
    assert weighed(SPANS, [[0, 3, 2.0]]) == [2, 1, 0, 0]
    assert weighed(SPANS, [[1, 5]]) == [0.5, 1, 0.5, 0]
    assert weighed(SPANS, [{"start": 4, "end": 6, "weight": 3.0}, {"start": 0, "end": 2}]) == [1, 0, 3, 0]
    assert weighed(SPANS, [{"start": 0, "end": 2, "weight": None}]) == [1, 0, 0, 0]
    assert weighed(SPANS, []) == [0, 0, 0, 0]
    assert weighed(Column(form=ColumnForm.SPANS, elsewhere=1.0, end_token=1.0), [(2, 4, 0)]) == [1, 0, 1, 1]
    assert weighed(Column(form=ColumnForm.SPANS, kind=Kind.DISTRIBUTION), [[0, 3, 2.0]]) == pytest.approx(
        [2 / 3, 1 / 3, 0, 0]
    )
    assert weighed(Column(form=ColumnForm.SPANS, signed=True), [[0, 1, -1.0]]) == [-0.5, 0, 0, 0]
    assert weighed(SPANS, [[4, 6]], EncodedResponse([1], [5], [(0, 2)])) == [0]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ([[0, 7]], r"span 0: expected a range within the response's 6 characters, got \[0, 7\)"),
        ([[-1, 2]], r"span 0: expected a range within"),
        ([[0, 2], [1, 3]], r"span 1: \[1, 3\) overlaps an earlier span"),
        ([[0, 2.5]], r"span 0: expected integers for start and end, got 0 and 2\.5"),
        ([[0, 2, math.nan]], r"span 0: expected a finite number, got nan"),
        ([[0, 2, -1]], r"span 0: expected at least 0"),
        ([[0]], r"span 0: expected \[start, end\], .* got \[0\]"),
        ([3], r"span 0: expected \[start, end\], .*got 3"),
    ],
)
def test_spans_that_are_none_are_refused(cell: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        weighed(SPANS, cell)


# ------------------------------------------------------------------------------------------------ as a source


def test_what_it_says_of_itself() -> None:
    assert Column("a", "b", kind=Kind.DISTRIBUTION).columns == ("a", "b")
    assert (Column().kind, Column(signed=True).signed) == (Kind.FACTOR, True)
    assert Column().unused_keys().keys() == {"elsewhere"} and not SPANS.unused_keys()


def test_masks_that_keep_nothing_make_their_pair_void() -> None:
    sides = {"chosen": WHOLE, "rejected": EncodedResponse([1], [8, 99], [(0, 2), (2, 2)])}
    nothing = training_weights(Column(), None, sides, pair=pair_with([0, 0, 0], [0]))
    assert nothing.factors and make_example("p", sides, nothing).pair_weight == 0.0
    one = training_weights(Column(), None, sides, pair=pair_with([0, 0, 0], [1]))
    assert make_example("p", sides, one).pair_weight == 1.0
    shares = training_weights(Column(kind=Kind.DISTRIBUTION), None, sides, pair=pair_with([1, 1, 2], [3]))
    assert not shares.factors and shares.chosen.tolist() == [0.25, 0.25, 0.5, 0] and shares.lengths == (4.0, 2.0)


# ------------------------------------------------------------------------------------------------ whole runs


def with_columns(world: World, weight: float = 1.0) -> None:
    """Gives every row a span of the first half of each response."""
    for file in sorted(world.data.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            for side in SIDES:
                answer = row[side] if isinstance(row[side], str) else row[side][-1]["content"]
                row[f"{side}_spans"] = [[0, max(1, len(answer) // 2), weight]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def contents(made: Made) -> dict[str, str]:
    """Digests of what the paths of a configuration hold."""
    return digest_contents(made.inputs, made.base, digest_named_functions(made.cfg.values))


CHOSEN = ("weights=column", "weights.form=spans", "weights.chosen=chosen_spans", "weights.rejected=rejected_spans")


def test_a_run_trains_on_its_data_s_spans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = build_world(tmp_path)
    with_columns(world)
    caplog.set_level("INFO")
    result = run(world.config(*CHOSEN, "callbacks=none", "objective.beta=0.5"), tmp_path / "run")
    assert result.metrics["first/val/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(result.metrics["val/loss"] - math.log(2)) > 1e-5
    assert not any("may contain weights" in message for message in caplog.messages)
    made = make(world.config(*CHOSEN))
    inputs, others = made.inputs, (made.inputs.recipe, made.inputs.weighed, made.readers)
    example = inputs.examples["train"].examples[0]
    assert example.factors and 0 < float(example.weights[0].mean()) < 1
    # Pairs of sampled answers have no such columns: no weights, and no error.
    bare = [PreferencePair.from_texts(pair.prompt, pair.chosen, pair.rejected) for pair in inputs.pairs["val"].pairs]
    assert all(not row.any() for one in weigh_other_pairs(*others, bare) for row in one.weights)
    assert all(row.any() for one in weigh_other_pairs(*others, inputs.pairs["val"].pairs) for row in one.weights)
    # Another column is another run, though the pairs' ids are the same.
    before = contents(made)
    with_columns(world, 2.0)
    after = contents(make(world.config(*CHOSEN)))
    assert {key for key in before if before[key] != after[key]} == {"judge and weights"}


def test_a_run_without_the_column_says_so(tmp_path: Path) -> None:
    world = build_world(tmp_path)
    with pytest.raises(UserError, match=re.escape("column 'chosen_spans': the data has no such column")):
        run(world.config(*CHOSEN, "callbacks=none"), tmp_path / "run")
