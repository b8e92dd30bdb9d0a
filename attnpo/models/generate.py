"""Generates responses with a causal LM through Hugging Face ``generate``, using only attnpo's own decoding settings.

Only the end-of-sequence ids are taken from the model folder's generation config. Sampling inverts the cumulative
distribution with one uniform number per prompt and step, derived from the seed and the prompt, so a response does not
depend on its batch. Presence and frequency penalties are subtracted from the logits first, as in vLLM and OpenAI's API.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import GENERATION_CONFIG_NAME

from attnpo.models.backbone import eval_mode, require_causal_lm
from attnpo.models.description import check_exact_length, config_vocabulary_size, exact_length
from attnpo.models.loading import load_config
from attnpo.models.spec import BATCH_SIZE, TOKEN_BUDGET
from attnpo.schema import Message, Sampling, UserError, digest
from attnpo.text.chat import ChatFormat


@dataclass(frozen=True)
class GenerationRequest:
    """Token ids of a prompt, up to the start of the response; ``draw``: index of the response among several."""

    ids: Sequence[int]
    draw: int = 0


@dataclass(frozen=True)
class GeneratedResponse:
    """Text of a response without special tokens, its number of tokens, and whether the model stopped on its own.

    ``tokens`` does not count the end token; a response without one has ``max_new_tokens`` tokens.
    """

    text: str
    tokens: int
    ended: bool


class HFGenerator:
    """Generates responses to chat prompts with a Hugging Face causal LM.

    ``encode_prompt`` maps turns to token ids, up to the start of the response. A batch has at most ``batch_size``
    prompts and ``token_budget`` tokens, including padding and room for responses, but it always has at least one
    prompt. ``end_ids``: additional token ids that end a response.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        encode_prompt: Callable[[Sequence[Message]], list[int]],
        *,
        batch_size: int = 16,
        token_budget: int | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        if batch_size < 1:
            raise UserError(f"the batch size for generation must be at least 1, got {batch_size}")
        self.model = require_causal_lm(model)
        self.tokenizer = tokenizer
        self.encode_prompt = encode_prompt
        self.batch_size = batch_size
        self.token_budget = token_budget
        self.end_ids = collect_end_ids(self.model, tokenizer, end_ids)

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one response per prompt, in order and without special tokens; a repeated prompt gets a new sample.

        Raises ``UserError`` for out-of-range settings or an empty prompt.
        """
        seen: dict[tuple[int, ...], int] = {}
        requests = []
        for prompt in prompts:
            ids = tuple(self.encode_prompt(prompt))
            seen[ids] = seen.get(ids, -1) + 1
            requests.append(GenerationRequest(ids, seen[ids]))
        answers: dict[int, GeneratedResponse] = {}
        for batch in self.batches(requests, sampling):
            answers.update(zip(batch, self.generate_batch([requests[i] for i in batch], sampling), strict=True))
        return [answers[index].text for index in range(len(requests))]

    def batches(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[list[int]]:
        """Splits the indices of ``requests`` into batches, longest first; raises UserError for an empty prompt."""
        empty = [index for index, request in enumerate(requests) if not request.ids]
        if empty:
            raise UserError(f"prompt {empty[0]} has no tokens: check the chat template")

        def size(longest: int) -> int:
            room = None if self.token_budget is None else self.token_budget // (longest + sampling.max_new_tokens)
            return self.batch_size if room is None else min(self.batch_size, room)

        return list(batch_longest_first([len(request.ids) for request in requests], size))

    def generate_batch(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[GeneratedResponse]:
        """Generates one batch of responses, in order, without using or changing torch's global random state."""
        pad_id = padding_id(self.model, self.tokenizer, self.end_ids)
        made = generate_tokens(self.model, requests, sampling, sampling.max_new_tokens, self.end_ids, pad_id)
        ends = self.end_ids.union(sampling.stop_ids)
        rows = [(row[:-1], True) if row[-1] in ends else (row, False) for row in made]
        texts = self.tokenizer.batch_decode([new for new, _ in rows], skip_special_tokens=True)
        return [GeneratedResponse(text, len(new), ended) for text, (new, ended) in zip(texts, rows, strict=True)]


def generate_tokens(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    sampling: Sampling,
    limit: int,
    end_ids: Collection[int],
    pad_id: int,
    until: "StopAtText | None" = None,
) -> list[list[int]]:
    """Generates at most ``limit`` token ids per request, up to and including the first id that ends a response.

    Runs in eval mode without gradients; torch's global random state is neither used nor changed. ``until``: stops each
    response once it contains a given string.
    """
    ends = {*end_ids, *sampling.stop_ids}
    width = max(len(request.ids) for request in requests)
    missing = [width - len(request.ids) for request in requests]
    ids = [[*[pad_id] * gap, *request.ids] for gap, request in zip(missing, requests, strict=True)]
    mask = [[0] * gap + [1] * (width - gap) for gap in missing]
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,  # _Draw samples
        num_beams=1,
        max_new_tokens=limit,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad_id,
    )
    with torch.no_grad(), eval_mode(model), replace_generation_config(model, config):
        output: Tensor = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(ids, dtype=torch.long, device=model.device),
            attention_mask=torch.tensor(mask, dtype=torch.long, device=model.device),
            generation_config=config,
            logits_processor=make_logits_processors(requests, sampling, width, model.device),
            stopping_criteria=StoppingCriteriaList([] if until is None else [until.prepare(width)]),
        )
    rows = output[:, width:].tolist()
    stops = [next((place for place, token in enumerate(row, 1) if token in ends), limit) for row in rows]
    if until is not None:
        stops = [min(stop, until.lengths.get(place, limit)) for place, stop in enumerate(stops)]
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]


class StopAtText(StoppingCriteria):
    """Stopping criterion that stops a response once it contains ``text``.

    ``lengths``: for each finished row of the batch, the length of the response in tokens.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text, self.tokenizer = text, tokenizer
        self.lengths: dict[int, int] = {}
        self._width = 0
        # A token has at least one byte; a few tokens more, because decoding may drop a leading blank.
        self._window = len(text.encode()) + 4

    def prepare(self, width: int) -> "StopAtText":
        """Resets the criterion for a batch of prompts padded to ``width`` tokens, and returns it."""
        self._width = width
        self.lengths.clear()
        return self

    def __call__(self, input_ids: Int[Tensor, "rows T"], scores: object, **kwargs: object) -> Bool[Tensor, " rows"]:
        """Returns a mask of the finished rows."""
        written = input_ids.shape[1] - self._width
        for row, ids in enumerate(input_ids[:, self._width :][:, -self._window :].tolist()):
            if row not in self.lengths and self.text in decode_with_special_tokens(self.tokenizer, ids):
                self.lengths[row] = written
        done = [row in self.lengths for row in range(input_ids.shape[0])]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def decode_with_special_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decodes tokens to text, including special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def batch_longest_first(lengths: Sequence[int], size: Callable[[int], int]) -> Iterator[list[int]]:
    """Yields indices in batches of similar length, longest first; ``size`` returns the batch size for a length."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        stop = start + max(1, size(lengths[order[start]]))
        yield order[start:stop]
        start = stop


def context_length(config: PretrainedConfig) -> int | None:
    """Returns the context length from a model's config, capped at the exact length; None if the config lacks it."""
    exact = exact_length(config)
    if exact is not None:
        return exact[0]
    stated = getattr(config.get_text_config(), "max_position_embeddings", None)
    return stated if isinstance(stated, int) else None


def max_sequence_length(path: str, revision: str | None, key: str, asked: int | None) -> int | None:
    """Returns the maximum length of prompt plus response: ``asked`` (value of ``key``) or the model's context length.

    Raises ``UserError`` if ``asked`` exceeds the model's exact length.
    """
    config = load_config(path, revision)
    if asked is None:
        return context_length(config)
    check_exact_length(config, path, key, asked)
    return asked


class RepetitionPenalties(LogitsProcessor):
    """Logits processor that penalises tokens already in the response by ``presence`` plus ``frequency`` per occurrence.

    The response starts after the first ``width`` tokens. Source: OpenAI's API reference, which vLLM follows.
    """

    def __init__(self, presence: float, frequency: float, width: int) -> None:
        self.presence, self.frequency, self.width = presence, frequency, width

    def __call__(
        self, input_ids: Int[Tensor, "rows T"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """Returns the logits minus the penalties."""
        written = input_ids[:, self.width :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class _InverseSampling(LogitsProcessor):
    """Logits processor that samples by inverting the CDF at given random numbers; masks all but the sampled token."""

    def __init__(self, uniforms: Float[Tensor, "rows steps"], width: int) -> None:
        self.uniforms, self.width = uniforms, width

    def __call__(
        self, input_ids: Int[Tensor, "rows T"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        reached = scores.double().softmax(dim=-1).cumsum(dim=-1)
        wanted = self.uniforms[:, input_ids.shape[1] - self.width, None] * reached[:, -1:]
        drawn = torch.searchsorted(reached, wanted, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn, 0.0)


def make_logits_processors(
    requests: Sequence[GenerationRequest], sampling: Sampling, width: int, device: torch.device
) -> LogitsProcessorList:
    """Returns the processors that sample from logits: penalties, transformers' warpers, then inversion.

    Greedy decoding uses only the penalties.
    """
    steps = LogitsProcessorList()
    if sampling.presence_penalty or sampling.frequency_penalty:
        steps.append(RepetitionPenalties(sampling.presence_penalty, sampling.frequency_penalty, width))
    if sampling.temperature == 0:
        return steps
    if sampling.temperature != 1:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    uniforms = torch.stack([draw_uniforms(request, sampling) for request in requests])
    steps.append(_InverseSampling(uniforms.to(device), width))
    return steps


def draw_uniforms(request: GenerationRequest, sampling: Sampling) -> Float[Tensor, " steps"]:
    """Draws one number in [0, 1) per step, determined by the seed, the prompt and the index of the response."""
    seed = int(digest([sampling.seed, list(request.ids), request.draw])[:15], 16)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)


def padding_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> int:
    """Returns the tokenizer's padding id if the model has an embedding for it, else an end id or, failing that, 0."""
    rows, pad = config_vocabulary_size(model.config), tokenizer.pad_token_id
    known = [index for index in ([] if pad is None else [int(pad)]) + sorted(end_ids) if rows is None or index < rows]
    return known[0] if known else 0


def collect_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, more: Sequence[int]) -> frozenset[int]:
    """Collects the token ids that end a response, from the model's folder, the tokenizer and ``more``."""
    ids = set(more) | _end_ids(model.generation_config)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return frozenset(ids)


def extra_end_ids(path: str | Path) -> dict[str, list[int]]:
    """Returns the EOS ids found only in generation_config.json, for use in a cache key; empty for a hub name."""
    if not (Path(path).expanduser() / GENERATION_CONFIG_NAME).is_file():
        return {}
    try:
        stated = _end_ids(GenerationConfig.from_pretrained(Path(path).expanduser(), trust_remote_code=False))
    except OSError:  # not readable: the library falls back to config.json
        return {}
    more = sorted(stated - _end_ids(load_config(path)))
    return {"ends in generation_config.json": more} if more else {}


def _end_ids(config: GenerationConfig | PretrainedConfig | None) -> set[int]:
    stated = getattr(config, "eos_token_id", None)
    return {stated} if isinstance(stated, int) else set(stated or ())


@contextmanager
def replace_generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Uses ``config`` in the context instead of the folder's generation config, which would fill in unset values."""
    folder = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = folder


def make_chat_generator(
    model: PreTrainedModel,
    chat: ChatFormat,
    batch_size: int = BATCH_SIZE,
    token_budget: int | None = TOKEN_BUDGET,
) -> HFGenerator:
    """Builds a generator that uses a chat format's prompts and end-of-turn ids."""
    return HFGenerator(
        model,
        chat.tokenizer,
        chat.prompt_ids,
        batch_size=batch_size,
        token_budget=token_budget,
        end_ids=sorted(chat.end_ids),
    )
