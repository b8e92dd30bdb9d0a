"""What every option of `weights` promises: its kind, where its weights stand, and which transforms are its controls."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.config.compose import list_groups, load
from attnpo.data.collate import collate
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.dpo import DPO
from attnpo.objectives.twdpo import OTPO, TwDPO
from attnpo.run.combinations import require_usable_weights
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, Kind, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.training.module import PreferenceModule, apply_online_weights
from attnpo.training.optimizer import Optimizer
from attnpo.weights.base import OnlineSource, TextSource, WeightSource, is_neutral, online_statistics
from attnpo.weights.pipeline import FOR_FACTORS, TrainingWeights, check_transforms, training_weights
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.column import Column, ColumnForm
from attnpo.weights.sources.confidence import Entropy, Selective
from attnpo.weights.sources.contrast import TISDPO
from attnpo.weights.sources.decay import Decay
from attnpo.weights.sources.edits import Edits
from attnpo.weights.sources.formula import ResponseTokens
from attnpo.weights.sources.gradient import Gradient
from attnpo.weights.sources.lengths import Lengths
from attnpo.weights.sources.pair_strength import MWPO
from attnpo.weights.sources.transport import Transport
from attnpo.weights.sources.verbalized import Verbalized
from attnpo.weights.transforms import Shuffled, TailCut, UniformOnSupport
from tests.conformance.records import built
from tests.objectives.inputs import Maker
from tests.training.tiny import make_examples, tiny_model
from tests.weights.fakes import word_id, words

TEXTS = ("one two three four five six seven eight", "one two three nine ten eleven twelve")
END = 999
CHOSEN, REJECTED = len(TEXTS[0].split()), len(TEXTS[1].split())


def by_length(tokens: ResponseTokens) -> list[float]:
    """A formula: how many characters a token has."""
    return [float(len(text)) for text in tokens.texts]


PAIR = PreferencePair.from_texts(
    [{"role": "user", "content": "q"}],
    *TEXTS,
    {"chosen_weights": list(range(CHOSEN)), "rejected_weights": list(range(REJECTED)), "trust": 2.0},
)
BOTH = {"positive__path": "a", "negative__path": "b"}
NEEDED: dict[str, dict[str, Any]] = {
    **{"contrast": BOTH, "contrast_cdpo": BOTH, "contrast_tgdpo": {"positive__path": "a"}},
    **{"selection": {"oracle__path": "a"}, "pair_column": {"column": "trust"}},
    "formula": {"function": "tests.weights.test_contract.by_length"},
}
# true_importance reads prompts of the testbed alone: tests/testbed.
OPTIONS = [option for option in list_groups()["weights"] if option != "true_importance"]
CONFIG = ["setting=real_smoke", "model.path=unset", "data.path=unset"]
TRANSFORMS: dict[str, object] = load("fit", [*CONFIG, f"transform=[{','.join(list_groups()['transform'])}]"]).transforms


def source_of(option: str) -> WeightSource:
    source: WeightSource = built("weights", f"weights={option}", **NEEDED.get(option, {}))
    return source.resolve(3)


ONLINE = [option for option in OPTIONS if isinstance(source_of(option), OnlineSource)]
OFFLINE = [option for option in OPTIONS if option not in ONLINE]


def encoded(text: str) -> EncodedResponse:
    places = words(text)
    ids = [word_id(text[start:end]) for start, end in places]
    return EncodedResponse([1], [*ids, END], [*places, (len(text), len(text))])


SIDED = dict(zip(SIDES, map(encoded, TEXTS), strict=True))


def captured(source: WeightSource) -> PairWeights | None:
    """One round of made-up rows: on the training tokens for scorers, on the words alone for other models."""
    if not source.requires:
        return None
    generator, rows = torch.Generator().manual_seed(4), []
    for side in SIDES:
        kept = slice(None) if source.tokens == "train" else slice(-1)
        ids, places = torch.tensor(SIDED[side].response_ids)[kept], torch.tensor(SIDED[side].offsets)[kept]
        raw = torch.rand(len(source.rows_to_read()), len(ids), generator=generator)
        rows.append(TokenWeights(ids, places, -raw if "scorers" in source.requires else raw))
    return PairWeights(PAIR.pair_id, (JudgeRound(True, *rows),))


def offline(source: WeightSource, *transforms: object) -> TrainingWeights:
    found = captured(source)
    return training_weights(source, found, SIDED, transforms=transforms, layers=source.rows_to_read(), pair=PAIR)  # type: ignore[arg-type]


def in_a_step(source: OnlineSource, *transforms: object) -> tuple[Tensor, Tensor]:
    """The weights of made-up rows, and their mask."""
    case = Maker(frozenset({"reference"}) | online_statistics(source)).case()
    batch = apply_online_weights(case.batch, source, case.policy, case.reference, transforms)  # type: ignore[arg-type]
    return batch.main.token_weights["reward"], batch.main.response_mask


def same_numbers(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.sort().values, other.sort().values)


@pytest.mark.parametrize("option", OPTIONS)
def test_what_a_source_says_of_itself(option: str) -> None:
    source = source_of(option)
    assert isinstance(source, WeightSource) and source.tokens in ("source", "train")
    assert source.requires <= {"judge", "generator", "scorers", "reward"}
    assert isinstance(source, TextSource) == (not source.requires)
    assert len(source.rows_to_read()) == bool(source.requires) and set(source.rows_to_read()) <= set(
        source.layers_to_store(3)
    )
    assert not (source.signed and source.kind is Kind.DISTRIBUTION)
    assert source_of(option).capture_fingerprint() == source.capture_fingerprint()
    if isinstance(source, TextSource):
        assert source.tokens == "train" and source.layers_to_store(3) == () and source.resolve(4) == source
        assert source.capture_fingerprint()["source"] == option
        with pytest.raises(
            UserError, match=rf"weights of {type(source).__name__} are computed in each run.*attnpo\.fit"
        ):
            source.capture([], None, ())
    if isinstance(source, OnlineSource):
        assert online_statistics(source) == source.statistics
        assert source.statistics <= {"reference", "hidden", "input_gradient", "vocab:entropy", "vocab:collision"}
    assert is_neutral(source) == (option in ("uniform", "pair_column", "wpo", "mwpo"))
    assert source.signed == (option == "contrast_tgdpo")


OUT_OF_RANGE: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (Decay, {"gamma": 0.0}, r"weights\.gamma must be in \(0, 1\], got 0\.0"),
    (Decay, {"gamma": math.nan}, r"weights\.gamma must be in"),
    (Decay, {"first_exponent": 2}, r"weights\.first_exponent: expected 1 .* or 0 .*, got 2"),
    (Edits, {"changed": -1.0}, r"weights\.changed must be at least 0, got -1"),
    (Edits, {"same": math.inf}, r"weights\.same must be at least 0, got inf"),
    (Edits, {"changed": 0.0, "same": 0.0}, r"weights\.changed and weights\.same are both 0"),
    (Edits, {"min_match": 0}, r"weights\.min_match must be at least 1, got 0"),
    (Lengths, {"alpha": 1.5}, r"weights\.alpha must be in \[0, 1\]"),
    (Lengths, {"seed": -1}, r"weights\.seed: expected a whole number"),
    (Selective, {"quantile": 1.5}, r"weights\.quantile must be in \[0, 1\], got 1\.5"),
    (Entropy, {"share": 0.0}, r"weights\.share must be in \(0, 1\], got 0\.0"),
    (MWPO, {"beta": 0.0}, r"weights\.beta must be above 0"),
    (MWPO, {"alpha": -1.0}, r"weights\.alpha must be at least 0"),
    (MWPO, {"length_scale": math.inf}, r"weights\.length_scale must be at least 0, got inf"),
    (Gradient, {"lam": 1.5}, r"weights\.lam must be in \[0, 1\], got 1\.5"),
    (Gradient, {"prior_sigma_div": 0.0}, r"weights\.prior_sigma_div must be above 0, got 0\.0"),
    (Transport, {"reg": 0.001}, r"weights\.reg must be at least 0\.002, got 0\.001"),
    (Transport, {"reg": math.inf}, r"weights\.reg must be at least 0\.002, got inf"),
    (Transport, {"reg_m": 0.0}, r"weights\.reg_m must be in \(0, 1e\+09\], got 0\.0"),
    (Transport, {"tolerance": 1e-15}, r"weights\.tolerance must be in \[1e-11, 1\), got 1e-15"),
    (
        Transport,
        {"reg": 0.02, "reg_m": 1e9},
        r"weights\.max_iterations must be at least \d+ for .* got 1000: raise weights\.max",
    ),
    (Transport, {"max_iterations": 4}, r"weights\.max_iterations must be at least 5 for weights\.reg=1.* got 4: raise"),
    (TISDPO, {"low": 2.0}, r"weights\.form\.high must be above 2, got 1\.5"),
    (TISDPO, {"least": 1.4}, r"weights\.form\.most must be at least 1\.4, got 1\.3"),
    (TISDPO, {"mu": math.inf}, r"weights\.form\.mu must be in \(-1e300, 1e300\), got inf"),
    (TISDPO, {"top_percent": 0.0}, r"weights\.form\.top_percent must be in \(0, 100\], got 0\.0"),
    (TISDPO, {"k": 0.0}, r"weights\.form\.k must be above 0, got 0\.0"),
    (Column, {"signed": True, "kind": Kind.DISTRIBUTION}, r"weights\.signed=true works only for factors"),
    (Column, {"end_token": None, "form": ColumnForm.SPANS}, r"weights\.end_token=null .* weights\.form=spans"),
    (Column, {"end_token": -1.0}, r"weights\.end_token must be finite and at least 0, got -1"),
    (Column, {"elsewhere": math.nan, "signed": True}, r"weights\.elsewhere must be finite, got nan"),
    (Verbalized, {"min_coverage": 1.5}, r"^weights\.min_coverage must be in \[0, 1\], got 1\.5$"),
    (Postprocess, {"sink_tokens": -1}, r"weights\.postprocess\.sink_tokens must be at least 0, got -1"),
    (Postprocess, {"sink_min_length": 0}, r"weights\.postprocess\.sink_min_length must be at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "values", "said"), OUT_OF_RANGE)
def test_settings_out_of_range_are_refused_with_their_key(kind: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        kind(**values)


def test_what_a_config_builds_has_its_defaults_and_reads_no_judge() -> None:
    for option in ("column", "transport"):
        cfg = load("fit", [*CONFIG, f"weights={option}", "objective=otpo"])
        assert cfg.weights == type(cfg.weights)()
        unread = cfg.unused_keys()
        assert {"judge", "align", "verbalizer", "auto_layer"} <= set(unread)
        assert not any(key.startswith("objective") for key in unread)


@pytest.mark.parametrize("option", OPTIONS)
def test_only_objectives_that_read_weights_take_them(option: str) -> None:
    source = source_of(option)
    require_usable_weights(source, TwDPO())
    if source.kind is Kind.FACTOR:
        require_usable_weights(source, OTPO())
    else:
        with pytest.raises(
            UserError, match=rf"OTPO needs weights that are factors, but {type(source).__name__} returns a distr"
        ):
            require_usable_weights(source, OTPO())
    if not is_neutral(source):
        with pytest.raises(
            UserError, match=f"DPO uses no token weights, so computing the weights of {type(source).__name__}"
        ):
            require_usable_weights(source, DPO())


@pytest.mark.parametrize("option", OFFLINE)
def test_weights_stand_on_the_training_tokens(option: str) -> None:
    source = source_of(option)
    made = offline(source)
    assert (made.chosen.numel(), made.rejected.numel()) == (CHOSEN + 1, REJECTED + 1)
    assert made.factors is (source.kind is Kind.FACTOR)
    for row in (made.chosen, made.rejected):
        assert bool(row.isfinite().all()) and row.any() and (source.signed or bool((row >= 0).all()))
        if not made.factors:
            assert float(row.sum()) == pytest.approx(1)


@pytest.mark.parametrize("option", OPTIONS)
def test_transforms_are_taken_where_they_have_a_meaning(option: str) -> None:
    """All by distributions that stand before training, those that change single weights by factors, none by pairs."""
    source = source_of(option)
    online = isinstance(source, OnlineSource)
    free = not online and source.kind is Kind.DISTRIBUTION
    for name, change in TRANSFORMS.items():
        if (online and is_neutral(source)) or not (free or name in FOR_FACTORS):
            with pytest.raises(UserError, match=rf"transforms \({type(change).__name__}\) .*{type(source).__name__} "):
                check_transforms(source, [change])
        else:
            check_transforms(source, [change])


@pytest.mark.parametrize("option", OFFLINE)
def test_shuffled_weights_are_the_same_numbers_on_other_tokens(option: str) -> None:
    """The multiset of every response stays, its last token, the end of turn, too where weights are factors."""
    source = source_of(option)
    check_transforms(source, [Shuffled()])
    plain, mixed = offline(source), offline(source, Shuffled())
    for before, after in ((plain.chosen, mixed.chosen), (plain.rejected, mixed.rejected)):
        assert same_numbers(before, after)
        if plain.factors:
            assert before[-1] == after[-1]
    assert torch.equal(mixed.chosen, offline(source, Shuffled()).chosen)
    constant = all(len(set(row.tolist())) == 1 for row in (plain.chosen, plain.rejected))
    moved = not (torch.equal(plain.chosen, mixed.chosen) and torch.equal(plain.rejected, mixed.rejected))
    assert moved is not constant and constant is (option in ("uniform", "pair_column"))
    assert (plain.lengths, plain.coverage, plain.factors) == (mixed.lengths, mixed.coverage, mixed.factors)


@pytest.mark.parametrize("option", ONLINE)
def test_weights_of_a_step_are_shuffled_within_each_response(option: str) -> None:
    source = source_of(option)
    assert isinstance(source, OnlineSource)
    if is_neutral(source):
        return  # weights of pairs: refused above
    plain, mask = in_a_step(source)
    mixed, _ = in_a_step(source, Shuffled())
    assert not torch.equal(plain, mixed) and not mixed[~mask].any()
    assert all(same_numbers(one[kept], other[kept]) for one, other, kept in zip(plain, mixed, mask, strict=True))
    assert torch.equal(mixed, in_a_step(source, Shuffled())[0])
    flat, _ = in_a_step(source, Shuffled(), UniformOnSupport())
    means = (plain * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    torch.testing.assert_close(flat, means * mask)


def test_a_tail_of_factors_is_counted_in_tokens_that_hold_characters() -> None:
    """The chosen side has one word more than the rejected one; the end of turn keeps its factor."""
    source = built("weights", "weights=decay", gamma=1.0)
    cut = offline(source, TailCut())
    assert cut.chosen.tolist() == [1.0] * REJECTED + [0.0, 1.0] and cut.rejected.tolist() == [1.0] * (REJECTED + 1)


def test_a_transform_that_changes_the_number_of_weights_names_the_pair() -> None:
    class Short(Shuffled):
        def __call__(self, row: Any) -> Tensor:
            return torch.ones(1, dtype=torch.float64)

    with pytest.raises(UserError, match=rf"pair {PAIR.pair_id}, chosen, after Short: expected {CHOSEN} weights"):
        offline(source_of("decay"), Short())


def test_training_shuffles_what_it_computes() -> None:
    batch = collate(make_examples(6), padded_layout, 0, 6)
    policy, reference = ScoredLM(tiny_model()), ScoredLM(tiny_model())
    rows: list[Tensor] = []
    for transforms in ((), (Shuffled(),)):
        given: Sequence[Shuffled] = transforms
        module = PreferenceModule(policy, reference, OTPO(0.5), Optimizer(), 3, Lengths(alpha=0.0), transforms=given)
        rows.append(module.score(batch)[0].main.token_weights["reward"])
    assert torch.equal(rows[0].sum(-1), rows[1].sum(-1)) and not torch.equal(rows[0], rows[1])
