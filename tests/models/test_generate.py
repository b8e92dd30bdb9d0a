from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from attnpo.models.generate import (
    GenerationRequest,
    HFGenerator,
    RepetitionPenalties,
    context_length,
    make_logits_processors,
)
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.schema import Generator, Message, Sampling, UserError

PROMPTS = [[Message(role="user", content=text)] for text in ("Once upon a time", "The dog", "Lily and Tom went to the")]
Babbler = tuple[PreTrainedModel, PreTrainedTokenizerBase, Callable[[Sequence[Message]], list[int]]]


@pytest.fixture(scope="module")
def babbling(babbler: Path) -> Babbler:
    """Is only read."""
    return loaded(babbler)


def loaded(folder: Path) -> Babbler:
    tokenizer = load_tokenizer(folder)

    def encode(prompt: Sequence[Message]) -> list[int]:
        return list(tokenizer("".join(turn["content"] for turn in prompt)).input_ids)

    return load_model(folder), tokenizer, encode


def test_greedy_text_is_the_known_one(shared: Path) -> None:
    model, tokenizer, _ = loaded(shared / "models" / "stories260K")
    generator = HFGenerator(model, tokenizer, lambda prompt: [1])
    assert isinstance(generator, Generator)
    (text,) = generator.generate([[]], Sampling(max_new_tokens=80, temperature=0.0))
    expected = (shared / "models" / "stories260K" / "expected_greedy.txt").read_text(encoding="utf-8")
    assert len(text) > 120
    assert expected.strip().startswith(text.strip())


def test_batching_leaves_greedy_answers_and_their_order(babbling: Babbler) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    together = HFGenerator(*babbling).generate(PROMPTS, sampling)
    alone = [HFGenerator(*babbling, batch_size=1).generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert together == alone
    assert len(set(together)) == 3


def test_sampling_follows_the_seed_and_leaves_torchs_state(babbling: Babbler) -> None:
    generator = HFGenerator(*babbling)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one = generator.generate(PROMPTS, Sampling(max_new_tokens=12, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=12, seed=1)) == one
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=12, seed=2)) != one
    assert one != generator.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0.0))


def test_a_draw_depends_on_seed_and_prompt_alone(babbling: Babbler) -> None:
    """Batch size, order and company decide nothing; a prompt that stands there twice is drawn twice."""
    sampling = Sampling(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=4)
    together = HFGenerator(*babbling).generate(PROMPTS, sampling)
    assert HFGenerator(*babbling, batch_size=1).generate(PROMPTS, sampling) == together
    assert HFGenerator(*babbling, batch_size=2, token_budget=60).generate(PROMPTS[::-1], sampling) == together[::-1]
    assert HFGenerator(*babbling).generate(PROMPTS[1:2], sampling) == together[1:2]
    twice = HFGenerator(*babbling).generate([PROMPTS[0], PROMPTS[0]], sampling)
    assert twice[0] == together[0] != twice[1]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [(Sampling(max_new_tokens=1, temperature=1.7, top_k=4), 4), (Sampling(max_new_tokens=1), 1150)],
)
def test_draws_follow_the_models_distribution(babbling: Babbler, sampling: Sampling, kept: int) -> None:
    model, tokenizer, encode = babbling
    ids = tuple(encode(PROMPTS[0]))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1] / sampling.temperature
    values, tokens = logits.topk(kept)
    expected: dict[str, float] = defaultdict(float)  # by text, which some tokens share
    for token, share in zip(tokens.tolist(), values.softmax(dim=-1).tolist(), strict=True):
        expected[tokenizer.decode([token])] += share
    draws = 2000
    generator = HFGenerator(model, tokenizer, encode, batch_size=draws)
    answers = generator.generate_batch([GenerationRequest(ids, draw) for draw in range(draws)], sampling)
    texts = [answer.text for answer in answers]
    likely = [text for text in list(expected)[:4] if text != ""]
    assert len(likely) >= 3
    for text in likely:
        share = expected[text]
        spread = (share * (1 - share) / draws) ** 0.5
        assert abs(texts.count(text) / draws - share) < 4 * spread + 1e-9, text
    if kept == 4:
        assert set(texts) == expected.keys()


def test_batches_keep_to_size_and_budget(babbling: Babbler) -> None:
    requests = [GenerationRequest([5] * length) for length in (3, 9, 1, 4, 4, 30)]
    sampling = Sampling(max_new_tokens=6)
    assert HFGenerator(*babbling, batch_size=2).batches(requests, sampling) == [[5, 1], [3, 4], [0, 2]]
    # 36 tokens: one prompt of 30 alone; at 15 tokens two fit; at 10 three do.
    assert HFGenerator(*babbling, token_budget=36).batches(requests, sampling) == [[5], [1, 3], [4, 0, 2]]
    assert HFGenerator(*babbling, token_budget=1).batches(requests[:2], sampling) == [[1], [0]]


def test_the_folders_own_sampling_values_have_no_say(babbler: Path) -> None:
    babbling = loaded(babbler)
    model = babbling[0]
    sampled, greedy = Sampling(max_new_tokens=12, seed=1), Sampling(max_new_tokens=12, temperature=0.0)
    before = [HFGenerator(*babbling).generate(PROMPTS, s) for s in (sampled, greedy)]
    model.generation_config.temperature = 0.01
    model.generation_config.top_k = 2
    model.generation_config.repetition_penalty = 9.0
    model.generation_config.min_new_tokens = 3
    model.generation_config.do_sample = True
    folder = model.generation_config
    assert [HFGenerator(*babbling).generate(PROMPTS, s) for s in (sampled, greedy)] == before
    assert model.generation_config is folder and folder.temperature == 0.01


def test_top_k_of_one_is_greedy_whatever_the_temperature(babbling: Babbler) -> None:
    generator = HFGenerator(*babbling)
    greedy = generator.generate(PROMPTS, Sampling(max_new_tokens=10, temperature=0.0))
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=10, temperature=3.0, top_k=1)) == greedy
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=10, top_p=1e-6)) == greedy


def test_new_tokens_are_counted_and_end_ids_end(babbling: Babbler) -> None:
    model, tokenizer, encode = babbling
    ids = encode(PROMPTS[0])
    with torch.no_grad():
        wanted = [int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        wanted.append(int(model(input_ids=torch.tensor([ids + wanted])).logits[0, -1].argmax()))
    (two,) = HFGenerator(*babbling).generate(PROMPTS[:1], Sampling(max_new_tokens=2, temperature=0.0))
    assert two == tokenizer.decode(wanted)
    assert wanted[0] != wanted[1]
    stopping = HFGenerator(*babbling, end_ids=[wanted[1]])
    (one,) = stopping.generate(PROMPTS[:1], Sampling(max_new_tokens=9, temperature=0.0))
    assert one == tokenizer.decode(wanted[:1])
    (ended,) = stopping.generate_batch([GenerationRequest(ids)], Sampling(max_new_tokens=9, temperature=0.0))
    (cut,) = stopping.generate_batch([GenerationRequest(ids)], Sampling(max_new_tokens=1, temperature=0.0))
    assert (ended.text, ended.tokens, ended.ended) == (one, 1, True)
    assert (cut.text, cut.tokens, cut.ended) == (one, 1, False)


# ------------------------------------------------------------------------------------------------ penalties, stop ids


def decoded_by_hand(
    model: PreTrainedModel, ids: Sequence[int], steps: int, presence: float, frequency: float
) -> list[int]:
    """Greedy ids with penalties, one forward over the whole sequence per token and counts kept in a dict."""
    answer: list[int] = []
    for _ in range(steps):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *answer]])).logits[0, -1].tolist()
        for token in set(answer):
            logits[token] -= presence + frequency * answer.count(token)
        answer.append(max(range(len(logits)), key=logits.__getitem__))
    return answer


def test_penalties_count_what_was_written_and_not_the_prompt() -> None:
    """Row 0 wrote 3, 1, 3; row 1 wrote 0, 0, 0; the first two tokens are prompt. presence 0.5, frequency 0.25."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    ids = torch.tensor([[2, 2, 3, 1, 3], [3, 1, 0, 0, 0]])
    lowered = RepetitionPenalties(0.5, 0.25, width=2)(ids, logits)
    assert lowered.tolist() == [[1.0, 1.25, 3.0, 3.0], [-0.25, 2.0, 3.0, 4.0]]
    assert RepetitionPenalties(0.5, 0.25, width=5)(ids, logits).tolist() == logits.tolist()


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.7), (-0.5, -0.2)])
def test_penalised_greedy_decoding_is_the_one_by_hand(babbling: Babbler, presence: float, frequency: float) -> None:
    model, tokenizer, encode = babbling
    sampling = Sampling(24, 0.0, presence_penalty=presence, frequency_penalty=frequency)
    made = HFGenerator(*babbling).generate_batch([GenerationRequest(encode(prompt)) for prompt in PROMPTS], sampling)
    for prompt, answer in zip(PROMPTS, made, strict=True):
        ids = decoded_by_hand(model, encode(prompt), 24, presence, frequency)
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert expected.startswith(answer.text) and answer.tokens >= 20


def test_penalties_come_before_the_temperature(babbling: Babbler) -> None:
    """At temperature 0.25 a penalty of 0.5 costs 2 after the division."""
    steps = make_logits_processors(
        [GenerationRequest([5])], Sampling(2, 0.25, presence_penalty=0.5), 1, torch.device("cpu")
    )
    scores = torch.zeros(1, 6)
    for step in list(steps)[:-1]:
        scores = step(torch.tensor([[5, 3]]), scores)
    assert scores.tolist() == [[0.0, 0.0, 0.0, -2.0, 0.0, 0.0]]


def test_penalised_draws_depend_on_seed_and_prompt_alone(babbling: Babbler) -> None:
    sampling = Sampling(30, 0.7, top_k=50, top_p=0.9, seed=4, presence_penalty=0.6, frequency_penalty=0.4)
    together = HFGenerator(*babbling).generate(PROMPTS, sampling)
    assert HFGenerator(*babbling, batch_size=1).generate(PROMPTS, sampling) == together
    assert HFGenerator(*babbling, batch_size=2).generate(PROMPTS[::-1], sampling) == together[::-1]
    assert HFGenerator(*babbling).generate(PROMPTS, Sampling(30, 0.7, 0.9, 50, 4)) != together


def test_every_stop_id_ends_an_answer(babbling: Babbler) -> None:
    model, tokenizer, encode = babbling
    ids = encode(PROMPTS[0])
    words = decoded_by_hand(model, ids, 8, 0.0, 0.0)
    first, second = words[3], words[6]
    assert {first, second}.isdisjoint(words[:3])
    (answer,) = HFGenerator(*babbling).generate_batch(
        [GenerationRequest(ids)], Sampling(8, 0.0, stop_ids=(second, first))
    )
    assert (answer.text, answer.tokens, answer.ended) == (tokenizer.decode(words[:3]), 3, True)
    (later,) = HFGenerator(*babbling).generate_batch([GenerationRequest(ids)], Sampling(8, 0.0, stop_ids=(second,)))
    assert later.tokens == words.index(second) > 3


def test_settings_that_came_later_leave_old_fingerprints_as_they_were() -> None:
    plain = {"max_new_tokens": 256, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    assert Sampling().fingerprint() == plain
    more = Sampling(presence_penalty=0.1, frequency_penalty=-0.2, stop_ids=(9, 3, 9))
    assert more.fingerprint() == {**plain, "presence_penalty": 0.1, "frequency_penalty": -0.2, "stop_ids": [3, 9]}


def test_positions_are_those_of_the_config(babbling: Babbler) -> None:
    assert context_length(babbling[0].config) == 512
    assert context_length(PretrainedConfig()) is None


def test_mode_is_restored(babbler: Path) -> None:
    babbling = loaded(babbler)
    model = babbling[0].train()
    HFGenerator(*babbling).generate(PROMPTS[:1], Sampling(max_new_tokens=1))
    assert model.training


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be between -2 and 2"),
        ({"stop_ids": (3, -1)}, "stop_ids must be non-negative token ids"),
    ],
)
def test_settings_out_of_range(babbling: Babbler, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HFGenerator(*babbling).generate(PROMPTS, Sampling(**setting))


def test_empty_prompts_and_batches(babbling: Babbler) -> None:
    model, tokenizer, _ = babbling
    with pytest.raises(UserError, match="prompt 0 has no token"):
        HFGenerator(model, tokenizer, lambda prompt: []).generate(PROMPTS, Sampling())
    with pytest.raises(UserError, match="batch size for generation must be at least 1"):
        HFGenerator(*babbling, batch_size=0)
    assert HFGenerator(*babbling).generate([], Sampling()) == []
