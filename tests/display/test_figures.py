"""Figures: PNG files of the expected size with something drawn on them, and nothing left open."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from attnpo.display import heat_figure
from attnpo.display.figures import COLOURS, DPI, FrontierPoint, LayerPoint, frontier, layer_curve, training_curves
from attnpo.display.heat import HeatRow, HeatSide, HeatToken
from attnpo.display.heat_figure import CELLS, heatmap_figure
from attnpo.schema import Message


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Matplotlib's settings are as before after every test."""
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before


def pixels(path: Path) -> np.ndarray:
    """A PNG as rows x columns x (red, green, blue), 0 to 1."""
    return np.asarray(matplotlib.image.imread(path))[:, :, :3]


def size(path: Path) -> tuple[int, int]:
    """Width and height in pixels."""
    image = pixels(path)
    return image.shape[1], image.shape[0]


def has_colour(path: Path, code: str, least: int = 20) -> bool:
    """Whether at least ``least`` pixels have nearly the colour ``code``."""
    wanted = np.array([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(pixels(path) - wanted).max(axis=2) < 0.02).sum()) >= least


def test_training_curves(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "train/loss": 0.69 - 0.004 * step,
            "train/rewards/margins": 0.01 * step,
            "train/rewards/accuracies": 0.5,
            "train/lr": 5e-7,
            "train/grad_norm": math.nan if step == 7 else 1.0,
            **({"val/loss": 0.7, "val/rewards/margins": 0.0} if step % 10 == 0 else {}),
        }
        for step in range(60)
    ]
    path = training_curves(rows, tmp_path / "new" / "curves.png", "a $title$ that is no formula$")
    assert size(path) == (12 * DPI, round(6.6 * DPI))
    assert has_colour(path, "#0072B2") and has_colour(path, "#D55E00")  # training, validation


@pytest.mark.parametrize(
    "rows",
    [[], [{"step": 0}], [{"step": 3.0, "val/loss": 0.69}], [{"train/loss": math.nan}], [{"train/loss": math.inf}]],
)  # fmt: skip
def test_training_curves_of_next_to_nothing(rows: list[dict[str, float]], tmp_path: Path) -> None:
    assert pixels(training_curves(rows, tmp_path / "curves.png")).min() < 0.9


def test_layer_curve(tmp_path: Path) -> None:
    points = [LayerPoint(4, 0.39, 0.3, 0.5), LayerPoint(1, 0.46), LayerPoint(2, math.nan)]
    path = layer_curve(points, tmp_path / "l.png", baselines={"DPO": 0.36, "gone": math.nan}, ylabel="x", title="t")
    assert size(path) == (round(6.4 * DPI), round(4.2 * DPI))
    assert has_colour(path, "#0072B2") and has_colour(path, "#D55E00") and not has_colour(path, "#009E73")
    assert layer_curve([], tmp_path / "empty.png").stat().st_size > 1000
    assert layer_curve([LayerPoint(n, 0.1) for n in range(1, 81)], tmp_path / "deep.png").is_file()


def test_frontier(tmp_path: Path) -> None:
    points = [
        FrontierPoint("uniform = DPO", 1.0, 0.4, "beta 1"),
        FrontierPoint("uniform = DPO", -0.01, 0.0),
        FrontierPoint("attention $1", 2.0, 0.4, "beta $0.1$", 0.3, 0.5, best=True),
        FrontierPoint("diverged", math.inf, 0.0),
    ]
    path = frontier(points, tmp_path / "f.png", limits=(0.5, 1, 2), base_reward=-0.1, title="t")
    assert size(path) == (round(7.6 * DPI), 5 * DPI)
    assert not has_colour(path, "#009E73")  # an arm without a finite point takes no colour
    plain = frontier([FrontierPoint(p.arm, p.kl, p.reward, p.label) for p in points], tmp_path / "g.png")
    orange = [
        int((np.abs(pixels(one) - np.array([0xD5, 0x5E, 0]) / 255).max(axis=2) < 0.2).sum()) for one in (path, plain)
    ]
    assert orange[0] > orange[1] + 100  # the ring around the best point
    assert frontier([], tmp_path / "empty.png").stat().st_size > 1000


def row(*tokens: HeatToken, prompt: str = "How?") -> HeatRow:
    side = HeatSide(tokens or (HeatToken("x", 1.0),))
    return HeatRow("p", (Message(role="user", content=prompt),), side, HeatSide((HeatToken("$a$ 日本 🙂", 1.0),)))


def test_heatmap_figure(tmp_path: Path) -> None:
    tokens = [HeatToken(" word", 0.01) for _ in range(30)]
    plain = heatmap_figure(row(*tokens), tmp_path / "a.png")
    assert size(plain)[0] == 12 * DPI
    heavy = heatmap_figure(row(*tokens, HeatToken("heavy" * 10, 1.0)), tmp_path / "b.png")
    lost = heatmap_figure(row(*tokens, HeatToken("lost" * 10, 0.0, matched=False)), tmp_path / "c.png")
    warm = [
        int((np.abs(pixels(p) - np.array([0xF1, 0x5D, 0x1E]) / 255).max(axis=2) < 0.06).sum()) for p in (plain, heavy)
    ]
    assert warm[0] > 0 and warm[1] > 2 * warm[0]  # the legend has a sample, too
    red = [int((np.abs(pixels(p) - np.array([0xB3, 0x26, 0x1E]) / 255).max(axis=2) < 0.1).sum()) for p in (plain, lost)]
    assert red[1] > red[0] + 50


def test_heatmap_figure_grows_with_the_response_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    short = size(heatmap_figure(row(HeatToken("x\n", 1.0)), tmp_path / "a.png"))[1]
    tokens = [HeatToken("x\n", 1.0) for _ in range(50)]
    long = size(heatmap_figure(row(*tokens), tmp_path / "b.png"))[1]
    assert long > short + 40 * 0.2 * DPI
    assert size(heatmap_figure(row(*tokens), tmp_path / "c.png", max_tokens=3))[1] < long
    assert size(heatmap_figure(row(prompt="x\n" * 500), tmp_path / "d.png"))[1] < short + 8 * 0.25 * DPI


def test_pieces_fill_lines_and_lose_nothing() -> None:
    texts = ["a" * (CELLS - 2), " bc", "d\n\ne", "", "w" * (2 * CELLS + 5), "日" * CELLS, "\t", "  "]
    pieces = list(heat_figure._pieces(tuple(HeatToken(text, 1.0) for text in texts)))
    assert all(piece.start + piece.cells <= CELLS for piece in pieces)
    joined = "".join(piece.text for piece in pieces)
    assert joined == "a" * (CELLS - 2) + " bc" + "d↵↵e" + "▯" + "w" * (2 * CELLS + 5) + "日" * CELLS + "⇥ " + "␣␣"
    order = [(piece.line, piece.start) for piece in pieces]
    assert order == sorted(order)
    assert (pieces[1].line, pieces[1].start) == (1, 0)  # " bc" does not fit after the first token


def test_right_to_left_rows_start_at_the_right_edge(tmp_path: Path) -> None:
    def warm_columns(text: str, name: str) -> float:
        side = HeatSide((HeatToken(text, 1.0), HeatToken(text[:1], 0.0)), length=8.0)
        path = heatmap_figure(HeatRow("p", (), side, HeatSide((HeatToken("x", 0.125),), length=1.0)), tmp_path / name)
        image = pixels(path)[round(0.9 * DPI) :]
        return float(np.where(np.abs(image - np.array([0xF1, 0x5D, 0x1E]) / 255).max(axis=2) < 0.06)[1].mean())

    assert warm_columns("שלום", "r.png") > 4 * DPI > warm_columns("word", "l.png")


def test_no_figure_stays_open_and_pyplot_is_never_imported() -> None:
    code = (
        "import sys, tempfile, pathlib\n"
        "from attnpo.display.figures import FrontierPoint, LayerPoint, frontier, layer_curve, training_curves\n"
        "from attnpo.display.heat import HeatRow, HeatSide, HeatToken\n"
        "from attnpo.display.heat_figure import heatmap_figure\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'x.png'\n"
        "side = HeatSide((HeatToken('x', 1.0),))\n"
        "training_curves([{'step': 0, 'val/loss': .7}], path); layer_curve([LayerPoint(1, .1)], path)\n"
        "frontier([FrontierPoint('a', 1., .1)], path); heatmap_figure(HeatRow('p', (), side, side), path)\n"
        "assert path.stat().st_size > 1000; path.unlink(); path.parent.rmdir()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib._pylab_helpers as helpers\n"
        "assert not helpers.Gcf.figs"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_point_far_off_is_named_and_does_not_press_the_others_together(tmp_path: Path) -> None:
    near = [FrontierPoint("uniform", 0.5, 0.1), FrontierPoint("uniform", 2.0, 0.3)]
    far = FrontierPoint("truth", 400.0, -0.8)
    frontier([*near, far], tmp_path / "far.png", limits=[2.0])
    frontier([*near, far], tmp_path / "all.png")
    first, second = COLOURS[:2]
    assert has_colour(tmp_path / "far.png", first) and not has_colour(tmp_path / "far.png", second, least=1)
    assert has_colour(tmp_path / "all.png", second)
