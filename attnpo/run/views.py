"""The weights of a pair under every view that is asked for: layers, rounds, stages of post-processing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jaxtyping import Float
from torch import Tensor

from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import make_example
from attnpo.data.rules import AlignRules
from attnpo.data.weighing import Weighed
from attnpo.display.heat import HeatSide, heat_row
from attnpo.display.shown_pair import ShownPair, ShownSide, View
from attnpo.judge.layers import Row, attending, distinct_layers
from attnpo.run.show_config import ALL, MEAN, ROUNDS
from attnpo.schema import EncodedResponse, PairWeights, PreferencePair, Round, UserError, check_choice
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import raw_weights, training_weights
from attnpo.weights.sources.attention import Attention
from attnpo.weights.transforms import WeightTransform

CAPTURED, SOURCE = "captured", "source"


@dataclass(frozen=True)
class Asked:
    """The views that are asked for, resolved against a source: each with the source at its layer."""

    views: tuple[tuple[View, WeightSource], ...]
    transforms: Mapping[str, WeightTransform]
    rows: tuple[Row, ...]
    align: AlignRules

    def of(self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse], raw: PairWeights | None) -> Iterator[
        tuple[View, TrainingExample, PairWeights | None]
    ]:  # fmt: skip
        """Yields each view with the pair weighed so, and the rounds it read."""
        for view, source in self.views:
            rounds = raw if raw is None else replace(raw, rounds=_rounds(raw, view.round))
            yield view, self._example(view, source, pair, encoded, rounds), rounds

    def _example(
        self,
        view: View,
        source: WeightSource,
        pair: PreferencePair,
        encoded: Mapping[str, EncodedResponse],
        raw: PairWeights | None,
    ) -> TrainingExample:
        names = list(self.transforms)
        first = names[: names.index(view.stage) + 1] if view.stage in names else []
        weights = training_weights(
            source,
            raw,
            encoded,
            self.align.method,
            [self.transforms[name] for name in first],
            layers=self.rows,
            pair=pair,
        )
        if view.stage == CAPTURED and raw is not None:
            captured = raw_weights(source, raw, encoded, self.align.method, layers=self.rows)
            weights = replace(weights, chosen=captured["chosen"], rejected=captured["rejected"])
        return make_example(pair.pair_id, encoded, weights)


def asked_views(
    layers: Sequence[int | str],
    rounds: Sequence[int | str],
    stages: Sequence[str],
    weighed: Weighed,
    transforms: Mapping[str, WeightTransform],
    align: AlignRules,
) -> Asked:
    """Returns the views that are asked for. UserError for a layer, round or stage that these weights have not."""
    source, name = weighed.source, type(weighed.source).__name__
    known = [*([CAPTURED] if source.requires else []), SOURCE, *transforms]
    chosen = known if list(stages) == [ALL] else list(stages) or known[-1:]
    for stage in chosen:
        check_choice("stages", stage, known)
    names = [str(one) for one in rounds]
    if names != [MEAN] and "judge" not in source.requires:
        raise UserError(f"rounds=[{','.join(names)}]: {name} asks no judge, so there are no rounds: leave rounds= out")
    sources: list[tuple[int | None, WeightSource]] = [(_layer(source), source)]
    if layers:
        if not isinstance(source, Attention):
            raise UserError(f"layers={list(layers)}: {name} reads no single layer; leave layers= out")
        every = list(layers) == [ALL]
        numbers = attending(weighed.depth) if every else distinct_layers(layers, weighed.depth, "layers")
        sources = [(number, replace(source, layer=number, layers=())) for number in numbers]
    views = [(View(layer, one, stage), at_layer) for (layer, at_layer), one, stage in product(sources, names, chosen)]
    return Asked(tuple(views), transforms, weighed.layers, align)


def _layer(source: WeightSource) -> int | None:
    """Returns the number of the one layer that a resolved source reads."""
    return (
        source.layer if isinstance(source, Attention) and not source.layers and isinstance(source.layer, int) else None
    )


def _rounds(raw: PairWeights, name: str) -> tuple[Round, ...]:
    if name == MEAN:
        return raw.rounds
    place = ROUNDS.index(name) - 1
    if place >= len(raw.rounds):
        raise UserError(f"rounds=[{name}]: pair {raw.pair_id} was read in {len(raw.rounds)} rounds")
    return raw.rounds[place : place + 1]


def shown(
    pair: PreferencePair,
    view: View,
    example: TrainingExample,
    rounds: PairWeights | None,
    decode: Callable[[int], str],
    more: Sequence[Mapping[str, Float[Tensor, " _"]]],
    note: str,
    traces: tuple[str, ...] = (),
) -> ShownPair:
    """Returns the pair under ``view``; ``more`` are further columns of (chosen, rejected)."""
    heat = heat_row(
        pair,
        example.sides,
        example.weights,
        decode,
        lengths=example.scales,
        coverage=example.coverage,
        source_coverage=example.source_coverage,
        kept_mass=example.kept_mass,
        rounds=() if rounds is None else rounds.rounds,
        note=f"{note}, {view.words()}",
    )
    sides = [
        shown_side(side, encoded.response_ids, encoded.offsets, row, scale, columns)
        for side, encoded, row, scale, columns in zip(
            (heat.chosen, heat.rejected), example.sides, example.weights, example.scales, more, strict=True
        )
    ]
    return ShownPair(pair.pair_id, pair.prompt, view, sides[0], sides[1], heat.verdicts, heat.note, heat, traces)


def shown_side(
    side: HeatSide,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]] | None,
    weights: Float[Tensor, " m"],
    scale: float,
    more: Mapping[str, Float[Tensor, " _"]],
) -> ShownSide:
    """Returns one response with its weights, these times ``scale`` (relative to uniform), and ``more`` columns."""
    columns = {"weight": weights, "relative": weights * scale, **more}
    return ShownSide(side.tokens, tuple(ids), None if offsets is None else tuple(offsets), columns, side.summary())
