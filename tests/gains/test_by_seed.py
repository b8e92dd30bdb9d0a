"""Gains of published studies over seeds, and pooled over studies."""

import math
from pathlib import Path

import pytest

from experiments.gains.by_seed import MISSING, main, over_noisy_worlds, over_seeds, pooled_change, read_gains

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out == (RESULTS / "by_seed.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("layer", ["1", "2", "4"])
def test_layers_are_those_of_the_printed_table(layer: str) -> None:
    # Cases do not name their layer: their means must be those that the study printed at KL 0.5.
    lines = (
        (RESULTS / "regimes.md").read_text(encoding="utf-8").split("At KL 0.5:")[1].split("At KL 1:")[0].splitlines()
    )
    worlds = [cell.strip() for cell in next(line for line in lines if line.startswith("| arm")).split("|")[2:-1]]
    cells = next(line for line in lines if line.startswith(f"| attention L{layer} ")).split("|")[2:-1]
    gains = read_gains()
    for world, cell in zip(worlds, cells, strict=True):
        found = gains["regimes", world, layer]
        assert over_seeds(list(found.values())).mean == pytest.approx(float(cell.split()[0]), abs=6e-4), world
        assert ("(4 of 5" in cell) == (len(found) == 4), world
    assert sum(map(len, MISSING.values())) == 4


def test_pooled_gains_by_hand() -> None:
    gains = read_gains()
    here, pooled = pooled_change(gains)
    changes = [gains["regimes", "plain", "1"][seed] - gains["regimes", "clean", "1"][seed] for seed in range(25, 30)]
    error = math.sqrt(sum((change - here.mean) ** 2 for change in changes) / 4 / 5)
    of_why = (0.226 + 0.007) / 2 / 2.776445  # t with 4 degrees of freedom
    assert "+0.110 [-0.007, 0.226]" in (RESULTS / "why.md").read_text(encoding="utf-8")
    assert here.mean == pytest.approx(sum(changes) / 5)
    assert pooled.mean == pytest.approx((here.mean / error**2 + 0.110 / of_why**2) / (1 / error**2 + 1 / of_why**2))
    assert (pooled.high - pooled.mean) * math.sqrt(1 / error**2 + 1 / of_why**2) == pytest.approx(2.306004, abs=1e-5)
    by_seed = [
        [
            found[seed]
            for (study, world, at), found in gains.items()
            if (study, at) == ("regimes", "4") and world != "clean" and seed in found
        ]
        for seed in range(25, 30)
    ]
    means = [sum(values) / len(values) for values in by_seed]
    assert over_noisy_worlds(gains, "4").mean == pytest.approx(sum(means) / 5)
