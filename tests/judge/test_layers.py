"""Names of layers and of stored rows."""

import pickle

import pytest

from attnpo.judge.layers import (
    Depth,
    HeadRow,
    StoredRow,
    describe_rows,
    distinct_layers,
    layer_column,
    layers_with_attention,
    resolve_layer,
)
from attnpo.schema import UserError
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout

PAPER_LAYERS = [(1, 1), ("1/4", 8), ("1/2", 16), ("3/4", 24), ("last", 32), ("12", 12), (32, 32), ("1/1", 32)]


@pytest.mark.parametrize(("name", "number"), PAPER_LAYERS)
def test_layer_names_of_the_paper_in_32_layers(name: int | str, number: int) -> None:
    assert resolve_layer(name, 32) == number


@pytest.mark.parametrize(("layers", "numbers"), [(2, [1, 1, 1, 2]), (6, [1, 3, 4, 6]), (1, [1, 1, 1, 1])])
def test_fractions_of_shallow_models_round_down_but_not_to_zero(layers: int, numbers: list[int]) -> None:
    assert [resolve_layer(name, layers) for name in ("1/4", "1/2", "3/4", "last")] == numbers


@pytest.mark.parametrize("name", [0, -1, 33, "0", "33", "auto", "", "first", "5/4", "0/4", "1/0", "1.5", True])
def test_other_layers_are_refused_with_the_range(name: int | str) -> None:
    with pytest.raises(UserError, match=r"weights\.layer: expected a whole number from 1 to 32"):
        resolve_layer(name, 32)


def test_distinct_layers_keep_every_name_and_rise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert distinct_layers(["last", 1, "1/4"], 32, "study.layers") == {1: ["1"], 8: ["1/4"], 32: ["last"]}
    assert distinct_layers([2, "1/2", "last"], 2, "study.layers") == {1: ["1/2"], 2: ["2", "last"]}
    assert caplog.messages == ["study.layers: 2, last are all the same layer in this model: 2 of 2"]
    with pytest.raises(UserError, match=r"^study\.layers: expected each layer once, got 2 twice in \['2', '2'\]"):
        distinct_layers([2, "2"], 2, "study.layers")
    for layers, name in (((1, 1), "1"), (("last", 2, " Last"), "last"), (("1/4", "1/4"), "1/4")):
        with pytest.raises(UserError, match=rf"weights\.layers: expected each layer once, got {name} twice"):
            Attention(layers=layers).resolve(32)


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ((1, 12), ["L01", "L12"], "2 layers"),
        ((3,), ["L03"], "1 layer"),
        ((0,), ["L00"], "1 row"),
        ((HeadRow(1, 3), HeadRow(1, 32), HeadRow(12, 3)), ["L01H03", "L01H32", "L12H03"], "2 layers x 2 heads"),
    ],
)
def test_rows_have_columns_and_words(rows: tuple[StoredRow, ...], columns: list[str], words: str) -> None:
    assert [layer_column(row) for row in rows] == columns
    assert describe_rows(rows) == words


def test_hybrids_count_layers_with_attention() -> None:
    depth = Depth(12, (4, 8, 12))
    assert (
        layers_with_attention(depth) == (4, 8, 12)
        and layers_with_attention(3) == (1, 2, 3)
        and layers_with_attention(Depth(2)) == (1, 2)
    )
    assert [resolve_layer(name, depth) for name in ("1/4", "1/3", "2/3", "last", 8)] == [4, 4, 8, 12, 8]
    assert resolve_layer("last", Depth(12, (4, 8))) == 8
    assert max(Depth(4), depth) is depth and layers_with_attention(pickle.loads(pickle.dumps(depth))) == (4, 8, 12)
    with pytest.raises(
        UserError,
        match=r"weights\.layer=5: .* has no readable softmax attention.*one of the layers with attention \(4, 8, 12\)",
    ):
        resolve_layer(5, depth)
    with pytest.raises(UserError, match="expected one of the layers with attention \\(4, 8, 12\\)"):
        resolve_layer(13, depth)


def test_all_stored_layers_and_rollout_go_by_the_layers_with_attention() -> None:
    depth = Depth(4, (2, 4))
    assert Attention().layers_to_store(depth) == (2, 4) and Attention("last").resolve(depth).layer == 4
    assert Rollout().resolve(4) == Rollout()
    with pytest.raises(UserError, match=r"weights=rollout .* in only 2 of 4 layers \(2, 4\)"):
        Rollout().resolve(depth)
