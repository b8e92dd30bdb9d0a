"""``weights.layer=auto``: finds the layer whose top-weighted tokens the judge's verdict depends on most."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import stdev

from attnpo.config.fields import to_config
from attnpo.data.prepare import EncodedSet, sample_as_splits, select_calibration_pairs
from attnpo.judge.base import CAPTURE_VERSION
from attnpo.judge.judge import RunJudge
from attnpo.judge.layers import layers_with_attention
from attnpo.lab.light import LayerRules
from attnpo.run.combinations import CHOICE
from attnpo.run.resolve import Readers
from attnpo.schema import PreferencePair, UserError, digest
from attnpo.system.credentials import identify
from attnpo.system.files import read_record, write_record
from attnpo.system.processes import world_size
from attnpo.weights.base import WeightSource, resolve_layer
from attnpo.weights.faithfulness import (
    EMPTIED,
    VERSION,
    Rankings,
    RemovalMode,
    RemovalSettings,
    measure_token_removal,
    rank_tokens,
)

log = logging.getLogger(__name__)


CLEAR = 2.0
"""Two scores count as different if they are more than this many standard errors apart."""


@dataclass(frozen=True)
class LayerChoice:
    """Selected layer and the scores of all layers.

    A layer's score is how much more the verdict's log-odds fall when its top-weighted tokens are removed than when
    random tokens are, averaged over pairs and over the shares of tokens removed.

    ``error``: standard error of the selected layer's score over pairs. ``errors``: for each other layer, the standard
    error of its paired difference from the selected layer. Both are None for fewer than two pairs. ``full``: mean
    log-odds of the judge's verdict on whole responses, an upper bound on the drop. ``pairs``: number of pairs scored.
    ``left_out``: number of pairs that could not be shown to the judge. ``emptied``: number of shortened responses with
    no tokens left. ``prompts`` and ``seconds``: cost of the search.
    """

    layer: int
    scores: dict[int, float]
    error: float | None
    errors: dict[int, float | None]
    full: float
    pairs: int
    left_out: int
    emptied: int
    prompts: int
    seconds: float
    rules: LayerRules

    def caveats(self) -> list[str]:
        """Lists warnings, with advice, if the sample is too small for a reliable choice."""
        more = "increase auto_layer.pairs"
        if self.pairs + self.left_out < self.rules.pairs:
            more = "there are no more training pairs, so set weights.layer to a number"
        found = []
        best = self.scores[self.layer]
        if self.error is None or best <= CLEAR * self.error:
            found.append(
                f"the sample of {self.pairs} pairs is too small to tell layer {self.layer} apart from random "
                f"tokens ({best:+.3f}, standard error {_format_error(self.error)}): {more}"
            )
        like = [
            layer for layer, error in self.errors.items() if error is None or self._lead_over(layer) <= CLEAR * error
        ]
        if like:
            *first, last = sorted([self.layer, *like])
            gaps = ", ".join(
                f"{layer}: {self._lead_over(layer):.3f} +- {_format_error(self.errors[layer])}" for layer in like
            )
            found.append(
                f"the sample of {self.pairs} pairs is too small to tell layers {', '.join(map(str, first))} and {last} "
                f"apart (lead of layer {self.layer} over each of them, with its standard error: {gaps}): {more}"
            )
        return found

    def _lead_over(self, layer: int) -> float:
        return self.scores[self.layer] - self.scores[layer]

    def to_dict(self) -> dict[str, object]:
        """Returns all fields as JSON data, with the caveats under the key ``doubts``."""
        values: dict[str, object] = json.loads(json.dumps(asdict(self)))  # the keys of ``scores`` become text
        return {**values, "doubts": self.caveats()}

    def summary(self) -> str:
        """Describes the choice and the scores of all layers in one log line."""
        scores = ", ".join(f"{layer}: {score:+.3f}" for layer, score in self.scores.items())
        return (
            f"weights.layer=auto selected layer {self.layer} of {len(self.scores)}; drop in the verdict's log-odds "
            f"beyond that of random removals, by layer: {scores} (full log-odds {self.full:.3f}; {self.pairs} pairs "
            f"scored, {self.left_out} skipped; {self.emptied} shortened responses were empty)"
        )


def _format_error(error: float | None) -> str:
    return "unknown" if error is None else f"{error:.3f}"


def find_layer(source: WeightSource, readers: Readers, train: EncodedSet, rules: LayerRules) -> LayerChoice:
    """Finds the layer for these training pairs, or loads an earlier choice from the store.

    Logs the choice and warns if the sample is too small for it. Raises UserError in a multi-process job if the store
    has no choice yet.
    """
    sample = select_calibration_pairs(train.pairs, rules.pairs)
    judge = readers.make_judge()
    key = {
        "version": VERSION,
        "capture": CAPTURE_VERSION,
        "pairs": [pair.pair_id for pair in sample],
        "rules": asdict(rules),
        "weights": {name: value for name, value in to_config(source).items() if name != "store_layers"},
        "judge": judge.fingerprint(),
        "prompts": judge.prompts.fingerprint(),
    }
    path = Path(readers.base.store.root) / CHOICE / f"{digest(key)[:20]}.json"
    known = _load_choice(path, key)
    if known is None and world_size() > 1:
        raise UserError(
            f"weights.layer=auto has not been resolved yet, and this job has {world_size()} processes, which would all "
            f"search for the layer: run {readers.command} in one process until it logs the layer, or set weights.layer "
            f"to a number"
        )
    if known is None:
        known = _score_layers(source, readers, train, sample, judge, rules)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, {"key": identify(key), **known.to_dict()})
        log.info("%s (%d judge prompts, %.0f s)", known.summary(), known.prompts, known.seconds)
    else:
        log.info("%s; loaded from the store", known.summary())
    for doubt in known.caveats():
        log.warning("weights.layer=auto: %s", doubt)
    return known


def _score_layers(
    source: WeightSource,
    readers: Readers,
    train: EncodedSet,
    sample: list[PreferencePair],
    judge: RunJudge,
    rules: LayerRules,
) -> LayerChoice:
    began = time.perf_counter()
    ranked = layer_rankings(source, readers, train, sample)
    log.info(
        "weights.layer=auto: scoring %d layers on %d training pairs with at most %d judge prompts",
        len(ranked),
        len(sample),
        2 * len(sample) + len(sample) * len(ranked) * len(rules.shares) * (2 + rules.draws),
    )
    loaded = judge.load(readers.base.device)
    removal = RemovalSettings(rules.shares, rules.draws, rules.seed, (RemovalMode.REMOVE,))
    sources = {str(layer): rows for layer, rows in ranked.items()}
    progress = partial(log.info, "weights.layer=auto: %d of %d judge prompts done")
    found = measure_token_removal(sample, sources, loaded.model, loaded.prompts, removal, progress)
    each = {layer: found.mean_advantages(str(layer)) for layer in ranked}
    scores = {layer: round(float(values.mean()), 6) for layer, values in each.items()}
    best = best_layer(scores)
    return LayerChoice(
        layer=best,
        scores=scores,
        error=standard_error(each[best].tolist()),
        errors={
            layer: standard_error((each[best] - values).tolist()) for layer, values in each.items() if layer != best
        },
        full=round(float(found.full.mean()), 6),
        pairs=len(found.pair_ids),
        left_out=len(sample) - len(found.pair_ids),
        emptied=found.counts[EMPTIED],
        prompts=found.prompts,
        seconds=round(time.perf_counter() - began, 2),
        rules=rules,
    )


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of ``values``; None for fewer than two."""
    return round(stdev(values) / math.sqrt(len(values)), 6) if len(values) > 1 else None


def best_layer(scores: Mapping[int, float]) -> int:
    """Returns the layer with the highest score. Ties go to the deepest layer, which has seen the most context."""
    return max(scores, key=lambda layer: (scores[layer], layer))


def layer_rankings(
    source: WeightSource,
    readers: Readers,
    encoded: EncodedSet,
    sample: list[PreferencePair],
    layers: "tuple[int | str, ...]" = (),
) -> dict[int, Rankings]:
    """Returns the final weights that ``source`` assigns to ``sample`` for each of ``layers`` (empty: all layers).

    ``sample``: subset of the pairs in ``encoded``. Pairs missing from the store are judged once for all layers.
    """
    depth = readers.make_judge().num_layers
    every = sorted({resolve_layer(layer, depth) for layer in layers or layers_with_attention(depth)})
    weighed = readers.weigh(replace_layers(source, 1, every), sample_as_splits(encoded, sample))
    return {
        layer: rank_tokens(replace_layers(source, layer).resolve(depth), weighed.captured, weighed.layers)
        for layer in every
    }


def pool_splits(encoded: Mapping[str, EncodedSet]) -> EncodedSet:
    """Merges the pairs of all splits into one set, training pairs first."""
    others = [made for split, made in encoded.items() if split != "train"]
    return replace(
        encoded["train"],
        pairs=[pair for made in (encoded["train"], *others) for pair in made.pairs],
        encoded=[row for made in (encoded["train"], *others) for row in made.encoded],
    )


def replace_layers(source: WeightSource, layer: int, layers: Sequence[int] = ()) -> WeightSource:
    """Returns a copy of ``source`` that reads ``layer``, or all of ``layers`` if any are given."""
    return replace(source, layer=layer, layers=tuple(layers))  # type: ignore[type-var]


def _load_choice(path: Path, key: Mapping[str, object]) -> LayerChoice | None:
    """Loads a stored choice; None if there is no file, or (with a warning) if it is damaged or has a different key."""
    if not path.exists():
        return None
    stored = read_record(path)
    try:
        if stored is None or digest(identify(stored.pop("key"))) != digest(identify(key)):
            raise ValueError("the file is damaged or has a different key")
        scores = {int(layer): float(score) for layer, score in stored.pop("scores").items()}
        errors = {int(layer): error for layer, error in stored.pop("errors").items()}
        del stored["doubts"]
        rules = stored.pop("rules")
        rules = LayerRules(**{**rules, "shares": tuple(rules["shares"])})
        choice = LayerChoice(scores=scores, errors=errors, rules=rules, **stored)
        if choice.layer not in scores or not all(map(math.isfinite, scores.values())):
            raise ValueError("the scores are not finite, or the selected layer has no score")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        log.warning("weights.layer=auto: ignoring the stored choice %s and searching again (%s)", path, problem)
        return None
    return choice
