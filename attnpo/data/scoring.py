"""Computes log-probabilities under frozen models, for use as references, as rewards or in token weights."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import Tally, encode_pair
from attnpo.data.rules import LengthRules
from attnpo.judge.base import WeightReader
from attnpo.models.description import config_vocabulary_size
from attnpo.models.generate import batch_longest_first
from attnpo.models.layouts import Layout, padded_layout
from attnpo.models.loading import load_model, load_text_config, load_tokenizer, resolve_attention, weights_fingerprint
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import DTYPES, ModelSpec
from attnpo.schema import (
    SIDES,
    EncodedResponse,
    Message,
    PreferencePair,
    TokenStats,
    UserError,
    check_choice,
    copy_message,
)
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.weights.base import ScoredSource, ScorerModel
from attnpo.weights.capture import LogpPair
from attnpo.weights.sources.scorers import LoadedScorers, Scorer

TOKENS_PER_FORWARD = 16384  # including padding, both branches of each pair


def score_examples(
    model: ScoredLM, examples: Sequence[TrainingExample], pad_id: int, layout: Layout = padded_layout
) -> Iterator[tuple[str, LogpPair]]:
    """Yields the pair id and the log-probabilities (chosen, rejected) of each example, shortest example first.

    The model is in eval mode during the iteration.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ordered = sorted(examples, key=lambda example: example.longest_branch)
    with torch.no_grad():
        for chunk in batch_by_budget(ordered):
            rows = [*(example.chosen for example in chunk), *(example.rejected for example in chunk)]
            inputs, ids, mask = layout([(row.prompt_ids, row.response_ids) for row in rows], pad_id)
            logps = model(inputs.to(device), ids.to(device), mask.to(device)).logps.float().cpu()
            for i, example in enumerate(chunk):
                counts = [len(side.response_ids) for side in example.sides]
                yield example.pair_id, (logps[i, : counts[0]].clone(), logps[len(chunk) + i, : counts[1]].clone())
    model.train(was_training)


def batch_by_budget(ordered: Sequence[TrainingExample]) -> Iterator[list[TrainingExample]]:
    """Yields batches of sorted examples: at most ``TOKENS_PER_FORWARD`` padded tokens each, or a single pair."""
    batch: list[TrainingExample] = []
    for example in ordered:
        if batch and 2 * (len(batch) + 1) * example.longest_branch > TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


# --------------------------------------------------------------------------------------------- scorers of weights

Scores = Mapping[str, Float[Tensor, " m"]]


@dataclass(frozen=True)
class ModelScorer:
    """Frozen model that scores training tokens (see ``attnpo.weights.base.Scorer``) in the model's own precision."""

    model: ScoredLM
    pad_id: int

    def scores(
        self, ids: Sequence[EncodedResponse], names: Collection[str], other: Scorer | None = None
    ) -> list[Scores]:
        """Returns the statistics listed in ``names`` for each response's tokens, in the order of ``ids``.

        Raises:
            UserError: a name is unknown, or the vocabulary of ``other`` has a different size.
            TypeError: ``other`` is not a ``ModelScorer``.
        """
        if not isinstance(other, ModelScorer | None):
            raise TypeError(f"comparing two models requires both output heads, but {type(other).__name__} has none")
        own, second = (len((scorer or self).model.head().weight) for scorer in (self, other))
        if own != second:
            raise UserError(
                f"the distributions of two scorers are compared token by token, but their heads have {own} and "
                f"{second} rows: use models with the same vocabulary"
            )
        found: dict[int, Scores] = {}
        for scorer in (self, *([] if other is None else [other])):
            scorer.model.eval()
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in ids]
        for batch in batch_longest_first(lengths, lambda length: TOKENS_PER_FORWARD // length):
            stats = self._score_batch([ids[place] for place in batch], frozenset({"logps", *names}), other)
            by_name = {"logps": stats.logps}
            by_name |= {f"vocab:{name}": rows for name, rows in stats.vocab.items()}
            by_name |= {f"joint:{name}": rows for name, rows in stats.joint.items()}
            for row, place in enumerate(batch):
                count = len(ids[place].response_ids)
                found[place] = {name: by_name[name][row, :count].float().cpu() for name in names}
        return [found[place] for place in range(len(ids))]

    @torch.no_grad()
    def _score_batch(
        self, rows: Sequence[EncodedResponse], names: frozenset[str], other: "ModelScorer | None"
    ) -> TokenStats:
        device = next(self.model.parameters()).device
        inputs, response_ids, mask = padded_layout([(row.prompt_ids, row.response_ids) for row in rows], self.pad_id)
        read = (inputs.to(device), response_ids.to(device), mask.to(device))
        second = None
        if other is not None:
            hidden = other.model(*read, frozenset({"logps", "hidden"})).hidden
            second = (hidden, other.model.head())
        stats: TokenStats = self.model(*read, names, second)
        return stats


# ------------------------------------------------------------------------------------- scorers of a run's weights


class RunPairEncoder:
    """Encodes a run's pairs with the run's chat format and length rules."""

    def __init__(self, chat: ChatFormat, rules: LengthRules) -> None:
        self.chat, self.rules = chat, rules

    def encode(self, pair: PreferencePair) -> Mapping[str, EncodedResponse]:
        """Returns the training ids by side.

        Raises:
            RefusedText: the length rules drop the pair.
        """
        tally = Tally()
        encoded = encode_pair(pair, self.chat, self.rules, tally, keep_same=True)
        if encoded is None:
            reason = next(event for event in tally.counts if event.startswith("dropped: ")).removeprefix("dropped: ")
            raise RefusedText(reason, f"pair {pair.pair_id}: {reason}")
        return encoded

    def add_instruction(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse], instruction: str
    ) -> tuple[Mapping[str, EncodedResponse], bool]:
        """Encodes the responses after a prompt with ``instruction``; also returns whether that prompt was truncated.

        The instruction is appended to the last user turn, so truncation keeps it.

        Raises:
            RefusedText: the prompt has no user turn, or the chat template rejects it.
        """
        prompt = _append_instruction(pair, instruction)
        found, cut = {}, False
        for side in SIDES:
            response = encoded[side].response_ids
            ids = self.chat.encode(prompt, pair.response(side)).prompt_ids
            # At least the length of the training prompt, even if a long response leaves less.
            room = min(self.rules.max_prompt_length, self.rules.max_length - len(response))
            room = max(room, len(encoded[side].prompt_ids))
            cut = cut or len(ids) > room
            found[side] = EncodedResponse(ids[-room:], response, encoded[side].offsets)
        return found, cut

    def fingerprint(self) -> dict[str, object]:
        """Returns the settings that determine the training ids: chat format and truncation."""
        rules = self.rules
        return {
            "chat": self.chat.fingerprint(),
            "max_prompt_length": rules.max_prompt_length,
            "max_length": rules.max_length,
            "keep": rules.keep.value,
        }


def _append_instruction(pair: PreferencePair, instruction: str) -> list[Message]:
    places = [place for place, turn in enumerate(pair.prompt) if turn["role"] == "user"]
    if not places:
        reason = "the prompt has no user turn for the scorer's instruction"
        raise RefusedText(reason, f"pair {pair.pair_id}: {reason}")
    turns = [copy_message(turn) for turn in pair.prompt]
    turns[places[-1]]["content"] += f"\n\n{instruction}"
    return turns


class RunScorers(WeightReader):
    """Models that a weight source compares. Only ``load`` loads the models; other methods just read model folders.

    Args:
        source: weight source that defines the scorers.
        model: the run's model, used for scorers whose path is not set.
        chat: the run's chat format; all scorers must share the vocabulary of its tokenizer.
        rules: the run's length rules.

    Raises:
        UserError: a scorer's model is missing or has a different vocabulary, or both scorers are the same model.
    """

    name, done = "scorers", "scored"

    def __init__(self, source: ScoredSource, model: ModelSpec, chat: ChatFormat, rules: LengthRules) -> None:
        self.models, self.reads = source.scorers, 2 * len(source.scorers)
        self.model, self.chat = model, chat
        self.texts = RunPairEncoder(chat, rules)
        for name, scorer in self.models.items():
            check_choice(f"weights.{name}.dtype", scorer.dtype, DTYPES)
            self._check_vocabulary(name, scorer)
        self._check_sizes(source)
        self._check_distinct()

    def locate_model(self, scorer: ScorerModel) -> tuple[str, str | None]:
        """Returns the path and revision of a scorer."""
        return (self.model.path, self.model.revision) if scorer.path is None else (scorer.path, scorer.revision)

    def _check_vocabulary(self, name: str, scorer: ScorerModel) -> None:
        if scorer.path is None:
            return
        try:
            vocabulary = load_tokenizer(*self.locate_model(scorer)).get_vocab()
        except UserError as error:
            raise UserError(f"weights.{name}.path: {error}") from error
        own = self.chat.tokenizer.get_vocab()
        if vocabulary != own:
            other = sorted(token for token in own.keys() | vocabulary.keys() if own.get(token) != vocabulary.get(token))
            raise UserError(
                f"weights.{name}.path={scorer.path} has a different vocabulary from {self.model.path} "
                f"({len(vocabulary)} and {len(own)} tokens; {len(other)} differ, e.g. {other[0]!r}), "
                "but scorers read the run's training ids: use a scorer with the run's tokenizer"
            )

    def _check_sizes(self, source: ScoredSource) -> None:
        sizes = {
            name: config_vocabulary_size(load_text_config(*self.locate_model(scorer)))
            for name, scorer in self.models.items()
        }
        longest = max(self.chat.tokenizer.get_vocab().values())
        if self.chat.rows.count is not None:
            longest = min(longest, self.chat.rows.count - 1)  # training uses no larger ids
        for name, size in sizes.items():
            if size is not None and size <= longest:
                raise UserError(
                    f"weights.{name}: the model has {size} token embeddings, but the largest training id is "
                    f"{longest}; use a model that matches this tokenizer"
                )
        if source.compares_whole and len(set(sizes.values())) > 1:
            stated = " and ".join(f"weights.{name} has {size}" for name, size in sizes.items())
            raise UserError(
                f"the two scorers' distributions are compared token by token, but their vocabularies differ in size "
                f"({stated}): use models with the same vocabulary size"
            )

    def _check_distinct(self) -> None:
        """Raises UserError if both scorers are the same model, comparing model weights rather than paths."""
        (first, one), (second, other) = self.models.items()
        if one.instruction == other.instruction and self._weights_digest(one) == self._weights_digest(other):
            raise UserError(
                f"weights.{first} and weights.{second} are the same model, so they agree on every token: set "
                f"weights.{first}.path or weights.{second}.path to a different model"
            )

    def _weights_digest(self, scorer: ScorerModel) -> dict[str, str]:
        return weights_fingerprint(*self.locate_model(scorer))

    def fingerprint(self) -> dict[str, object]:
        """Returns the settings that determine each model's scores, in order: weights, dtype, attention kernel."""
        described: dict[str, object] = {}
        for rank, scorer in zip(("first", "second"), self.models.values(), strict=True):
            described[rank] = {
                "weights": self._weights_digest(scorer),
                "dtype": scorer.dtype,
                "kernel": resolve_attention(*self.locate_model(scorer), "sdpa"),
            }
        return described

    def describe_models(self) -> str:
        """Returns a description of both models for the log."""
        return " and ".join(f"{name} {self.locate_model(scorer)[0]}" for name, scorer in self.models.items())

    def describe_pass(self, rows: str) -> str:
        """Returns a description of the scorers' forward passes, for the log."""
        return f"scorer pass: {self.describe_models()} read the training tokens of both responses"

    def prompts_fingerprint(self) -> Mapping[str, object]:
        """Returns the settings that determine the token ids that the scorers read."""
        return self.texts.fingerprint()

    def load(self, device: torch.device) -> LoadedScorers:
        """Loads the scorers; a model that is used with two instructions is loaded only once."""
        loaded: dict[tuple[str, str | None, str], Scorer] = {}
        scorers = {}
        for name, scorer in self.models.items():
            path, revision = self.locate_model(scorer)
            key = (path, revision, scorer.dtype)
            if key not in loaded:
                model = load_model(path, dtype=scorer.dtype, revision=revision)
                model.to(device)  # type: ignore[arg-type]
                loaded[key] = ModelScorer(ScoredLM(model), self.chat.rows.pad_id)
            scorers[name] = loaded[key]
        return LoadedScorers(scorers, self.texts)
