"""Records of an ``extraction/`` folder: judge prompts, spans, attention rows and weights of real text and a real model.

The judge, its prompts and the weight source are the run's own; one call of the source reads every pair. Where the
reference cut a prompt its tokens are read as given, because our rule for cuts is another one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from attnpo.judge.base import JudgePrompt, JudgeReading, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.models.loading import load_tokenizer
from attnpo.schema import SIDES, Message, PairWeights, PreferencePair, UserError
from attnpo.text.chat import ChatFormat
from attnpo.weights.base import WeightSource
from tests.conformance.drawn import model_folder
from tests.conformance.extraction_folder import (
    ANSWERS,
    ROUNDS,
    GivenCuts,
    Golden,
    GoldenPair,
    Recorder,
    preference,
)
from tests.conformance.fields import Fields
from tests.conformance.records import PRODUCT_ERRORS, Absent, Check, Comparison, Item, built, has_option
from tests.conformance.weights import (
    align_weights,
    is_tied,
    on_training_tokens,
    unit_items,
    weight_source,
)

PREFIX = "extraction/"
# The stored float32 rows are up to 8e-6 from the same model in float64, and ours as much again, another way on every
# kind of processor. A single head is less exact than the mean over heads: up to 2e-5.
ROW_TOLERANCE = 2e-5
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
        label = f"{pair.index:02d} {pair.name}"
        for name, what, compare in groups:
            yield Check(PREFIX + name, f"{label} {what}".rstrip(), partial(compare, pair))
        if f"{pair.index:02d}/all_layers/cr/rows_per_head" in golden.expected:
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
        self._passes: dict[str, dict[int, Judged] | Exception] = {}
        self._shown: dict[int, tuple[JudgePrompt, JudgePrompt]] = {}

    @cached_property
    def chat(self) -> ChatFormat:
        """The folder's tokenizer with its own chat template."""
        return ChatFormat(load_tokenizer(self.golden.path / "tokenizer"))

    def _room(self, span: str) -> RunJudge:
        template = str(self.golden.path / "template.txt")
        judge = built("judge", "judge=pairwise", span=span, template_file=template, **self.golden.span_rules)
        model = built("model", path=str(model_folder(self.golden.path / "model")))
        return RunJudge(judge, model, self.chat)

    @cached_property
    def room(self) -> RunJudge:
        """The judge with the reference's spans."""
        return self._room("reference")

    @cached_property
    def touch(self) -> JudgePromptBuilder:
        """Prompts with spans of all tokens that hold a character of the response."""
        return self._room("touch").prompts

    @cached_property
    def judge(self) -> Recorder:
        """The run's judge, with its readings kept."""
        judge = self.room.load(torch.device("cpu")).model
        if judge is None:
            raise UserError("the judge of configs/judge brings no model")
        return Recorder(judge)

    @cached_property
    def prompts(self) -> GivenCuts:
        """The run's judge prompts, with the reference's tokens for those that it cut."""
        return GivenCuts(self.room.prompts, self.golden.pairs)

    @cached_property
    def depth(self) -> int:
        """Layers of the judge."""
        return self.room.num_layers

    def attention(self, layer: int | str, sink: int) -> WeightSource:
        """The attention source of one layer as the authors' code has it (each round normalised first)."""
        return weight_source("attention", sink, layer=layer).resolve(self.depth)

    @property
    def judged(self) -> dict[int, Judged]:
        """What the attention source captured and what the judge read, by the pairs' index; all pairs in one call."""
        return self._captured("attention", self.attention("last", 1))

    @property
    def rolled(self) -> dict[int, Judged]:
        """The same of the rollout source."""
        return self._captured("rollout", weight_source("rollout", 1))

    def _captured(self, name: str, source: WeightSource) -> dict[int, Judged]:
        if name not in self._passes:
            self._passes[name] = self._outcome(source)
        outcome = self._passes[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _outcome(self, source: WeightSource) -> dict[int, Judged] | Exception:
        # An error is kept like a result: every record that needs the pass fails with it, and the pass runs once.
        try:
            judge = LoadedJudge(self.judge, self.prompts, self.room.settings.verdict)
            pairs = [pair.preference for pair in self.golden.pairs]
            captured = source.capture(pairs, judge, source.layers_to_store(self.depth))
        except PRODUCT_ERRORS as error:
            return error
        return {
            pair.index: (weights, self.judge.readings[2 * place : 2 * place + 2])
            for place, (pair, weights) in enumerate(zip(self.golden.pairs, captured, strict=True))
        }

    # ------------------------------------------------------------------------------------------ text

    def shown(self, pair: GoldenPair) -> PreferencePair:
        """The texts that the reference shows the judge: the pair's own, or what it cut them to."""
        if not pair.cut:
            return pair.preference
        decode = self.chat.tokenizer.decode
        ids = {side: self._ids(text.strip() or " ")[:REFERENCE_RESPONSE] for side, text in pair.responses.items()}
        keep = REFERENCE_LIMIT - REFERENCE_ALLOWANCE - sum(map(len, ids.values()))
        question = self._ids(pair.prompt)
        prompt = pair.prompt if len(question) <= keep else str(decode(question[-keep:]))
        return preference(prompt, **{side: str(decode(row)) for side, row in ids.items()})

    def _prompts_shown(self, pair: GoldenPair) -> tuple[JudgePrompt, JudgePrompt]:
        """Builds the run's prompts of the texts that the reference shows, once."""
        if pair.index not in self._shown:
            self._shown[pair.index] = self.room.prompts.build(self.shown(pair))
        return self._shown[pair.index]

    def _ids(self, text: str) -> list[int]:
        return self.chat.tokenize(text, start=False)[0]

    def _is_rebuilt(self, pair: GoldenPair, comparison: Comparison) -> bool:
        """Whether ``shown`` has the reference's tokens, as it must for pairs that are not cut; notes the variant."""
        if not pair.cut:
            return True
        rounds = zip(ROUNDS, self._prompts_shown(pair), strict=True)
        rebuilt = all(ours.input_ids == pair.rounds[order]["judge_ids"] for order, ours in rounds)
        comparison.variant = CUT.format(REBUILT if rebuilt else NOT_REBUILT)
        return rebuilt

    def prompt(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the tokens of both rounds, and for a cut pair also checks that ours is cut and fits."""
        rebuilt = self._is_rebuilt(pair, comparison)
        prompts = self.room.prompts
        limit = self.room.settings.max_length
        rounds = zip(ROUNDS, prompts.build(pair.preference), self._prompts_shown(pair), strict=True)
        for order, ours, shown in rounds:
            info, count = pair.rounds[order], len(ours.input_ids)
            comparison.same(f"{order}/truncated", ours.cut, info["truncated"])
            comparison.require(count < limit, f"{order}: {count} tokens, limit {limit}")
            comparison.same(f"{order}/answer_a", "chosen" if ours.chosen_is_a else "rejected", info["answer_a"])
            comparison.same(f"{order}/n_tokens", len(info["judge_ids"]), info["n_tokens"])
            if rebuilt:
                comparison.same(f"{order}/judge_ids", shown.input_ids, info["judge_ids"])
        first = pair.rounds[ROUNDS[0]]
        for side in SIDES:
            start, end = first.span(side)
            comparison.same(f"{side}_tokens", first["judge_ids"][start:end], pair.judge_tokens[side])

    def span(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the token ranges of both responses, the reference's and those of all their characters."""
        if not self._is_rebuilt(pair, comparison):
            return
        shown = self.shown(pair)
        reference, touch = self._prompts_shown(pair), self.touch.build(shown)
        for order, shorter, longer in zip(ROUNDS, reference, touch, strict=True):
            info = pair.rounds[order]
            sides = SIDES if info["answer_a"] == "chosen" else SIDES[::-1]
            answers = [shown.response(side).strip() or " " for side in sides]
            marks = self._marks(shown.prompt[0]["content"], *answers)
            for answer, side in zip(ANSWERS, sides, strict=True):
                comparison.same(f"{order}/span_{answer}", list(shorter.spans[side]), info[f"span_{answer}"])
                start, end = longer.spans[side]
                first, last = marks[answer].shared(start, end)
                content = {
                    "touch": [start, end],
                    "inside": [start + first, end - last],
                    "shared_first_token": first,
                    "shared_last_token": last,
                }
                for name, ours in content.items():
                    comparison.same(f"{order}/content_{answer}/{name}", ours, info[f"content_{answer}"].get(name))

    def _marks(self, question: str, answer_a: str, answer_b: str) -> dict[str, "Marks"]:
        """Where both answers stand in the whole prompt's text, and the tokens' characters there."""
        rendered = self.room.prompts.template.render(question, answer_a, answer_b)
        turn = Message(role="user", content=rendered.text)
        full = self.chat.render([turn], add_generation_prompt=True)
        shift = full.index(rendered.text.strip()) - (len(rendered.text) - len(rendered.text.lstrip()))
        places = self.chat.tokenize(full)[1]
        spans = {answer: rendered.spans[f"answer_{answer}"] for answer in ANSWERS}
        return {answer: Marks((begin + shift, end + shift), places) for answer, (begin, end) in spans.items()}

    def span_case(self, case: Fields, comparison: Comparison) -> None:
        """Compares tokens and ranges of awkward texts: delimiters, placeholders and merges inside answers."""
        texts = [case[key] for key in ("prompt", "answer_a", "answer_b")]
        prompt, _ = self.touch.build(preference(*texts))
        comparison.same("judge_ids", prompt.input_ids, case["judge_ids"])
        marks = self._marks(*texts)
        for answer, side in zip(ANSWERS, SIDES, strict=True):
            characters, tokens = (list(case[f"{what}_{answer}"]) for what in ("chars", "tokens"))
            comparison.same(f"chars_{answer}", list(marks[answer].characters), characters)
            comparison.same(f"tokens_{answer}", list(prompt.spans[side]), tokens)
            shared = f"last_token_shared_{answer}"
            comparison.same(shared, marks[answer].shared(*prompt.spans[side])[1], case[shared])

    def unedited(self, pair: GoldenPair, side: str) -> list[int]:
        """The completion's ids before the reference changed them: its text tokenised, and EOS."""
        return [*self._ids(pair.completion_texts[side]), int(self.chat.tokenizer.eos_token_id)]

    def training_ids(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the training ids: the reference's, less what it puts in front and its own EOS."""
        for side in SIDES:
            ids, plain = pair.completion_ids[side], self.unedited(pair, side)
            added, end = ids[: len(ids) - len(plain)], ids[len(ids) - len(plain) :]
            comparison.require(end == plain, f"{side}: the ids do not end with those of the text")
            comparison.same(f"{side}: ids put in front", added, pair.judge_tokens[side][: len(added)])
            ours = self._trained(pair, side)
            if self.golden.completions_alone and ours != plain[:-1]:
                texts = [str(self.chat.tokenizer.decode(row)).strip() for row in (ours, plain[:-1])]
                comparison.same(f"{side}: the text of the ids", *texts)
            else:
                comparison.same(f"{side}/completion_ids", ours, plain[:-1])
        self._note_ids(pair, comparison)

    def _trained(self, pair: GoldenPair, side: str) -> list[int]:
        return self.chat.encode(pair.preference.prompt, pair.responses[side]).response_ids

    def _note_ids(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Notes how the reference's training ids differ from ours on purpose, if they do."""
        plain = {side: self.unedited(pair, side) for side in SIDES}
        edited = sum(pair.completion_ids[side] != plain[side] for side in SIDES)
        alone = any(self._trained(pair, side) != plain[side][:-1] for side in SIDES)
        if edited:
            comparison.vary(EDITED.format(edited))
        if alone and self.golden.completions_alone:
            comparison.vary(ALONE)

    # ------------------------------------------------------------------------------------------ numbers

    def verdict(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the arg max token at the verdict position of both rounds."""
        captured, _ = self.judged[pair.index]
        for order, item in zip(ROUNDS, captured.rounds, strict=True):
            comparison.same(f"{order}/argmax_token_id", item.verdict_token, pair.rounds[order]["argmax_token_id"])

    def rows(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the head-mean attention rows of both rounds."""
        _, readings = self.judged[pair.index]
        layers = self.attention("last", 1).layers_to_store(self.depth)
        for order, reading in zip(ROUNDS, readings, strict=True):
            for layer in self.golden.layers:
                ours = reading.rows[layers.index(layer)]
                self._stored(f"L{layer:02d}/{order}/row", ours, pair, comparison, ROW_TOLERANCE)

    def heads(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the rows of all layers, head means and per head."""
        _, readings = self.judged[pair.index]
        ids = [prompt.input_ids for prompt in self.prompts.build(pair.preference)]
        per_head = self.judge.read(ids, layers=range(1, self.depth + 1), per_head=True, verdict=False)
        for order, heads, means in zip(ROUNDS, per_head, readings, strict=True):
            self._stored(f"all_layers/{order}/rows", means.rows, pair, comparison, ROW_TOLERANCE)
            self._stored(f"all_layers/{order}/rows_per_head", heads.rows, pair, comparison, HEAD_TOLERANCE)

    def weights(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares each round normalised, their mean, and the mean with the sink rule, on the judge's ids."""
        captured, _ = self.judged[pair.index]
        for layer in self.golden.layers:
            sources = self.attention(layer, 0), self.attention(layer, 1)
            self._combined(f"L{layer:02d}", sources, captured, pair, comparison)

    def rollout(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the rollout rows of both rounds and the weights that follow from them."""
        captured, readings = self.rolled[pair.index]
        for order, reading in zip(ROUNDS, readings, strict=True):
            key = f"rollout/{order}/row"
            if reading.rollout is None:
                comparison.mismatch(f"{key}: the judge gave none")
            else:
                self._stored(key, reading.rollout, pair, comparison, ROW_TOLERANCE)
        sources = weight_source("rollout", 0), weight_source("rollout", 1)
        self._combined("rollout", sources, captured, pair, comparison)

    def _combined(
        self,
        name: str,
        sources: tuple[WeightSource, WeightSource],
        captured: PairWeights,
        pair: GoldenPair,
        comparison: Comparison,
    ) -> None:
        """Compares one source's rounds, their mean, and (second of ``sources``) that with the sink rule."""
        ids = {side: captured.rounds[0].side(side).token_ids.tolist() for side in SIDES}
        plain, fixed = sources
        quantities = [
            (order, plain, replace(captured, rounds=(item,)))
            for order, item in zip(ROUNDS, captured.rounds, strict=True)
        ]
        for what, source, rounds in [*quantities, ("mean", plain, captured), ("fixed", fixed, captured)]:
            ours = on_training_tokens(source, rounds, ids, source.layers_to_store(self.depth))
            for side in SIDES:
                self._stored(f"{name}/{what}/{side}", getattr(ours, side), pair, comparison, WEIGHT_TOLERANCE)

    def _stored(self, key: str, ours: Tensor, pair: GoldenPair, comparison: Comparison, tolerance: float) -> None:
        """Compares ``ours`` with a tensor that the folder stores for the pair."""
        comparison.numbers(key, ours, self.golden.value(pair, key), atol=tolerance)

    def aligned(self, pair: GoldenPair, comparison: Comparison) -> None:
        """Compares the last layer's weights on the reference's completion ids, times the judge's token count."""
        captured, _ = self.judged[pair.index]
        self._note_ids(pair, comparison)
        source = self.attention("last", 1)
        ours = on_training_tokens(source, captured, pair.completion_ids, source.layers_to_store(self.depth))
        for side, length in zip(SIDES, ours.lengths, strict=True):
            target = self.golden.value(pair, f"aligned/{side}").double()
            # The alignment alone, without the judge: the reference's own weights on the same ids.
            fixed = self.golden.value(pair, f"L{self.depth:02d}/fixed/{side}").double()
            judge_ids, ids = pair.judge_tokens[side], pair.completion_ids[side]
            alone = align_weights(judge_ids, fixed, ids)
            if is_tied(alone, target, judge_ids, fixed, ids, FLOAT32):
                comparison.vary(TIED)
                target = alone
            # Both sides are multiplied by the count, and so is the tolerance.
            tolerance = WEIGHT_TOLERANCE * length
            comparison.numbers(f"aligned/{side}", getattr(ours, side) * length, target, atol=tolerance)
            comparison.numbers(f"aligned/{side}, moved alone", alone, target, rtol=FLOAT32, atol=FLOAT32)


@dataclass(frozen=True)
class Marks:
    """The characters of one answer in the whole prompt, and those of every token."""

    characters: tuple[int, int]
    places: Sequence[tuple[int, int]]

    def shared(self, start: int, end: int) -> tuple[bool, bool]:
        """Whether the first and the last token of the range start..end-1 also hold characters outside the answer."""
        return self.places[start][0] < self.characters[0], self.places[end - 1][1] > self.characters[1]
