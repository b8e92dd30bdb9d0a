"""The second base: another vocabulary and seed, built on request only; identities of bases; the grammar's knobs."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.pairs import build_pairs
from attnpo.lab.testbed.prepare import REPORT, Testbed, _make_key, load_base
from attnpo.lab.testbed.recipes import BaseRecipe, PairRecipe, SecondRecipe
from attnpo.run.components import BuiltFolders
from attnpo.schema import UserError

SMALL = BaseRecipe(
    layers=1, width=16, heads=2, mlp=16, steps=3, answer_rows=1, judge_rows=1, score_rows=1, judge_pairs=2,
    judge_gate=0.0,
)  # fmt: skip
SECOND = SecondRecipe(base=replace(SMALL, merges=300), seed_offset=5)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_base_keeps_the_identity_it_had_before_there_were_later_settings() -> None:
    """The folders that lie in stores are found again: bases with one token per word, learnt at full length."""
    testbed = Testbed(seed=3)
    old = asdict(testbed.base)
    for later in ("merges", "easy_length", "answer_tokens"):
        del old[later]
    assert testbed.base_key() == _make_key({"grammar": testbed.grammar.digest(), "base": old, "seed": 3})
    assert replace(testbed, base=replace(testbed.base, easy_length=0.5)).base_key() != testbed.base_key()
    assert replace(testbed, base=replace(testbed.base, answer_tokens=65)).base_key() != testbed.base_key()
    bpe = replace(testbed, base=replace(testbed.base, merges=500))
    assert bpe.base_key() != testbed.base_key()
    assert replace(bpe, base=replace(bpe.base, merges=400)).base_key() != bpe.base_key()


def test_a_second_base_moves_no_other_identity() -> None:
    alone, both = Testbed(), Testbed(second=SECOND)
    assert (alone.base_key(), alone.data_key()) == (both.base_key(), both.data_key())


def test_the_second_base_is_built_on_request_once_with_its_own_vocabulary_and_seed(scratch: Path) -> None:
    testbed = Testbed(base=SMALL, seed=2, second=SECOND)
    made = testbed.prepare_judge(scratch)
    assert not made.reused and folders(scratch) == [made.path.name]
    assert made.report["seed"] == 7 and {"judge_text", "judge_ids"} <= set(made.report)
    assert (made.path / REPORT).is_file()
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    assert tokenizer.is_fast and tokenizer.tokenize("the broth")[1] == "Ġbroth"
    stamp = (made.path / "model.safetensors").stat().st_mtime_ns
    again = testbed.prepare_judge(scratch)
    assert again.reused and again.report == made.report
    assert (again.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert replace(testbed, seed=3).prepare_judge(scratch).path != made.path
    same = Testbed(base=SECOND.base, seed=7)
    assert made.path.name == f"base-{same.base_key()}"


def test_without_a_description_there_is_no_second_base(scratch: Path) -> None:
    with pytest.raises(UserError, match=r"prepare\.second is null"):
        Testbed().prepare_judge(scratch)


def test_preparing_builds_no_second_base(built_folders: BuiltFolders, tiny_testbed: Testbed) -> None:
    before = folders(built_folders.model_path.parent)
    again = replace(tiny_testbed, second=SECOND).prepare(built_folders.model_path.parent)
    assert again.reused and folders(built_folders.model_path.parent) == before


def test_a_negative_number_of_merges_is_refused() -> None:
    with pytest.raises(ValueError, match=r"base\.merges must be at least 0, or null"):
        BaseRecipe(merges=-1)


# ---- knobs of the regimes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "marks"),
    [
        ({"style": True, "p_sentiment": 0.5}, {"bought", "carried", "stood", "sold", "saw"}),
        ({"negation": 0.5}, {"not"}),
        ({"p_sentiment": 0.3, "p_neutral": 0.1}, {"paid", "raining", "find", "heard", "went", "came"}),
    ],
    ids=["style", "negation", "filler"],
)
def test_a_knob_of_the_grammar_reaches_base_and_pairs(
    knobs: dict[str, float | bool], marks: set[str], tiny_testbed: Testbed, scratch: Path
) -> None:
    """Its words are tokens of the base and stand in the answers that the base samples for its pairs."""
    testbed = replace(
        tiny_testbed,
        grammar=Grammar(min_clauses=1, max_clauses=2, **{"p_sentiment": 0.8, **knobs}),  # type: ignore[arg-type]
        base=replace(tiny_testbed.base, steps=90, judge_pairs=10),
        pairs=PairRecipe(train=12, validation=4, margin=0.25),
    )
    made = testbed.prepare(scratch)
    model, tokenizer = load_base(made.model_path)
    assert marks <= set(tokenizer.get_vocab()) and len(tokenizer) == model.config.vocab_size
    text = (made.data_path / "train.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 12
    assert any(f" {mark} " in text for mark in marks)
    assert made.report["digest"] != tiny_testbed.grammar.digest()


def test_noise_and_number_of_pairs_are_knobs_of_one_base(built_folders: BuiltFolders, tiny_testbed: Testbed) -> None:
    """Fewer pairs are a prefix of more; noise exchanges exactly its share of them and trains no base anew."""
    root = built_folders.model_path.parent
    few = replace(tiny_testbed, pairs=replace(tiny_testbed.pairs, train=10)).prepare(root)
    noisy = replace(tiny_testbed, pairs=replace(tiny_testbed.pairs, train=10, label_noise=0.3)).prepare(root)
    assert few.model_path == noisy.model_path == built_folders.model_path
    assert noisy.report["pairs"]["flipped_share"] == pytest.approx(0.3)  # type: ignore[index]
    whole = (built_folders.data_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    part = (few.data_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    changed = (noisy.data_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert part == whole[:10] and sum(one != two for one, two in zip(part, changed, strict=True)) == 3


def test_a_base_of_bytes_writes_pairs(tiny_testbed: Testbed, scratch: Path) -> None:
    """The whole way (sampling, decoding, true reward, pairs) holds for byte-level tokens too."""
    recipe = replace(tiny_testbed.base, steps=90, judge_pairs=10, merges=420)
    testbed = replace(tiny_testbed, base=recipe, pairs=PairRecipe(train=8, validation=4, margin=0.25))
    made = testbed.prepare(scratch)
    model, tokenizer = load_base(made.model_path)
    assert isinstance(model, LlamaForCausalLM)
    rows = build_pairs(model, tokenizer, testbed.grammar, testbed.pairs, "validation")
    text = rows[0]["chosen"][1]["content"]  # type: ignore[index]
    assert text and "Ġ" not in text and "<" not in text
