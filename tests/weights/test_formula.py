"""Weights from a user's function: what it sees, what is refused, and that its source tells runs apart."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnpo.config.compose import list_groups, load
from attnpo.config.named_files import digest_named_files, digest_named_functions
from attnpo.schema import EncodedResponse, Kind, PreferencePair, UserError
from attnpo.system.files import file_digest
from attnpo.weights.capture import weights_key
from attnpo.weights.pipeline import training_weights
from attnpo.weights.sources.formula import Formula

CODE = """
import torch

def by_place(tokens):
    return [1 / (1 + place) for place in tokens.positions]

def told(tokens):
    assert tokens.texts == ("good", " ok", "") and tokens.ids == (5, 6, 7), tokens
    assert tokens.offsets == ((0, 4), (4, 7), (7, 7)) and tokens.prompt[0]["content"] == "q"
    assert (tokens.side, tokens.response, tokens.other) == ("chosen", "good ok", "bad"), tokens
    return torch.ones(len(tokens.ids), requires_grad=True)

def lengths(tokens): return [len(text) for text in tokens.texts]
def minus(tokens): return [-1] * len(tokens.ids)
def nothing(tokens): return [0] * len(tokens.ids)
def one_short(tokens): return [1.0] * (len(tokens.ids) - 1)
def column(tokens): return [[1.0]] * len(tokens.ids)
def words(tokens): return ["a"] * len(tokens.ids)
def absent(tokens): return None
def fails(tokens): return 1 / 0
def nan(tokens): return [float("nan")] * len(tokens.ids)
def huge(tokens): return [1e300] * len(tokens.ids)

NUMBER = 3
"""
PAIR = PreferencePair.from_texts([{"role": "user", "content": "q"}], "good ok", "bad")
CHOSEN = EncodedResponse([1], [5, 6, 7], [(0, 4), (4, 7), (7, 7)])
REJECTED = EncodedResponse([1], [8, 7], [(0, 3), (3, 3)])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module ``my_formulas`` whose package the environment allows."""
    (tmp_path / "my_formulas.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "tests,my_formulas")
    yield tmp_path / "my_formulas.py"
    sys.modules.pop("my_formulas", None)


def test_it_sees_tokens_places_and_texts(module: Path) -> None:
    assert Formula("my_formulas.told").weigh(PAIR, "chosen", CHOSEN).tolist() == [1, 1, 1]


def test_factors_are_used_as_they_are_and_distributions_divided_by_their_sum(module: Path) -> None:
    factor = Formula("my_formulas.by_place")
    assert factor.weigh(PAIR, "chosen", CHOSEN).tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    shares = Formula("my_formulas.by_place", Kind.DISTRIBUTION).weigh(PAIR, "chosen", CHOSEN)
    assert shares.tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    made = training_weights(factor, None, {"chosen": CHOSEN, "rejected": REJECTED}, pair=PAIR)
    assert made.rejected.tolist() == [1, 1 / 2] and made.lengths == (3.0, 2.0)
    signed = Formula("my_formulas.minus", signed=True)
    assert (
        training_weights(signed, None, {"chosen": CHOSEN, "rejected": REJECTED}, pair=PAIR).chosen.tolist() == [-1] * 3
    )


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("fails", Kind.FACTOR, "failed on 3 tokens: ZeroDivisionError: division by zero"),
        ("words", Kind.FACTOR, "failed on 3 tokens: .*"),
        ("absent", Kind.FACTOR, "failed on 3 tokens: .*"),
        ("one_short", Kind.FACTOR, r"expected 3 weights, one for each token, got shape \(2,\)"),
        ("column", Kind.FACTOR, r"expected 3 weights, one for each token, got shape \(3, 1\)"),
        ("nan", Kind.FACTOR, "expected finite weights, got nan for token 0"),
        ("huge", Kind.FACTOR, "expected finite weights, got inf for token 0"),
        ("minus", Kind.FACTOR, r"expected weights of at least 0, got -1: .* function, or set weights\.signed=true"),
        ("minus", Kind.DISTRIBUTION, "expected weights of at least 0, got -1: correct the function$"),
        ("nothing", Kind.DISTRIBUTION, "expected a distribution, got 0 for all 3 tokens"),
    ],
)
def test_what_a_formula_gets_wrong_names_pair_and_side(module: Path, name: str, kind: Kind, said: str) -> None:
    with pytest.raises(
        UserError, match=rf"^pair {PAIR.pair_id}, chosen: weights\.function=my_formulas\.{name}:? {said}"
    ):
        Formula(f"my_formulas.{name}", kind).weigh(PAIR, "chosen", CHOSEN)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Formula("by_place"), r"weights\.function: expected an import path"),
        (
            lambda: Formula("json.dumps"),
            r"weights\.function: expected a function of attnpo, got json\.dumps; .*=json only",
        ),
        (lambda: Formula("my_formulas.by_plac"), r"weights\.function: cannot import my_formulas\.by_plac"),
        (lambda: Formula("my_formulas.NUMBER"), "expected a function, but my_formulas.NUMBER is of type int"),
        (lambda: Formula("my_formulas.lengths", Kind.DISTRIBUTION, signed=True), r"weights\.signed=true"),
    ],
)
def test_names_that_cannot_be_called_are_refused(module: Path, make: Callable[[], Formula], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def by_place(tokens)\n    return 1\n", "SyntaxError: expected ':'"),
        ("RATE = rat\n", "NameError: name 'rat' is not defined"),
        ("RATE = 1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told(module: Path, code: str, said: str) -> None:
    module.write_text(code)
    with pytest.raises(UserError, match=rf"^weights\.function: cannot import my_formulas\.by_place: {said}"):
        Formula("my_formulas.by_place")


def test_the_digest_of_its_source_is_in_keys_and_identities(module: Path) -> None:
    source = Formula("my_formulas.by_place")
    before = weights_key(source, None, None)
    assert before["source"] == {"source": "formula", "function": "my_formulas.by_place", "kind": "factor",
                                "signed": False, "code": [file_digest(module)]}  # fmt: skip
    values = {"weights": {"function": "my_formulas.by_place", "kind": "factor"}}
    point = digest_named_files({"weights.function": "my_formulas.by_place"})
    assert point == digest_named_functions(values) == {"weights.function": file_digest(module)}
    module.write_text(CODE.replace("1 / (1 + place)", "2 / (1 + place)"))
    assert weights_key(source, None, None) != before
    assert digest_named_functions(values) != point and digest_named_functions({"weights": {"layer": "last"}}) == {}


def test_the_documented_example_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files and names of docs/own_weights.md, typed as they stand there."""
    text = (Path(__file__).parents[2] / "docs" / "own_weights.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"^```\w+\n# own/(\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "my_rules")
    asked = ["setting=real_smoke", "model.path=unset", "data.path=unset", "weights=mine", "transform=shuffled"]
    assert " ".join(asked[-2:]) in text and "mine" in list_groups(tmp_path)["weights"]
    source = load("fit", asked, tmp_path).weights
    assert source.weigh(PAIR, "chosen", CHOSEN).tolist() == pytest.approx([1.0, 0.2, 0.0])
    sys.modules.pop("my_rules")
