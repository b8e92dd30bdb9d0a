"""ABC's credit: a reward model's attention, by hand, against the library's maps, and from the command line."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from attnpo.data.prepare import REFUSED
from attnpo.judge.base import JudgeReading
from attnpo.judge.causal_judge import RewardModel
from attnpo.judge.layers import HeadRow
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.schema import SIDES, EncodedResponse, Message, PreferencePair, UserError
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.weights.capture import UnreadablePair
from attnpo.weights.pipeline import training_weights
from attnpo.weights.sources.reward_attention import LoadedRewardModel, RewardAttention, response_attention
from tests.run.made import make, make_inputs
from tests.run.worlds import TRAIN, VAL, World, build_world
from tests.weights.fakes import words


class Letters(ChatFormat):
    """A prompt of two tokens, a token per word, the end of turn (9)."""

    def __init__(self) -> None:
        pass

    def encode(self, prompt: Sequence[Message], response: str) -> EncodedResponse:
        if response == "never":
            raise RefusedText("the template refuses it", "the template refuses 'never'")
        places = words(response) if response else []
        ids = [10 + place for place in range(len(places))]
        return EncodedResponse([1, 2], [*ids, 9], [*places, (len(response), len(response))])


class Squares:
    """Layer L's row has L * place^2 at each place, from 1; heads add their number."""

    num_layers = 3

    def read(
        self,
        conversations: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        verdict: bool = True,
    ) -> list[JudgeReading]:
        found = []
        for ids in conversations:
            rows = torch.stack([layer * torch.arange(1.0, len(ids) + 1) ** 2 for layer in layers])
            found.append(JudgeReading(torch.stack([rows + 1, rows + 2], 1) if per_head else rows))
        return found


def pair_of(chosen: str, rejected: str) -> PreferencePair:
    return PreferencePair.from_texts([{"role": "user", "content": "q"}], chosen, rejected)


TOOLS = LoadedRewardModel(model=Squares(), conversations=Letters())


def test_credit_is_the_row_on_the_response_without_prompt_and_end() -> None:
    """Places 3, 4, 5 of a row of squares: 9 : 16 : 25."""
    source = RewardAttention().resolve(3)
    captured = source.capture([pair_of("a b c", "d")], TOOLS, (1, 2, 3))[0]
    row = captured.rounds[0].chosen
    assert row.weights.tolist() == [[9, 16, 25], [18, 32, 50], [27, 48, 75]]
    assert row.token_ids.tolist() == [10, 11, 12] and row.offsets.tolist() == [[0, 1], [1, 3], [3, 5]]
    encoded = {side: Letters().encode([], text) for side, text in zip(SIDES, ("a b c", "d"), strict=True)}
    made = training_weights(source, captured, encoded, layers=(1, 2, 3))
    assert made.chosen.tolist() == pytest.approx([9 / 50, 16 / 50, 25 / 50, 0.0])
    assert made.rejected.tolist() == [1.0, 0.0]
    heads = RewardAttention(heads=(2,)).resolve(3)
    per_head = heads.capture([pair_of("a b", "d")], TOOLS, (HeadRow(3, 1), HeadRow(3, 2)))[0]
    assert per_head.rounds[0].chosen.weights.tolist() == [[28, 49], [29, 50]]


def test_pairs_that_cannot_be_shown_come_back_with_a_reason() -> None:
    pairs = [pair_of("a b c", "d"), pair_of("a", "never"), pair_of("", "a"), pair_of("a b", "c")]
    captured = RewardAttention(max_length=5).capture(pairs, TOOLS, (1,))
    assert [pair.pair_id for pair in captured] == [pair.pair_id for pair in pairs]
    reasons = [pair.reason if isinstance(pair, UnreadablePair) else "" for pair in captured]
    assert reasons == ["a conversation is longer than weights.max_length 5", "the template refuses it",
                       "a response is empty", ""]  # fmt: skip
    assert RewardAttention(max_length=5).capture(pairs[:1], TOOLS, (1,))[0].rounds == ()


def test_settings_are_checked_and_named() -> None:
    with pytest.raises(UserError, match=r"weights\.path"):
        RewardAttention().capture([pair_of("a", "b")], None, (1,))
    with pytest.raises(UserError, match=r"weights\.layer=auto needs a judge"):
        RewardAttention("auto")
    with pytest.raises(UserError, match=r"weights\.max_length must be at least 1"):
        RewardAttention(max_length=0)
    prints = [RewardAttention(**keys).capture_fingerprint() for keys in ({}, {"max_length": 9}, {"heads": (1,)})]
    assert prints[0] not in prints[1:] and prints[1] != prints[2]
    assert prints[0] == RewardAttention(layer=1, token_budget=7).capture_fingerprint()


def reward_folder(folder: Path, vocab: int = 60, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_labels=1,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
                         initializer_range=0.3)  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_rows_are_the_library_s_own_attention(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path)
    model = load_model(folder, reward=True)
    conversations = [list(range(3, 3 + count)) for count in (7, 2, 11)]
    found = RewardModel(model, token_budget=22).read(conversations, layers=(2, 1), verdict=False)
    heads = RewardModel(model).read(conversations, layers=(2,), per_head=True, verdict=False)
    eager = LlamaForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    for ids, reading, each in zip(conversations, found, heads, strict=True):
        with torch.no_grad():
            maps = eager.model(torch.tensor([ids]), output_attentions=True).attentions
        expected = torch.stack([maps[layer][0].mean(0)[-1] for layer in (1, 0)])
        torch.testing.assert_close(reading.rows, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(each.rows[0], maps[1][0, :, -1], rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match=r"layer 3 is out of range: this reward model has layers 1\.\.2"):
        RewardModel(model).read(conversations, layers=(3,))


def test_models_that_are_no_causal_reward_models_are_refused(tmp_path: Path) -> None:
    bert = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                      max_position_embeddings=64, num_labels=1)  # fmt: skip
    BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="is not causal"):
        load_model(tmp_path / "bert", reward=True)
    eager = LlamaForSequenceClassification.from_pretrained(reward_folder(tmp_path / "reward"))
    eager.model.save_pretrained(tmp_path / "headless")
    with pytest.raises(
        UserError,
        match=r"1 parameters of LlamaForSequenceClassification are missing .* \(first: score\.weight\)",
    ):
        load_model(tmp_path / "headless", reward=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def test_a_run_reads_it_once_and_stores_it(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(world.model)
    path = reward_folder(tmp_path / "reward", vocab=len(tokenizer))
    tokenizer.save_pretrained(path)
    asked = ("weights=reward_attention", f"weights.path={path}")
    made = make(world.config(*asked))
    first = made.inputs
    assert first.weighed.report is not None and first.weighed.report.computed == TRAIN + VAL
    again = make_inputs(world.config(*asked, "weights.layer=1"))
    assert again.weighed.report is not None and again.weighed.report.computed == 0, "every layer is stored"
    model, pair, example = RewardModel(load_model(path, reward=True)), first.pairs["train"].pairs[0], first.examples
    encoded = made.base.chat.encode(pair.prompt, pair.chosen)
    (reading,) = model.read([encoded.prompt_ids + encoded.response_ids], layers=(2,), verdict=False)
    raw = response_attention(reading.rows, encoded).weights[0]
    found = example["train"].examples[0].weights[0]
    torch.testing.assert_close(found[: len(raw)], raw / raw.sum(), rtol=1e-5, atol=1e-7)
    assert not found[len(raw) :].any(), "the end of turn"
    reward_folder(path, vocab=len(tokenizer), seed=1)  # another model at the same place is another table
    other = make_inputs(world.config(*asked, "seed=1"))
    assert other.weighed.report is not None and other.weighed.report.computed == TRAIN + VAL


def test_without_a_model_or_for_long_pairs_the_key_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights\.path is null: set weights\.path=FOLDER_OR_HUB_NAME"):
        make_inputs(world.config("weights=reward_attention"))
    tokenizer = load_tokenizer(world.model)
    path = reward_folder(tmp_path / "reward", vocab=len(tokenizer))
    tokenizer.save_pretrained(path)
    with pytest.raises(
        UserError, match=rf"the reward model cannot read any of the {TRAIN + VAL} pairs, e\.g\. pair .*max_length 3"
    ):
        make_inputs(world.config("weights=reward_attention", f"weights.path={path}", "weights.max_length=3"))
    assert "reward" in REFUSED
