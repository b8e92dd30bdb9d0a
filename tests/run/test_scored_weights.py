"""Weights from scorers as a run: what is refused before any data are read, what is stored, what training reads."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnpo.data.collate import collate
from attnpo.data.prepare import VOID
from attnpo.data.scoring import RunPairEncoder, RunScorers
from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.layouts import padded_layout
from attnpo.run.resolve import resolve
from attnpo.run.run import run
from attnpo.schema import SIDES, UserError
from attnpo.weigh import fill_store
from tests.run.made import make, make_inputs
from tests.run.worlds import GRAMMAR, RECIPE, TRAIN, VAL, World

PAIRS = TRAIN + VAL


@pytest.fixture(scope="module")
def other(world: World) -> Path:
    """A second model with the world's tokenizer."""
    folder = world.model.parent / "other"
    tokenizer = build_tokenizer(GRAMMAR)
    new_model(RECIPE, tokenizer, seed=9).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def two(other: Path, *more: str) -> list[str]:
    """TIS-DPO's weights of the second model against the run's own."""
    return ["weights=contrast", f"weights.positive.path={other}", "weights.negative.path=null", *more]


def test_a_whole_run_reads_factors_and_its_weights_are_those_of_plain_transformers(
    world: World, other: Path, tmp_path: Path
) -> None:
    config = world.config(*two(other, f"store={tmp_path}"))
    inputs = make_inputs(config)
    assert inputs.weighed.report is not None and inputs.weighed.report.computed == PAIRS
    models = [AutoModelForCausalLM.from_pretrained(path).train(False) for path in (other, world.model)]
    for example in inputs.examples["train"].examples[:3]:
        for sign, side, weights in zip((1, -1), example.sides, example.weights, strict=True):
            ids = torch.tensor([[*side.prompt_ids, *side.response_ids]])
            start = len(side.prompt_ids)
            with torch.no_grad():
                positive, negative = (
                    torch.log_softmax(model(ids).logits[0, start - 1 : -1].double(), -1)
                    .gather(1, ids[0, start:, None])[:, 0] for model in models
                )  # fmt: skip
            reward = (sign * (positive - negative)).clamp(-1.5, 1.5)
            expected = 0.7 + (reward + 1.5) / 3 * 0.6
            expected[[end <= begin for begin, end in side.offsets]] = 0.0
            # Two decimals of a reward are 0.005 x 0.2 of a weight.
            torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1.1e-3)
    batch = collate(inputs.examples["train"].examples[:2], padded_layout, 0, 2)
    assert batch.main.factors
    result = run(config, tmp_path / "run")
    assert result.inputs["weights"] == {"from_store": PAIRS, "computed": 0}
    assert result.inputs["scorers"] == {"pairs": PAIRS, "cut": 0}


def test_another_form_or_selection_asks_no_model_again_and_other_weights_do(
    world: World, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_store(world.config(*two(other, f"store={tmp_path}")))
    with monkeypatch.context() as patch:
        patch.setattr(RunScorers, "load", lambda *_: pytest.fail("a model was loaded"))
        make_inputs(world.config(*two(other, f"store={tmp_path}", "weights.form.transform=rank")))
        make_inputs(world.config("weights=contrast_tgdpo", f"weights.positive.path={other}", f"store={tmp_path}"))
        selected = make_inputs(world.config("weights=selection", f"weights.oracle.path={other}", f"store={tmp_path}"))
    assert all(example.factors for example in selected.examples["train"].examples)
    turned = world.config(
        "weights=contrast", "weights.positive.path=null", f"weights.negative.path={other}", f"store={tmp_path}"
    )
    again = make_inputs(turned)
    assert again.weighed.report is not None and again.weighed.report.computed == PAIRS
    keys = [
        json.dumps(RunScorers(cfg.weights, base.spec, base.chat, cfg.lengths).fingerprint())
        for cfg, base, *_ in map(resolve, (turned, world.config(*two(other))))
    ]
    assert keys[0] != keys[1] and str(other) not in keys[0]


def test_one_frozen_model_under_two_instructions(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tiny vocabulary reads most words as unknown; the prompts differ in length at least."""
    caplog.set_level(logging.INFO)
    made = make(world.config("weights=contrast_prompt", f"store={tmp_path}", "weights.positive.instruction=good film"))
    inputs = made.inputs
    assert inputs.weighed.report is not None and inputs.weighed.report.computed == PAIRS
    raw = [item.chosen.weights for pair in inputs.weighed.captured.values() for item in pair.rounds]
    assert any(row.abs().max() > 1e-3 for row in raw)
    texts, pair = RunPairEncoder(made.base.chat, made.cfg.lengths), made.cfg.data.load("train").pairs[0]
    plain = texts.encode(pair)
    asked, cut = texts.add_instruction(pair, plain, "good film")
    assert not cut
    for side in SIDES:
        assert asked[side].response_ids == plain[side].response_ids
        assert len(asked[side].prompt_ids) > len(plain[side].prompt_ids)


def test_an_instruction_that_does_not_fit_is_kept_and_the_prompt_is_cut(world: World) -> None:
    cfg, base, *_ = resolve(world.config("weights=contrast_prompt"))
    pair = cfg.data.load("train").pairs[0]
    plain = RunPairEncoder(base.chat, cfg.lengths).encode(pair)
    room = max(len(one.prompt_ids) + len(one.response_ids) for one in plain.values())
    most = max(len(one.prompt_ids) for one in plain.values())
    limits = (f"lengths.max_length={room}", f"lengths.max_prompt_length={most}")
    tight = resolve(world.config("weights=contrast_prompt", *limits))
    texts = RunPairEncoder(tight.base.chat, tight.cfg.lengths)
    asked, cut = texts.add_instruction(pair, texts.encode(pair), "good film")
    longest = max(SIDES, key=lambda side: len(plain[side].response_ids))
    assert cut and len(asked[longest].prompt_ids) == len(plain[longest].prompt_ids)


def test_selections_that_keep_nothing_are_void_and_counted(world: World, other: Path, tmp_path: Path) -> None:
    """int(0.01 x fewer than 100 tokens) = 0: every pair has weight 0."""
    choice = ["weights=selection", f"weights.oracle.path={other}", "weights.top_fraction=0.01", f"store={tmp_path}"]
    made = make_inputs(world.config(*choice)).examples["train"]
    assert [example.pair_weight for example in made.examples] == [0.0] * TRAIN
    assert made.tally.counts[VOID] == TRAIN


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["weights=contrast"], "weights.positive.path"),
        (["weights=selection", "weights.oracle.path=null"], "are both the run's own model with the same instruction"),
        (["weights=selection", "weights.oracle.path=./nowhere"], "weights.oracle.path: no folder"),
        (["weights=selection", "weights.oracle.path=FOREIGN"], "has a different vocabulary from"),
        (["weights=selection", "weights.oracle.path=SAME"], "are the same model, so they agree on every token"),
        (["weights=selection", "weights.oracle.path=OTHER", "weights.oracle.dtype=int8"], "weights.oracle.dtype must"),
        (["weights=selection", "weights.oracle.path=OTHER", "objective=dpo"], "uses no token weights"),
        (["weights=selection", "weights.oracle.path=OTHER", "transform=[smeared]"], "need distributions"),
    ],
)
def test_what_cannot_score_is_refused_before_any_data(
    world: World, other: Path, overrides: list[str], said: str
) -> None:
    foreign = world.model.parent / "foreign"
    if not foreign.exists():
        tokenizer = build_tokenizer(GRAMMAR, 250)
        new_model(RECIPE, tokenizer, seed=2).save_pretrained(foreign)
        tokenizer.save_pretrained(foreign)
    places = {"FOREIGN": foreign, "SAME": world.model, "OTHER": other}
    named = [
        next((item.replace(name, str(path)) for name, path in places.items() if item.endswith(f"={name}")), item)
        for item in overrides
    ]
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        resolve(world.config(*named, "data.path=nowhere"))
