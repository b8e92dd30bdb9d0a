"""Vectors of the repository: small, drawn as they say, and remade by their builders."""

import json
import shutil
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file

from attnpo.schema import UserError
from tests.conformance import build_alpaca, build_vectors
from tests.conformance.drawn import DRAWN, model_folder


def test_no_file_is_above_a_mebibyte(vectors: Path) -> None:
    assert [path for path in vectors.rglob("*") if path.is_file() and path.stat().st_size > 2**20] == []
    assert not list(vectors.rglob("model.safetensors"))


def test_a_model_that_is_drawn_otherwise_is_refused(vectors: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(vectors / "extraction/model", folder)
    told = json.loads((folder / DRAWN).read_text())
    (folder / DRAWN).write_text(json.dumps({**told, "seed": told["seed"] + 1}))
    with pytest.raises(UserError, match="have another SHA-256 than"):
        model_folder(folder)


@pytest.mark.parametrize(("name", "short"), [("extraction", (2, 6, 16)), ("extraction_sentencepiece", (0, 6))])
def test_the_builder_makes_what_is_stored(vectors: Path, tmp_path: Path, name: str, short: tuple[int, ...]) -> None:
    folder = tmp_path / name
    shutil.copytree(vectors / name, folder)
    content = json.loads((folder / "pairs.json").read_text())
    content["pairs"] = [pair for pair in content["pairs"] if pair["index"] in short]
    before = json.dumps(content)
    (folder / "pairs.json").write_text(before)
    build_vectors.build(folder)
    assert json.loads((folder / "pairs.json").read_text()) == json.loads(before)
    assert (folder / "model" / DRAWN).read_text() == (vectors / name / "model" / DRAWN).read_text()
    made, stored = load_file(folder / "expected.safetensors"), load_file(vectors / name / "expected.safetensors")
    assert made.keys() == {key for key in stored if int(key[:2]) in short}
    for key, row in made.items():
        torch.testing.assert_close(row, stored[key], rtol=1e-5, atol=1e-7)


def test_figures_of_drawn_judgments_are_the_librarys(vectors: Path) -> None:
    """Draws themselves may move with numpy, so that the stored ones are read."""
    folder = vectors / "evaluation/alpaca_eval"
    expected = json.loads((folder / "expected.json").read_text())
    assert expected.keys() == build_alpaca.MODELS.keys()
    for model, figures in expected.items():
        table = pandas.read_csv(folder / f"{model}.csv")
        columns = [table[name].to_numpy() for name in ("preference", "len_baseline", "len_model")]
        assert build_alpaca.raw(columns[0]) == pytest.approx(figures["leaderboard"], abs=1e-6)
        found = build_alpaca.control_length(*columns, model, folder / "df_gamed_drawn.csv")
        assert found == pytest.approx(figures["library_with_reconstructed_aux"], abs=0.02), model
