"""``report weights explorer=N``: searchable page with the weights of N training pairs from one or two sources.

The page shows the weights combined over judge rounds, as the objective uses them. It also shows the weights of each
round, post-processed and aligned separately but without transforms.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attnpo.config.compose import load
from attnpo.data.prepare import EncodedSet, make_example
from attnpo.data.prepared import ExampleRecipe, read_pairs
from attnpo.display.explorer import ExplorerPair, ExplorerView, write_explorer
from attnpo.display.output import make_console
from attnpo.lab.reports.report_config import ReportConfig
from attnpo.lab.reports.weight_report import inputs_by_layer, model_label, requested_layers, weights_label
from attnpo.run.inputs import Inputs, encode_splits, make_heat_map_pairs
from attnpo.run.models import reference_table
from attnpo.run.resolve import resolve
from attnpo.schema import SIDES, PairWeights, UserError
from attnpo.system.store import StoreTable
from attnpo.weights.base import OnlineSource
from attnpo.weights.capture import load_logps
from attnpo.weights.pipeline import training_weights

PAGE = "explorer.html"


def write_weight_explorer(cfg: ReportConfig, folder: Path) -> None:
    """Writes ``explorer.html`` with the first ``cfg.explorer`` training pairs to ``folder``.

    ``cfg.against``: overrides that turn this configuration into that of the second source; a word without ``=`` is an
    option of ``weights``. Also shows the reference's log-probabilities of a pair if they are in the store. Raises
    UserError if a source computes its weights during training, or if the two sources have different training tokens.
    """
    configs = [cfg]
    more = [word if "=" in word else f"weights={word}" for word in shlex.split(cfg.against or "")]
    if more:
        configs.append(load("report", [*cfg.composed.overrides, *more], cfg.composed.config_dir))
    sources: list[dict[str, ExplorerPair]] = []
    for one in configs:
        run, base, readers, built = resolve(one)
        choices = run.composed.choices
        if len(sources) == 0:
            table = reference_table(base, run.lengths)
            setting = choices.get("setting", "prepared") if built else None
            label = model_label(run.judge, base.spec, setting) if run.label is None else run.label
        texts = encode_splits(read_pairs(run.data, run.weights, base.store), base, run.lengths)
        recipe = ExampleRecipe(run.weights, None, [*run.transforms.values()], run.align, run.data)
        name, layered = choices.get("weights"), hasattr(run.weights, "layer")
        layers = requested_layers(run.weights, name, readers, run.layers if layered else ())
        every = inputs_by_layer(recipe, readers, run.auto_layer, texts, layers)
        labelled = ((weights_label(made.weighed.source, name, run.transforms), made) for made in every)
        sources.append(collect_pairs(labelled, texts.encoded["train"], base.tokenizer, run.explorer))
    pairs = sources[0]
    for others in sources[1:]:
        suffix = f" ({' '.join(more)})"
        pairs = {
            pair_id: merge_views(pair, others[pair_id], suffix) for pair_id, pair in pairs.items() if pair_id in others
        }
    if not pairs:
        raise UserError(f"explorer={cfg.explorer}: the sources have no pairs in common; use a larger number")
    shown = add_reference_logps(pairs, table)
    note = "weights on training tokens; combined: as used by the objective; single round: before transforms"
    path = write_explorer(folder / PAGE, shown, title=f"Token weights: {label}", note=note)
    make_console().print(f"  {path}", highlight=False, markup=False)


def collect_pairs(
    labelled: Iterable[tuple[str, Inputs]], train: EncodedSet, tokenizer: PreTrainedTokenizerBase, count: int
) -> dict[str, ExplorerPair]:
    """Returns the first ``count`` pairs by id that have weights at all layers of a source.

    Each has one view per layer and round. ``labelled``: for each layer, a label and the weighted inputs.
    """
    kept: dict[str, ExplorerPair] = {}
    for number, (label, made) in enumerate(labelled):
        if isinstance(made.weighed.source, OnlineSource):
            raise UserError(
                f"explorer: {label} computes its weights during training, so none are stored; choose other weights"
            )
        found = first_pair_views(made, train, tokenizer, label, count)
        if number:
            found = {name: merge_views(kept[name], pair) for name, pair in found.items() if name in kept}
        kept = found
    return kept


def first_pair_views(
    made: Inputs, encoded: EncodedSet, tokenizer: PreTrainedTokenizerBase, label: str, count: int
) -> dict[str, ExplorerPair]:
    """Returns the first ``count`` training pairs by id, with a combined view and one per judge round."""
    sides = {pair.pair_id: both for pair, both in zip(encoded.pairs, encoded.encoded, strict=True)}
    option, *transforms = label.split(" + ")
    option, _, layer = option.partition(" ")
    name = " + ".join([option, *transforms])
    pairs: dict[str, ExplorerPair] = {}
    for combined in make_heat_map_pairs(made, tokenizer, count):
        pair, rounds = combined.pair, () if combined.captured is None else combined.captured.rounds
        views = {ExplorerView(name, layer): replace(combined, captured=None)}
        for number, one in enumerate(rounds if len(rounds) > 1 else (), 1):
            alone, encoded_pair = PairWeights(pair.pair_id, (one,)), sides[pair.pair_id]
            method, layers = made.recipe.align.method, made.weighed.layers
            weights = training_weights(made.weighed.source, alone, encoded_pair, method, layers=layers, pair=pair)
            found = make_example(pair.pair_id, encoded_pair, weights)
            arrived = zip(found.weight_scales, found.coverage, found.source_coverage, found.kept_mass, strict=True)
            chosen, rejected = (
                replace(side, weights=row, length=scale, coverage=coverage, source_coverage=source, kept_mass=kept)
                for (_, side), row, (scale, coverage, source, kept) in zip(
                    combined.sides, found.weights, arrived, strict=True
                )
            )
            views[ExplorerView(name, layer, f"round {number}")] = replace(
                combined, chosen=chosen, rejected=rejected, captured=None
            )
        pairs[pair.pair_id] = views
    return pairs


def merge_views(pair: ExplorerPair, other: ExplorerPair, suffix: str = "") -> ExplorerPair:
    """Adds the views of ``other`` to those of ``pair``; appends ``suffix`` to source names that exist in both.

    Raises UserError if the two have different training tokens.
    """
    first, second = (next(iter(views.values())) for views in (pair, other))
    for (name, mine), (_, theirs) in zip(first.sides, second.sides, strict=True):
        if mine.token_ids != theirs.token_ids:
            raise UserError(
                f"against: pair {first.pair.pair_id}, {name}: the second source has different training tokens; "
                f"against= may change weights and judge, but not model, data or lengths"
            )
    taken = {view.source for view in pair} if suffix else set()
    named = {
        replace(view, source=view.source + suffix) if view.source in taken else view: row for view, row in other.items()
    }
    return {**pair, **named}


def add_reference_logps(pairs: Mapping[str, ExplorerPair], table: StoreTable) -> list[ExplorerPair]:
    """Adds the reference's log-probabilities from the store, where present, to the first view of each pair."""
    first = {pair_id: next(iter(pair)) for pair_id, pair in pairs.items()}
    sides = {pair_id: [side for _, side in pairs[pair_id][view].sides] for pair_id, view in first.items()}
    lengths = {pair_id: (len(chosen.tokens), len(rejected.tokens)) for pair_id, (chosen, rejected) in sides.items()}
    lacking = set(table.missing_pairs(list(lengths), SIDES))
    present = [pair_id for pair_id in lengths if pair_id not in lacking]
    known = load_logps(table, present, lengths) if present else {}
    found = dict(pairs)
    for pair_id, logps in known.items():
        chosen, rejected = (
            replace(side, scores={**side.scores, "reference_logp": row})
            for side, row in zip(sides[pair_id], logps, strict=True)
        )
        view = first[pair_id]
        found[pair_id] = {**pairs[pair_id], view: replace(pairs[pair_id][view], chosen=chosen, rejected=rejected)}
    return list(found.values())
