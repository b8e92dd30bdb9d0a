"""Weight readers other than the judge: verbalizer and reward model. Their models are loaded only when needed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from attnpo.config.named_files import read_template
from attnpo.judge.base import WeightReader
from attnpo.judge.causal_judge import RewardModel
from attnpo.judge.judge import AttentionReader
from attnpo.judge.layers import Depth
from attnpo.models.description import config_vocabulary_size
from attnpo.models.generate import extra_end_ids, make_chat_generator, max_sequence_length
from attnpo.models.loading import (
    inspect_model,
    load_model,
    load_text_config,
    load_tokenizer,
    num_layers,
    weights_fingerprint,
)
from attnpo.models.spec import ModelSpec
from attnpo.schema import SIDES, Generator, Message, PairWeights, PreferencePair, Sampling, UserError, digest
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import ChatFormat
from attnpo.text.traces import judged_text
from attnpo.weights.score_parser import parse_scores
from attnpo.weights.sources.reward_attention import LoadedRewardModel, RewardAttention
from attnpo.weights.sources.verbalized import LoadedVerbalizer
from attnpo.weights.verbalizer_settings import ScorePromptBuilder, Verbalizer


@dataclass(frozen=True)
class VerbalizerStatistics:
    """Statistics of a verbalizer's answers; ``pairs``: number of pairs covered.

    ``answers``: number of answers. ``parsed``: how many of them have at least one usable part. ``parts``: total number
    of usable parts. ``coverage``: mean share of a response's tokens with a score. ``problems``: counts of unusable
    parts and answers, by reason. ``unasked``: pairs that the model could not be asked about. ``lost``: answers that are
    no longer in the store although the rows computed from them still are.
    """

    pairs: int
    answers: int
    parsed: int
    parts: int
    coverage: float
    problems: Mapping[str, int]
    unasked: int = 0
    lost: int = 0

    @property
    def parse_rate(self) -> float:
        """Returns the share of answers with at least one usable part; 0 if there are no answers."""
        return self.parsed / max(1, self.answers)

    def to_dict(self) -> dict[str, object]:
        """Returns the statistics as plain data."""
        rounded = {"parse_rate": round(self.parse_rate, 5), "coverage": round(self.coverage, 5)}
        return {**vars(self), **rounded, "problems": dict(self.problems)}


def answer_statistics(
    pairs: Sequence[PreferencePair], captured: Mapping[str, PairWeights], answers: Mapping[tuple[str, str], str]
) -> VerbalizerStatistics:
    """Computes the statistics of ``pairs`` from the rows in ``captured`` and ``answers``, keyed by (pair id, side)."""
    problems: Counter[str] = Counter()
    shares, parsed, parts, read, lost, unasked = [], 0, 0, 0, 0, 0
    unique = {pair.pair_id: pair for pair in pairs if pair.pair_id in captured}
    for pair_id, pair in unique.items():
        rounds = captured[pair_id].rounds
        if not rounds:
            unasked += 1
            continue
        for side in SIDES:
            row = rounds[0].side(side).weights[0]
            shares.append(float((row != 0).double().mean()) if row.numel() else 0.0)
            text = answers.get((pair_id, side))
            if text is None:
                lost += 1
                continue
            reading = parse_scores(text, judged_text(pair, side))
            read += 1
            parsed += bool(reading.spans)
            parts += len(reading.spans)
            problems.update(reading.problems)
    coverage = sum(shares) / len(shares) if shares else 0.0
    return VerbalizerStatistics(
        len(unique), read, parsed, parts, coverage, dict(sorted(problems.items())), unasked, lost
    )


log = logging.getLogger(__name__)


ANSWERS = "answers"
ANSWER = "answer"
# Increase by hand with every code change that changes an answer.
ANSWERS_VERSION = "1"
BATCHES_AT_ONCE = 4
"""Number of answer batches to store at a time."""


class RunVerbalizer(WeightReader):
    """Verbalizer of a run; its model is loaded only if an answer is missing.

    Args:
        verbalizer: the settings.
        model: the run's model, used unless ``verbalizer.path`` names a different one.
        chat: the run's chat format. Scores always refer to its tokens. The prompts use it unless a different model is
            named.
        store: store for the answers.
    """

    name, done = "verbalizer", "scored in words"

    def __init__(self, verbalizer: Verbalizer, model: ModelSpec, chat: ChatFormat, store: Store) -> None:
        own = verbalizer.path is None
        self.settings = verbalizer
        self.path = model.path if verbalizer.path is None else verbalizer.path
        self.revision = model.revision if own else verbalizer.revision
        self.chat = chat
        if not own:
            tokenizer = load_tokenizer(self.path, self.revision)
            rows = config_vocabulary_size(load_text_config(self.path, self.revision))
            template = read_template(verbalizer.chat_template, "verbalizer.chat_template")
            fallback = model.fallback_template
            self.chat = ChatFormat(tokenizer, template, fallback=fallback, part="verbalizer", rows=rows)
        self.questions = ScorePromptBuilder(verbalizer.load_template(), self.chat, chat, self._max_prompt_tokens())
        self._store = store

    def _max_prompt_tokens(self) -> int | None:
        """Returns the maximum number of prompt tokens; UserError if answers could fill the whole context."""
        limit = max_sequence_length(self.path, self.revision, "verbalizer.max_length", self.settings.max_length)
        new = self.settings.sampling.max_new_tokens
        if limit is not None and limit <= new:
            source = "verbalizer.max_length" if self.settings.max_length is not None else f"positions of {self.path}"
            raise UserError(
                f"verbalizer.sampling.max_new_tokens={new} leaves no room for a prompt within {limit} tokens "
                f"({source}): lower max_new_tokens"
            )
        return None if limit is None else limit - new

    def fingerprint(self) -> dict[str, object]:
        """Returns all settings that affect the answer to a given prompt: weights, dtype, decoding, chat format."""
        maker = self.settings.known_parts
        return {
            "weights": {**weights_fingerprint(self.path, self.revision), **extra_end_ids(self.path)},
            "dtype": self.settings.dtype,
            "sampling": self.settings.sampling.fingerprint(),
            "chat": self.chat.fingerprint(),
            "known_parts": None if maker is None else maker.fingerprint(),
            "code": ANSWERS_VERSION,
        }

    def _answer_table(self) -> StoreTable:
        return self._store.table(ANSWERS, self.fingerprint())

    def load(self, device: torch.device) -> LoadedVerbalizer:
        """Returns the generator, the prompt builder and the decoding settings for capturing.

        The model is loaded when the first missing answer is requested.
        """
        at_once = BATCHES_AT_ONCE * self.settings.batch_size
        generator = CachedGenerator(self._answer_table(), lambda: self._load_generator(device), at_once)
        return LoadedVerbalizer(generator, self.questions, self.settings.sampling)

    def _load_generator(self, device: torch.device) -> Generator:
        model = load_model(self.path, dtype=self.settings.dtype, revision=self.revision)
        model.to(device)  # type: ignore[arg-type]
        if self.settings.known_parts is not None:
            return self.settings.known_parts.make_generator(model, self.chat.tokenizer)
        return make_chat_generator(model, self.chat, self.settings.batch_size, self.settings.token_budget)

    def describe_pass(self, rows: str) -> str:
        """Formats a log line about the scoring pass."""
        return f"verbalizer pass: {self.path} scores the parts of both responses"

    def prompts_fingerprint(self) -> Mapping[str, object]:
        """Returns all prompt and tokenization settings that affect the stored scores."""
        return self.questions.fingerprint()

    def compute_answer_statistics(
        self, pairs: Sequence[PreferencePair], captured: Mapping[str, PairWeights]
    ) -> VerbalizerStatistics:
        """Computes the statistics of the stored answers for ``pairs``."""
        asked = {
            (pair.pair_id, side): answer_key(self.questions.messages(pair, side))
            for pair in pairs
            if pair.pair_id in captured and captured[pair.pair_id].rounds
            for side in SIDES
        }
        stored = load_answers(self._answer_table(), list(asked.values()))
        return answer_statistics(pairs, captured, {at: stored[key] for at, key in asked.items() if key in stored})


def answer_key(prompt: Sequence[Message]) -> str:
    """Returns the store key of the answer to a prompt."""
    return digest([[turn["role"], turn["content"]] for turn in prompt])[:32]


def load_answers(table: StoreTable, keys: Sequence[str]) -> dict[str, str]:
    """Loads the stored answers for ``keys``, omitting those that are not in the store."""
    known = [key for key, columns in table.columns_present(keys).items() if ANSWER in columns]
    return {key: str(row[ANSWER]) for key, row in table.read(known, [ANSWER]).items()}


class CachedGenerator:
    """Generator that caches answers in a table and gets missing ones from another generator, built by ``make``.

    Identical prompts get the same answer. ``make`` is called at most once. New answers are stored and progress is
    logged every ``at_once`` answers, so an interruption loses at most that many.
    """

    def __init__(self, table: StoreTable, make: Callable[[], Generator], at_once: int = 64) -> None:
        self.table, self.make, self.at_once = table, make, at_once
        self._generator: Generator | None = None

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one answer per prompt, in order."""
        keys = [answer_key(prompt) for prompt in prompts]
        found = load_answers(self.table, keys)
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in found}
        if missing and self._generator is None:
            self._generator = self.make()
        # Longest first, as within a batch: prompts that do not fit into memory fail early, and padding is small.
        waiting = iter(sorted(missing, key=lambda key: -sum(len(turn["content"]) for turn in missing[key])))
        done, began = 0, time.perf_counter()
        while self._generator is not None and (some := list(islice(waiting, self.at_once))):
            answers = self._generator.generate([missing[key] for key in some], sampling)
            new = dict(zip(some, answers, strict=True))
            self.table.append({key: {ANSWER: text} for key, text in new.items()})
            found |= new
            done += len(new)
            log.info("verbalizer: %d of %d answers, %.0f s", done, len(missing), time.perf_counter() - began)
        return [found[key] for key in keys]


# ------------------------------------------------------------------------------------- a reward model


class RunRewardModel(AttentionReader):
    """Reward model of a run, loaded at most once.

    Args:
        source: weight source that specifies the reward model. UserError if it specifies none, or if the model's
            tokenizer has no character offsets.
        fallback: chat template for a tokenizer without one.
    """

    name, done = "reward model", "read"

    def __init__(self, source: RewardAttention, fallback: str | None = None) -> None:
        if source.path is None:
            raise UserError(
                "weights=reward_attention needs a reward model, but weights.path is null: set "
                "weights.path=FOLDER_OR_HUB_NAME"
            )
        self.settings, self.path, self.revision, self.dtype = source, source.path, source.revision, source.dtype
        self.tokenizer = load_tokenizer(self.path, self.revision)
        rows = config_vocabulary_size(load_text_config(self.path, self.revision))
        template = read_template(source.chat_template, "weights.chat_template")
        self.chat = ChatFormat(self.tokenizer, template, fallback=fallback, part="weights", rows=rows)

    @property
    def num_layers(self) -> Depth:
        """Returns the number of layers and which of them have attention, without loading the model.

        UserError if no layer can be read.
        """
        found = inspect_model(self.path, self.revision)
        if found.mapped or not found.layers:
            raise UserError(
                f"weights.path={self.path}: no layer of {found.name} has readable softmax attention, because none uses "
                "transformers' AttentionInterface; choose a different reward model"
            )
        return Depth(num_layers(self.path, self.revision), found.layers)

    def describe_pass(self, rows: str) -> str:
        """Formats a log line about reading ``rows`` with the reward model."""
        return f"reward model: reading {rows} of {self.path} for both responses"

    def prompts_fingerprint(self) -> Mapping[str, object]:
        """Returns the fingerprint of the chat format in which the model reads conversations."""
        return self.chat.fingerprint()

    def load(self, device: torch.device) -> LoadedRewardModel:
        """Loads the model onto ``device``; returns it with its chat format, for capturing."""
        model = load_model(self.path, dtype=self.settings.dtype, revision=self.revision, reward=True)
        model.to(device)  # type: ignore[arg-type]
        reader = RewardModel(model, token_budget=self.settings.token_budget, kernel=self.kernel)
        return LoadedRewardModel(reader, self.chat)
