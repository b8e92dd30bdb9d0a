"""``Weigher``: the token weights of pairs of one's own, from Python, by the very steps that training takes."""

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
from attnpo.display.weighed_pair import WeighedPair, WeighedPairs, pair_with_weights
from attnpo.judge.base import LoadedJudge
from attnpo.judge.judge import PAIRS, thinking
from attnpo.judge.layers import Depth
from attnpo.judge.prompts import PLACEHOLDERS, JudgePrompts, JudgeTemplate
from attnpo.judge.reader import CausalJudge, kernel_for
from attnpo.judge.settings import Assembly, Judge, TraceRules
from attnpo.judge.traces import KeptTraces
from attnpo.judge.verdicts import measure_labels
from attnpo.models.backbone import require_causal_lm
from attnpo.models.described import check_exact_length, describe_model, stated_positions, token_rows
from attnpo.models.loading import inspect_model, load_model, load_text_config, load_tokenizer, num_heads_from_config
from attnpo.schema import EncodedResponse, Message, PairWeights, PreferencePair, UserError, check_choice
from attnpo.system.machine import inference_device
from attnpo.text.chat import ChatFormat
from attnpo.weights.arrival import Arrival
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
    """Weighs the tokens of preference pairs by the attention of a judge model, as training with it would.

    The defaults are those of the command line with ``weights=attention judge=pairwise``. The first pairs tell how much
    probability the judge puts on its labels; a warning in the log says where that is little, and where much of the
    weights arrives on no training token (``kept_mass`` of a response).

    >>> from attnpo import Weigher
    >>> weigher = Weigher(model, layer="last", template="judge/testbed.txt")
    >>> weighed = weigher("write a review of the film", "the film was great .", "the film was awful .")
    >>> weighed
    WeighedPair(..., chosen 6 tokens, rejected 6 tokens, layer 2)
    >>> weighed.chosen.tokens[:4]
    ('the', ' film', ' was', ' great')
    >>> [verdict.chosen_is_a for verdict in weighed.verdicts]
    [True, False]
    >>> weighed.at(layer=1).chosen.weights.shape
    torch.Size([6])

    Many pairs are read together, faster than one by one. They come as three lists, or as rows in any convention that
    the command line reads; a table of them has one row per token.

    >>> rows = [{"prompt": "write a review of the film", "chosen": "the film was great .", "rejected": "awful ."}]
    >>> weigher(rows).to_frame()[["side", "token", "relative"]].shape
    (9, 3)

    Args:
        model: a folder, a hub name, or a loaded causal language model, which stays where it is unless ``device`` says
            otherwise.
        tokenizer: of the model; None reads it from the same place. A loaded model needs it, loaded or by its place.
        layer: 1-based number, "last", a fraction of the depth such as "1/2".
        source: "attention", "rollout", or a weight source of ``attnpo.weights.sources`` that reads a judge or the texts
            alone, whose own settings hold then (heads, several layers, order of averaging, ...).
        sink_tokens: so many first tokens get 1/|y|, against the attention sink (paper: 1), in responses of five or more
            tokens that the judge read; 0 keeps their attention.
        both_orders: average over both orders of the answers (paper); False keeps the order with the chosen one first.
        template: the judge's wording: a file (also one of ``configs/``), or the text itself with {question},
            {answer_a} and {answer_b}.
        chat: whether the wording is one user message of the chat template, or the whole prompt.
        prefill: the beginning of the judge's reply, up to the letter; None for none.
        trace: how the judge thinks before it replies (``TraceRules``); None for not at all.
        labels: the letters that the wording asks for.
        assembly: "text" tokenises the rendered prompt (paper), "ids" splices the training-side ids.
        max_length: tokens of a judge prompt from which it is cut; ``max_response_length`` tokens a response keeps then.
        verdict: whether verdicts are read as well, which runs all layers.
        token_budget: the most tokens of one forward.
        chat_template: Jinja text or a file of it, for a tokenizer without one.
        chat_template_kwargs: values of variables that the chat template reads, such as {"enable_thinking": False}.
        lengths: the length rules of training (2048 tokens, prompts 1800).
        revision: of the hub.
        dtype: number format of a model that is loaded here.
        device: where the model runs; None takes a GPU where there is one for a model that is loaded here.

    Raises:
        UserError: for what cannot be loaded, read or combined.
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
        chosen_source = _source(source, layer, sink_tokens)
        self.both_orders = both_orders
        self.lengths = LengthRules() if lengths is None else lengths
        self.tokenizer = _tokenizer(model, tokenizer, revision)
        stated = load_text_config(model, revision) if isinstance(model, str | Path) else require_causal_lm(model).config
        template_of_chat = read_template(chat_template)
        self.chat = ChatFormat(self.tokenizer, template_of_chat, kwargs=chat_template_kwargs, rows=token_rows(stated))
        loaded = _model(model, dtype, revision, device)
        found = describe_model(
            type(loaded.config).from_dict(loaded.config.to_dict())
        )  # not the kernel it was loaded with
        config, name = loaded.config.get_text_config(), str(loaded.config.name_or_path or found.name)
        check_exact_length(config, name, "max_length", max_length)
        template_text = None if wording is None else JudgeTemplate(wording)
        self.prompts = JudgePrompts(settings.rules(stated_positions(config)), self.chat, template_text)
        if not found.layers:
            raise UserError(
                f"no layer of {found.name} has softmax attention that can be read: {found.why}; give another model"
            )
        judge = CausalJudge(loaded, token_budget=token_budget, kernel=kernel_for(found))
        self.depth = Depth(judge.num_layers, found.layers)
        self.source = chosen_source.resolve(self.depth)
        self._rows = self.source.rows_to_store(self.depth, partial(num_heads_from_config, config, name))
        asked = thinking(judge, self.prompts, KeptTraces(None))
        self._judge = LoadedJudge(asked, self.prompts, verdict)
        self._least: float | None = settings.min_label_mass  # of the labels' probability; None once it was looked at
        self._lost = False  # whether lost weights were warned of

    # ------------------------------------------------------------------------------------------ calling

    @overload
    def __call__(self, prompt: str, chosen: Turns, rejected: Turns) -> WeighedPair: ...
    @overload
    def __call__(self, prompt: PairRow) -> WeighedPair: ...
    @overload
    def __call__(self, prompt: Iterable[PairRow]) -> WeighedPairs: ...
    @overload
    def __call__(
        self, prompt: Iterable[object], chosen: Iterable[object], rejected: Iterable[object]
    ) -> WeighedPair | WeighedPairs: ...
    def __call__(
        self,
        prompt: str | PairRow | Iterable[object],
        chosen: Iterable[object] | None = None,
        rejected: Iterable[object] | None = None,
    ) -> WeighedPair | WeighedPairs:
        """Returns the weights of one pair, or of many in their order.

        Args:
            prompt: a text or chat messages; a list of these for many pairs. Given alone: a row, or many, with the
                columns ``prompt``, ``chosen`` and ``rejected`` in one of the Hugging Face conventions.
            chosen: the better answer, as text or messages; a list for many.
            rejected: the other answer; likewise.

        Raises:
            UserError: for a pair that cannot be weighed, with its place in the list and the reason.
        """
        if (chosen is None) != (rejected is None):
            raise UserError(
                "expected a prompt with chosen and rejected, or rows that have all three, got only one response: call "
                "weigher(prompt, chosen, rejected) or weigher(rows)"
            )
        if chosen is None or rejected is None:
            if isinstance(prompt, Mapping):
                return self._weigh([_from_row(prompt, "the row")])[0]
            return self._weigh(_pairs_of(prompt))
        if isinstance(prompt, str) or _is_chat(prompt := list(prompt)):
            return self._weigh([_from_texts(prompt, chosen, rejected, "the pair")])[0]
        columns = [list(prompt), list(chosen), list(rejected)]
        counts = [len(column) for column in columns]
        if isinstance(chosen, str) or isinstance(rejected, str) or len(set(counts)) > 1:
            raise UserError(
                f"many prompts need as many chosen and rejected responses: expected lists of {counts[0]}, got "
                f"{_kind(chosen, counts[1])} and {_kind(rejected, counts[2])}"
            )
        rows = enumerate(zip(*columns, strict=True))
        return self._weigh([_from_texts(row[0], row[1], row[2], f"pair {place}") for place, row in rows])

    def examples(self, rows: Iterable[PairRow]) -> list[TrainingExample]:
        """Returns training examples with the weights of rows, for ``PreferenceDataModule.from_examples``.

        Args:
            rows: with the columns ``prompt``, ``chosen`` and ``rejected``, as for a call.

        Raises:
            UserError: for a row that cannot be weighed, with its place and the reason.
        """
        return [self._example(one, self.source, self._rounds(raw)) for one, raw in self._capture(_pairs_of(rows))]

    # ------------------------------------------------------------------------------------------ weighing

    def _weigh(self, pairs: Sequence[PreferencePair]) -> WeighedPairs:
        weighed = WeighedPairs([self._finish(one, raw, None, None) for one, raw in self._capture(pairs)])
        self._warn_of_lost(weighed)
        return weighed

    def _capture(self, pairs: Sequence[PreferencePair]) -> list[tuple[EncodedSet, PairWeights | None]]:
        """Returns training ids and raw rows of each pair."""
        several = len(pairs) > 1
        encoded = [
            self._encode_pairs(pair, f"pair {place}" if several else "the pair") for place, pair in enumerate(pairs)
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
            mass = measure_labels(
                self._judge.model, prompts, self.prompts.label_ids, lambda token: str(self.tokenizer.decode([token]))
            )
        except UserError as unread:
            log.warning("the probability of the judge's labels was not measured: %s", unread)
        else:
            problem = mass.problem(self._least)
            if problem is not None:
                names = "chat_template_kwargs, trace, prefill, template and labels"
                log.warning("warning: %s. A Weigher takes these as %s", problem, names)
        self._least = None

    def _warn_of_lost(self, pairs: Sequence[WeighedPair]) -> None:
        """Warns once, by the first pairs that lose much, of weights that no training token gets."""
        if self._lost or not pairs or self.source.tokens == "train":
            return
        both = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        arrived = Arrival(
            fmean(side.coverage for side in both),
            fmean(side.source_coverage for side in both),
            fmean(pair.chosen.kept_mass for pair in pairs),
            fmean(pair.rejected.kept_mass for pair in pairs),
        )
        self._lost = arrived.is_low
        if self._lost:
            log.warning(
                "warning: weights of %s: %s: the weights of tokens that match no training token are lost; "
                "assembly='ids' gives the judge the training tokens themselves",
                type(self.source).__name__,
                arrived.text(),
            )

    def _encode_pairs(self, pair: PreferencePair, where: str) -> dict[str, EncodedResponse]:
        tally = Tally()
        encoded = encode_pair(pair, self.chat, self.lengths, tally)
        if encoded is None:
            story = next(iter(tally.words.values()), "; ".join(tally.counts)).removeprefix(f"pair {pair.pair_id}: ")
            raise UserError(f"{where} cannot be trained on: {story}; change its texts, lengths or chat_template")
        return encoded

    def _finish(
        self, one: EncodedSet, captured: PairWeights | None, layer: int | str | None, chosen_round: int | None
    ) -> WeighedPair:
        """Returns the pair at ``layer`` and by one round; None of either is the weigher's own choice."""
        source, pair, raw = self.source, one.pairs[0], self._rounds(captured, chosen_round)
        if layer is not None:
            if not isinstance(source, Attention):
                raise UserError(f"at(layer={layer!r}): {type(source).__name__} reads no single layer")
            source = replace(source, layer=layer, layers=()).resolve(self.depth)
        example = self._example(one, source, raw)
        read = source.layer if isinstance(source, Attention) and not source.layers else None
        found = pair_with_weights(pair, example, lambda token: str(self.tokenizer.decode([token])), raw)
        note = type(source).__name__.lower() + ("" if read is None else f", layer {read} of {int(self.depth)}")
        number = read if isinstance(read, int) else None
        return replace(found, note=note, layer=number, again=partial(self._finish, one, captured))

    def _example(self, one: EncodedSet, source: WeightSource, raw: PairWeights | None) -> TrainingExample:
        made = prepare_examples(one, source, {} if raw is None else {raw.pair_id: raw}, AlignRules(), self._rows)
        if not made.examples:
            raise UserError(
                f"pair {one.pairs[0].pair_id}: {'; '.join(made.tally.counts)}; change its texts or template"
            )
        return made.examples[0]

    def _rounds(self, raw: PairWeights | None, chosen_round: int | None = None) -> PairWeights | None:
        """Returns ``raw`` with the rounds that are averaged, or with the chosen one alone."""
        if raw is None or not raw.rounds:
            return raw
        if chosen_round is None:
            return raw if self.both_orders else replace(raw, rounds=raw.rounds[:1])
        if not 1 <= chosen_round <= len(raw.rounds):
            raise UserError(
                f"at(round={chosen_round}): expected 1 (chosen is answer A) to {len(raw.rounds)} of the judge's rounds"
            )
        return replace(raw, rounds=raw.rounds[chosen_round - 1 : chosen_round])


# ------------------------------------------------------------------------------------------------ what is given


def _source(source: WeightSource | str, layer: int | str, sink_tokens: int) -> WeightSource:
    if isinstance(source, str):
        check_choice("source", source, SOURCES)
        rule = Postprocess(sink_tokens=sink_tokens)
        return Rollout(postprocess=rule) if source == "rollout" else Attention(layer=layer, postprocess=rule)
    name = type(source).__name__
    if isinstance(source, OnlineSource) or not source.requires <= {"judge"}:
        needs = "a training step" if isinstance(source, OnlineSource) else " and ".join(sorted(source.requires))
        raise UserError(
            f"source {name} needs {needs}, which a Weigher has not: use it in a run (attnpo.weigh), or give "
            f"one of {', '.join(SOURCES)}"
        )
    if layer != "last" or sink_tokens != 1:
        raise UserError(f"source {name} has settings of its own: give layer and sink_tokens to it, not to the Weigher")
    return source


def _tokenizer(
    model: str | Path | nn.Module, tokenizer: PreTrainedTokenizerBase | str | Path | None, revision: str | None
) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        if isinstance(model, nn.Module):
            raise UserError(
                "Weigher: a loaded model needs its tokenizer: expected Weigher(model, tokenizer), got no tokenizer"
            )
        return load_tokenizer(model, revision)
    return load_tokenizer(tokenizer, revision) if isinstance(tokenizer, str | Path) else tokenizer


def _model(
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


def _pairs_of(rows: str | Iterable[object]) -> list[PreferencePair]:
    pairs = []
    for place, row in enumerate(rows):
        if isinstance(rows, str) or not isinstance(row, Mapping):
            got = "one text" if isinstance(rows, str) else f"{type(row).__name__} at place {place}"
            raise UserError(
                f"expected rows with chosen and rejected, got {got}: call weigher(prompt, chosen, rejected), or give "
                "mappings"
            )
        pairs.append(_from_row(row, f"row {place}"))
    return pairs


def _from_row(row: Mapping[str, object], where: str) -> PreferencePair:
    """Returns the pair of a row, as the data of a run is read."""
    try:
        return adapt_row(row, Columns()).pair
    except RowError as problem:
        raise UserError(
            f"{where}: {problem.reason.value}; expected a prompt with a chosen and a rejected response, as texts or as "
            "messages with role and content"
        ) from problem


def _from_texts(prompt: object, chosen: object, rejected: object, where: str) -> PreferencePair:
    """Returns the pair of three texts as they are; where messages are among them, as a row of such is read."""
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return PreferencePair.from_texts([Message(role="user", content=prompt)], chosen, rejected)
    return _from_row({"prompt": prompt, "chosen": chosen, "rejected": rejected}, where)


def _is_chat(value: Sequence[object]) -> bool:
    return len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _kind(value: object, count: int) -> str:
    return "one text" if isinstance(value, str) else str(count)
