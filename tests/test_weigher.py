"""The Python API of weights: the numbers a run trains on, every way of calling it, every way of showing them."""

import doctest
import inspect
import json
import pickle
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython
import pandas as pd
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnpo
from attnpo.config.compose import compose, parse
from attnpo.display.heatmap import heatmap_html
from attnpo.display.weighted_pair import WeightedPair, WeightedPairs
from attnpo.run.inputs import Inputs
from attnpo.schema import UserError
from attnpo.weigher import Weigher
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.confidence import Confidence
from attnpo.weights.sources.uniform import Uniform
from tests.run.made import make_inputs
from tests.run.worlds import World, build_world

WORDING = "{question}\nA : {answer_a}\nB : {answer_b}\nwhich is better , A or B ?"
PAIR = ("review the film .", "the film was great . it was raining today .", "the film was awful .")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def weigher(world: World) -> Weigher:
    return Weigher(world.model, template="judge/testbed.txt", max_length=512, max_response_length=200, device="cpu")


@pytest.fixture(scope="module")
def weighted_pair(weigher: Weigher) -> WeightedPair:
    return weigher(*PAIR)


@pytest.fixture(scope="module")
def trained(world: World) -> Inputs:
    return make_inputs(world.config("weights=attention"))


# ------------------------------------------------------------------------------------------------ the same numbers


def test_the_weights_are_those_a_run_trains_on(weigher: Weigher, trained: Inputs) -> None:
    pairs = [pair for split in ("train", "val") for pair in trained.pairs[split].pairs]
    rows = [{"prompt": list(pair.prompt), "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]
    found = {one.pair.pair_id: one for one in weigher(rows)}
    examples = [example for made in trained.examples.values() for example in made.examples]
    assert len(examples) == len(pairs)
    for example in examples:
        one = found[example.pair_id]
        for (_, side), ids, weights in zip(one.sides, example.sides, example.weights, strict=True):
            assert list(side.token_ids) == ids.response_ids and list(side.offsets) == ids.offsets
            assert torch.equal(side.weights, weights)
        assert (one.chosen.length, one.rejected.length) == example.lengths
        assert (one.chosen.coverage, one.rejected.coverage) == example.coverage
        for response in (one.chosen, one.rejected):
            assert response.kept_mass == pytest.approx(float(response.weights.sum()), abs=1e-6)
            assert 0 < response.source_coverage <= 1 and response.to_dict()["kept_mass"] == response.kept_mass
        logits = [item.verdict_logits for item in trained.weighed.captured[example.pair_id].rounds]
        for verdict, expected in zip(one.verdicts, logits, strict=True):
            assert expected is not None and verdict.logits == (float(expected[0]), float(expected[1]))


def test_what_the_tokenizer_was_called_with_before_changes_no_weight(world: World) -> None:
    """Padded on the left with its BOS, which a template that writes none would seem to lack; it stays as it was."""
    model, template = (
        AutoModelForCausalLM.from_pretrained(world.model),
        "{% for m in messages %}{{ m.content }} {% endfor %}",
    )
    found = []
    for padded in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(world.model)
        if padded:
            tokenizer.pad_token, tokenizer.padding_side = tokenizer.bos_token, "left"
            tokenizer(["the film", "was"], padding="max_length", truncation=True, max_length=16)
        state = tokenizer.backend_tokenizer.padding
        found.append(Weigher(model, tokenizer, template=WORDING, chat_template=template)(*PAIR))
    for plain, after in zip(found[0].sides, found[1].sides, strict=True):
        assert torch.equal(plain[1].weights, after[1].weights)
    assert state is not None and tokenizer.backend_tokenizer.padding == state


def test_another_layer_and_a_pair_alone_are_those_of_a_run_too(weigher: Weigher, world: World) -> None:
    inputs = make_inputs(world.config("weights.layer=1", "weights.postprocess.sink_tokens=0"))
    example = inputs.examples["train"].examples[3]
    pair = next(one for one in inputs.pairs["train"].pairs if one.pair_id == example.pair_id)
    settings = {"template": "judge/testbed.txt", "max_length": 512, "max_response_length": 200, "device": "cpu"}
    one = Weigher(world.model, layer=1, sink_tokens=0, **settings)(
        pair.prompt[0]["content"], pair.chosen, pair.rejected
    )
    for (_, side), weights in zip(one.sides, example.weights, strict=True):
        torch.testing.assert_close(side.weights, weights, rtol=0, atol=2e-6)  # alone, sums run in another order
    kept = weigher(pair.prompt[0]["content"], pair.chosen, pair.rejected)
    assert kept.layer == 2 and kept.at("1/2").layer == 1
    assert not torch.allclose(kept.chosen.weights, kept.at(1).chosen.weights)


def test_rollout_is_that_of_a_run(world: World) -> None:
    inputs = make_inputs(world.config("weights=rollout"))
    example = inputs.examples["train"].examples[0]
    pair = next(one for one in inputs.pairs["train"].pairs if one.pair_id == example.pair_id)
    weigher = Weigher(world.model, source="rollout", template="judge/testbed.txt", max_length=512, device="cpu")
    one = weigher({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected})
    torch.testing.assert_close(one.chosen.weights, example.weights[0], rtol=0, atol=2e-6)
    with pytest.raises(UserError, match=r"Rollout does not read single layers"):
        one.at(1)


def test_the_defaults_are_those_of_the_configs() -> None:
    root = parse(compose("fit", ["~setting"])).root
    judge, source = root.judge, root.weights
    given = {name: one.default for name, one in inspect.signature(Weigher.__init__).parameters.items()}
    for name in ("max_length", "max_response_length", "labels", "chat", "prefill", "verdict", "token_budget", "dtype"):
        assert given[name] == getattr(judge, name), name
    assert given["template"] == judge.template_file and given["assembly"] == judge.assembly.value
    assert given["layer"] == source.layer and given["sink_tokens"] == source.postprocess.sink_tokens
    assert isinstance(source, Attention) and Attention() == source


def test_rounds_are_read_one_by_one(weigher: Weigher, world: World, weighted_pair: WeightedPair) -> None:
    first, second = weighted_pair.at(round=1), weighted_pair.at(round=2)
    assert [len(one.verdicts) for one in (weighted_pair, first, second)] == [2, 1, 1]
    assert [one.verdicts[0].chosen_is_a for one in (first, second)] == [True, False]
    assert not torch.allclose(first.chosen.weights, second.chosen.weights)
    alone = Weigher(world.model, template="judge/testbed.txt", max_length=512, both_orders=False, device="cpu")(*PAIR)
    torch.testing.assert_close(alone.chosen.weights, first.chosen.weights)
    with pytest.raises(UserError, match=r"at\(round=3\): expected a judge round from 1 .* to 2"):
        weighted_pair.at(round=3)


# ------------------------------------------------------------------------------------------------ ways to call it


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("assembly", ["text", "ids"])
def test_weights_that_no_training_token_gets_are_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture, assembly: str
) -> None:
    """Joins the last full stop with what follows it in the judge's prompt, unless ids are spliced in."""
    weigher = Weigher(world.model, template="judge/testbed.txt", assembly=assembly, max_length=512)
    weighted_pair = weigher(*PAIR)
    weigher(*PAIR)
    kept = [float(side.weights.sum()) for side in (weighted_pair.chosen, weighted_pair.rejected)]
    warned = [line for line in warnings_in(caplog) if "kept mass" in line]
    assert (min(kept) < 0.9) == (assembly == "text") and len(warned) == (assembly == "text")
    if warned:
        assert f"kept mass {kept[0]:.3f} (chosen) and {kept[1]:.3f} (rejected)" in warned[0]
        assert "assembly='ids'" in warned[0]


@pytest.mark.parametrize(("verdict", "sure"), [(True, True), (True, False), (False, False)])
def test_a_judge_that_would_write_something_else_is_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture, verdict: bool, sure: bool
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(world.model), AutoTokenizer.from_pretrained(world.model)
    settings = {"template": "judge/testbed.txt", "max_length": 512, "max_response_length": 200}
    weigher = Weigher(model, tokenizer, 1, verdict=verdict, **settings)
    labels = list(weigher.prompts.label_ids)
    if sure:
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.lm_head.weight[labels] = torch.stack([torch.ones(32), -torch.ones(32)]) * 100
    weighted_pair = weigher(*PAIR)
    weigher(*PAIR)
    masses = []
    for prompt in weigher.prompts.build(weighted_pair.pair):
        with torch.no_grad():
            masses.append(model(torch.tensor([prompt.input_ids])).logits[0, -1].softmax(-1)[labels].sum())
    share = float(torch.stack(masses).mean())
    warned = [line for line in warnings_in(caplog) if "kept mass" not in line]
    assert (share > 0.5) == sure and len(warned) == (0 if sure else 1)
    if not sure:
        assert f"the judge puts {100 * share:.3g} % of its probability on its labels, less than the 50 %" in warned[0]
        assert "most likely tokens: " in warned[0] and "(2 of 2)" in warned[0]
        assert "prefill, template and labels" in warned[0]


def test_texts_messages_lists_and_rows_are_one_pair(weigher: Weigher, weighted_pair: WeightedPair) -> None:
    prompt, chosen, rejected = PAIR
    turns = [{"role": "user", "content": prompt}]
    answers = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    whole = {"chosen": turns + answers[0], "rejected": turns + answers[1]}
    single = [weigher(turns, chosen, rejected), weigher(turns, *answers), weigher(whole)]
    several: list[Any] = [weigher([prompt], [chosen], [rejected]), weigher([turns], [answers[0]], [answers[1]])]
    several += [weigher([whole]), weigher(row for row in [whole])]
    said = "\n\nHuman: review the film .\n\nAssistant:"
    assert weigher(said, "great .", "awful .").pair.prompt == ({"role": "user", "content": said},), "is no dialogue"
    assert all(isinstance(one, WeightedPair) for one in single)
    assert all(isinstance(one, WeightedPairs) and len(one) == 1 for one in several)
    for one in [*single, *(many[0] for many in several)]:
        assert one.pair == weighted_pair.pair and torch.equal(one.chosen.weights, weighted_pair.chosen.weights)


def test_pairs_come_in_their_order_and_twice_if_given_twice(weigher: Weigher) -> None:
    texts = ["the film was great .", "it was raining today .", "the film was great ."]
    many = weigher(["review the film ."] * 3, texts, ["awful ."] * 3)
    assert isinstance(many, WeightedPairs)
    assert [one.pair.chosen for one in many] == texts and [len(part) for part in (many, many[1:])] == [3, 2]
    assert torch.equal(many[0].chosen.weights, many[2].chosen.weights)
    assert len(weigher([])) == 0


def test_loaded_objects_whatever_their_kernel(world: World, weighted_pair: WeightedPair) -> None:
    model = AutoModelForCausalLM.from_pretrained(world.model, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    for given in (tokenizer, str(world.model)):
        one = Weigher(model, given, template="judge/testbed.txt", max_length=512)(*PAIR)
        assert torch.equal(one.chosen.weights, weighted_pair.chosen.weights)
    assert model.training is False and model.config._attn_implementation == "eager"


def test_own_wording_as_text_or_file(world: World, weigher: Weigher, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(WORDING, encoding="utf-8")
    by_text, by_file = (
        Weigher(world.model, template=one, device="cpu")(*PAIR) for one in (WORDING, tmp_path / "mine.txt")
    )
    assert torch.equal(by_text.chosen.weights, by_file.chosen.weights)
    assert not torch.allclose(by_text.chosen.weights, weigher(*PAIR).chosen.weights)


def test_a_source_of_ones_own_settings(world: World) -> None:
    heads = Weigher(world.model, source=Attention(heads=(1,)), template="judge/testbed.txt", device="cpu")(*PAIR)
    uniform = Weigher(world.model, source=Uniform(), device="cpu")(*PAIR)
    assert uniform.verdicts == () and uniform.layer is None
    assert uniform.chosen.relative.tolist() == pytest.approx([1.0] * len(uniform.chosen.tokens))
    assert heads.layer == 2 and not torch.allclose(heads.chosen.weights, uniform.chosen.weights)


# ------------------------------------------------------------------------------------------------ what comes back


def test_tokens_are_the_text_with_their_places(weighted_pair: WeightedPair) -> None:
    for side, one in weighted_pair.sides:
        assert "".join(one.tokens[:-1]) == one.text == weighted_pair.pair.response(side)
        assert [one.text[start:end] for start, end in one.offsets] == [text.strip() for text in one.tokens[:-1]] + [""]
        assert float(one.weights[-1]) == 0 and not one.matched_flags[-1]
        assert 0 < float(one.weights.sum()) <= 1 + 1e-6
    assert torch.equal(weighted_pair.chosen.relative, weighted_pair.chosen.weights * weighted_pair.chosen.length)


def test_dict_frame_and_tokens_agree(weigher: Weigher, weighted_pair: WeightedPair) -> None:
    plain = json.loads(json.dumps(weighted_pair.to_dict()))
    frame = weighted_pair.to_frame()
    assert list(frame.columns) == list(weighted_pair.tokens[0]._fields) and len(frame) == len(weighted_pair.tokens)
    for side, one in weighted_pair.sides:
        part = frame[frame["side"] == side]
        assert part["weight"].tolist() == plain[side]["weights"] == one.weights.tolist()
        assert part["token"].tolist() == plain[side]["tokens"] == list(one.tokens)
        assert plain[side]["relative"] == part["relative"].tolist()
    assert [one["chosen_is_a"] for one in plain["verdicts"]] == [True, False]
    many = weigher([PAIR[0]] * 2, [PAIR[1]] * 2, [PAIR[2]] * 2)
    assert isinstance(many.to_frame(), pd.DataFrame) and len(many.to_frame()) == 2 * len(frame)
    assert [one["pair_id"] for one in many.to_dict()] == [weighted_pair.pair.pair_id] * 2


def test_it_is_shown_in_terminal_notebook_page_and_picture(weighted_pair: WeightedPair, tmp_path: Path) -> None:
    out = StringIO()
    weighted_pair.show(Console(file=out, width=80, color_system=None))
    assert (
        "chosen" in out.getvalue() and "p(chosen)" in out.getvalue() and max(map(len, out.getvalue().split("\n"))) <= 80
    )
    assert weighted_pair._repr_html_() == heatmap_html([weighted_pair], page=False)
    page = weighted_pair.html(tmp_path / "deep" / "pair.html")
    assert (
        page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and "attention, layer 2 of 2" in page.read_text()
    )
    assert weighted_pair.svg(tmp_path / "drawn" / "pair.svg").read_text(encoding="utf-8").startswith("<svg")
    many = WeightedPairs([weighted_pair, weighted_pair])
    assert many._repr_html_().count('class="heat-side chosen"') == 2
    assert repr(many) == "WeightedPairs(2 pairs)" and "layer 2" in repr(weighted_pair)


def test_in_a_notebook_it_is_shown_as_html(weighted_pair: WeightedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As notebooks/01_judge_attention.ipynb shows one in a real kernel."""
    shown: list[str] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", lambda page: shown.append(page.data))
    weighted_pair.show()
    WeightedPairs([weighted_pair, weighted_pair]).show()
    weighted_pair.show(Console(file=(out := StringIO()), width=80))
    assert shown == [heatmap_html([weighted_pair] * count, page=False) for count in (1, 2)]
    assert "p(chosen)" in out.getvalue(), "a console that is given is written to"
    assert pickle.loads(pickle.dumps(weighted_pair))._repr_html_() == weighted_pair._repr_html_() == shown[0]


# ------------------------------------------------------------------------------------------------ errors


WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("a", "b"), r"call weigher\(prompt, chosen, rejected\) or weigher\(rows\)"),
    (("just a text",), "expected rows with chosen and rejected, got one text"),
    (([1, 2],), "got int at position 0"),
    ((["a", "b"], ["c"], ["d", "e"]), "expected 2 responses each, got 1 as chosen and 2 as rejected"),
    ((["a", "b"], "c", "d"), "expected 2 responses each, got one text as chosen and one text as rejected"),
    (
        ([{"chosen": "a", "rejected": "b", "prompt": "p"}, {"chosen": None, "rejected": "b"}],),
        "row 1: value is missing",
    ),
    (({"chosen": "a"},), 'the row has no column "rejected"'),
    (("p", [{"role": "user", "content": "x"}], "b"), "the pair: malformed conversation"),
    (
        ("p", "it was good .", "it was good . "),
        "the pair cannot be used for training: dropped: both responses have the same",
    ),
    (
        ("p", "a", "\ud800"),
        "the pair cannot be used for training: .*not valid Unicode|the pair cannot be used for training",
    ),
]


@pytest.mark.parametrize(("given", "story"), WRONG)
def test_what_cannot_be_weighed_says_where_and_why(weigher: Weigher, given: tuple[Any, ...], story: str) -> None:
    with pytest.raises(UserError, match=story):
        weigher(*given)


def test_a_prompt_that_is_rendered_already_is_warned_of(weigher: Weigher, caplog: pytest.LogCaptureFixture) -> None:
    weigher(weigher.chat.render([{"role": "user", "content": PAIR[0]}], add_generation_prompt=True), *PAIR[1:])
    assert "1 of 1 prompts" in caplog.text and "contain special tokens as text" in caplog.text
    caplog.clear()
    weigher(*PAIR)
    assert not caplog.records


def test_what_cannot_be_built_says_what_to_do(world: World, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(world.model)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((model,), {}, r"call Weigher\(model, tokenizer\)"),
        ((torch.nn.Linear(2, 2), world.model), {}, "expected a Hugging Face causal language model, got Linear"),
        ((tmp_path / "none",), {}, "to load the tokenizer from"),
        ((world.model, None, 7), {}, r"from 1 to 2.*got 7"),
        ((world.model,), {"source": "attntion"}, "source must be one of attention, rollout, got 'attntion'"),
        ((world.model,), {"source": Confidence()}, "source Confidence needs a training step"),
        ((world.model, None, 1), {"source": Attention()}, "pass layer and sink_tokens to it"),
        ((world.model,), {"template": "{question} {answer_a}"}, "judge template: expected the placeholders"),
        ((world.model,), {"template": "no/such.txt"}, "judge.template_file=no/such.txt: no such file"),
        ((world.model,), {"assembly": "texts"}, "assembly must be one of text, ids"),
        ((world.model,), {"dtype": "float8"}, "judge.dtype must be one of"),
    ]
    for given, named, story in wrong:
        with pytest.raises(UserError, match=story):
            Weigher(*given, **{"device": "cpu", **named} if given[0] is not model else named)


# ------------------------------------------------------------------------------------------------ the façade


def test_the_package_has_it_lazily() -> None:
    assert attnpo.Weigher is Weigher and "Weigher" in dir(attnpo)
    with pytest.raises(AttributeError, match="has no attribute 'Wiegher'"):
        _ = attnpo.Wiegher  # type: ignore[attr-defined]


def test_the_examples_of_its_docstring_run(world: World) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    example = doctest.DocTestFinder(recurse=False).find(Weigher, "Weigher", globs={"model": world.model})[0]
    assert len(example.examples) >= 6
    assert runner.run(example).failed == 0


def test_every_setting_is_explained() -> None:
    text = str(Weigher.__doc__)
    names = [name for name in inspect.signature(Weigher.__init__).parameters if name != "self"]
    assert [name for name in names if f"{name}:" not in text and f"``{name}``" not in text] == []
