"""Does the verdict hang on the tokens a layer weighs most, and is that the layer that trains best: a study's analysis.

Measured once per world and seed, without a trained policy, for every layer, the rollout, equal weights (a floor: they
must come out near 0) and, where the truth is known, true importance. Compared over layers with the true importance and,
separately, with the trained reward at equal KL; nothing makes the three agree.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from attnpo.data.prepare import EncodedSet, calibration_pairs, sample_of
from attnpo.display.page import Section
from attnpo.lab.auto_layer import layer_rankings, pooled
from attnpo.lab.studies.study import MeasuredBy, Outcome
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.importance import decisive
from attnpo.run.components import Truth
from attnpo.run.readers import Readers
from attnpo.schema import SIDES, PreferencePair, UserError, check_least
from attnpo.weights.base import WeightSource
from attnpo.weights.faithfulness import Mode, Rankings, Removal, measure, rankings
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout

log = logging.getLogger(__name__)


ROLLOUT, EQUAL, TRUTH = "rollout", "equal weights", "true importance"


@dataclass(frozen=True)
class Faithfulness:
    """Faithfulness of every layer on ``pairs`` training pairs (then validation pairs), in the order of their ids.

    The top-weighted ``shares`` of the tokens of both responses are removed, or alone kept, against ``draws`` random
    sets of as many tokens from the same places, keyed by ``seed`` (an even number, so that the judge's liking for a
    place cancels). ``layers`` empty measures every layer of the judge. Layers are read with the study's own weights
    (their post-processing, their heads), the rollout with the same post-processing. ``kl_limit``: the KL to the base at
    which trained rewards are set beside it, each layer's read off its own path over the grid.
    """

    pairs: int = 250
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0
    layers: tuple[int | str, ...] = ()
    kl_limit: float = 1.0

    def __post_init__(self) -> None:
        check_least("faithfulness", 2, pairs=self.pairs)
        check_least("faithfulness", 1, draws=self.draws)
        if not self.kl_limit > 0:
            raise UserError(f"faithfulness.kl_limit: expected a KL above 0, got {self.kl_limit}")
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"faithfulness: expected shares between 0 and 1, got {list(self.shares)}")

    def measure(
        self,
        source: WeightSource,
        readers: Readers,
        truth: Truth | None,
        encoded: dict[str, EncodedSet],
        folder: Path,
    ) -> dict[str, object]:
        """Per weights and pair how much more the top-weighted tokens matter than random ones, and the true mass.

        Plain data: ``weights`` maps a name to ``layer``, ``mass``, ``remove`` and ``keep`` (by share a number per pair)
        and ``fall``; beside it what the whole responses give, what was read and what it cost.
        """
        began = time.perf_counter()
        pool, sample = self._sample(encoded)
        known = getattr(truth, "grammar", None)
        grammar = known if isinstance(known, Grammar) else None
        ranked = self._rankings(source, readers, pool, sample, grammar)
        loaded = readers.make_judge().load(readers.base.device)
        removal = Removal(self.shares, self.draws, self.seed)
        log.info("faithfulness: %d weights on %d pairs", len(ranked), len(sample))
        sources = {name: rows for name, (_, rows) in ranked.items()}
        progress = partial(log.info, "faithfulness: %d of %d judge prompts")
        found = measure(sample, sources, loaded.model, loaded.prompts, removal, progress)
        kept = [pair for pair in sample if pair.pair_id in set(found.pair_ids)]
        return {
            "pairs": len(found.pair_ids),
            "full": round(float(found.full.mean()), 4),
            "counts": dict(found.counts),
            "prompts": found.prompts,
            "seconds": round(time.perf_counter() - began, 1),
            "weights": {
                name: {
                    "layer": layer,
                    "mass": None if grammar is None else true_mass(kept, rows, grammar),
                    "fall": {str(share): round(float(found.fall(name, share).mean()), 4) for share in self.shares},
                    **{
                        mode.value: {
                            str(share): found.advantage(name, mode, share).round(4).tolist() for share in self.shares
                        }
                        for mode in Mode
                    },
                }
                for name, (layer, rows) in ranked.items()
            },
        }

    def _sample(self, encoded: dict[str, EncodedSet]) -> tuple[EncodedSet, list[PreferencePair]]:
        """Returns all pairs as one set, and those measured."""
        pool = pooled(encoded)
        first = calibration_pairs(encoded["train"].pairs, self.pairs)
        known = {pair.pair_id for pair in first}
        rest = [pair for pair in pool.pairs if pair.pair_id not in known] if len(first) < self.pairs else []
        return pool, [*first, *calibration_pairs(rest, self.pairs - len(first))]

    def _rankings(
        self,
        source: WeightSource,
        readers: Readers,
        pool: EncodedSet,
        sample: list[PreferencePair],
        grammar: Grammar | None,
    ) -> dict[str, tuple[int | None, Rankings]]:
        """Returns what is measured, by name: its layer if it is one, and its weights."""
        layers = layer_rankings(by_layer(source), readers, pool, sample, self.layers)
        found: dict[str, tuple[int | None, Rankings]] = {
            f"layer {layer}": (layer, rows) for layer, rows in layers.items()
        }
        found[ROLLOUT] = None, rollout_rankings(source, readers, pool, sample)
        tokens = next(iter(layers.values()))
        found[EQUAL] = None, equal_rankings(tokens)
        if grammar is not None:
            found[TRUTH] = None, true_rankings(sample, tokens, grammar)
        return found

    def sections(self, outcome: Outcome, measured: MeasuredBy) -> list[Section]:
        """Tables over layers, per seed and over seeds, the rank correlations, and a figure; one set per world."""
        from attnpo.lab.studies.faithfulness_pages import world_sections

        found = []
        for world in dict.fromkeys(world for world, _ in measured):
            by_seed = {seed: values for (of, seed), values in sorted(measured.items()) if of == world}
            found += world_sections(self, outcome, world, by_seed)
        return found


# ------------------------------------------------------------------------------------------------ weights


def by_layer(source: WeightSource) -> WeightSource:
    """Returns ``source`` where it reads a layer; else attention as it is by default."""
    return source if hasattr(source, "layer") else Attention()


def rollout_rankings(
    source: WeightSource, readers: Readers, pool: EncodedSet, sample: list[PreferencePair]
) -> Rankings:
    """Returns the rollout's weights of ``sample``, post-processed as the study's are; what the store
    lacks is judged.
    """
    own = getattr(by_layer(source), "postprocess", None)
    rollout = Rollout() if own is None else Rollout(postprocess=own)
    weighed = readers.weigh(rollout, sample_of(pool, sample))
    return rankings(weighed.source, weighed.captured, weighed.layers)


def equal_rankings(tokens: Rankings) -> Rankings:
    """Returns weight 1 for every token."""
    return {
        name: {side: replace(row, weights=(1.0,) * len(row.weights)) for side, row in rows.items()}
        for name, rows in tokens.items()
    }


def true_rankings(sample: Sequence[PreferencePair], tokens: Rankings, grammar: Grammar) -> Rankings:
    """Weight 1 for the tokens that hold a decisive character, 0 for the others."""
    return {
        pair.pair_id: {
            side: replace(row, weights=tuple(map(float, decisive(pair, side, row.offsets, grammar))))
            for side, row in tokens[pair.pair_id].items()
        }
        for pair in sample
        if pair.pair_id in tokens
    }


def true_mass(sample: Sequence[PreferencePair], rows: Rankings, grammar: Grammar) -> float:
    """Returns the share of the weights on decisive tokens, mean over the responses that have any; NaN when none has."""
    shares = []
    for pair in sample:
        for side in SIDES:
            row = rows[pair.pair_id][side]
            marks = decisive(pair, side, row.offsets, grammar)
            total = sum(row.weights)
            if any(marks) and total > 0:
                shares.append(sum(w for w, mark in zip(row.weights, marks, strict=True) if mark) / total)
    return round(sum(shares) / len(shares), 4) if shares else math.nan
