"""``Weigher``: computes token weights for your own pairs from Python, with the same steps as in training."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import overload

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnpo.config.named_files import read_template
from attnpo.data.adapters import Columns, RowError, adapt_row
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import EncodedSet, Tally, encode_pair, prepare_examples, warn_about_special_tokens
from attnpo.data.rules import AlignRules, LengthRules
from attnpo.display.weighted_pair import WeightedPair, WeightedPairs, pair_with_weights
from attnpo.judge.base import LoadedJudge
from attnpo.judge.causal_judge import CausalJudge, kernel_for
from attnpo.judge.judge import PAIRS, add_reasoning
from attnpo.judge.layers import Depth
from attnpo.judge.prompts import PLACEHOLDERS, JudgePromptBuilder, JudgeTemplate
from attnpo.judge.settings import Assembly, Judge, TraceRules
from attnpo.judge.traces import TraceCache
from attnpo.judge.verdicts import measure_label_mass
from attnpo.models.backbone import require_causal_lm
from attnpo.models.description import check_exact_length, config_vocabulary_size, describe_model, max_positions
from attnpo.models.loading import inspect_model, load_model, load_text_config, load_tokenizer, num_heads_from_config
from attnpo.schema import EncodedResponse, Message, PairWeights, PreferencePair, UserError, check_choice
from attnpo.system.machine import inference_device
from attnpo.text.chat import ChatFormat
from attnpo.weights.arrival import WeightCoverage
from attnpo.weights.base import OnlineSource, WeightSource
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout

log = logging.getLogger(__name__)

Chat = Sequence[Mapping[str, str]]
"""Messages in the Hugging Face convention."""
Turns = str | Chat
PairRow = Mapping[str, object]

TEMPLATE = "judge/pairwise.txt"
SOURCES = ("attention", "rollout")


class Weigher:
    """Weights the tokens of preference pairs by the attention of a judge model, as training with that judge would.

    The defaults match the command line with ``weights=attention judge=pairwise``. On the first pairs, the weigher
    measures how much probability the judge puts on its labels. It logs a warning if that probability is low, and
    another if much of the weight does not reach the training tokens (``kept_mass`` of a response).

    >>> from attnpo import Weigher
    >>> weigher = Weigher(model, layer="last", template="judge/testbed.txt")
    >>> weighed = weigher("write a review of the film", "the film was great .", "the film was awful .")
    >>> weighed
    WeightedPair(..., chosen 6 tokens, rejected 6 tokens, layer 2)
    >>> weighed.chosen.tokens[:4]
    ('the', ' film', ' was', ' great')
    >>> [verdict.chosen_is_a for verdict in weighed.verdicts]
    [True, False]
    >>> weighed.at(layer=1).chosen.weights.shape
    torch.Size([6])

    One call with many pairs is faster than one call per pair. Pass three lists, or rows in any format that the command
    line accepts; the resulting table has one row per token.

    >>> rows = [{"prompt": "write a review of the film", "chosen": "the film was great .", "rejected": "awful ."}]
    >>> weigher(rows).to_frame()[["side", "token", "relative"]].shape
    (9, 3)

    Args:
        model: a folder, a Hub name, or a loaded causal language model. A loaded model stays on its device unless
            ``device`` is given.
        tokenizer: the model's tokenizer, loaded or by name; None loads it from ``model``. A loaded model needs one.
        layer: 1-based number, "last", or a fraction of the depth, e.g. "1/2".
        source: "attention", "rollout", or a weight source of ``attnpo.weights.sources`` that reads a judge or only the
            texts. Such a source has its own settings (heads, several layers, order of averaging, ...).
        sink_tokens: number of leading tokens whose weight is set to 1/|y| to remove the attention sink (paper: 1).
            Responses of fewer than five judge tokens are left unchanged; 0 keeps the attention.
        both_orders: whether to average over both orders of the answers (paper); False uses only the order with the
            chosen answer first.
        template: the judge prompt, as a file (including those in ``configs/``) or as a string with {question},
            {answer_a} and {answer_b}.
        chat: whether the judge prompt becomes a user message of the chat template (True) or is used as is (False).
        prefill: the start of the judge's reply, up to the letter; None for no prefill.
        trace: how the judge reasons before it replies (``TraceRules``); None for no reasoning.
        labels: the letters that the judge prompt asks for.
        assembly: "text" tokenises the rendered prompt (paper), "ids" splices in the token ids used in training.
        max_length: judge prompts of this many tokens or more are truncated; each response then keeps
            ``max_response_length`` tokens.
        max_response_length: number of tokens that a response keeps in a truncated judge prompt.
        verdict: whether to read the verdicts as well, which runs all layers.
        token_budget: maximum number of tokens per forward pass.
        chat_template: a Jinja template, or a file containing one, for a tokenizer without a chat template.
        chat_template_kwargs: values for variables that the chat template reads, e.g. {"enable_thinking": False}.
        lengths: the length rules of training (2048 tokens, at most 1800 of them for the prompt).
        revision: revision on the Hub.
        dtype: dtype of a model that is loaded here.
        device: where the model runs; None puts a model that is loaded here on a GPU if there is one.

    Raises:
        UserError: something cannot be loaded, read or combined.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        layer: int | str = "last",
        *,
        source: WeightSource | str = "attention",
        sink_tokens: int = 1,
        both_orders: bool = True,
        template: str | Path = TEMPLATE,
        chat: bool = True,
        prefill: str | None = None,
        trace: TraceRules | None = None,
        labels: tuple[str, str] = ("A", "B"),
        assembly: str = "text",
        max_length: int = 2048,
        max_response_length: int = 768,
        verdict: bool = True,
        token_budget: int = 16384,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        lengths: LengthRules | None = None,
        revision: str | None = None,
        dtype: str = "float32",
        device: str | torch.device | None = None,
    ) -> None:
        check_choice("assembly", assembly, [one.value for one in Assembly])
        wording = str(template) if any("{" + name + "}" in str(template) for name in PLACEHOLDERS) else None
        settings = Judge(
            template_file=TEMPLATE if wording is not None else str(template),
            assembly=Assembly(assembly),
            max_length=max_length,
            max_response_length=max_response_length,
            labels=labels,
            chat=chat,
            prefill=prefill,
            trace=trace,
            dtype=dtype,
            verdict=verdict,
            token_budget=token_budget,
        )
        chosen_source = _make_source(source, layer, sink_tokens)
        self.both_orders = both_orders
        self.lengths = LengthRules() if lengths is None else lengths
        self.tokenizer = _resolve_tokenizer(model, tokenizer, revision)
        stated = load_text_config(model, revision) if isinstance(model, str | Path) else require_causal_lm(model).config
        template_of_chat = read_template(chat_template)
        self.chat = ChatFormat(
            self.tokenizer, template_of_chat, kwargs=chat_template_kwargs, rows=config_vocabulary_size(stated)
        )
        loaded = _resolve_model(model, dtype, revision, device)
        # Not the kernel it was loaded with.
        found = describe_model(type(loaded.config).from_dict(loaded.config.to_dict()))
        config, name = loaded.config.get_text_config(), str(loaded.config.name_or_path or found.name)
        check_exact_length(config, name, "max_length", max_length)
        template_text = None if wording is None else JudgeTemplate(wording)
        self.prompts = JudgePromptBuilder(settings.prompt_rules(max_positions(config)), self.chat, template_text)
        if not found.layers:
            raise UserError(
                f"no layer of {found.name} has softmax attention that can be read: {found.why}; use another model"
            )
        judge = CausalJudge(loaded, token_budget=token_budget, kernel=kernel_for(found))
        self.depth = Depth(judge.num_layers, found.layers)
        self.source = chosen_source.resolve(self.depth)
        self._rows = self.source.rows_to_store(self.depth, partial(num_heads_from_config, config, name))
        asked = add_reasoning(judge, self.prompts, TraceCache(None))
        self._judge = LoadedJudge(asked, self.prompts, verdict)
        self._least: float | None = settings.min_label_mass  # of the labels' probability; None once measured
        self._lost = False  # whether a warning about lost weights was logged

    # ------------------------------------------------------------------------------------------ calling

    @overload
    def __call__(self, prompt: str, chosen: Turns, rejected: Turns) -> WeightedPair: ...
    @overload
    def __call__(self, prompt: PairRow) -> WeightedPair: ...
    @overload
    def __call__(self, prompt: Iterable[PairRow]) -> WeightedPairs: ...
    @overload
    def __call__(
        self, prompt: Iterable[object], chosen: Iterable[object], rejected: Iterable[object]
    ) -> WeightedPair | WeightedPairs: ...
    def __call__(
        self,
        prompt: str | PairRow | Iterable[object],
        chosen: Iterable[object] | None = None,
        rejected: Iterable[object] | None = None,
    ) -> WeightedPair | WeightedPairs:
        """Returns the weights of one pair, or of many pairs in order.

        Args:
            prompt: a string or chat messages, or a list of these for many pairs. As the only argument: one row or many
                rows with the columns ``prompt``, ``chosen`` and ``rejected`` in one of the Hugging Face conventions.
            chosen: the better answer, as a string or messages; a list for many pairs.
            rejected: the other answer, in the same form.

        Raises:
            UserError: a pair cannot be weighted; the message includes the pair's index in the list and the reason.
        """
        if (chosen is None) != (rejected is None):
            raise UserError(
                "expected a prompt with chosen and rejected, or rows with all three, got only one response: call "
                "weigher(prompt, chosen, rejected) or weigher(rows)"
            )
        if chosen is None or rejected is None:
            if isinstance(prompt, Mapping):
                return self._weigh_pairs([_pair_from_row(prompt, "the row")])[0]
            return self._weigh_pairs(_read_pairs(prompt))
        if isinstance(prompt, str) or _is_chat(prompt := list(prompt)):
            return self._weigh_pairs([_pair_from_texts(prompt, chosen, rejected, "the pair")])[0]
        columns = [list(prompt), list(chosen), list(rejected)]
        counts = [len(column) for column in columns]
        if isinstance(chosen, str) or isinstance(rejected, str) or len(set(counts)) > 1:
            raise UserError(
                f"prompts, chosen and rejected must be lists of the same length: expected {counts[0]} responses each, "
                f"got {_describe_value(chosen, counts[1])} as chosen and {_describe_value(rejected, counts[2])} as "
                "rejected"
            )
        rows = enumerate(zip(*columns, strict=True))
        return self._weigh_pairs([_pair_from_texts(row[0], row[1], row[2], f"pair {place}") for place, row in rows])

    def examples(self, rows: Iterable[PairRow]) -> list[TrainingExample]:
        """Returns weighted training examples for ``PreferenceDataModule.from_examples``.

        Args:
            rows: rows with the columns ``prompt``, ``chosen`` and ``rejected``, as for a call.

        Raises:
            UserError: a row cannot be weighted; the message includes the row's index and the reason.
        """
        return [
            self._make_example(one, self.source, self._select_rounds(raw))
            for one, raw in self._capture_raw(_read_pairs(rows))
        ]

    # ------------------------------------------------------------------------------------------ weighing

    def _weigh_pairs(self, pairs: Sequence[PreferencePair]) -> WeightedPairs:
        weighed = WeightedPairs([self._finish_pair(one, raw, None, None) for one, raw in self._capture_raw(pairs)])
        self._warn_of_lost_weights(weighed)
        return weighed

    def _capture_raw(self, pairs: Sequence[PreferencePair]) -> list[tuple[EncodedSet, PairWeights | None]]:
        """Returns the training ids and the raw weights of each pair."""
        several = len(pairs) > 1
        encoded = [
            self._encode_pair(pair, f"pair {place}" if several else "the pair") for place, pair in enumerate(pairs)
        ]
        rendered = [pair.pair_id[:8] for pair in pairs if self.chat.has_special_tokens(pair.prompt)]
        warn_about_special_tokens(len(rendered), len(pairs), rendered)
        unique = list({pair.pair_id: pair for pair in pairs}.values())
        raw: dict[str, PairWeights] = {}
        if self._rows and unique:
            raw = {item.pair_id: item for item in self.source.capture(unique, self._judge, self._rows)}
            self._check_labels([pair for pair in unique if raw[pair.pair_id].rounds][:PAIRS])
        both = zip(pairs, encoded, strict=True)
        return [(EncodedSet([pair], [sides], Tally(), 1), raw.get(pair.pair_id)) for pair, sides in both]

    def _check_labels(self, pairs: Sequence[PreferencePair]) -> None:
        """Warns once if the judge puts little probability on its labels, measured on the first pairs."""
        if self._least is None or not pairs or "judge" not in self.source.requires:
            return
        prompts = [prompt.input_ids for pair in pairs for prompt in self.prompts.build(pair)]
        try:
            mass = measure_label_mass(
                self._judge.model, prompts, self.prompts.label_ids, lambda token: str(self.tokenizer.decode([token]))
            )
        except UserError as unread:
            log.warning("could not measure the probability of the judge's labels: %s", unread)
        else:
            problem = mass.describe_shortfall(self._least)
            if problem is not None:
                names = "chat_template_kwargs, trace, prefill, template and labels"
                log.warning("warning: %s. The arguments of Weigher for these options are %s", problem, names)
        self._least = None

    def _warn_of_lost_weights(self, pairs: Sequence[WeightedPair]) -> None:
        """Warns once if much of the weight falls on source tokens that match no training token."""
        if self._lost or not pairs or self.source.tokens == "train":
            return
        both = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        arrived = WeightCoverage(
            fmean(side.coverage for side in both),
            fmean(side.source_coverage for side in both),
            fmean(pair.chosen.kept_mass for pair in pairs),
            fmean(pair.rejected.kept_mass for pair in pairs),
        )
        self._lost = arrived.is_low
        if self._lost:
            log.warning(
                "warning: weights of %s: %s; the weights of tokens that match no training token are lost; "
                "assembly='ids' shows the judge the training tokens themselves",
                type(self.source).__name__,
                arrived.describe(),
            )

    def _encode_pair(self, pair: PreferencePair, where: str) -> dict[str, EncodedResponse]:
        tally = Tally()
        encoded = encode_pair(pair, self.chat, self.lengths, tally)
        if encoded is None:
            story = next(iter(tally.words.values()), "; ".join(tally.counts)).removeprefix(f"pair {pair.pair_id}: ")
            raise UserError(f"{where} cannot be used for training: {story}; change its texts, lengths or chat_template")
        return encoded

    def _finish_pair(
        self, one: EncodedSet, captured: PairWeights | None, layer: int | str | None, chosen_round: int | None
    ) -> WeightedPair:
        """Returns the pair weighted at ``layer`` and by ``chosen_round``; None means the weigher's own setting."""
        source, pair, raw = self.source, one.pairs[0], self._select_rounds(captured, chosen_round)
        if layer is not None:
            if not isinstance(source, Attention):
                raise UserError(f"at(layer={layer!r}): {type(source).__name__} does not read single layers")
            source = replace(source, layer=layer, layers=()).resolve(self.depth)
        example = self._make_example(one, source, raw)
        read = source.layer if isinstance(source, Attention) and not source.layers else None
        found = pair_with_weights(pair, example, lambda token: str(self.tokenizer.decode([token])), raw)
        note = type(source).__name__.lower() + ("" if read is None else f", layer {read} of {int(self.depth)}")
        number = read if isinstance(read, int) else None
        return replace(found, note=note, layer=number, again=partial(self._finish_pair, one, captured))

    def _make_example(self, one: EncodedSet, source: WeightSource, raw: PairWeights | None) -> TrainingExample:
        made = prepare_examples(one, source, {} if raw is None else {raw.pair_id: raw}, AlignRules(), self._rows)
        if not made.examples:
            raise UserError(
                f"pair {one.pairs[0].pair_id} has no weights: {'; '.join(made.tally.counts)}; change its texts or the "
                "template"
            )
        return made.examples[0]

    def _select_rounds(self, raw: PairWeights | None, chosen_round: int | None = None) -> PairWeights | None:
        """Returns ``raw`` with the rounds to average, or only with ``chosen_round``."""
        if raw is None or not raw.rounds:
            return raw
        if chosen_round is None:
            return raw if self.both_orders else replace(raw, rounds=raw.rounds[:1])
        if not 1 <= chosen_round <= len(raw.rounds):
            raise UserError(
                f"at(round={chosen_round}): expected a judge round from 1 (chosen is answer A) to {len(raw.rounds)}"
            )
        return replace(raw, rounds=raw.rounds[chosen_round - 1 : chosen_round])


# ------------------------------------------------------------------------------------------------ what is given


def _make_source(source: WeightSource | str, layer: int | str, sink_tokens: int) -> WeightSource:
    if isinstance(source, str):
        check_choice("source", source, SOURCES)
        rule = Postprocess(sink_tokens=sink_tokens)
        return Rollout(postprocess=rule) if source == "rollout" else Attention(layer=layer, postprocess=rule)
    name = type(source).__name__
    if isinstance(source, OnlineSource) or not source.requires <= {"judge"}:
        needs = "a training step" if isinstance(source, OnlineSource) else " and ".join(sorted(source.requires))
        raise UserError(
            f"source {name} needs {needs}, which a Weigher does not have: use it in a run (attnpo.weigh), or use "
            f"one of {', '.join(SOURCES)}"
        )
    if layer != "last" or sink_tokens != 1:
        raise UserError(f"source {name} has its own settings: pass layer and sink_tokens to it, not to the Weigher")
    return source


def _resolve_tokenizer(
    model: str | Path | nn.Module, tokenizer: PreTrainedTokenizerBase | str | Path | None, revision: str | None
) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        if isinstance(model, nn.Module):
            raise UserError(
                "Weigher: a loaded model needs its tokenizer, but none was given: call Weigher(model, tokenizer)"
            )
        return load_tokenizer(model, revision)
    return load_tokenizer(tokenizer, revision) if isinstance(tokenizer, str | Path) else tokenizer


def _resolve_model(
    model: str | Path | nn.Module, dtype: str, revision: str | None, device: str | torch.device | None
) -> PreTrainedModel:
    if isinstance(model, str | Path):
        reading = inspect_model(model, revision).judge_attention
        loaded = load_model(model, dtype=dtype, revision=revision, attn_implementation=reading)
        device = inference_device("auto") if device is None else device
    else:
        loaded = require_causal_lm(model)
    if device is not None:
        loaded.to(torch.device(device))  # type: ignore[arg-type]
    return loaded


def _read_pairs(rows: str | Iterable[object]) -> list[PreferencePair]:
    pairs = []
    for place, row in enumerate(rows):
        if isinstance(rows, str) or not isinstance(row, Mapping):
            got = "one text" if isinstance(rows, str) else f"{type(row).__name__} at position {place}"
            raise UserError(
                f"expected rows with chosen and rejected, got {got}: call weigher(prompt, chosen, rejected), or pass "
                "mappings"
            )
        pairs.append(_pair_from_row(row, f"row {place}"))
    return pairs


def _pair_from_row(row: Mapping[str, object], where: str) -> PreferencePair:
    """Reads a pair from a row in the same way as a run reads its data."""
    try:
        return adapt_row(row, Columns()).pair
    except RowError as problem:
        raise UserError(
            f"{where}: {problem.reason.value}; expected a prompt with a chosen and a rejected response, as strings or "
            "as messages with role and content"
        ) from problem


def _pair_from_texts(prompt: object, chosen: object, rejected: object, where: str) -> PreferencePair:
    """Builds a pair from three strings; reads them as a row if one of them is a list of messages."""
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return PreferencePair.from_texts([Message(role="user", content=prompt)], chosen, rejected)
    return _pair_from_row({"prompt": prompt, "chosen": chosen, "rejected": rejected}, where)


def _is_chat(value: Sequence[object]) -> bool:
    return len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _describe_value(value: object, count: int) -> str:
    return "one text" if isinstance(value, str) else str(count)
