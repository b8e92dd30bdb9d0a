"""A mixture of sets: what is taken of each, how each is counted, what is refused by its name."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo.config.compose import compose, load, parse
from attnpo.data.base import SET, MixtureSet, PairSource
from attnpo.run.identity import make_identity
from attnpo.run.resolve import missing_path_keys
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from tests.bad_input.table import PROPERTY


def sheet(folder: Path, name: str, count: int, broken: int = 0) -> str:
    """A file of so many pairs, two of each prompt, and rows with nothing to prefer; three prompts are in every file."""
    prompt = ["one", "two", "three"] + [f"{name} {number}" for number in range(count)]
    rows = [{"prompt": prompt[n // 2], "chosen": f"{name} good {n}", "rejected": "bad"} for n in range(count)]
    rows += [{"prompt": "same", "chosen": "x", "rejected": "x"}] * broken
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def source(folder: Path, seed: int = 0, **amounts: tuple[str, float]) -> PairSource:
    sets = {
        "chat": MixtureSet(sheet(folder, "chat", 40, broken=2)),
        "code": MixtureSet(sheet(folder, "code", 20)),
        "mail": MixtureSet(sheet(folder, "mail", 60)),
    }
    sets |= {name: MixtureSet(sets[name].path, **{key: value}) for name, (key, value) in amounts.items()}  # type: ignore[arg-type]
    return PairSource("???", val_share=0.2, mix=sets, mix_seed=seed)


def taken(mixture: PairSource) -> Counter[str]:
    return Counter(str(pair.extra[SET]) for pair in mixture.load("train").pairs)


def test_each_set_is_counted_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train, val = (source(tmp_path).load(split) for split in ("train", "val"))
    assert train.read == train.num_kept + train.num_dropped and train.read + val.read == 122
    assert train.counts == {"chat: identical responses": 2}
    assert sum(one.taken for one in train.sets.values()) == len(train) == 120 - len(val)
    chat = train.sets["chat"]
    assert (chat.read, chat.dropped, chat.taken) == (chat.kept + 2, 2, chat.kept)
    assert f"data.mix.chat: {chat.read} rows read, {chat.kept} kept, 2 dropped, {chat.kept} used" in caplog.text
    assert "chat: identical responses: 2 (rows 40, 41)" in train.summary()


def test_no_prompt_is_on_both_sides_whichever_sets_have_it(tmp_path: Path) -> None:
    train, val = (source(tmp_path).load(split) for split in ("train", "val"))
    sides = [{pair.prompt[-1]["content"] for pair in found.pairs} for found in (train, val)]
    assert sides[0] & sides[1] == set() and {"one", "two", "three"} <= sides[0] | sides[1]
    assert len(sides[1]) == round(0.2 * (20 + 10 + 30 - 2 * 3))


def test_counts_and_weights_are_kept(tmp_path: Path) -> None:
    assert taken(source(tmp_path, chat=("count", 7), code=("count", 3), mail=("count", 11))) == {
        "chat": 7,
        "code": 3,
        "mail": 11,
    }
    even = source(tmp_path, chat=("weight", 1.0), code=("weight", 1.0), mail=("weight", 2.0))
    least = even.load("train").sets["code"].kept  # the scarcest for its weight
    assert taken(even) == {"chat": least, "code": least, "mail": 2 * least}
    assert even.load("train").counts["mail: not taken"] == even.load("train").sets["mail"].kept - 2 * least


def test_the_seed_draws_pairs_and_order_and_the_sets_are_in_the_fingerprint(tmp_path: Path) -> None:
    given = {"chat": ("count", 9), "code": ("count", 9), "mail": ("count", 9)}
    first, again, other = (source(tmp_path, seed, **given).load("train") for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert [pair.extra[SET] for pair in first.pairs] != sorted(str(pair.extra[SET]) for pair in first.pairs)
    mixed = source(tmp_path, 0, **given)
    assert mixed.mix is not None
    renamed = PairSource("???", val_share=0.2, mix={f"{name}2": one for name, one in mixed.mix.items()})
    assert renamed.load("train").fingerprint != first.fingerprint


def test_an_empty_set_is_refused_with_its_name(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    (tmp_path / "none.jsonl").write_text("", encoding="utf-8")
    bad = tmp_path / "same.jsonl"
    bad.write_text('{"prompt": "p", "chosen": "x", "rejected": "x"}\n', encoding="utf-8")
    for path, problem in ((tmp_path / "none.jsonl", r"none\.jsonl is empty"), (bad, "has no usable pairs")):
        sets = {"chat": MixtureSet(sheet(tmp_path, "chat", 8)), "void": MixtureSet(str(path))}
        with pytest.raises(UserError, match=rf"data\.mix\.void: .*{problem}") as refused:
            PairSource("???", val_share=0.2, mix=sets).load("train")
        case = f"a set of a mixture: {path.name}"
        record_property(PROPERTY, (case, str(refused.value).replace(str(tmp_path), "TMP"), "run not started"))


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ({}, r"data\.mix: expected at least one set"),
        ({"a b": MixtureSet("x")}, r"'a b' is not a valid set name"),
        (
            {"a": MixtureSet("x", weight=1.0), "b": MixtureSet("y")},
            r"data\.mix\.b has no weight, but other sets have one",
        ),
        ({"a": MixtureSet("x", count=1), "b": MixtureSet("y", weight=1.0)}, r"data\.mix\.a has no weight"),
    ],
)
def test_what_is_no_mixture_is_refused(sets: dict[str, MixtureSet], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        PairSource("???", mix=sets)


def test_more_than_a_set_has_or_less_than_a_pair_is_refused(tmp_path: Path) -> None:
    given = {"chat": ("count", 900), "code": ("count", 9), "mail": ("count", 9)}
    with pytest.raises(UserError, match=r"data\.mix\.chat\.count=900: the set has only \d+ usable pairs"):
        source(tmp_path, **given).load("train")
    given = {"chat": ("weight", 1.0), "code": ("weight", 1e-9), "mail": ("weight", 1.0)}
    with pytest.raises(UserError, match=r"data\.mix\.code\.weight=1e-09 selects none of its"):
        source(tmp_path, **given).load("train")


def test_a_mixture_needs_no_path_and_says_where_a_problem_is(tmp_path: Path) -> None:
    mix = f"data.mix={{chat: {{path: {sheet(tmp_path, 'chat', 8)}, weight: 2}}, code: {{path: X, weight: 1}}}}"
    reading = parse(compose("fit", ["setting=real_smoke", "model.path=M", mix, "data.val_share=0.2"]))
    assert [path for path in reading.missing if not reading.is_unused(path)] == []
    cfg = reading.as_type(RunConfig)
    assert missing_path_keys(cfg.model, cfg.data) == []
    wrong = parse(compose("fit", ["setting=real_smoke", "model.path=M", "data.mix={chat: {path: X, wieght: 2}}"]))
    assert any("data.mix.chat.wieght: unknown key" in problem for problem in wrong.problems)


def test_a_run_is_told_by_what_is_mixed_and_not_by_where_it_lies() -> None:
    def numbers(path: str, weight: int) -> dict[str, object]:
        mix = f"data.mix={{chat: {{path: {path}, weight: {weight}}}, code: {{path: Y, weight: 1}}}}"
        return make_identity(load("fit", ["setting=real_smoke", "model.path=M", mix])).numbers

    assert numbers("here", 2) == numbers("there", 2) != numbers("here", 3)
