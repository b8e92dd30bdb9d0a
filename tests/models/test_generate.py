from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnpo.models.generate import HFGenerator
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.schema import Generator, Message, Sampling, UserError

PROMPTS = [[Message(role="user", content=text)] for text in ("Once upon a time", "The dog", "Lily and Tom went to the")]
Stories = tuple[PreTrainedModel, PreTrainedTokenizerBase, Callable[[Sequence[Message]], list[int]]]


@pytest.fixture
def stories(shared: Path) -> Stories:
    folder = shared / "models" / "stories260K"
    tokenizer = load_tokenizer(folder)

    def encode(prompt: Sequence[Message]) -> list[int]:
        return list(tokenizer("".join(turn["content"] for turn in prompt)).input_ids)

    return load_model(folder), tokenizer, encode


def test_greedy_text_is_the_known_one(stories: Stories, shared: Path) -> None:
    model, tokenizer, _ = stories
    generator = HFGenerator(model, tokenizer, lambda prompt: [1])
    assert isinstance(generator, Generator)
    (text,) = generator.generate([[]], Sampling(max_new_tokens=80, temperature=0.0))
    expected = (shared / "models" / "stories260K" / "expected_greedy.txt").read_text(encoding="utf-8")
    assert len(text) > 120
    assert expected.strip().startswith(text.strip())


def test_batching_leaves_greedy_answers_and_their_order(stories: Stories) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    together = HFGenerator(*stories).generate(PROMPTS, sampling)
    alone = [HFGenerator(*stories, batch_size=1).generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert together == alone
    assert len(set(together)) == 3


def test_sampling_follows_the_seed_and_leaves_torchs_state(stories: Stories) -> None:
    generator = HFGenerator(*stories)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one = generator.generate(PROMPTS, Sampling(max_new_tokens=12, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=12, seed=1)) == one
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=12, seed=2)) != one
    assert one != generator.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0.0))


def test_the_folders_own_sampling_values_have_no_say(stories: Stories) -> None:
    model = stories[0]
    sampled, greedy = Sampling(max_new_tokens=12, seed=1), Sampling(max_new_tokens=12, temperature=0.0)
    before = [HFGenerator(*stories).generate(PROMPTS, s) for s in (sampled, greedy)]
    model.generation_config.temperature = 0.01
    model.generation_config.top_k = 2
    model.generation_config.repetition_penalty = 9.0
    model.generation_config.min_new_tokens = 3
    model.generation_config.do_sample = True
    folder = model.generation_config
    assert [HFGenerator(*stories).generate(PROMPTS, s) for s in (sampled, greedy)] == before
    assert model.generation_config is folder and folder.temperature == 0.01


def test_top_k_of_one_is_greedy_whatever_the_temperature(stories: Stories) -> None:
    generator = HFGenerator(*stories)
    greedy = generator.generate(PROMPTS, Sampling(max_new_tokens=10, temperature=0.0))
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=10, temperature=3.0, top_k=1)) == greedy
    assert generator.generate(PROMPTS, Sampling(max_new_tokens=10, top_p=1e-6)) == greedy


def test_new_tokens_are_counted_and_end_ids_end(stories: Stories) -> None:
    model, tokenizer, encode = stories
    ids = encode(PROMPTS[0])
    with torch.no_grad():
        wanted = [int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        wanted.append(int(model(input_ids=torch.tensor([ids + wanted])).logits[0, -1].argmax()))
    (two,) = HFGenerator(*stories).generate(PROMPTS[:1], Sampling(max_new_tokens=2, temperature=0.0))
    assert two == tokenizer.decode(wanted)
    assert wanted[0] != wanted[1]
    stopping = HFGenerator(*stories, end_ids=[wanted[1]])
    (one,) = stopping.generate(PROMPTS[:1], Sampling(max_new_tokens=9, temperature=0.0))
    assert one == tokenizer.decode(wanted[:1])


def test_mode_is_restored(stories: Stories) -> None:
    model = stories[0].train()
    HFGenerator(*stories).generate(PROMPTS[:1], Sampling(max_new_tokens=1))
    assert model.training


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (Sampling(temperature=-1.0), "temperature must be 0"),
        (Sampling(top_p=0.0), r"top_p must be in \(0, 1\]"),
        (Sampling(top_k=-1), "top_k must be 0"),
    ],
)
def test_settings_out_of_range(stories: Stories, sampling: Sampling, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HFGenerator(*stories).generate(PROMPTS, sampling)


def test_empty_prompts_and_batches(stories: Stories) -> None:
    model, tokenizer, _ = stories
    with pytest.raises(UserError, match="prompt 0 has no token"):
        HFGenerator(model, tokenizer, lambda prompt: []).generate(PROMPTS, Sampling())
    with pytest.raises(UserError, match="batch size of at least 1"):
        HFGenerator(*stories, batch_size=0)
    assert HFGenerator(*stories).generate([], Sampling()) == []
