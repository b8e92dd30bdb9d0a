"""Memory of a step that compares whole distributions, at a vocabulary of 128 thousand words, tensor by tensor."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from attnpo.data.collate import TrainingExample, collate
from attnpo.models.backbone import freeze
from attnpo.models.layouts import padded_layout
from attnpo.models.logps import LMHead, token_statistics
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.objectives.dpo import DPO
from attnpo.objectives.tdpo import TDPO1, TDPO2
from attnpo.schema import EncodedResponse, PreferenceBatch
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer

VOCAB, HIDDEN, CHUNK, LENGTHS = 131072, 8, 48, (90, 70)
OBJECTIVES: dict[str, PreferenceObjective] = {"dpo": DPO(0.1), "tdpo1": TDPO1(0.1), "tdpo2": TDPO2(0.1)}


class Live(TorchDispatchMode):
    """Bytes of all tensors alive that operations made under it: the most at a time, and the largest single one."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def _storages(items: object) -> list[torch.UntypedStorage]:
    return [item.untyped_storage() for item in tree_leaves(items) if isinstance(item, Tensor)]


def test_the_watcher_counts_what_is_alive() -> None:
    with Live() as seen:
        first = torch.ones(1000)
        second = first + 1  # 8,000 bytes alive
        del first
        (second.view(10, 100) * 2).sum()  # 8,000 again: a view is no allocation
        torch.cat([second, second, second])  # 16,000
    assert (seen.peak, seen.largest) == (16_000, 12_000)


class Found(NamedTuple):
    """Bytes that a step made beside the weights: the most at a time, and the largest single tensor."""

    peak: int
    largest: int
    weights: int


def model(seed: int) -> ScoredLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return ScoredLM(LlamaForCausalLM(config), chunk=CHUNK)


def pair() -> PreferenceBatch:
    generator = torch.Generator().manual_seed(0)
    sides = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        sides.append(EncodedResponse([5, 6, 7], ids, [(i, i + 1) for i in range(length)]))
    weights = tuple(torch.full((length,), 1 / length) for length in LENGTHS)
    lengths = (float(LENGTHS[0]), float(LENGTHS[1]))
    return collate(
        [TrainingExample("pair", *sides, (weights[0], weights[1]), lengths, (1.0, 1.0))], padded_layout, 0, 1
    )


@cache
def step(name: str) -> Found:
    """One training step with a live reference."""
    policy, reference = model(0), model(1)
    freeze(reference)
    module = PreferenceModule(policy, reference, OBJECTIVES[name], Optimizer(lr=1e-3), 1)
    module.set_modes(training=True)
    batch = pair()
    with Live() as seen:
        loss = module.score(batch)[3].losses.mean()
        loss.backward()
    assert loss.item() > 0.01 and all(p.grad is not None and p.grad.any() for p in policy.parameters())
    weights = sum(p.nbytes for scored in (policy, reference) for p in scored.parameters())
    return Found(seen.peak, seen.largest, weights)


@pytest.mark.parametrize("name", ["tdpo1", "tdpo2"])
def test_a_step_peaks_below_one_and_a_half_times_that_of_dpo(name: str) -> None:
    """With the weights of both models, and by what the step makes beside them alone."""
    ours, dpo = step(name), step("dpo")
    assert ours.peak + ours.weights < 1.5 * (dpo.peak + dpo.weights)
    assert ours.peak < 1.5 * dpo.peak


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_nothing_of_the_size_of_response_tokens_times_vocabulary_is_made(name: str) -> None:
    assert step(name).largest <= CHUNK * VOCAB * 4 < sum(LENGTHS) * VOCAB * 4


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_two_distributions_and_their_statistics_take_less_than_one_and_a_half_chunks(softcap: float | None) -> None:
    """Forward and backward with a frozen head: both models' logits and all that the statistics make of them."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(64, 4, requires_grad=True), torch.randint(0, 20_000, (64,))
    head, second = (LMHead(torch.randn(20_000, 4), softcap=softcap) for _ in range(2))
    statistics = {"vocab": ("entropy",), "joint": ("kl_ref_policy", "kl_policy_ref")}
    with Live() as seen:
        found = token_statistics(hidden, head, labels, other=(torch.randn(64, 4), second), chunk=32, **statistics)
        torch.stack(list(found.values())).sum().backward()
    chunk = 32 * 20_000 * 4
    assert chunk < seen.peak < 1.4 * chunk
