"""Tokenizers whose normaliser composes, strips or removes characters: no character, and no weight, goes missing."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import Assembly, JudgeRules
from attnpo.schema import SIDES, JudgeRound, PairWeights, PreferencePair, TokenWeights
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import ChatFormat
from attnpo.weights.pipeline import training_weights
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.attention import Attention

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "say it"}]
JOINER = "\u200d"
NORMALIZERS = {
    "none": None,
    "nfc": normalizers.NFC(),
    "nfkc": normalizers.NFKC(),
    "nfd": normalizers.NFD(),
    "no accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    "no joiners": normalizers.Replace(JOINER, ""),
}
# Decomposed Vietnamese and Hangul, an emoji of several, marks at both ends and behind a blank, a ligature.
TEXTS = [
    unicodedata.normalize("NFD", "Tiếng Việt rất hay và đẹp. Cà phê sữa"),
    unicodedata.normalize("NFD", "한국어 좋아요"),
    f"a \U0001f468{JOINER}\U0001f469{JOINER}\U0001f467 b{JOINER}",
    "\u0301e\u0301\u0323 x \u0301y e\u0301",
    f"{JOINER}first and la\ufb01",
    "plain text , as ever .",
]


def chat(name: str) -> ChatFormat:
    """Returns a tokenizer of bytes behind the normaliser of that name; each has another vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    shift = list(NORMALIZERS).index(name)
    vocabulary = {letter: place + shift for place, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(vocabulary | {"</s>": 400}, []))
    if (normalizer := NORMALIZERS[name]) is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return ChatFormat(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"), TEMPLATE)


def visible(text: str) -> set[int]:
    return {place for place, character in enumerate(text) if not character.isspace()}


def characters_in(places: Sequence[tuple[int, int]]) -> set[int]:
    return {place for start, end in places for place in range(start, end)}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_every_visible_character_lies_in_a_token(name: str, text: str) -> None:
    format_ = chat(name)
    encoded = format_.encode(QUESTION, text)
    assert visible(text) <= characters_in(encoded.offsets)
    starts = [start for start, _ in encoded.offsets]
    assert starts == sorted(starts) and encoded.offsets[-1] == (len(text), len(text))
    # Where the tokenizer's own ranges hold every character they stay as they are.
    full = f"user: say itassistant: {text}</s>"
    _, own = format_.tokenize(full)
    begin = full.index(text)
    own = [(start - begin, end - begin) for start, end in own[-len(encoded.offsets) : -1]]
    if visible(text) <= characters_in(own):
        assert encoded.offsets[:-1] == own


def test_what_is_composed_belongs_to_the_token_before() -> None:
    """é, a character and its accent, goes as one; so do all bytes of 각; what leads belongs to the token behind it."""
    encoded = chat("nfc").encode(QUESTION, "ae\u0301 \u1100\u1161\u11a8.")
    assert encoded.offsets == [(0, 1), (1, 3), (1, 3), (3, 4), *[(4, 7)] * 3, (7, 8), (8, 8)]
    assert chat("no joiners").encode(QUESTION, f"{JOINER}ab{JOINER}").offsets == [(0, 2), (2, 4), (4, 4)]
    blanks = chat("no joiners").encode(QUESTION, f"a {JOINER}{JOINER} b")
    assert blanks.offsets == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 6)]


def captured_by(judge: ChatFormat, rules: JudgeRules, pair: PreferencePair) -> PairWeights:
    """Returns a judge's rounds with a weight for each of its tokens."""
    dice, rounds = torch.Generator().manual_seed(0), []
    for prompt in JudgePromptBuilder(rules, judge).build(pair):
        sides = {}
        for side in SIDES:
            first, last = prompt.spans[side]
            ids, row = torch.tensor(prompt.input_ids[first:last]), torch.rand(1, last - first, generator=dice)
            sides[side] = TokenWeights(ids, torch.tensor(prompt.offsets[side]).reshape(-1, 2), row)
        rounds.append(JudgeRound(prompt.chosen_is_a, sides["chosen"], sides["rejected"]))
    return PairWeights(pair.pair_id, tuple(rounds))


@pytest.fixture
def rules(tmp_path: Path) -> JudgeRules:
    path = tmp_path / "wording.txt"
    path.write_text("{question}\n1 {answer_a}\n2 {answer_b}\nbetter:")
    return JudgeRules(str(path))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("judge", "policy"), [("none", "nfc"), ("nfc", "none"), ("no joiners", "no accents")])
def test_no_weight_is_lost_between_vocabularies(judge: str, policy: str, text: str, rules: JudgeRules) -> None:
    """Both sides hold all text, so all of a distribution arrives, whichever of them composes its characters."""
    pair = PreferencePair.from_texts(QUESTION, text, "no")
    trained = chat(policy)
    encoded = {side: trained.encode(pair.prompt, pair.response(side)) for side in SIDES}
    source = Attention(1, postprocess=Postprocess(sink_tokens=0))
    found = training_weights(
        source, captured_by(chat(judge), rules, pair), encoded, AlignMethod.CHARACTERS, layers=(1,), pair=pair
    )
    assert found.coverage == (1.0, 1.0)
    assert float(found.chosen.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("assembly", list(Assembly))
def test_a_cut_never_parts_an_accent_from_its_letter(rules: JudgeRules, assembly: Assembly) -> None:
    """Whatever the judge has room for, it reads whole characters: é, not e."""
    text = "e\u0301" * 30
    pair = PreferencePair.from_texts(QUESTION, text, "o" * 60)
    for room in range(40, 70):
        small = JudgeRules(rules.template_file, assembly, max_length=room, chat=False)
        for prompt in JudgePromptBuilder(small, chat("nfc")).build(pair):
            assert prompt.cut
            first, last = prompt.spans["chosen"]
            assert prompt.offsets["chosen"][-1][1] % 2 == 0
            letters = bytes(prompt.input_ids[first:last])
            assert letters == letters[:2] * (len(letters) // 2), "both bytes of each é"
