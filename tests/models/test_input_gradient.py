"""Input gradients: against a naive backward through whole logits, and what they must leave alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from attnpo.models.input_gradient import input_gradient, prompt_lengths
from attnpo.models.layouts import packed_layout, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.schema import RowGroup, UserError
from tests.models.conftest import shard_all

Build = Callable[..., PreTrainedModel]
LENGTHS = ((5, 9), (3, 4), (11, 1), (2, 17), (4, 0), (1, 3))


def sequences(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts and responses of different length; one response is empty, one prompt a single token."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, 97, (a + b,), generator=generator).tolist() for a, b in LENGTHS]
    return [(ids[:a], ids[a:]) for ids, (a, _) in zip(drawn, LENGTHS, strict=True)]


def rows_of(given: list[tuple[list[int], list[int]]]) -> RowGroup:
    laid = padded_layout(given, 0)
    mask = laid.response_mask
    return RowGroup(
        response_ids=laid.response_ids,
        response_mask=mask,
        token_weights={"reward": mask.float()},
        source_lengths=mask.sum(-1).float(),
        reference_logps=None,
        inputs=laid.inputs,
    )


def naive(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Per token of one unpadded row: the L1 norm of its gradient, through all logits of the whole model."""
    model = model.eval()
    table = model.get_input_embeddings()
    embedded = table(torch.tensor([tokens])).detach().requires_grad_()
    top = model(inputs_embeds=embedded, use_cache=False).logits[0, -1].max()
    (gradient,) = torch.autograd.grad(top, embedded)
    return gradient[0].abs().sum(-1)


def check(model: PreTrainedModel, rtol: float) -> None:
    given = sequences()
    found = input_gradient(ScoredLM(model), rows_of(given))
    assert found.prompt_tokens.tolist() == [a for a, _ in LENGTHS]
    for row, (prompt, response) in enumerate(given):
        expected = naive(model, prompt + response)
        assert float(expected.min()) > 0
        torch.testing.assert_close(found.prompt[row], expected[: len(prompt)].sum(), rtol=rtol, atol=0)
        torch.testing.assert_close(found.response[row, : len(response)], expected[len(prompt) :], rtol=rtol, atol=0)
        assert not found.response[row, len(response) :].any()


def test_equals_the_naive_backward_in_double(exact_llama: Build) -> None:
    check(exact_llama(), 1e-10)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_equals_the_naive_backward(tiny: Build, family: str) -> None:
    """Capped logits, scaled embeddings, sliding windows and tied heads included."""
    check(tiny(family), 2e-3)


class Bent(nn.Module):
    """A head that no config field describes."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sin(self.head(hidden))


def test_a_model_that_is_called_whole_gives_its_own_gradients(exact_llama: Build) -> None:
    model = exact_llama()
    model.lm_head = Bent(model.lm_head)
    check(model, 1e-10)


def test_padding_and_neighbours_change_nothing(exact_llama: Build) -> None:
    scored, rows = ScoredLM(exact_llama()), rows_of(sequences())
    clean = input_gradient(scored, rows)
    assert rows.inputs is not None and rows.inputs.attention_mask is not None
    dirty = rows.inputs.input_ids.masked_fill(rows.inputs.attention_mask == 0, 55)
    found = input_gradient(scored, replace(rows, inputs=replace(rows.inputs, input_ids=dirty)))
    torch.testing.assert_close(found.response, clean.response, rtol=1e-12, atol=0)
    alone = input_gradient(scored, rows_of(sequences()[1:2]))
    torch.testing.assert_close(alone.response[0], clean.response[1, :4], rtol=1e-12, atol=0)


def test_nothing_is_left_behind(tiny: Build) -> None:
    """No gradient in any parameter, whether it had one or none; every module in its mode; no graph."""
    model = tiny("llama", attention_dropout=0.5).train()
    model.model.layers[1].eval()
    scored, rows = ScoredLM(model), rows_of(sequences())
    before = {name: part.training for name, part in scored.named_modules()}
    held = model.model.norm.weight
    held.grad = torch.full_like(held, 2.0)
    state = torch.random.get_rng_state()
    found = input_gradient(scored, rows)
    assert {name: part.training for name, part in scored.named_modules()} == before
    assert all(parameter.grad is None for parameter in model.parameters() if parameter is not held)
    assert bool((held.grad == 2.0).all()) and torch.equal(torch.random.get_rng_state(), state)
    assert not any(value.requires_grad for value in (found.response, found.prompt))
    assert not model.model.embed_tokens._forward_hooks and not model._forward_hooks
    again = input_gradient(ScoredLM(model.eval()), rows)
    torch.testing.assert_close(found.response, again.response, rtol=0, atol=0)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_gives_the_same_numbers(tiny: Build, context: Callable[[], object]) -> None:
    """Also for rows that were built in inference mode, whose tensors no backward may keep."""
    scored = ScoredLM(tiny("llama"))
    expected = input_gradient(scored, rows_of(sequences()))
    with context():  # type: ignore[attr-defined]
        found = input_gradient(scored, rows_of(sequences()))
    assert torch.equal(found.response, expected.response) and torch.equal(found.prompt, expected.prompt)


def test_a_frozen_model_and_autocast_will_do(tiny: Build) -> None:
    scored, rows = ScoredLM(tiny("llama").requires_grad_(False)), rows_of(sequences())
    expected = input_gradient(scored, rows)
    with torch.autocast("cpu", torch.bfloat16):
        found = input_gradient(scored, rows)
    assert found.response.dtype == torch.float32
    share = expected.response.sum(-1)[:2], found.response.sum(-1)[:2]
    torch.testing.assert_close(share[1], share[0], rtol=0.2, atol=0)


class Largest(TorchDispatchMode):
    """The most elements that a tensor with the vocabulary as its last axis had."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.elements = vocab, 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        made = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if isinstance(made, Tensor) and made.shape and made.shape[-1] == self.vocab:
            self.elements = max(self.elements, made.numel())
        return made


def test_only_one_position_of_a_row_meets_the_head(tiny: Build) -> None:
    scored, rows = ScoredLM(tiny("llama")), rows_of(sequences())
    with Largest(97) as seen:
        input_gradient(scored, rows)
    assert 0 < seen.elements <= max(len(LENGTHS), 32) * 97  # the head's own gradient would be 32 x 97


@pytest.mark.parametrize("spoil", ["left", "no mask", "packed", "order"])
def test_other_layouts_are_refused(tiny: Build, spoil: str) -> None:
    rows = rows_of([([4, 5], [6, 7, 8]), ([4], [9])])
    assert rows.inputs is not None
    made = rows.inputs
    assert made.attention_mask is not None
    bad = {
        "left": replace(made, attention_mask=made.attention_mask.flip(1)),
        "no mask": replace(made, attention_mask=None),
        "packed": packed_layout([([4, 5], [6, 7, 8]), ([4], [9])], 0).inputs,
        "order": replace(made, predict_index=made.predict_index.flip(0)),
    }[spoil]
    with pytest.raises(UserError, match="need the padded layout"):
        prompt_lengths(replace(rows, inputs=bad))
    with pytest.raises(UserError, match="need the padded layout"):
        input_gradient(ScoredLM(tiny("llama")), replace(rows, inputs=bad))


def test_a_model_without_one_embedding_lookup_is_refused(tiny: Build) -> None:
    model = tiny("llama")
    model.set_input_embeddings(nn.Embedding(97, 32))
    table = model.get_input_embeddings()
    model.model.embed_tokens = nn.Sequential(nn.Embedding(97, 32))
    model.get_input_embeddings = lambda: table  # type: ignore[method-assign]  # the model reads another one
    with pytest.raises(UserError, match="looked up its input embeddings 0 times"):
        input_gradient(ScoredLM(model), rows_of(sequences()))
    assert not table._forward_hooks


def test_sharded_weights_give_the_same_and_keep_the_step_s_gradient(tiny: Build, one_rank: None) -> None:
    rows = rows_of(sequences())
    read = (rows.inputs, rows.response_ids, rows.response_mask)
    plain = ScoredLM(tiny("llama"))
    expected = input_gradient(plain, rows)
    plain(*read).logps.sum().backward()
    scored = shard_all(ScoredLM(tiny("llama")))
    logps = scored(*read).logps
    found = input_gradient(scored, rows)  # between the step's forward and its backward
    assert all(parameter.grad is None for parameter in scored.parameters())
    logps.sum().backward()
    torch.testing.assert_close(found.response, expected.response, rtol=1e-5, atol=0)
    for one, other in zip(scored.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)  # type: ignore[attr-defined]


def kept_bytes(policy: ScoredLM, rows: RowGroup) -> tuple[int, Tensor]:
    """Bytes kept for the backward, and the gradient's norms."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = input_gradient(policy, rows)
    return total, found.response


def test_layers_that_recompute_their_activations_do_so_here_too(tiny: Build) -> None:
    model, rows = tiny("llama"), rows_of(sequences())
    policy = ScoredLM(model)
    kept, plain = kept_bytes(policy, rows)
    model.activation_checkpointing_enable()
    for training in (True, False):
        policy.train(training)
        less, same = kept_bytes(policy, rows)
        assert less < 0.5 * kept
        torch.testing.assert_close(same, plain, rtol=1e-6, atol=0)
        assert all(module.training == training for module in policy.modules())
