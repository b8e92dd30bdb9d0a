"""Answers from a causal LM through Hugging Face ``generate``, with decoding settings that are ours alone.

Implements ``attnpo.schema.Generator``. Model folders often carry a generation config with a temperature or a
repetition penalty; here only their end-of-sequence ids are used, so that the settings asked for are those that run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from attnpo.models.parts import eval_mode, require_causal_lm
from attnpo.schema import Message, Sampling, UserError


class HFGenerator:
    """Answers chat prompts with a Hugging Face causal LM.

    ``encode_prompt`` maps the turns of a prompt to the ids that end where the answer begins. ``batch_size``: prompts
    per batch, sorted by length; with sampling it is part of what decides the draws, with greedy decoding it is not.
    ``end_ids``: further ids that end an answer, beside those of the tokenizer and the model's folder.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        encode_prompt: Callable[[Sequence[Message]], list[int]],
        *,
        batch_size: int = 16,
        end_ids: Sequence[int] = (),
    ) -> None:
        if batch_size < 1:
            raise UserError(f"generation needs a batch size of at least 1, got {batch_size}")
        self.model = require_causal_lm(model)
        self.tokenizer = tokenizer
        self.encode_prompt = encode_prompt
        self.batch_size = batch_size
        self.end_ids = _end_ids(self.model, tokenizer, end_ids)

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """One answer per prompt, in their order, special tokens removed.

        ``sampling.max_new_tokens`` counts new tokens only; temperature 0 is greedy. The same prompts, settings and
        batch size give the same answers; torch's own random state is as before afterwards. Raises ``UserError`` for
        settings out of range or an empty prompt.
        """
        _check(sampling)
        encoded = [self.encode_prompt(prompt) for prompt in prompts]
        empty = [index for index, ids in enumerate(encoded) if not ids]
        if empty:
            raise UserError(f"prompt {empty[0]} has no token; check the chat template")
        config = self._config(sampling)
        order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
        answers: dict[int, str] = {}
        seeded = _seeded(sampling.seed, self.model.device)
        with torch.no_grad(), eval_mode(self.model), seeded, _own_settings(self.model, config):
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                new = self._continue([encoded[index] for index in batch], config)
                texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
                answers.update(zip(batch, texts, strict=True))
        return [answers[index] for index in range(len(prompts))]

    def _continue(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> list[list[int]]:
        """New ids of a left-padded batch, up to and without the first end id."""
        width = max(len(prompt) for prompt in prompts)
        pad = int(config.pad_token_id)
        ids = torch.tensor([[*([pad] * (width - len(prompt))), *prompt] for prompt in prompts], dtype=torch.long)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.long)
        device = self.model.device
        output: Tensor = self.model.generate(  # type: ignore[operator]
            input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config
        )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _until_end(self, ids: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(ids) if token in self.end_ids]
        return ids[: ends[0]] if ends else ids

    def _config(self, sampling: Sampling) -> GenerationConfig:
        greedy = sampling.temperature == 0
        pad = self.tokenizer.pad_token_id
        settings: dict[str, float] = {}
        if not greedy:
            settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=not greedy,
            num_beams=1,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(self.end_ids) or None,
            pad_token_id=pad if pad is not None else min(self.end_ids, default=0),
            **settings,
        )


def _check(sampling: Sampling) -> None:
    if sampling.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if sampling.temperature < 0:
        raise UserError(f"temperature must be 0 (greedy) or positive, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p must be in (0, 1], got {sampling.top_p}")
    if sampling.top_k < 0:
        raise UserError(f"top_k must be 0 (off) or positive, got {sampling.top_k}")


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, more: Sequence[int]) -> frozenset[int]:
    folder = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(more) | set([folder] if isinstance(folder, int) else folder or [])
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return frozenset(ids)


@contextmanager
def _own_settings(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """A context in which the model's folder has no say: unset values would be filled from its generation config."""
    folder = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = folder


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context with torch's generators seeded; their states (CPU and ``device``) are restored."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.manual_seed(seed)
        yield
