"""``report weights explorer=N``: the stored weights of N training pairs, of one or two sources, as one page to search.

The combined round is what the objective multiplies. A single round is finished and aligned by itself, before
transforms.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnpo.config.compose import load
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import EncodedSet
from attnpo.data.prepared import Recipe
from attnpo.data.reading import read_pairs
from attnpo.display.explorer import ExplorerPair, ExplorerSide, SideWeights, View, write_explorer
from attnpo.display.output import terminal
from attnpo.lab.reports.report_config import ReportConfig
from attnpo.lab.reports.weight_report import asked_layers, each_weights, model_label, weights_label
from attnpo.run.heat_rows import heat_rows
from attnpo.run.inputs import Inputs, encode
from attnpo.run.models import reference_table
from attnpo.run.resolve import resolve
from attnpo.schema import SIDES, EncodedResponse, PairWeights, PreferencePair, UserError
from attnpo.system.store import Table
from attnpo.weights.arrival import Weighted
from attnpo.weights.base import OnlineSource
from attnpo.weights.capture import LogpPair, load_logps
from attnpo.weights.pipeline import training_weights

PAGE = "explorer.html"


def weight_explorer(cfg: ReportConfig, folder: Path) -> None:
    """Writes ``explorer.html`` of the first ``cfg.explorer`` training pairs to ``folder``.

    ``cfg.against``: words that make the second source's configuration out of this one, overrides or, without ``=``, an
    option of weights. Log-probabilities of the reference are shown for pairs that the store has them of. Raises
    UserError when a source computes its weights in training, or when the two are not on the same training tokens.
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
        texts = encode(read_pairs(run.data, run.weights, base.store), base, run.lengths)
        recipe = Recipe(run.weights, None, [*run.transforms.values()], run.align, run.data)
        name, layered = choices.get("weights"), hasattr(run.weights, "layer")
        layers = asked_layers(run.weights, name, readers, run.layers if layered else ())
        every = each_weights(recipe, readers, run.auto_layer, texts, layers)
        labelled = ((weights_label(made.weighed.source, name, run.transforms), made) for made in every)
        sources.append(explored(labelled, texts.encoded["train"], base.tokenizer, run.explorer))
    pairs = sources[0]
    for others in sources[1:]:
        marked = f" ({' '.join(more)})"
        pairs = {pair_id: joined(pair, others[pair_id], marked) for pair_id, pair in pairs.items() if pair_id in others}
    if not pairs:
        raise UserError(f"explorer={cfg.explorer}: the sources have no pair in common; give a larger number")
    logps = stored_logps(table, list(pairs.values()))
    shown = [with_logps(pair, logps.get(pair_id)) for pair_id, pair in pairs.items()]
    note = "on training tokens; combined: as the objective reads them; a single round: before transforms"
    path = write_explorer(folder / PAGE, shown, title=f"Token weights: {label}", note=note)
    terminal().print(f"  {path}", highlight=False, markup=False)


def explored(
    every: Iterable[tuple[str, Inputs]], train: EncodedSet, tokenizer: PreTrainedTokenizerBase, count: int
) -> dict[str, ExplorerPair]:
    """Returns the first ``count`` pairs that all layers of a source keep, by id, with a view per layer and round.

    ``every``: the source at each layer, with its label.
    """
    kept: dict[str, ExplorerPair] = {}
    for number, (label, made) in enumerate(every):
        if isinstance(made.weighed.source, OnlineSource):
            raise UserError(
                f"explorer: {label} computes its weights in training, so the store has none to show; take other weights"
            )
        found = first_pairs(made, train, tokenizer, label, count)
        if number:
            found = {name: joined(kept[name], pair) for name, pair in found.items() if name in kept}
        kept = found
    return kept


def first_pairs(
    made: Inputs, encoded: EncodedSet, tokenizer: PreTrainedTokenizerBase, label: str, count: int
) -> dict[str, ExplorerPair]:
    """Returns the first ``count`` training pairs with the views of one source and layer."""
    texts = {pair.pair_id: (pair, sides) for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True)}
    decode, rows = tokenizer.decode, heat_rows(made, tokenizer, count)
    pairs = {}
    for example, row in zip(made.examples["train"].examples[:count], rows, strict=True):
        pair, _ = texts[example.pair_id]
        chosen, rejected = (
            ExplorerSide.of(
                pair.response(side),
                ids,
                {one: str(decode([one])) for one, (a, b) in zip(ids.response_ids, ids.offsets, strict=True) if b <= a},
            )
            for side, ids in zip(SIDES, example.sides, strict=True)
        )
        verdicts = "; ".join(f"round {number}: {one.summary()}" for number, one in enumerate(row.verdicts, 1))
        seen = dict(views(made, label, example, texts[pair.pair_id]))
        pairs[pair.pair_id] = ExplorerPair(pair.pair_id, pair.prompt, chosen, rejected, seen, verdicts)
    return pairs


def views(
    made: Inputs, label: str, example: TrainingExample, texts: tuple[PreferencePair, Mapping[str, EncodedResponse]]
) -> Iterator[tuple[View, tuple[SideWeights, SideWeights]]]:
    """Yields the combined weights of an example as training reads them, and those of each of its rounds alone.

    ``label``: of ``weights_label``.
    """
    weighed, (pair, encoded) = made.weighed, texts
    option, *transforms = label.split(" + ")
    source, _, layer = option.partition(" ")
    name = " + ".join([source, *transforms])
    yield View(name, layer), both(example.weights, example.scales, example)
    captured = weighed.captured.get(pair.pair_id)
    rounds = () if captured is None else captured.rounds
    for number, one in enumerate(rounds if len(rounds) > 1 else (), 1):
        alone = PairWeights(pair.pair_id, (one,))
        found = training_weights(
            weighed.source, alone, encoded, made.recipe.align.method, layers=weighed.layers, pair=pair
        )
        scales = (1.0, 1.0) if found.factors else found.lengths
        yield View(name, layer, f"round {number}"), both((found.chosen, found.rejected), scales, found)


def both(
    weights: tuple[Tensor, Tensor], scales: tuple[float, float], arrived: Weighted
) -> tuple[SideWeights, SideWeights]:
    """Returns both sides' weights as the page takes them."""
    shares = arrived.coverage, arrived.source_coverage, arrived.kept_mass
    chosen, rejected = (
        SideWeights(weights[i].tolist(), float(scales[i]), *(float(share[i]) for share in shares)) for i in (0, 1)
    )
    return chosen, rejected


def joined(pair: ExplorerPair, other: ExplorerPair, marked: str = "") -> ExplorerPair:
    """Returns the pair with the other's views too; sources of the same name get ``marked`` behind it.

    UserError when the two are not on the same training tokens.
    """
    for name, mine, theirs in zip(SIDES, pair.sides, other.sides, strict=True):
        if list(mine.token_ids) != list(theirs.token_ids):
            raise UserError(
                f"against: pair {pair.pair_id}, {name}: the second source has other training tokens; let against "
                "change weights and judge, and leave model, data and lengths as they are"
            )
    taken = {view.source for view in pair.weights} if marked else set()
    added = {
        replace(view, source=view.source + marked) if view.source in taken else view: rows
        for view, rows in other.weights.items()
    }
    return replace(pair, weights={**pair.weights, **added}, note=pair.note or other.note)


# ------------------------------------------------------------------------------------------------ log-probs


def stored_logps(table: Table, pairs: Sequence[ExplorerPair]) -> dict[str, LogpPair]:
    """Returns the reference's log-probabilities that the store has of the pairs, by id."""
    lengths = {pair.pair_id: (len(pair.chosen.token_ids), len(pair.rejected.token_ids)) for pair in pairs}
    lacking = set(table.missing(list(lengths), SIDES))
    present = [pair_id for pair_id in lengths if pair_id not in lacking]
    return load_logps(table, present, lengths) if present else {}


def with_logps(pair: ExplorerPair, logps: LogpPair | None) -> ExplorerPair:
    """Returns the pair with its reference log-probabilities, where there are any."""
    if logps is None:
        return pair
    chosen, rejected = (
        replace(side, logps={"reference": row.tolist()}) for side, row in zip(pair.sides, logps, strict=True)
    )
    return replace(pair, chosen=chosen, rejected=rejected)
