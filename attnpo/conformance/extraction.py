"""Records of an ``extraction/`` folder: judge prompts, spans, attention rows and weights of real text and a real model.

The judge, its prompts and the weight source are the run's own; one call of the source reads every pair. Where the
reference cut a prompt its tokens are read as given, because our rule for cuts is another one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from attnpo.conformance.extraction_folder import ROUNDS, GivenCuts, Golden, Recorder, answer_of, is_cut, preference
from attnpo.conformance.records import PRODUCT_ERRORS, Absent, Check, Comparison, Item, built, has_option
from attnpo.conformance.weights import attention_source, is_tied, moved, on_training_tokens, rollout_source, unit_items
from attnpo.models.loading import load_tokenizer
from attnpo.runs.judges import RunJudge
from attnpo.schema import SIDES, JudgeReading, Message, PairWeights, PreferencePair, UserError
from attnpo.text.chat import ChatFormat
from attnpo.text.judge_template import JudgePrompts
from attnpo.weights.base import Tools, WeightSource

PREFIX = "extraction/"
ANSWERS = ("a", "b")
# float32 with another kernel or batch layout (the golden folder's own README, which measured it). A single head is
# less exact than the mean over heads: the stored ones are up to 2e-5 from the same model in float64, as ours are.
ROW_TOLERANCE = 1e-5
HEAD_TOLERANCE = 5e-5
WEIGHT_TOLERANCE = 5e-5
FLOAT32 = 1e-6  # the same float32 numbers once more, rounded elsewhere

CUT = "the reference cuts tokens and encodes again, ours at character boundaries; {}"
REBUILT = "the rest was checked on the texts it shows"
NOT_REBUILT = "the texts it shows could not be rebuilt, so only its tokens are read"
# The reference's rule for long prompts (its README): responses keep this many tokens, the question what is left of
# the limit less an allowance for the template.
REFERENCE_RESPONSE, REFERENCE_LIMIT, REFERENCE_ALLOWANCE = 768, 2048, 300
EDITED = "{} of 2 completions edited by the reference (lone judge token put in front); weights compared on its ids"
ALONE = "the reference tokenises completions alone, ours in the conversation; weights compared on its ids"
TIED = "several edit alignments are best and the reference's library takes another; both checked to cost the same"

Judged = tuple[PairWeights, list[JudgeReading]]  # both rounds of one pair


def items(path: Path) -> Iterator[Item]:
    """The items of one folder: per pair and group of quantities, then the span and unit cases."""
    golden = Golden.read(path)
    study = Extraction(golden)
    last = f"L{golden.layers[-1]:02d}"
    span = f"L{golden.layers[0]:02d}..{last}"
    groups = (
        ("prompt", "", study.prompt),
        ("span", "", study.span),
        ("training_ids", "", study.training_ids),
        ("verdict", "", study.verdict),
        ("rows", span, study.rows),
        ("weights", span, study.weights),
        ("aligned", last, study.aligned),
    )
    for pair in golden.pairs:
        label = f"{pair['index']:02d} {pair['name']}"
        for name, what, compare in groups:
            yield Check(PREFIX + name, f"{label} {what}".rstrip(), partial(compare, pair))
        if f"{pair['index']:02d}/all_layers/cr/rows_per_head" in golden.expected:
            yield Check(PREFIX + "rows_per_head", f"{label} all layers", partial(study.heads, pair))
        for source in golden.sources:
            if source == "rollout" and has_option("weights", source):
                yield Check(PREFIX + source, label, partial(study.rollout, pair))
            elif not re.fullmatch(r"L\d+", source):
                yield Absent(PREFIX + source, label, "weights", source)
    for index, case in enumerate(golden.span_cases):
        yield Check(f"{PREFIX}span_cases", f"{index:02d}", partial(study.span_case, case))
    yield from unit_items(golden.unit_cases, PREFIX)


class Extraction:
    """Recomputes one folder; model, prompts and readings come into being when the first record asks for them."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden
        self._sources: dict[tuple[int | str, int], WeightSource] = {}
        self._passes: dict[str, dict[int, Judged] | Exception] = {}

    @cached_property
    def chat(self) -> ChatFormat:
        """The folder's tokenizer with its own chat template."""
        return ChatFormat(load_tokenizer(self.golden.path / "tokenizer"))

    def _room(self, span: str) -> RunJudge:
        choices = ["judge=pairwise"]
        rules = {"template_file": str(self.golden.path / "template.txt"), **self.golden.span_rules}
        judge = built("judge", choices, span=span, **rules)
        model = built("model", choices, path=str(self.golden.path / "model"), chat_template=None)
        return RunJudge(judge, model, self.chat)

    @cached_property
    def room(self) -> RunJudge:
        """The judge with the reference's spans."""
        return self._room("reference")

    @cached_property
    def touch(self) -> JudgePrompts:
        """Prompts with spans of all tokens that hold a character of the response."""
        return self._room("touch").prompts

    @cached_property
    def tools(self) -> Tools:
        """The run's tools with the judge's readings kept."""
        tools = self.room.tools(torch.device("cpu"))
        if tools.judge is None:
            raise UserError("the judge of configs/judge brings no model")
        cut = {preference(pair).pair_id: pair for pair in self.golden.pairs if is_cut(pair)}
        return replace(tools, judge=Recorder(tools.judge), prompts=GivenCuts(self.room.prompts, cut))

    @cached_property
    def depth(self) -> int:
        """Layers of the judge."""
        return self.room.num_layers

    def source(self, layer: int | str, sink: int) -> WeightSource:
        """The attention source of one layer as the authors' code has it (each round normalised first)."""
        if (layer, sink) not in self._sources:
            self._sources[layer, sink] = attention_source(layer, self.depth, **self._rules(sink))
        return self._sources[layer, sink]

    @staticmethod
    def _rules(sink: int) -> dict[str, Any]:
        return {"round_order": "normalize_then_mean", "sink_tokens": sink, "sink_min_length": 5}

    @property
    def judged(self) -> dict[int, Judged]:
        """What the attention source captured and what the judge read, by the pairs' index; all pairs in one call."""
        return self._pass(self.source("last", 1))

    @property
    def rolled(self) -> dict[int, Judged]:
        """The same of the rollout source."""
        return self._pass(rollout_source(**self._rules(1)))

    def _pass(self, source: WeightSource) -> dict[int, Judged]:
        kind = type(source).__name__
        if kind not in self._passes:
            self._passes[kind] = self._outcome(source)
        outcome = self._passes[kind]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _outcome(self, source: WeightSource) -> dict[int, Judged] | Exception:
        # An error is kept like a result: every record that needs the pass fails with it, and the pass runs once.
        try:
            pairs = [preference(pair) for pair in self.golden.pairs]
            captured = source.capture(pairs, self.tools, source.capture_layers(self.depth))
        except PRODUCT_ERRORS as error:
            return error
        readings = self.tools.judge.readings if isinstance(self.tools.judge, Recorder) else []
        return {
            pair["index"]: (weights, readings[2 * place : 2 * place + 2])
            for place, (pair, weights) in enumerate(zip(self.golden.pairs, captured, strict=True))
        }

    @property
    def _last(self) -> str:
        return f"L{self.depth:02d}"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that ``judged`` holds, in the order of its rows."""
        return self.source("last", 1).capture_layers(self.depth)

    # ------------------------------------------------------------------------------------------ text

    def shown(self, pair: dict[str, Any]) -> PreferencePair:
        """The texts that the reference shows the judge: the pair's own, or what it cut them to."""
        if not is_cut(pair):
            return preference(pair)
        ids = {side: self._ids(pair[side].strip() or " ")[:REFERENCE_RESPONSE] for side in SIDES}
        keep = REFERENCE_LIMIT - REFERENCE_ALLOWANCE - sum(map(len, ids.values()))
        question = self._ids(pair["prompt"])
        decoded = {side: str(self.chat.tokenizer.decode(ids[side])) for side in SIDES}
        if len(question) > keep:
            decoded["prompt"] = str(self.chat.tokenizer.decode(question[-keep:]))
        return preference({**pair, **decoded})

    def _ids(self, text: str) -> list[int]:
        return self.chat.tokenize(text, start=False)[0]

    def _is_rebuilt(self, pair: dict[str, Any], found: Comparison) -> bool:
        """Whether ``shown`` has the reference's tokens, as it must for pairs that are not cut; notes the variant."""
        if not is_cut(pair):
            return True
        rounds = zip(ROUNDS, self.room.prompts.build(self.shown(pair)), strict=True)
        rebuilt = all(ours.input_ids == pair["rounds"][order]["judge_ids"] for order, ours in rounds)
        found.variant = CUT.format(REBUILT if rebuilt else NOT_REBUILT)
        return rebuilt

    def prompt(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the tokens of both rounds, and for a cut pair also checks that ours is cut and fits."""
        rebuilt = self._is_rebuilt(pair, found)
        prompts = self.room.prompts
        limit = self.room.settings.max_length
        rounds = zip(ROUNDS, prompts.build(preference(pair)), prompts.build(self.shown(pair)), strict=True)
        for order, ours, shown in rounds:
            info = pair["rounds"][order]
            ids = info["judge_ids"]
            found.same(f"{order}/truncated", ours.cut, info["truncated"])
            found.require(len(ours.input_ids) < limit, f"{order}: {len(ours.input_ids)} tokens, limit {limit}")
            found.same(f"{order}/answer_a", "chosen" if ours.chosen_is_a else "rejected", info["answer_a"])
            found.same(f"{order}/n_tokens", len(ids), info["n_tokens"])
            if rebuilt:
                found.same(f"{order}/judge_ids", shown.input_ids, ids)
        for side in SIDES:
            info = pair["rounds"][ROUNDS[0]]
            start, end = info[f"span_{answer_of(info, side)}"]
            found.same(f"{side}_tokens", info["judge_ids"][start:end], pair[f"{side}_tokens"])

    def span(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the token ranges of both responses, the reference's and those of all their characters."""
        if not self._is_rebuilt(pair, found):
            return
        shown = self.shown(pair)
        reference, touch = self.room.prompts.build(shown), self.touch.build(shown)
        for order, shorter, longer in zip(ROUNDS, reference, touch, strict=True):
            info = pair["rounds"][order]
            sides = SIDES if info["answer_a"] == "chosen" else SIDES[::-1]
            answers = [shown.response(side).strip() or " " for side in sides]
            marks = self._marks(shown.prompt[0]["content"], *answers)
            for answer, side in zip(ANSWERS, sides, strict=True):
                found.same(f"{order}/span_{answer}", list(shorter.spans[side]), info[f"span_{answer}"])
                start, end = longer.spans[side]
                first, last = marks[answer].shared(start, end)
                content = {
                    "touch": [start, end],
                    "inside": [start + first, end - last],
                    "shared_first_token": first,
                    "shared_last_token": last,
                }
                for name, ours in content.items():
                    found.same(f"{order}/content_{answer}/{name}", ours, info[f"content_{answer}"][name])

    def _marks(self, question: str, answer_a: str, answer_b: str) -> dict[str, "Marks"]:
        """Where both answers stand in the whole prompt's text, and the tokens' characters there."""
        rendered = self.room.prompts.template.render(question, answer_a, answer_b)
        turn = Message(role="user", content=rendered.text)
        full = self.chat.render([turn], add_generation_prompt=True)
        shift = full.index(rendered.text.strip()) - (len(rendered.text) - len(rendered.text.lstrip()))
        places = self.chat.tokenize(full)[1]
        spans = {answer: rendered.spans[f"answer_{answer}"] for answer in ANSWERS}
        return {answer: Marks((begin + shift, end + shift), places) for answer, (begin, end) in spans.items()}

    def span_case(self, case: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares tokens and ranges of awkward texts: delimiters, placeholders and merges inside answers."""
        pair = PreferencePair.make([Message(role="user", content=case["prompt"])], case["answer_a"], case["answer_b"])
        prompt, _ = self.touch.build(pair)
        found.same("judge_ids", prompt.input_ids, case["judge_ids"])
        marks = self._marks(case["prompt"], case["answer_a"], case["answer_b"])
        for answer, side in zip(ANSWERS, SIDES, strict=True):
            found.same(f"chars_{answer}", list(marks[answer].characters), case[f"chars_{answer}"])
            found.same(f"tokens_{answer}", list(prompt.spans[side]), case[f"tokens_{answer}"])
            _, last = marks[answer].shared(*prompt.spans[side])
            found.same(f"last_token_shared_{answer}", last, case[f"last_token_shared_{answer}"])

    def unedited(self, pair: dict[str, Any], side: str) -> list[int]:
        """The completion's ids before the reference changed them: its text tokenised, and EOS."""
        return [*self._ids(pair["training"][side]["completion_text"]), int(self.chat.tokenizer.eos_token_id)]

    def training_ids(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the training ids: the reference's, less what it puts in front and its own EOS."""
        for side in SIDES:
            ids, plain = pair["training"][side]["completion_ids"], self.unedited(pair, side)
            found.require(ids[len(ids) - len(plain) :] == plain, f"{side}: the ids do not end with those of the text")
            added = ids[: len(ids) - len(plain)]
            found.same(f"{side}: ids put in front", added, pair[f"{side}_tokens"][: len(added)])
            ours = self._trained(pair, side)
            if self.golden.completions_alone and ours != plain[:-1]:
                texts = [str(self.chat.tokenizer.decode(row)).strip() for row in (ours, plain[:-1])]
                found.same(f"{side}: the text of the ids", *texts)
            else:
                found.same(f"{side}/completion_ids", ours, plain[:-1])
        self._note_ids(pair, found)

    def _trained(self, pair: dict[str, Any], side: str) -> list[int]:
        known = preference(pair)
        return self.chat.encode(known.prompt, known.response(side)).response_ids

    def _note_ids(self, pair: dict[str, Any], found: Comparison) -> None:
        """Notes how the reference's training ids differ from ours on purpose, if they do."""
        plain = {side: self.unedited(pair, side) for side in SIDES}
        edited = sum(pair["training"][side]["completion_ids"] != plain[side] for side in SIDES)
        alone = any(self._trained(pair, side) != plain[side][:-1] for side in SIDES)
        if edited:
            found.vary(EDITED.format(edited))
        if alone and self.golden.completions_alone:
            found.vary(ALONE)

    # ------------------------------------------------------------------------------------------ numbers

    def verdict(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the arg max token at the verdict position of both rounds."""
        captured, _ = self.judged[pair["index"]]
        for order, item in zip(ROUNDS, captured.rounds, strict=True):
            found.same(f"{order}/argmax_token_id", item.verdict_token, pair["rounds"][order]["argmax_token_id"])

    def rows(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the head-mean attention rows of both rounds."""
        _, readings = self.judged[pair["index"]]
        for order, reading in zip(ROUNDS, readings, strict=True):
            for layer in self.golden.layers:
                key = f"L{layer:02d}/{order}/row"
                ours = reading.rows[self.layers.index(layer)]
                found.numbers(key, ours, self.golden.value(pair, key), atol=ROW_TOLERANCE)

    def heads(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the rows of all layers, head means and per head."""
        prompts, judge = self.tools.prompts, self.tools.judge
        if prompts is None or judge is None:
            raise UserError("the judge of configs/judge brings no model or no prompts")
        ids = [prompt.input_ids for prompt in prompts.build(preference(pair))]
        per_head = judge.read(ids, layers=range(1, self.depth + 1), per_head=True, verdict=False)
        _, readings = self.judged[pair["index"]]
        for order, heads, means in zip(ROUNDS, per_head, readings, strict=True):
            key = f"all_layers/{order}/rows"
            found.numbers(key, means.rows, self.golden.value(pair, key), atol=ROW_TOLERANCE)
            key = f"all_layers/{order}/rows_per_head"
            found.numbers(key, heads.rows, self.golden.value(pair, key), atol=HEAD_TOLERANCE)

    def weights(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares each round normalised, their mean, and the mean with the sink rule, on the judge's ids."""
        captured, _ = self.judged[pair["index"]]
        for layer in self.golden.layers:
            sources = self.source(layer, 0), self.source(layer, 1)
            self._combined(f"L{layer:02d}", sources, captured, self.layers, pair, found)

    def rollout(self, pair: dict[str, Any], found: Comparison) -> None:
        """Nothing; compares the rollout rows of both rounds and the weights that follow from them."""
        captured, readings = self.rolled[pair["index"]]
        for order, reading in zip(ROUNDS, readings, strict=True):
            if reading.rollout is None:
                found.mismatch(f"rollout/{order}/row: the judge gave none")
                continue
            key = f"rollout/{order}/row"
            found.numbers(key, reading.rollout, self.golden.value(pair, key), atol=ROW_TOLERANCE)
        sources = rollout_source(**self._rules(0)), rollout_source(**self._rules(1))
        self._combined("rollout", sources, captured, sources[0].capture_layers(self.depth), pair, found)

    def _combined(
        self,
        name: str,
        sources: tuple[WeightSource, WeightSource],
        captured: PairWeights,
        layers: tuple[int, ...],
        pair: dict[str, Any],
        found: Comparison,
    ) -> None:
        """Nothing; compares one source's rounds, their mean, and (second of ``sources``) that with the sink rule."""
        ids = {side: captured.rounds[0].side(side).token_ids.tolist() for side in SIDES}
        plain, fixed = sources
        quantities = [
            (order, plain, replace(captured, rounds=(item,)))
            for order, item in zip(ROUNDS, captured.rounds, strict=True)
        ]
        for what, source, rounds in [*quantities, ("mean", plain, captured), ("fixed", fixed, captured)]:
            ours = on_training_tokens(source, rounds, ids, layers)
            for side in SIDES:
                key = f"{name}/{what}/{side}"
                found.numbers(key, getattr(ours, side), self.golden.value(pair, key), atol=WEIGHT_TOLERANCE)

    def aligned(self, pair: dict[str, Any], found: Comparison) -> None:
        """Compares the last layer's weights on the reference's completion ids, times the judge's token count."""
        captured, _ = self.judged[pair["index"]]
        ids = {side: pair["training"][side]["completion_ids"] for side in SIDES}
        self._note_ids(pair, found)
        ours = on_training_tokens(self.source("last", 1), captured, ids, self.layers)
        for side, length in zip(SIDES, ours.lengths, strict=True):
            target = self.golden.value(pair, f"aligned/{side}").double()
            # The alignment alone, without the judge: the reference's own weights on the same ids.
            fixed = self.golden.value(pair, f"{self._last}/fixed/{side}").double()
            judge_ids = pair[f"{side}_tokens"]
            alone = moved(judge_ids, fixed, ids[side])
            if is_tied(alone, target, judge_ids, fixed, ids[side], FLOAT32):
                found.vary(TIED)
                target = alone
            # Both sides are multiplied by the count, and so is the tolerance.
            tolerance = WEIGHT_TOLERANCE * length
            found.numbers(f"aligned/{side}", getattr(ours, side) * length, target, atol=tolerance)
            found.numbers(f"aligned/{side}, moved alone", alone, target, rtol=FLOAT32, atol=FLOAT32)


@dataclass(frozen=True)
class Marks:
    """The characters of one answer in the whole prompt, and those of every token."""

    characters: tuple[int, int]
    places: Sequence[tuple[int, int]]

    def shared(self, start: int, end: int) -> tuple[bool, bool]:
        """Whether the first and the last token of the range start..end-1 also hold characters outside the answer."""
        return self.places[start][0] < self.characters[0], self.places[end - 1][1] > self.characters[1]
