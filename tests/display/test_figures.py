"""Figures: PNG files of the expected size, what their SVG twins say, and nothing left open."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from attnpo.display.figures import training_curves
from attnpo.display.look import COLOURS, DPI, INK, ArmStyle, ScoreInterval, axis_limits, make_arm_styles
from attnpo.display.page import svg_path
from attnpo.lab.figures import ArmPanel, FrontierPoint, LayerPoint, arm_figure, frontier_figure, layer_curve

BLUE, ORANGE, GREEN = (colour.lower() for colour in COLOURS[:3])


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matplotlib's settings are as before after every test; pyplot, which keeps figures open, cannot be imported."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before


def pixels(path: Path) -> np.ndarray:
    """A PNG as rows x columns x (red, green, blue), 0 to 1."""
    return np.asarray(matplotlib.image.imread(path))[:, :, :3]


def read_drawing(path: Path) -> str:
    """Returns the SVG beside a PNG, after the rules of dark pages, which name colours too."""
    return svg_path(path).read_text(encoding="utf-8").partition("</style>")[2]


def test_training_curves(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "train/loss": 0.69 - 0.004 * step,
            "train/rewards/margins": 0.01 * step,
            "train/grad_norm": math.nan if step == 7 else 1.0,
            **({"val/loss": 0.7, "val/rewards/margins": 0.0} if step % 10 == 0 else {}),
        }
        for step in range(60)
    ]
    path = training_curves(rows, tmp_path / "new" / "curves.png", "a $title$ that is no formula$")
    image, told = pixels(path), read_drawing(path)
    assert image.shape[:2] == (round(6.6 * DPI), 12 * DPI) and image.min() < 0.5
    assert BLUE in told and ORANGE in told and "a $title$ that is no formula$" in told
    assert "gradient norm (1 not finite)" in told and told.count("not logged") == 3
    few = read_drawing(
        training_curves([{"step": 3.0, "val/loss": 0.69}, {"train/loss": math.inf}], tmp_path / "few.png")
    )
    assert few.count("not logged") == 5 and "loss (1 not finite)" in few


def test_layer_curve(tmp_path: Path) -> None:
    """With intervals the figure says so, and the control's is a band over all of it."""
    points = [LayerPoint(4, 0.39), LayerPoint(1, 0.46), LayerPoint(2, math.nan)]
    levels = {"uniform": ScoreInterval(0.36, 0.33, 0.38), "gone": math.nan}
    held = read_drawing(layer_curve(points, tmp_path / "h.png", baselines=levels, title="t", control="uniform"))
    many = [LayerPoint(number, 0.1) for number in range(1, 81)]
    bare = read_drawing(layer_curve(many, tmp_path / "b.png", baselines={"uniform": 0.36}, control="uniform"))
    assert BLUE in held and INK in held and ORANGE not in held
    assert "95 % intervals" in held and "opacity: 0.15" in held
    assert "95 %" not in bare and "opacity: 0.15" not in bare and ">76<" in bare and ">77<" not in bare
    assert layer_curve([], tmp_path / "empty.png").stat().st_size > 1000


def test_frontier(tmp_path: Path) -> None:
    points = [
        FrontierPoint("uniform = DPO", 1.0, 0.4, "beta 1"),
        FrontierPoint("uniform = DPO", -0.01, 0.0),
        FrontierPoint("a <b> & $c$", 2.0, 0.4, "beta $0.1$", 0.3, 0.5, best=True),
        FrontierPoint("diverged", math.inf, 0.0),
    ]
    base = ScoreInterval(-0.1, -0.2, 0.0)
    path = frontier_figure(points, tmp_path / "f.png", limits=(0.5, 1, 2), base_reward=base, title="t")
    told = read_drawing(path)
    assert GREEN not in told, "an arm without a finite point takes no colour"
    assert "stroke-width: 1.8" in told, "the ring around the best point"
    assert "opacity: 0.18" in told and "non-finite points omitted: 1" in told and "dash-dotted: KL" in told
    whole = svg_path(path).read_text(encoding="utf-8")
    root = ElementTree.fromstring(whole)
    words = [text for node in root.iter("{http://www.w3.org/2000/svg}text") for text in node.itertext()]
    assert "a <b> & $c$" in words and "    best: beta $0.1$" in words, "text stays text"
    assert "prefers-color-scheme:dark" in whole and INK in whole and "<script" not in whole
    assert 'style="fill: #ffffff"' not in told, "no background"
    plain = [FrontierPoint(p.arm, p.kl, p.reward, p.label) for p in points]
    told = read_drawing(frontier_figure(plain, tmp_path / "g.png", base_reward=-0.1))
    assert "stroke-width: 1.8" not in told and "opacity: 0.18" not in told
    again = [
        svg_path(frontier_figure([], tmp_path / name / "f.png")).read_text(encoding="utf-8") for name in ("1", "2")
    ]
    assert again[0] == again[1], "the same figure gives the same file"


def test_a_point_far_off_stands_at_the_edge_and_does_not_press_the_others_together(tmp_path: Path) -> None:
    points = [
        FrontierPoint("uniform", 0.5, 0.1),
        FrontierPoint("uniform", 2.0, 0.3),
        FrontierPoint("truth", 400.0, -0.8),
    ]
    frontier_figure(points, tmp_path / "far.png", limits=[2.0])
    frontier_figure(points, tmp_path / "all.png")

    def widest(name: str) -> int:
        wanted = np.array([int(BLUE[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        image = pixels(tmp_path / name)
        columns = np.where((np.abs(image - wanted).max(axis=2) < 0.12).any(axis=0))[0]
        half = columns[columns < 0.6 * image.shape[1]]  # the legend is at the right
        return int(half.max() - half.min())

    assert widest("far.png") > 3 * widest("all.png")
    assert "KL 400, reward -0.80" in read_drawing(tmp_path / "far.png") and "hollow arrow" in read_drawing(
        tmp_path / "far.png"
    )
    assert "hollow arrow" not in read_drawing(tmp_path / "all.png")


def test_the_axis_leaves_out_what_would_press_all_others_together_and_nothing_else() -> None:
    values = [0.1, 0.12, 0.2, 0.22, 0.25, 0.3, 0.31, 0.33]
    low, high = axis_limits(values)
    assert low < 0.1 and high > 0.33
    assert axis_limits([*values, -9.0]) == pytest.approx((low, high), abs=0.05)
    assert axis_limits([0.1, 9.0])[1] > 9, "of few values none is far off"
    assert axis_limits(values, [0.0, 0.5])[1] > 0.5 and axis_limits(values, [90.0])[1] < 1, (
        "intervals reach one span further"
    )
    assert axis_limits([math.nan]) == (0.0, 1.0) and axis_limits([0.5])[0] < 0.5 < axis_limits([0.5])[1]


def test_an_arm_looks_the_same_whatever_is_drawn_with_it() -> None:
    arms = ["uniform", "attention L1", "shuffled", "true importance"]
    looks = make_arm_styles(arms, "uniform", altered=["shuffled"], told=["true importance"])
    assert looks["uniform"] == ArmStyle(INK, "s", "--", note="control")
    assert [looks[arm].colour for arm in arms[1:]] == list(COLOURS[:3])
    assert not looks["shuffled"].filled and looks["true importance"].style == ":"
    many = make_arm_styles([*arms, *(f"arm {number}" for number in range(20))], "uniform", altered=["shuffled"])
    assert many["attention L1"] == looks["attention L1"] and many["shuffled"] == looks["shuffled"]
    seen = [(look.colour, look.marker, look.style) for look in many.values()]
    assert len(set(seen)) == len(seen) == 24, "no two of them look alike"
    assert len({look.colour for look in list(many.values())[:13]}) == 13


def test_an_arms_colour_is_that_of_its_look_in_every_figure(tmp_path: Path) -> None:
    looks = {"a": ArmStyle("#c2185b"), "b": ArmStyle("#2f8f9d"), "u": ArmStyle(INK, "s", "--")}
    points = [FrontierPoint(arm, 1.0, 0.1 * place) for place, arm in enumerate("bua")]
    first = frontier_figure(points, tmp_path / "f.png", looks=looks)
    levels = {arm: ScoreInterval(0.2, 0.1, 0.3) for arm in "ab"}
    second = arm_figure([ArmPanel("t", "x", levels)], tmp_path / "a.png", looks=looks)
    third = layer_curve([LayerPoint(1, 0.1, arm="a"), LayerPoint(2, 0.2, arm="b")], tmp_path / "l.png", looks=looks)
    for path in (first, second, third):
        assert all(looks[arm].colour in read_drawing(path) for arm in "ab") and BLUE not in read_drawing(path)
