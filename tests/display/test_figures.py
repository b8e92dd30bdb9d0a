"""Figures: PNG files of the expected size with something drawn on them, and nothing left open."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from attnpo.display import heat_figure
from attnpo.display.arm_figure import ArmPanel, arm_figure
from attnpo.display.figures import LayerPoint, layer_curve, training_curves
from attnpo.display.frontier_figure import FrontierPoint, frontier
from attnpo.display.heat import HeatRow, HeatSide, HeatToken
from attnpo.display.heat_figure import CELLS, heatmap_figure
from attnpo.display.look import COLOURS, DPI, INK, Level, Look, fitting, looks_of
from attnpo.display.page import svg_beside
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
    lines = {"uniform": Level(0.36, 0.33, 0.38), "other": 0.37, "gone": math.nan}
    path = layer_curve(points, tmp_path / "l.png", baselines=lines, ylabel="x", title="t", control="uniform")
    assert has_colour(path, COLOURS[0]) and has_colour(path, INK) and not has_colour(path, COLOURS[1])
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
        "from attnpo.display.figures import LayerPoint, layer_curve, training_curves\n"
        "from attnpo.display.frontier_figure import FrontierPoint, frontier\n"
        "from attnpo.display.heat import HeatRow, HeatSide, HeatToken\n"
        "from attnpo.display.heat_figure import heatmap_figure\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'x.png'\n"
        "side = HeatSide((HeatToken('x', 1.0),))\n"
        "training_curves([{'step': 0, 'val/loss': .7}], path); layer_curve([LayerPoint(1, .1)], path)\n"
        "frontier([FrontierPoint('a', 1., .1)], path); heatmap_figure(HeatRow('p', (), side, side), path)\n"
        "assert path.stat().st_size > 1000; path.unlink(); path.with_suffix('.svg').unlink()\n"
        "path.parent.rmdir()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib._pylab_helpers as helpers\n"
        "assert not helpers.Gcf.figs"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_point_far_off_stands_at_the_edge_and_does_not_press_the_others_together(tmp_path: Path) -> None:
    near = [FrontierPoint("uniform", 0.5, 0.1), FrontierPoint("uniform", 2.0, 0.3)]
    far = FrontierPoint("truth", 400.0, -0.8)
    frontier([*near, far], tmp_path / "far.png", limits=[2.0])
    frontier([*near, far], tmp_path / "all.png")

    def widest(name: str) -> int:
        wanted = np.array([int(COLOURS[0][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        columns = np.where((np.abs(pixels(tmp_path / name) - wanted).max(axis=2) < 0.12).any(axis=0))[0]
        half = columns[columns < 0.6 * size(tmp_path / name)[0]]  # the legend is at the right
        return int(half.max() - half.min())

    assert widest("far.png") > 3 * widest("all.png")
    assert has_colour(tmp_path / "far.png", COLOURS[1], least=10), "the arrow at the edge"
    told = svg_beside(tmp_path / "far.png").read_text()
    assert "KL 400, reward -0.80" in told and "hollow arrow" in told
    assert "hollow arrow" not in svg_beside(tmp_path / "all.png").read_text()


def test_the_axis_leaves_out_what_would_press_all_others_together_and_nothing_else() -> None:
    values = [0.1, 0.12, 0.2, 0.22, 0.25, 0.3, 0.31, 0.33]
    low, high = fitting(values)
    assert low < 0.1 and high > 0.33
    assert fitting([*values, -9.0]) == pytest.approx((low, high), abs=0.05)
    assert fitting([0.1, 9.0])[1] > 9, "of few values none is far off"
    assert fitting(values, [0.0, 0.5])[1] > 0.5 and fitting(values, [90.0])[1] < 1, "intervals reach one span further"
    assert fitting([math.nan]) == (0.0, 1.0) and fitting([0.5])[0] < 0.5 < fitting([0.5])[1]


def test_an_arm_looks_the_same_whatever_is_drawn_with_it() -> None:
    arms = ["uniform", "attention L1", "shuffled", "true importance"]
    looks = looks_of(arms, "uniform", altered=["shuffled"], told=["true importance"])
    assert looks["uniform"] == Look(INK, "s", "--", note="control")
    assert [looks[arm].colour for arm in arms[1:]] == list(COLOURS[:3])
    assert not looks["shuffled"].filled and looks["true importance"].style == ":"
    many = looks_of([*arms, *(f"arm {number}" for number in range(20))], "uniform", altered=["shuffled"])
    assert many["attention L1"] == looks["attention L1"] and many["shuffled"] == looks["shuffled"]
    seen = [(look.colour, look.marker, look.style) for look in many.values()]
    assert len(set(seen)) == len(seen) == 24, "no two of them look alike"
    assert len({look.colour for look in list(many.values())[:13]}) == 13


def test_an_arms_colour_is_that_of_its_look_in_every_figure(tmp_path: Path) -> None:
    looks = {"a": Look("#C2185B"), "b": Look("#2F8F9D"), "u": Look(INK, "s", "--")}
    points = [FrontierPoint(arm, 1.0, 0.1 * place) for place, arm in enumerate("bua")]
    first = frontier(points, tmp_path / "f.png", looks=looks)
    levels = {arm: Level(0.2, 0.1, 0.3) for arm in "ab"}
    second = arm_figure([ArmPanel("t", "x", levels)], tmp_path / "a.png", looks=looks)
    third = layer_curve([LayerPoint(1, 0.1, arm="a"), LayerPoint(2, 0.2, arm="b")], tmp_path / "l.png", looks=looks)
    for path in (first, second, third):
        assert has_colour(path, "#C2185B") and has_colour(path, "#2F8F9D") and not has_colour(path, COLOURS[0])


def test_baselines_have_intervals(tmp_path: Path) -> None:
    """More of the baseline's colour and, for the control, a band over the whole width."""
    points = [LayerPoint(1, 0.1), LayerPoint(2, 0.2)]
    bare = layer_curve(points, tmp_path / "bare.png", baselines={"x": 0.15}, control="x")
    held = layer_curve(points, tmp_path / "held.png", baselines={"x": Level(0.15, 0.12, 0.18)}, control="x")
    grey = [int(((pixels(path) > 0.9) & (pixels(path) < 0.99)).all(axis=2).sum()) for path in (bare, held)]
    assert grey[1] > grey[0] + 10_000
    assert "95 % intervals" in svg_beside(held).read_text() and "95 %" not in svg_beside(bare).read_text()
    based = frontier([FrontierPoint("a", 1.0, 0.5)], tmp_path / "f.png", base_reward=Level(0.1, 0.0, 0.2))
    plain = frontier([FrontierPoint("a", 1.0, 0.5)], tmp_path / "g.png", base_reward=0.1)
    grey = [int(((pixels(path) > 0.9) & (pixels(path) < 0.99)).all(axis=2).sum()) for path in (plain, based)]
    assert grey[1] > grey[0] + 10_000


def test_every_figure_is_an_svg_too_that_follows_a_dark_page(tmp_path: Path) -> None:
    path = frontier([FrontierPoint("a <b> & $c$", 1.0, 0.5)], tmp_path / "f.png", title="t")
    told = svg_beside(path).read_text()
    root = ElementTree.fromstring(told)
    words = [text for node in root.iter("{http://www.w3.org/2000/svg}text") for text in node.itertext()]
    assert "a <b> & $c$" in words, "text stays text"
    assert "prefers-color-scheme:dark" in told and INK in told and "<script" not in told
    assert 'style="fill: #ffffff"' not in told, "no background"
    again = frontier([FrontierPoint("a <b> & $c$", 1.0, 0.5)], tmp_path / "2" / "f.png", title="t")
    assert svg_beside(again).read_text() == told, "the same figure gives the same file"
    drawn = heatmap_figure(row(), tmp_path / "h.png")
    assert "prefers-color-scheme" not in svg_beside(drawn).read_text(), "tints are made for white"
