"""Readers of weights beside the judge: a verbalizer, a reward model. Described cheaply, loaded when one is needed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from attnpo.config.named_files import read_template
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import AttentionReader
from attnpo.judge.layers import Depth
from attnpo.judge.reader import RewardModel
from attnpo.models.described import token_rows
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
from attnpo.weights.score_parser import read_answer
from attnpo.weights.sources.reward_attention import LoadedReward, RewardAttention
from attnpo.weights.sources.verbalized import LoadedVerbalizer
from attnpo.weights.verbalizer_settings import ScoreQuestions, Verbalizer


@dataclass(frozen=True)
class VerbalizerStatistics:
    """Account of the answers about the responses of ``pairs`` pairs.

    ``parsed``: answers with at least one usable part, of ``answers``. ``parts``: usable parts in all. ``coverage``:
    mean share of a response's tokens with a score. ``problems``: what could not be used, by reason. ``unasked``: pairs
    that the model could not be asked about. ``lost``: answers whose text is no longer in the store (their rows are).
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
        """Returns the share of the answers with at least one usable part; 0 without answers."""
        return self.parsed / max(1, self.answers)

    def numbers(self) -> dict[str, object]:
        """Returns the statistics as plain data."""
        rounded = {"parse_rate": round(self.parse_rate, 5), "coverage": round(self.coverage, 5)}
        return {**vars(self), **rounded, "problems": dict(self.problems)}


def answer_statistics(
    pairs: Sequence[PreferencePair], captured: Mapping[str, PairWeights], answers: Mapping[tuple[str, str], str]
) -> VerbalizerStatistics:
    """Returns the statistics of ``pairs``, rows in ``captured`` and texts of ``answers`` by (pair id, side)."""
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
            reading = read_answer(text, judged_text(pair, side))
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
# Raised by hand with every change of the code that moves an answer.
ANSWERS_VERSION = "1"
BATCHES_AT_ONCE = 4
"""Batches of answers that go into the store together."""


class RunVerbalizer(WeightReader):
    """Verbalizer that is described cheaply and loaded only when an answer is missing.

    Args:
        verbalizer: the component.
        model: the run's model, which answers unless ``verbalizer.path`` names another.
        chat: the run's chat format: that of the prompts unless another model is named, and always that of the tokens.
        store: where the answers are kept.
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
            rows = token_rows(load_text_config(self.path, self.revision))
            template = read_template(verbalizer.chat_template, "verbalizer.chat_template")
            fallback = model.fallback_template
            self.chat = ChatFormat(tokenizer, template, fallback=fallback, part="verbalizer", rows=rows)
        self.questions = ScoreQuestions(verbalizer.template(), self.chat, chat, self._prompt_room())
        self._store = store

    def _prompt_room(self) -> int | None:
        """Returns tokens that a prompt may have; UserError when the answer alone takes all there are."""
        limit = max_sequence_length(self.path, self.revision, "verbalizer.max_length", self.settings.max_length)
        new = self.settings.sampling.max_new_tokens
        if limit is not None and limit <= new:
            source = "verbalizer.max_length" if self.settings.max_length is not None else f"positions of {self.path}"
            raise UserError(
                f"verbalizer.sampling.max_new_tokens={new} leaves no room for a prompt within {limit} tokens "
                f"({source}): lower it"
            )
        return None if limit is None else limit - new

    def fingerprint(self) -> dict[str, object]:
        """Returns what identifies the answers to given prompts: model weights, number format, decoding, chat format."""
        maker = self.settings.known_parts
        return {
            "weights": {**weights_fingerprint(self.path, self.revision), **extra_end_ids(self.path)},
            "dtype": self.settings.dtype,
            "sampling": self.settings.sampling.fingerprint(),
            "chat": self.chat.fingerprint(),
            "known_parts": None if maker is None else maker.fingerprint(),
            "code": ANSWERS_VERSION,
        }

    def _answers(self) -> StoreTable:
        return self._store.table(ANSWERS, self.fingerprint())

    def load(self, device: torch.device) -> LoadedVerbalizer:
        """Returns generator, questions and decoding for capturing.

        The model is loaded when the first answer is missing.
        """
        at_once = BATCHES_AT_ONCE * self.settings.batch_size
        generator = StoredAnswers(self._answers(), lambda: self._generator(device), at_once)
        return LoadedVerbalizer(generator, self.questions, self.settings.sampling)

    def _generator(self, device: torch.device) -> Generator:
        model = load_model(self.path, dtype=self.settings.dtype, revision=self.revision)
        model.to(device)  # type: ignore[arg-type]
        if self.settings.known_parts is not None:
            return self.settings.known_parts.generator(model, self.chat.tokenizer)
        return make_chat_generator(model, self.chat, self.settings.batch_size, self.settings.token_budget)

    def describe_pass(self, rows: str) -> str:
        """Returns in words what a pass does."""
        return f"verbalizer pass: {self.path} scores the parts of both responses"

    def fingerprint_of_prompts(self) -> Mapping[str, object]:
        """Returns every setting of questions and tokens that changes a number."""
        return self.questions.fingerprint()

    def count_answers(
        self, pairs: Sequence[PreferencePair], captured: Mapping[str, PairWeights]
    ) -> VerbalizerStatistics:
        """Returns how well the answers about ``pairs`` could be read, from the texts in the store."""
        asked = {
            (pair.pair_id, side): prompt_key(self.questions.messages(pair, side))
            for pair in pairs
            if pair.pair_id in captured and captured[pair.pair_id].rounds
            for side in SIDES
        }
        stored = stored_answers(self._answers(), list(asked.values()))
        return answer_statistics(pairs, captured, {at: stored[key] for at, key in asked.items() if key in stored})


def prompt_key(prompt: Sequence[Message]) -> str:
    """Returns the name under which the answer to a prompt is kept."""
    return digest([[turn["role"], turn["content"]] for turn in prompt])[:32]


def stored_answers(table: StoreTable, keys: Sequence[str]) -> dict[str, str]:
    """Returns the stored answers among ``keys``."""
    known = [key for key, columns in table.columns_present(keys).items() if ANSWER in columns]
    return {key: str(row[ANSWER]) for key, row in table.read(known, [ANSWER]).items()}


class StoredAnswers:
    """Generator that keeps its answers in a table and asks ``make``'s generator for missing ones only.

    Equal prompts get one answer. ``make`` is called at most once. Answers are stored, and their number is logged,
    whenever there are ``at_once`` of them: an interruption loses no more.
    """

    def __init__(self, table: StoreTable, make: Callable[[], Generator], at_once: int = 64) -> None:
        self.table, self.make, self.at_once = table, make, at_once
        self._generator: Generator | None = None

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one answer per prompt, in their order."""
        keys = [prompt_key(prompt) for prompt in prompts]
        found = stored_answers(self.table, keys)
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in found}
        if missing and self._generator is None:
            self._generator = self.make()
        # The longest first, as within a batch: what does not fit into memory fails at once, and little is padded.
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


class RunReward(AttentionReader):
    """Reward model that is described cheaply and loaded at most once.

    Args:
        source: the weights that name it. UserError when they name none, and for a tokenizer without characters.
        fallback: chat template for a tokenizer without one.
    """

    name, done = "reward model", "read"

    def __init__(self, source: RewardAttention, fallback: str | None = None) -> None:
        if source.path is None:
            raise UserError(
                "weights=reward_attention reads a reward model, and weights.path is null: set "
                "weights.path=FOLDER_OR_HUB_NAME"
            )
        self.settings, self.path, self.revision, self.dtype = source, source.path, source.revision, source.dtype
        self.tokenizer = load_tokenizer(self.path, self.revision)
        rows = token_rows(load_text_config(self.path, self.revision))
        template = read_template(source.chat_template, "weights.chat_template")
        self.chat = ChatFormat(self.tokenizer, template, fallback=fallback, part="weights", rows=rows)

    @property
    def num_layers(self) -> Depth:
        """Returns the depth, with the layers that have attention, from its config alone.

        UserError when none can be read.
        """
        found = inspect_model(self.path, self.revision)
        if found.mapped or not found.layers:
            raise UserError(
                f"weights.path={self.path}: no layer of {found.name} has softmax attention that can be read, since "
                "none goes through transformers' AttentionInterface; name another reward model"
            )
        return Depth(num_layers(self.path, self.revision), found.layers)

    def describe_pass(self, rows: str) -> str:
        """Returns in words what a pass does that reads ``rows``."""
        return f"reward model: reading {rows} of {self.path} on both responses"

    def fingerprint_of_prompts(self) -> Mapping[str, object]:
        """Returns what identifies the conversations that it reads."""
        return self.chat.fingerprint()

    def load(self, device: torch.device) -> LoadedReward:
        """Returns model and conversations for capturing; loads the model onto ``device``."""
        model = load_model(self.path, dtype=self.settings.dtype, revision=self.revision, reward=True)
        model.to(device)  # type: ignore[arg-type]
        reader = RewardModel(model, token_budget=self.settings.token_budget, kernel=self.kernel)
        return LoadedReward(reader, self.chat)
