"""From a composed config to training examples: pairs read and encoded, weights captured, examples made.

Shared by ``fit``, ``weigh`` and ``report``; nothing here loads the policy.
"""

from dataclasses import dataclass

from omegaconf import DictConfig

from attnpo.config import build
from attnpo.data.base import PairSet
from attnpo.data.prepare import EncodedSet, ExampleSet, encode_pairs, fit_transforms, prepare_examples
from attnpo.data.rules import BatchPlan
from attnpo.schema import UserError
from attnpo.studies.ground import Ground, lay_ground
from attnpo.studies.startup import planned_processes
from attnpo.studies.weighing import SPLITS, Weighed, weigh


@dataclass(frozen=True)
class Inputs:
    """Pairs, weights and training examples of both splits."""

    ground: Ground
    pairs: dict[str, PairSet]
    weighed: Weighed
    examples: dict[str, ExampleSet]


def read_pairs(ground: Ground) -> dict[str, PairSet]:
    """The pairs of both splits."""
    source = build(ground.cfg.data)
    return {split: source.load(split) for split in SPLITS}


def encode(ground: Ground, pairs: dict[str, PairSet]) -> dict[str, EncodedSet]:
    """Training ids of both splits under the run's length rules."""
    rules = build(ground.cfg.lengths)
    encoded = {}
    for split, found in pairs.items():
        try:
            encoded[split] = encode_pairs(found.pairs, ground.chat, rules)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error
    return encoded


def make_inputs(cfg: DictConfig) -> Inputs:
    """Everything before the policy: pairs, weights (from the store or computed), training examples."""
    return inputs_on(lay_ground(cfg))


def inputs_on(ground: Ground) -> Inputs:
    """The same on ground that is laid already."""
    plan: BatchPlan = build(ground.cfg.batch)
    plan.accumulation(planned_processes(ground.cfg))  # refuses what cannot be split evenly
    pairs = read_pairs(ground)
    encoded = encode(ground, pairs)
    weighed = weigh(ground, encoded)
    align = build(ground.cfg.align)
    source, captured, layers = weighed.source, weighed.captured, weighed.layers
    chosen = [build(node) for node in ground.cfg.transforms.values()]
    transforms = fit_transforms(chosen, encoded["train"], source, captured, layers)
    examples = {
        split: prepare_examples(encoded[split], source, captured, align, layers, transforms) for split in SPLITS
    }
    return Inputs(ground, pairs, weighed, examples)
