"""``python -m experiments.gains.by_seed``: intervals over seeds of published gains, and gains pooled over studies.

Reads ``docs/gain_cases.json``: gains of judge layers over uniform weights at KL 0.5, one per seed and world, of the
studies regimes, layer_sweep, controls and long_answers. Rewards per prompt were not kept, so intervals are Student's
t over the seeds. Studies were pooled after their runs: strong evidence if they agree, but not a registered test.
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from attnpo.display.page import TableBlock
from attnpo.display.tables import Cell, table_markdown
from attnpo.evaluation.intervals import QUANTILE, Interval, mean_interval, t_quantile

CASES = Path(__file__).parents[2] / "docs" / "gain_cases.json"
LAYERS = {"regimes": ("1", "2", "4"), "layer_sweep": ("1", "2", "3", "4"), "controls": ("1",), "long_answers": ("1",)}
"""Layers of each study's arms, in the order of its cases."""
MISSING = {"clean, seed 25": "4", "few pairs, seed 28": "1", "style words, seed 28": "24"}
"""Layers without a gain at this KL in ``regimes``; its printed tables mark them with "4 of 5 seeds"."""
WHY_CHANGE = (0.110, -0.007, 0.226)
"""Printed change of attention's gain from 0 to 30 % wrong labels in ``why`` (seeds 20 to 24), with its old interval.

That interval covers 99 % rather than 95 %, so it counts for too little in the pooled gain.
"""

HEAD = """\
# Gains over uniform weights at KL 0.5, over seeds

Commands need `. .venv/bin/activate`. Made from [gain_cases.json](../../docs/gain_cases.json) by
`python -m experiments.gains.by_seed > experiments/results/by_seed.md`. Intervals of 95 % are Student's t over seeds,
because rewards per prompt were not kept. Older judge wording: layers 2 to 4 lost 15 to 23 % of their weights.
"""

Gains = dict[tuple[str, str, str], dict[int, float]]  # by study, world and layer, then by seed


def read_gains(path: Path = CASES) -> Gains:
    """Returns the gains of every layer by seed."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"].values():
        ((study, world, seed),) = re.findall(r"(\w+)-testbed(?:: (.+))?, seed (\d+)", case["group"])
        groups[study, world, int(seed)].append(case["gain"])
    gains: Gains = defaultdict(dict)
    for (study, world, seed), found in groups.items():
        missing = MISSING.get(f"{world}, seed {seed}", "")
        layers = [layer for layer in LAYERS[study] if layer not in missing]
        for layer, gain in zip(layers, found, strict=True):
            gains[study, world, layer][seed] = gain
    # Seeds 20 to 22 of controls are those of layer_sweep: the same arm, world and grid.
    for seed, gain in gains["layer_sweep", "", "1"].items():
        gains["controls", "", "1"][seed] = gain
    return gains


def over_seeds(values: list[float]) -> Interval:
    """Returns the mean with Student's t interval over seeds."""
    return mean_interval(np.array(values)[:, None])


def signed_text(gain: Interval) -> str:
    """Formats a gain with its sign and interval."""
    return f"{'+' * (gain.mean > 0)}{gain.text()}"


def pooled_change(gains: Gains) -> tuple[Interval, Interval]:
    """Returns how much attention gains as labels get worse: in regimes, and pooled with why by inverse variance."""
    noisy, clean = gains["regimes", "plain", "1"], gains["regimes", "clean", "1"]
    here = over_seeds([noisy[seed] - clean[seed] for seed in sorted(noisy)])
    mean, low, high = WHY_CHANGE
    t_one = t_quantile(QUANTILE, here.seeds - 1)
    errors = [(here.high - here.low) / 2 / t_one, (high - low) / 2 / t_one]
    weights = np.array([1 / error**2 for error in errors])
    pooled = float(weights @ [here.mean, mean] / weights.sum())
    reach = t_quantile(QUANTILE, 2 * (here.seeds - 1)) / math.sqrt(float(weights.sum()))
    return here, Interval(pooled, pooled - reach, pooled + reach, 2 * here.seeds, 1)


def over_noisy_worlds(gains: Gains, layer: str) -> Interval:
    """Returns a layer's gain in the six noisy worlds of regimes, averaged over the worlds of each seed."""
    worlds = [
        found for (study, world, at), found in gains.items() if (study, at) == ("regimes", layer) and world != "clean"
    ]
    seeds = sorted({seed for found in worlds for seed in found})
    return over_seeds([float(np.mean([found[seed] for found in worlds if seed in found])) for seed in seeds])


def make_tables(gains: Gains) -> tuple[TableBlock, TableBlock]:
    """Builds the tables of single and of pooled gains."""
    single: list[dict[str, Cell]] = [
        {
            "study": study,
            "world": world,
            "layer": layer,
            "seeds": len(by_seed),
            "gain": signed_text(over_seeds(list(by_seed.values()))),
        }
        for (study, world, layer), by_seed in gains.items()
    ]
    ten = [*gains["regimes", "plain", "1"].values(), *gains["controls", "", "1"].values()]
    long, clean = gains["long_answers", "label noise", "1"], gains["long_answers", "clean", "1"]
    here, pooled = pooled_change(gains)
    found = {
        "layer 1, a quarter wrong, ten seeds of controls and regimes": over_seeds(ten),
        "layer 1, a quarter wrong minus true labels, regimes": here,
        "layer 1, worse labels minus true labels, regimes and why pooled": pooled,
        "layer 1, a quarter wrong minus true labels, long_answers": over_seeds(
            [long[seed] - clean[seed] for seed in long]
        ),
        **{
            f"layer {layer}, six noisy worlds of regimes": over_noisy_worlds(gains, layer)
            for layer in LAYERS["regimes"]
        },
    }
    rows: list[dict[str, Cell]] = [
        {"gain": name, "seeds": interval.seeds, "95 %": signed_text(interval)} for name, interval in found.items()
    ]
    return TableBlock([*single[0]], single), TableBlock([*rows[0]], rows)


def main() -> None:
    """Prints both tables as Markdown."""
    single, pooled = make_tables(read_gains())
    print(HEAD)
    print(f"## Pooled after the runs\n\n{table_markdown(pooled)}\n\n## Each study\n\n{table_markdown(single)}", end="")


if __name__ == "__main__":
    main()
