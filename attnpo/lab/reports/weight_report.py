"""The paper's statistics tables for the weights a run would train with: from the store, for one or many layers.

Which rows a table stands on: concentration and most-weighted tokens are about what the objective multiplies, so they
are read off the training examples (after the sink rule, transforms, alignment and truncation). The sink share is about
what the judge looked at before the sink rule took it away, so it is read off the source's own tokens with the sink
kept, before transforms and alignment. Either way of the training pairs that are kept, no pair of validation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attnpo.config.compose import as_yaml
from attnpo.data.base import PairSet
from attnpo.data.prepare import EncodedSet, ExampleSet, fit_transforms, prepare_examples
from attnpo.data.rules import AlignRules
from attnpo.data.weighing import Weighed
from attnpo.display.heat import HeatRow
from attnpo.display.heatmap import heatmap_html
from attnpo.display.output import terminal
from attnpo.display.page import Fragment, KeyValues, Preformatted, Section
from attnpo.display.printed import KeyedTable, PrintedTable, beside, counterpart, label_of, read_printed
from attnpo.display.tables import Cell
from attnpo.judge.layers import HeadRow, attending, distinct_layers
from attnpo.judge.verdicts import judge_warning
from attnpo.lab.analysis.weight_stats import (
    ResponseStats,
    TokenMean,
    WeightedRow,
    WeightSummary,
    response_statistics,
    sink_row,
    statistics_row,
    summarize,
    token_means,
    token_rows,
)
from attnpo.lab.auto_layer import at_layers
from attnpo.lab.reports.output import publish
from attnpo.lab.reports.report_config import ReportConfig, files, mark_of
from attnpo.run.context import RunContext, make_context, run_judge
from attnpo.run.heat_rows import heat_rows
from attnpo.run.input_summary import describe_split_loss
from attnpo.run.inputs import Inputs, encode, read_pairs
from attnpo.run.weighing import weigh
from attnpo.schema import SIDES, UserError
from attnpo.system.files import clean
from attnpo.system.machine import versions
from attnpo.weights.arrival import COLUMNS as ARRIVED
from attnpo.weights.arrival import Arrival
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import finished_weights

KEYS = ("model", "side", "token")
DIGITS = {
    **{"std": 4, "max": 4, "mean_length": 2, "effective": 1, "mass": 4, "weight": 4, "relative": 2},
    **{f"{place}_token_percent": 2 for place in ("first", "second", "third")},
    "uniform_percent": 2,
}


@dataclass(frozen=True)
class Measured:
    """One set of weights, by its ``label``.

    Statistics by side, shares before the sink rule, means of the tokens met often enough, how often the most frequent
    token is met on one side, what became of the pairs, heat maps.
    """

    label: str
    sides: dict[str, WeightSummary]
    sink: WeightSummary
    tokens: dict[str, list[TokenMean]]
    most: int
    account: dict[str, Cell]
    heat: list[HeatRow]


def weight_report(cfg: ReportConfig, folder: Path) -> None:
    """Prints the tables of the weights that ``cfg`` describes, and writes them with heat maps to ``folder``.

    The page has those of the first pairs, ``heat-WEIGHTS.png`` that of the first one alone.

    Weights that the store lacks are computed as for a run, all layers in one judge pass.
    """
    context = make_context(cfg)
    pairs = read_pairs(context)
    encoded = encode(context, pairs)
    measured = [
        measure(made, encoded, min_count=cfg.min_count, heat_maps=cfg.heat_maps)
        for made in each_weights(context, pairs, encoded, asked_layers(context, cfg.layers))
    ]
    piece = context.tokenizer.convert_ids_to_tokens
    model = model_label(context, cfg.label)
    tables = weight_tables(measured, model, lambda token: str(piece(token)), min_count=cfg.min_count, top=cfg.top)
    notes = notes_on(context, measured, cfg)
    below: list[list[KeyedTable]] = [[] for _ in tables]
    for path in files(cfg.printed):
        printed = read_printed(path, KEYS)
        place = counterpart(tables, printed)
        mine = rows_on(printed, model)
        below[place] += [beside(tables[place], mine)] if mine.rows else []
        notes += left_out(printed, mine, model)
    tables[1] = shortened(tables[1], cfg.top)
    shown = [one for table, joined in zip(tables, below, strict=True) for one in (table, *joined)]
    sections = [
        Section(f"Token weights of the first pairs: {one.label}", [Fragment(heatmap_html(one.heat, page=False))])
        for one in measured
        if one.heat
    ]
    about = [
        *(Section(f"Account: {one.label}", [KeyValues(one.account)]) for one in measured),
        Section(
            "Versions and configuration",
            [KeyValues(versions()), Preformatted(as_yaml(context.cfg.values))],
        ),
    ]
    publish(f"Token weights: {model}", shown, notes, folder, "weights", mark_of(cfg), [*sections, *about], by="side")
    for one in measured:
        if one.heat:
            from attnpo.display.heat_figure import heatmap_figure  # matplotlib: not for a report without figures

            path = heatmap_figure(one.heat[0], folder / f"heat-{clean(one.label)}.png")
            terminal().print(f"  {path}", highlight=False, markup=False)


# ------------------------------------------------------------------------------------------------ what is weighed


def asked_layers(context: RunContext, layers: Sequence[int | str] | str) -> list[int | None]:
    """Returns the layers to report on as numbers, each once; [None] for the weights as they are configured.

    UserError for weights without a layer to choose, and for layers outside the judge's.
    """
    if not layers:
        return [None]
    if not hasattr(context.cfg.weights, "layer"):
        name = context.cfg.composed.choices.get("weights")
        raise UserError(f"layers: weights={name} has no layer to choose; leave layers out")
    depth = run_judge(context).num_layers
    return list(attending(depth) if layers == "all" else distinct_layers(layers, depth, "layers"))


def each_weights(
    context: RunContext, pairs: dict[str, PairSet], encoded: dict[str, EncodedSet], layers: Sequence[int | None]
) -> Iterator[Inputs]:
    """Yields the weights of each layer on the training examples, one after the other; the judge is
    asked at most once.
    """
    chosen = [layer for layer in layers if layer is not None]
    if len(chosen) > 1:
        source: WeightSource = context.cfg.weights
        if not set(chosen) <= set(source.capture_layers(run_judge(context).num_layers)):
            weigh(at_layers(context, chosen[0], chosen), encoded)  # store_layers: selected would judge once per layer
    for layer in layers:
        here = context.cfg.auto_layer.settle(context, encoded) if layer is None else at_layers(context, layer, [])
        weighed = weigh(here, encoded)
        yield Inputs(here, pairs, weighed, {"train": examples_of(here, encoded["train"], weighed)})


def examples_of(context: RunContext, encoded: EncodedSet, weighed: Weighed) -> ExampleSet:
    """Returns the training examples of a run with these weights."""
    transforms = list(context.cfg.transforms.values())
    align: AlignRules = context.cfg.align
    fitted = fit_transforms(transforms, encoded, weighed.source, weighed.captured, weighed.layers, align)
    return prepare_examples(encoded, weighed.source, weighed.captured, align, weighed.layers, fitted)


# ------------------------------------------------------------------------------------------------ statistics


def measure(made: Inputs, encoded: dict[str, EncodedSet], *, min_count: int = 1, heat_maps: int = 0) -> Measured:
    """Returns everything the tables say of one set of weights. UserError when no pair is left to train on."""
    examples = made.examples["train"]
    label = weights_label(made.context, made.weighed)
    if not examples.examples:
        raise UserError(f"{label}: none of {examples.read} pairs is left: {'; '.join(examples.tally.lines())}")
    sides, tokens, most = {}, {}, 0
    for place, side in enumerate(SIDES):
        rows = [
            WeightedRow(torch.tensor(example.sides[place].response_ids), example.weights[place], example.scales[place])
            for example in examples.examples
        ]
        statistics = [response_statistics(one.weights[place], one.lengths[place]) for one in examples.examples]
        sides[side] = summarize(statistics)
        means = token_means(rows)
        tokens[side] = [mean for mean in means if mean.count >= min_count]
        most = max([most, *(mean.count for mean in means)])
    kept = {example.pair_id for example in examples.examples}
    arrived = Arrival.of(examples.examples)
    account: dict[str, Cell] = {
        "pairs read": examples.read,
        "pairs kept": len(examples.examples),
        "coverage": arrived.coverage,
        **{head: getattr(arrived, name) for name, head in ARRIVED.items()},
        **dict(examples.tally.counts),
    }
    warning = None if made.weighed.verdicts is None else judge_warning(made.weighed.verdicts)
    if warning is not None:
        account["warning"] = warning
    lost = describe_split_loss(made, "train")
    if lost is not None:
        account["weights lost"] = lost
    sink = summarize(list(shares_before_sink(made.weighed, encoded["train"], kept)))
    return Measured(label, sides, sink, tokens, most, account, heat_rows(made, heat_maps) if heat_maps else [])


def shares_before_sink(weighed: Weighed, encoded: EncodedSet, kept: set[str]) -> Iterator[ResponseStats]:
    """Statistics of every kept response's row on the source's own tokens: rounds combined, the sink kept."""
    source = weighed.source
    if source.postprocess is not None:
        source = replace(source, postprocess=replace(source.postprocess, sink_tokens=0))  # type: ignore[type-var]
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        if pair.pair_id not in kept:
            continue
        found = weighed.captured.get(pair.pair_id)
        finished = finished_weights(source, found, sides, layers=weighed.layers, pair=pair)
        for side in SIDES:
            yield response_statistics(finished[side].weights)


# ------------------------------------------------------------------------------------------------ tables


def weight_tables(
    measured: Sequence[Measured], model: str, piece: Callable[[int], str], *, min_count: int = 100, top: int = 10
) -> list[KeyedTable]:
    """Returns the three tables, a row per weights (and side, and token): concentration, tokens, sink share.

    The table of tokens holds every token met ``min_count`` times, so that a printed one finds ours; ``shortened`` cuts
    it to the first ``top``. ``piece`` gives a token's text as the vocabulary has it.
    """
    spread: list[dict[str, Cell]] = [
        {"weights": one.label, **statistics_row(model, side, summary)}
        for one in measured
        for side, summary in one.sides.items()
    ]
    tokens: list[dict[str, Cell]] = [
        {"weights": one.label, "model": model, "side": side, **row}
        for one in measured
        for side in SIDES
        for row in token_rows(one.tokens[side], piece)
    ]
    sinks: list[dict[str, Cell]] = [{"weights": one.label, **sink_row(model, one.sink)} for one in measured]
    return [
        _table("statistics", "Concentration of the weights on training tokens, means over responses", spread, KEYS[:2]),
        KeyedTable(
            "tokens",
            f"Most-weighted training tokens that occur at least {min_count} times, top {top} of each side",
            ("weights", "model", "side", "rank", "token", "weight", "relative", "count"),
            tuple(tokens),
            KEYS,
            "weights",
            DIGITS,
        ),
        _table("sink", "Percent of the mass on the first tokens, before the sink rule", sinks, KEYS[:1]),
    ]


def shortened(table: KeyedTable, top: int) -> KeyedTable:
    """Returns the table of tokens with ranks up to ``top``."""
    return replace(table, rows=tuple(row for row in table.rows if isinstance(row["rank"], int) and row["rank"] <= top))


def _table(name: str, title: str, rows: list[dict[str, Cell]], keys: tuple[str, ...]) -> KeyedTable:
    return KeyedTable(name, title, tuple(rows[0]), tuple(rows), keys, "weights", DIGITS)


# ------------------------------------------------------------------------------------------------ words


def weights_label(context: RunContext, weighed: Weighed) -> str:
    """Returns what the tables call these weights: the option, its layer, the transforms."""
    name = str(context.cfg.composed.choices.get("weights", type(weighed.source).__name__))
    if hasattr(context.cfg.weights, "layer"):
        rows = weighed.source.rows_read()
        name += " " + "+".join(f"L{row.layer}H{row.head}" if isinstance(row, HeadRow) else f"L{row}" for row in rows)
    return " + ".join([name, *map(str, context.cfg.transforms)])


def model_label(context: RunContext, label: str | None) -> str:
    """Returns what the tables call the model whose weights these are: ``label``, else the judge's own name, else the
    setting's.

    A model that ``prepare`` built has no name of its own.
    """
    cfg = context.cfg
    if label is not None:
        return label
    if cfg.judge.path is None and context.prepared:
        return cfg.composed.choices.get("setting", "prepared")
    return Path(cfg.judge.path or context.model.path).name


def rows_on(printed: PrintedTable, model: str) -> PrintedTable:
    """Returns the printed rows about a model; all of a file that names none."""
    if KEYS[0] not in printed.columns:
        return printed
    return replace(printed, rows=tuple(row for row in printed.rows if row[KEYS[0]] == model))


def left_out(printed: PrintedTable, mine: PrintedTable, model: str) -> list[str]:
    """Returns a line on printed rows about other models, if there are such."""
    names = list(dict.fromkeys(str(row[KEYS[0]]) for row in printed.rows if row not in mine.rows))
    if not names:
        return []
    if mine.rows:
        return [f"{label_of(printed.path)}: rows of other models left out ({', '.join(names)})"]
    said = f"say label={names[0]}" + (f" (or {', '.join(names[1:])})" if names[1:] else "")
    return [
        f"{label_of(printed.path)}: left out, its numbers belong to other models than {model}; where {model} is one of "
        f"them under another name, {said}"
    ]


def notes_on(context: RunContext, measured: Sequence[Measured], cfg: ReportConfig) -> list[str]:
    """Returns what a reader must know under the tables."""
    cell = measured[0].account
    lines = [
        f"training split: {cell['pairs kept']} of {cell['pairs read']} pairs, both sides of each; seed {cfg.seed}",
        "statistics and tokens: on training tokens, as the objective reads them (after the sink rule, transforms, "
        "alignment and truncation); mean_length is |y|, the source's count",
        "sink: on the source's own tokens before the sink rule, transforms and alignment; both sides together",
    ]
    for name in ("warning", "weights lost"):
        lines += dict.fromkeys(f"WARNING: {one.account[name]}" for one in measured if name in one.account)
    most = max(one.most for one in measured)
    if most < cfg.min_count:
        lines.append(f"no token occurs {cfg.min_count} times on one side (most: {most}); lower min_count")
    return lines
