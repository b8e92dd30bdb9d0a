"""Builds the paper's statistics tables for the weights that a run would train with, at one or several layers.

Concentration and most-weighted tokens describe the weights that the objective uses, so they are measured on the
training examples (after the sink rule, transforms, alignment and truncation). The sink share describes the judge's
attention before the sink rule removes it, so it is measured on the source's own tokens, before transforms and
alignment. All tables use the kept training pairs and no validation pairs.

Shares and the effective number are computed from |w| / sum |w|, so they do not depend on a row's scale and also apply
to factors and signed rows. ``mass``, ``max`` and ``std`` are computed from the raw row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnpo.config.compose import to_yaml
from attnpo.data.prepare import EncodedSet, fit_transforms, prepare_examples
from attnpo.data.prepared import EncodedTexts, ExampleRecipe, read_pairs
from attnpo.data.weighing import WeightingResult
from attnpo.display.heatmap import heatmap_html, write_svg
from attnpo.display.output import make_console
from attnpo.display.page import CodeBlock, KeyValues, RawHtml, Section
from attnpo.display.printed import (
    KeyedTable,
    PublishedTable,
    file_label,
    find_matching_table,
    join_published,
    read_published_table,
)
from attnpo.display.tables import Cell
from attnpo.display.weighted_pair import WeightedPair
from attnpo.judge.layers import HeadRow, distinct_layers, layers_with_attention
from attnpo.judge.settings import Judge
from attnpo.judge.verdicts import judge_warning
from attnpo.lab.auto_layer import replace_layers
from attnpo.lab.reports.output import publish_report
from attnpo.lab.reports.report_config import ReportConfig, printed_files
from attnpo.models.spec import ModelSpec
from attnpo.run.components import LayerFinder
from attnpo.run.input_summary import describe_lost_weights_of_split
from attnpo.run.inputs import Inputs, encode_splits, make_heat_map_pairs
from attnpo.run.resolve import Readers, resolve
from attnpo.schema import SIDES, UserError
from attnpo.system.files import safe_filename
from attnpo.system.machine import package_versions
from attnpo.weights.arrival import COLUMNS as ARRIVED
from attnpo.weights.arrival import WeightCoverage
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import compute_source_weights
from attnpo.weights.postprocess import absolute_shares, effective_token_count

if TYPE_CHECKING:
    import pandas


SINK = ("first", "second", "third")  # the tokens of the paper's sink table
TOP_SHARE = 0.1
KEYS = ("model", "side", "token")
DIGITS = {
    **{"std": 4, "max": 4, "mean_length": 2, "effective": 1, "mass": 4, "weight": 4, "relative": 2},
    **{f"{place}_token_percent": 2 for place in ("first", "second", "third")},
    "uniform_percent": 2,
}


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of one set of weights, named by ``label``.

    ``sides``: mean statistics by side. ``sink``: mean statistics before the sink rule. ``tokens``: mean weights of the
    frequent tokens by side. ``most``: count of the most frequent token on one side. ``account``: pairs read and kept,
    coverage, warnings. ``heat``: pairs for heat maps.
    """

    label: str
    sides: dict[str, dict[str, float]]
    sink: dict[str, float]
    tokens: dict[str, "pandas.DataFrame"]
    most: int
    account: dict[str, Cell]
    heat: list[WeightedPair]


def write_weight_report(cfg: ReportConfig, folder: Path, mark: str) -> None:
    """Prints the tables for the weights that ``cfg`` describes, and writes them with heat maps to ``folder``.

    The page shows the heat maps of the first pairs; ``heat-WEIGHTS.svg`` contains only the first one. Weights missing
    from the store are computed as for a run, with one judge pass for all layers. ``mark``: digest of the command.
    """
    run, base, readers, built = resolve(cfg)
    texts = encode_splits(read_pairs(run.data, run.weights, base.store), base, run.lengths)
    name, transforms = run.composed.choices.get("weights"), run.transforms
    recipe = ExampleRecipe(run.weights, None, [*transforms.values()], run.align, run.data)
    layers = requested_layers(run.weights, name, readers, run.layers)
    measured = [
        measure_weights(
            made,
            texts.encoded["train"],
            base.tokenizer,
            label=weights_label(made.weighed.source, name, transforms),
            min_count=run.min_count,
            heat_maps=run.heat_maps,
        )
        for made in inputs_by_layer(recipe, readers, run.auto_layer, texts, layers)
    ]
    piece = base.tokenizer.convert_ids_to_tokens
    setting = run.composed.choices.get("setting", "prepared") if built else None
    model = model_label(run.judge, base.spec, setting) if run.label is None else run.label
    tables = weight_tables(measured, model, lambda token: str(piece(token)), min_count=cfg.min_count, top=cfg.top)
    notes = weight_notes(measured, run.seed, run.min_count)
    shown = [[table] for table in tables]
    for path in printed_files(cfg.printed):
        printed = read_published_table(path, KEYS)
        place = find_matching_table(tables, printed)
        mine, lines = select_model_rows(printed, model)
        shown[place] += [join_published(tables[place], mine)] if mine.rows else []
        notes += lines
    ranked = (row for row in tables[1].rows if isinstance(row["rank"], int) and row["rank"] <= cfg.top)
    shown[1][0] = replace(tables[1], rows=tuple(ranked))
    sections = [
        *(
            Section(f"Token weights of the first pairs: {one.label}", [RawHtml(heatmap_html(one.heat, page=False))])
            for one in measured
            if one.heat
        ),
        *(Section(f"Pairs and coverage: {one.label}", [KeyValues(one.account)]) for one in measured),
        Section("Versions and configuration", [KeyValues(package_versions()), CodeBlock(to_yaml(run.values))]),
    ]
    publish_report(f"Token weights: {model}", [*chain(*shown)], notes, folder, "weights", mark, sections, by="side")
    for one in measured:
        if one.heat:
            path = write_svg(one.heat[:1], folder / f"heat-{safe_filename(one.label)}.svg")
            make_console().print(f"  {path}", highlight=False, markup=False)


# ------------------------------------------------------------------------------------------------ weights


def requested_layers(
    source: WeightSource, name: str | None, readers: Readers, layers: Sequence[int | str] | str
) -> list[int | None]:
    """Returns the distinct layer numbers to report on; [None] for the weights as configured.

    ``name``: selected option of ``weights``. Raises UserError for weights without a layer, and for layers that the
    judge does not have.
    """
    if not layers:
        return [None]
    if not hasattr(source, "layer"):
        raise UserError(f"layers: weights={name} has no layer to select; omit layers=")
    depth = readers.make_judge().num_layers
    return list(layers_with_attention(depth) if layers == "all" else distinct_layers(layers, depth, "layers"))


def inputs_by_layer(
    recipe: ExampleRecipe, readers: Readers, finder: LayerFinder, texts: EncodedTexts, layers: Sequence[int | None]
) -> Iterator[Inputs]:
    """Yields the weighted training examples of each layer, with at most one judge pass in total."""
    source, encoded = recipe.source, texts.encoded
    chosen = [layer for layer in layers if layer is not None]
    if len(chosen) > 1 and not set(chosen) <= set(source.layers_to_store(readers.make_judge().num_layers)):
        readers.weigh(
            replace_layers(source, chosen[0], chosen), encoded
        )  # store_layers: selected would judge once a layer
    for layer in layers:
        here = (
            replace_layers(source, layer)
            if layer is not None
            else finder.resolve_layer(source, readers, encoded["train"])[0]
        )
        weighed, made = readers.weigh(here, encoded), replace(recipe, source=here, reader=readers.make_reader(here))
        train, read, captured, rows = encoded["train"], weighed.source, weighed.captured, weighed.layers
        fitted = fit_transforms(recipe.transforms, train, read, captured, rows, recipe.align)
        examples = prepare_examples(train, read, captured, recipe.align, rows, fitted)
        yield Inputs(texts.pairs, weighed, {"train": examples}, made)


# ------------------------------------------------------------------------------------------------ statistics


def measure_weights(
    made: Inputs,
    encoded: EncodedSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    label: str,
    min_count: int = 1,
    heat_maps: int = 0,
) -> WeightStatistics:
    """Computes all table statistics of one set of weights. Raises UserError if no training pair was kept.

    ``encoded``: the training pairs.
    """
    examples = made.examples["train"]
    if not examples.examples:
        raise UserError(
            f"{label}: none of the {examples.read} pairs was kept: {'; '.join(examples.tally.format_lines())}"
        )
    sides, tokens, most = {}, {}, 0
    for place, side in enumerate(SIDES):
        ids = [example.sides[place].response_ids for example in examples.examples]
        weights, scales = (
            [getattr(one, name)[place] for one in examples.examples] for name in ("weights", "weight_scales")
        )
        sides[side] = mean_statistics(
            response_statistics(one.weights[place], one.lengths[place]) for one in examples.examples
        )
        means = token_means(ids, weights, scales)
        tokens[side] = means[means["count"] >= min_count]
        most = max([most, *means["count"].tolist()])
    kept = {example.pair_id for example in examples.examples}
    arrived = WeightCoverage.mean_over(examples.examples)
    account: dict[str, Cell] = {
        "pairs read": examples.read,
        "pairs kept": len(examples.examples),
        "coverage": arrived.coverage,
        **{head: getattr(arrived, name) for name, head in ARRIVED.items()},
        **dict(examples.tally.counts),
    }
    said = {
        "warning": None if made.weighed.verdicts is None else judge_warning(made.weighed.verdicts),
        "weights lost": describe_lost_weights_of_split(made, "train"),
    }
    account |= {name: text for name, text in said.items() if text is not None}
    sink = mean_statistics(statistics_before_sink(made.weighed, encoded, kept))
    heat = make_heat_map_pairs(made, tokenizer, heat_maps) if heat_maps else []
    return WeightStatistics(label, sides, sink, tokens, most, account, heat)


def statistics_before_sink(weighed: WeightingResult, encoded: EncodedSet, kept: set[str]) -> Iterator[dict[str, float]]:
    """Yields the statistics of each kept response on the source's own tokens, before the sink rule."""
    source = weighed.source
    if source.postprocess is not None:
        source = replace(source, postprocess=replace(source.postprocess, sink_tokens=0))  # type: ignore[type-var]
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        if pair.pair_id not in kept:
            continue
        found = weighed.captured.get(pair.pair_id)
        finished = compute_source_weights(source, found, sides, layers=weighed.layers, pair=pair)
        for side in SIDES:
            yield response_statistics(finished[side].weights)


# ------------------------------------------------------------------------------------------------ tables


def weight_tables(
    measured: Sequence[WeightStatistics],
    model: str,
    piece: Callable[[int], str],
    *,
    min_count: int = 100,
    top: int = 10,
) -> list[KeyedTable]:
    """Builds the tables of concentration, most-weighted tokens and sink share for several sets of weights.

    The token table contains all tokens that occur at least ``min_count`` times, regardless of ``top``, so that a
    paper's tokens can be joined. ``piece`` returns a token's text in the vocabulary.
    """
    rows: dict[str, list[dict[str, Cell]]] = {"statistics": [], "tokens": [], "sink": []}
    for one in measured:
        weights: dict[str, Cell] = {"weights": one.label}
        for side in SIDES:
            rows["statistics"].append({**weights, **statistics_row(model, side, one.sides[side])})
            named: dict[str, Cell] = {**weights, "model": model, "side": side}
            rows["tokens"] += [{**named, **row} for row in token_rows(one.tokens[side], piece)]
        rows["sink"].append({**weights, **sink_row(model, one.sink)})
    titles = {
        "statistics": "Concentration of the weights on training tokens, means over responses",
        "tokens": f"Most-weighted training tokens that occur at least {min_count} times, top {top} of each side",
        "sink": "Percent of the weight on the first tokens, before the sink rule",
    }
    heads = {name: tuple(found[0]) for name, found in rows.items() if name != "tokens"}
    heads["tokens"] = ("weights", "model", "side", "rank", "token", "weight", "relative", "count")
    keys = {"statistics": KEYS[:2], "tokens": KEYS, "sink": KEYS[:1]}
    return [
        KeyedTable(name, titles[name], heads[name], tuple(found), keys[name], "weights", DIGITS)
        for name, found in rows.items()
    ]


# ------------------------------------------------------------------------------------------------ words


def weights_label(source: WeightSource, option: str | None, transforms: Iterable[str]) -> str:
    """Returns a label for the weights: the option, its layers and the transforms."""
    name = option or type(source).__name__
    if hasattr(source, "layer"):
        rows = source.rows_to_read()
        name += " " + "+".join(f"L{row.layer}H{row.head}" if isinstance(row, HeadRow) else f"L{row}" for row in rows)
    return " + ".join([name, *transforms])


def model_label(judge: Judge, model: ModelSpec, setting: str | None) -> str:
    """Returns a label for the model behind the weights: the last part of the judge's or policy's path.

    ``setting``: used instead for a model built by ``prepare``, which has no name.
    """
    if judge.path is None and setting is not None:
        return setting
    return Path(judge.path or model.path).name


def select_model_rows(printed: PublishedTable, model: str) -> tuple[PublishedTable, list[str]]:
    """Returns the printed rows of a model (all if the file names no model), and a note about rows of other models."""
    mine = tuple(row for row in printed.rows if row.get(KEYS[0], model) == model)
    names = list(dict.fromkeys(str(row[KEYS[0]]) for row in printed.rows if row not in mine))
    lines = []
    if names and mine:
        lines.append(f"{file_label(printed.path)}: skipped rows for other models ({', '.join(names)})")
    elif names:
        said = f"set label={names[0]}" + (f" (or {', '.join(names[1:])})" if names[1:] else "")
        lines.append(
            f"{file_label(printed.path)}: skipped, because its numbers are for models other than {model}; if {model} "
            f"is one of them under another name, {said}"
        )
    return replace(printed, rows=mine), lines


def weight_notes(measured: Sequence[WeightStatistics], seed: int, min_count: int) -> list[str]:
    """Lists the notes below the tables: pairs used, what each table measures, and warnings."""
    cell = measured[0].account
    lines = [
        f"training split: {cell['pairs kept']} of {cell['pairs read']} pairs, both sides of each; seed {seed}",
        "statistics and tokens: measured on training tokens, as the objective uses them (after the sink rule, "
        "transforms, alignment and truncation); mean_length is |y|, as the source counts it",
        "sink: measured on the source's own tokens before the sink rule, transforms and alignment, both sides together",
    ]
    for name in ("warning", "weights lost"):
        lines += dict.fromkeys(f"WARNING: {one.account[name]}" for one in measured if name in one.account)
    most = max(one.most for one in measured)
    if most < min_count:
        lines.append(
            f"no token occurs at least {min_count} times on either side (largest count: {most}); lower min_count"
        )
    return lines


def response_statistics(weights: Float[Tensor, " m"], length: float | int | None = None) -> dict[str, float]:
    """Computes the statistics of one response's weights.

    ``std``: over the tokens of the row, ddof 0. ``mean_length``: ``length``, i.e. |y| as counted by the source
    (default: the number of weights). ``effective``: effective number of weights, 1 / sum a^2. ``effective_share``: the
    effective number divided by the number of weights; 1 for uniform weights. ``entropy``: in nats. ``top10_share``:
    share of the top tenth of the tokens (rounded up). ``mass``: sum of the weights. ``uniform``: a token's share under
    uniform weights. ``first``, ``second``, ``third``: shares of the first three tokens, 0 if there are fewer.

    Effective number, entropy and shares are 0 if all weights are 0. Raises UserError for an empty or non-finite row.
    """
    count = weights.numel()
    if count == 0:
        raise UserError("weight statistics: expected at least one weight, got an empty row; drop empty responses first")
    if not bool(torch.isfinite(weights).all()):
        bad = int((~torch.isfinite(weights)).sum())
        raise UserError(f"weight statistics: expected finite weights, but {bad} of {count} are not finite")
    row, shares, effective = weights.double(), absolute_shares(weights), effective_token_count(weights)
    tenth = -(-count // round(1 / TOP_SHARE))  # integer arithmetic: 0.1 * 30 is above 3 in floating point
    return {
        "std": float(row.std(correction=0)),
        "max": float(row.max()),
        "mean_length": float(count if length is None else length),
        "effective": effective,
        "effective_share": effective / count,
        "entropy": abs(float(torch.special.entr(shares).sum())),  # abs: no minus zero for a single token
        "top10_share": float(shares.topk(tenth).values.sum()),
        "mass": float(row.sum()),
        "uniform": 1.0 / count,
        **dict(zip(SINK, [*shares[: len(SINK)].tolist(), 0.0, 0.0, 0.0], strict=False)),
    }


def mean_statistics(statistics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Averages each statistic over responses, and adds the number of responses as ``responses``.

    Raises UserError if there are no responses.
    """
    rows = list(statistics)
    if not rows:
        raise UserError("weight statistics: expected at least one response, got none")
    means = torch.tensor([[*one.values()] for one in rows], dtype=torch.float64).mean(dim=0).tolist()
    return {**dict(zip(rows[0], means, strict=True)), "responses": len(rows)}


def statistics_row(model: str, side: str, summary: Mapping[str, float]) -> dict[str, str | float | int]:
    """Builds a row of the paper's statistics table (side, model, std, max, mean_length), with our further statistics.

    All values are means over responses. The paper does not say this of the maximum, but its values are 0.09 to 0.12,
    whereas the maximum over all responses would be near 1.
    """
    numbers = {name: value for name, value in summary.items() if name not in ("uniform", *SINK)}
    return {"side": side, "model": model, **numbers}


def sink_row(model: str, summary: Mapping[str, float]) -> dict[str, str | float | int]:
    """Builds a row of the paper's sink table: model, and percentage of the weight on the first, second and third token.

    ``summary``: means before the sink rule, over both sides of all pairs. ``uniform_percent`` is our addition: the
    percentage of each token under uniform weights on responses of these lengths.
    """
    percents = {f"{place}_token_percent": 100 * summary[place] for place in SINK}
    return {"model": model, **percents, "uniform_percent": 100 * summary["uniform"]}


# ------------------------------------------------------------------------------------------------ tokens


def token_means(
    ids: Sequence[Sequence[int]], weights: Sequence[Float[Tensor, " _"]], lengths: Sequence[float | int]
) -> "pandas.DataFrame":
    """Returns the mean weight of every token id over all responses, largest first, as in the paper.

    Tokens of short answers rank high merely because the answers are short. ``relative`` corrects for this: it is the
    mean of the weight times ``lengths``, which is |y| for a distribution and 1 for factors. Each occurrence counts
    once. Ties go to the smaller id.
    """
    import pandas

    frame = pandas.DataFrame(
        {
            "id": np.concatenate([np.zeros(0, dtype=np.int64), *ids]),
            "weight": torch.cat([torch.zeros(0), *weights]).double().numpy(),
            "length": np.repeat(np.array(lengths, dtype=float), np.array([len(of) for of in ids], dtype=int)),
        }
    )
    frame["relative"] = frame["weight"] * frame["length"]
    means = frame.groupby("id").agg(weight=("weight", "mean"), relative=("relative", "mean"), count=("weight", "size"))
    return means.sort_values("weight", ascending=False, kind="stable")


def token_rows(means: "pandas.DataFrame", decode: Callable[[int], str]) -> list[dict[str, str | float | int]]:
    """Builds a table row for each of ``means``, ranked in order; ``decode`` returns the text of a token id."""
    rows = means.to_dict("index").items()
    return [{"rank": rank, "token": decode(token), **row} for rank, (token, row) in enumerate(rows, 1)]
