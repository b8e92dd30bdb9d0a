"""Sampling and the exact KL, against plain one-row computations."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.sampling import Answers, sample_answers, sequence_kl
from attnpo.lab.testbed.tokenizer import chat_prompts

Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
PROMPTS = [prompt.text for prompt in Grammar().prompts("validation")[:30]]


def shaken(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy with slightly moved weights: another policy."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other


def test_samples_depend_on_the_seed_and_not_on_the_batch_size(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    one = sample_answers(model, tokenizer, PROMPTS, seed=7)
    assert one == sample_answers(model, tokenizer, PROMPTS, seed=7, batch_size=4)
    assert one.texts != sample_answers(model, tokenizer, PROMPTS, seed=8).texts
    assert len(one.texts) == len(PROMPTS)


def test_greedy_sampling_equals_a_loop_without_a_cache(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    answers = sample_answers(model, tokenizer, PROMPTS[:6], seed=0, temperature=0.0, max_new_tokens=12)
    for text, ended, head in zip(answers.texts, answers.ended, chat_prompts(tokenizer, PROMPTS[:6]), strict=True):
        row = list(head)
        while len(row) < len(head) + 12 and row[-1] != tokenizer.eos_token_id:
            row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
        assert ended == (row[-1] == tokenizer.eos_token_id)
        assert text == tokenizer.decode(row[len(head) :]).removesuffix(" <end>")


def test_token_limit_cuts_and_is_reported(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    answers = sample_answers(model, tokenizer, PROMPTS, seed=0, max_new_tokens=3)
    assert isinstance(answers, Answers)
    assert max(answers.lengths) == 3
    assert not any(ended and length == 3 for ended, length in zip(answers.ended, answers.lengths, strict=True))
    with pytest.raises(ValueError, match="temperature"):
        sample_answers(model, tokenizer, PROMPTS, seed=0, temperature=-1.0)


def test_sampling_keeps_the_training_mode_and_the_global_random_state(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    model.train()
    before = torch.get_rng_state()
    sample_answers(model, tokenizer, PROMPTS[:4], seed=0, max_new_tokens=4)
    assert model.training and torch.equal(before, torch.get_rng_state())
    model.eval()


def test_kl_is_zero_for_equal_models_and_positive_otherwise(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    answers = sample_answers(model, tokenizer, PROMPTS, seed=1).texts
    assert sequence_kl(model, copy.deepcopy(model), tokenizer, PROMPTS, answers).abs().max() < 1e-9
    kl = sequence_kl(shaken(model), model, tokenizer, PROMPTS, answers)
    assert kl.shape == (len(PROMPTS),) and kl.min() > 1e-3


def test_kl_equals_a_row_by_row_sum(loaded_base: Loaded) -> None:
    policy, (base, tokenizer) = shaken(loaded_base[0]), loaded_base
    answers = sample_answers(base, tokenizer, PROMPTS[:5], seed=2).texts
    got = sequence_kl(policy, base, tokenizer, PROMPTS[:5], answers, batch_size=2)
    for value, head, answer in zip(got, chat_prompts(tokenizer, PROMPTS[:5]), answers, strict=True):
        ids = torch.tensor([head + tokenizer(answer)["input_ids"]])
        with torch.no_grad():
            p, q = (m(input_ids=ids).logits[0, len(head) - 1 :].softmax(-1).double() for m in (policy, base))
        assert len(p) == len(answer.split()) + 1  # every answer token and the end
        assert float(value) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)


def test_kl_refuses_unequal_lists(loaded_base: Loaded) -> None:
    model, tokenizer = loaded_base
    with pytest.raises(ValueError, match="2 prompts and 1 answers"):
        sequence_kl(model, model, tokenizer, PROMPTS[:2], ["the broth was fine ."])
