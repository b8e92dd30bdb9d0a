"""The explorer's packing without a browser, and a small page of it in headless Chromium."""

import base64
import json
import math
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnpo.display.explorer import ExplorerView, WeightScale, encode_logps, explorer_html, write_explorer
from attnpo.schema import UserError
from tests.display.browser import Browser, browser
from tests.display.explored import hard, many

LIMIT = 15_000_000  # bytes of 500 pairs of 700 tokens, two sources, four layers


def blob(page: str, name: str) -> bytes:
    """What a page holds under a name, unpacked."""
    (found,) = re.findall(rf'<script type="text/plain" id="data-{name}">([^<]*)</script>', page)
    return zlib.decompress(base64.b64decode(found))


def texts(page: str) -> Any:
    return json.loads(blob(page, "texts"))


# ------------------------------------------------------------------------------------------------ numbers


def decode(scale: WeightScale, packed: bytes) -> np.ndarray:
    """Returns the weights of the codes, NaN where unknown, as the page's script does."""
    codes = np.frombuffer(packed, dtype=np.uint8).astype(float)
    negative = scale.signed & (codes > 127) & (codes < 255)
    sizes = np.exp2(scale.low + (codes - 1 - np.where(negative, 127, 0)) * scale.octaves_per_code) * np.where(
        negative, -1, 1
    )
    return np.where(codes == 0, 0.0, np.where(codes == 255, np.nan, sizes))


@pytest.mark.parametrize("signed", [False, True])
def test_weights_come_back_within_the_stated_error(signed: bool) -> None:
    rng = np.random.default_rng(1)
    weights = np.exp(2 * rng.standard_normal(5000)) * (rng.choice([-1, 1], 5000) if signed else 1)
    weights[:7] = [0, math.nan, math.inf, 1, 1, 0, 3]
    scale = WeightScale.fit(weights)
    back = decode(scale, scale.encode(weights))
    finite = np.isfinite(weights)
    assert scale.signed == signed and np.isnan(back[~finite]).all()
    assert ((back == 0) == (weights == 0)).all()
    present = finite & (weights != 0)
    error = np.abs(back[present] / weights[present] - 1)
    assert error.max() <= scale.relative_error * (1 + 1e-9) and 0.005 < scale.relative_error < 0.07


def test_few_weights_have_a_scale_too_and_what_is_smaller_is_its_lowest() -> None:
    for weights in ([], [0.0, 0.0], [1.0, 1.0], [math.nan], [-2.0]):
        given = np.array(weights, dtype=float)
        scale = WeightScale.fit(given)
        np.testing.assert_allclose(decode(scale, scale.encode(given)), given)
    given = np.array([1.0, 2.0**-40])
    scale = WeightScale.fit(given)
    assert decode(scale, scale.encode(given)).tolist() == [1.0, 2.0**-24] and scale.relative_error < 0.034


def test_log_probs_come_back() -> None:
    logps = np.array([0.0, -0.125, -17.5, math.nan])
    data, step = encode_logps(logps)
    codes = np.frombuffer(data, dtype="<u2").astype(float)
    assert codes[3] == 65535 and abs(-codes[:3] * step - logps[:3]).max() <= step / 2 < 2e-4
    assert encode_logps(np.array([0.0]))[0] == b"\0\0"


# ------------------------------------------------------------------------------------------------ the page's data


def test_a_page_holds_every_number_of_its_pairs() -> None:
    pairs = hard(2)
    page = explorer_html(pairs, title="<i>t</i>", note="n & m")
    told = texts(page)
    sides = [side for pair in pairs for _, side in next(iter(pair.values())).sides]
    ids = np.frombuffer(blob(page, "ids"), dtype="<i4").tolist()
    assert ids == [one for side in sides for one in side.token_ids]
    steps, place = np.frombuffer(blob(page, "characters"), dtype="<i4").reshape(-1, 2), 0
    for side in sides:
        bounds = np.cumsum(steps[place : place + len(side.token_ids)].reshape(-1)).reshape(-1, 2)
        assert [tuple(one) for one in bounds.tolist()] == list(side.offsets)
        place += len(side.token_ids)
    assert [text for pair in told["pairs"] for text in pair["texts"]] == [side.text for side in sides]
    assert len(told["views"]) == 2 * 2 * 3
    for number, view in enumerate(told["views"]):
        mine = ExplorerView(view["source"], view["layer"], view["round"])
        relative = np.concatenate([side.relative.numpy() for pair in pairs for _, side in pair[mine].sides])
        scale = WeightScale.fit(relative)
        assert (view["low"], view["step"], view["signed"]) == (scale.low, scale.octaves_per_code, False)
        np.testing.assert_allclose(
            decode(scale, blob(page, f"weights-{number}")), relative, rtol=scale.relative_error + 1e-9
        )
    assert told["logps"][0]["name"] == "reference" and "<i>" not in page and told["note"] == "n & m"


def test_a_view_may_lack_a_pair() -> None:
    first, second = hard(1)[:2]
    view, *_ = first
    page = explorer_html([first, {view: second[view]}])
    count = sum(len(side.tokens) for _, side in second[view].sides)
    assert blob(page, "weights-1")[-count:] == bytes([255]) * count
    assert texts(page)["views"][1]["lengths"][1] is None
    for wrong in ([], [{}, first]):
        with pytest.raises(UserError, match="needs at least one pair"):
            explorer_html(wrong)


def test_the_page_refers_to_nothing_outside_and_never_writes_html() -> None:
    page = explorer_html(hard(1))
    assert not re.search(r"(src|href)=|url\(|@import|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)
    assert "default-src 'none'" in page


def test_what_the_first_pair_is_drawn_from_stands_before_the_script() -> None:
    """A browser reads a page from its top: the other views' numbers are still on their way when the first is drawn."""
    before, _, after = explorer_html(hard(2)).partition('"use strict"')
    names = [re.findall(r'id="data-([a-z]+-?\d*)"', part) for part in (before, after)]
    rollout = 2 * 3  # the number of the second source's first view, behind two layers of three rounds
    assert sorted(names[0]) == sorted(["texts", "ids", "characters", "weights-0", f"weights-{rollout}"])
    assert len(names[1]) == 12 - 2 + 1 and "logps-0" in names[1]
    single = [dict(list(pair.items())[:3]) for pair in hard(1)]
    assert re.findall(r"data-(weights-\d)", explorer_html(single).partition('"use strict"')[0]) == [
        "weights-0",
        "weights-1",
    ]


def test_a_page_of_500_pairs_fits_the_limit() -> None:
    """Counts a fiftieth of them: the rest of a page, its script and style, is counted fifty times over."""
    assert 50 * len(explorer_html(many(10, 700, 4))) <= LIMIT


# ------------------------------------------------------------------------------------------------ in node


def test_the_script_draws_a_pair_with_tokens_that_have_no_partner(tmp_path: Path) -> None:
    """A browser is rarer than node, which runs the script up to its first pair."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node on the PATH: the page's script is JavaScript, which no Python package of ours runs")
    page = write_explorer(tmp_path / "explorer.html", hard(1))
    command = [node, str(Path(__file__).with_name("explorer_page.mjs")), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    told = json.loads(done.stdout)
    assert "could not be read" not in told["about"], told["about"]
    assert "lost" in {look for _, _, look in told["tokens"]} and len(told["tokens"]) > 10


# ------------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def chosen(tab: Browser, name: str, value: str) -> None:
    """Takes a value of one of the page's choices, as a reader does."""
    tab.value(
        f"(() => {{ const e = document.getElementById({name!r}); e.value = {value!r};"
        " e.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


SECOND = (("rollout", "L2", "round 1"), ("attention", "L2", "round 1"))


def shades(tab: Browser) -> str:
    return str(tab.value("[...document.querySelectorAll('#pair .tokens span')].map(one => one.className).join()"))


def test_a_reader_searches_sorts_switches_and_hovers(tab: Browser, tmp_path: Path) -> None:
    pairs = [*hard(2), *many(12, 40, 2)]
    page = write_explorer(tmp_path / "explorer.html", pairs, title="a <b>title</b>")
    tab.look()
    tab.open(page)
    tab.until("document.documentElement.dataset.ready")
    assert tab.value("document.querySelector('h1').textContent") == "a <b>title</b>"
    assert tab.value("document.querySelectorAll('#pair b, #pair img, #pair script').length") == 0

    first, told = shades(tab), []
    for name, value in (("layer", "L2"), ("round", "round 1"), ("source", "rollout")):
        chosen(tab, name, value)
        expected = ExplorerView(
            *("rollout" if name == "source" else "attention", "L2", "combined" if name == "layer" else "round 1")
        )
        row = pairs[0][expected].chosen
        tab.hover("#pair .tokens span:nth-child(5)")
        found = tab.until(
            "(() => { const t = document.getElementById('tip'); return !t.hidden && t.textContent.includes("
            f"{', '.join((expected.source, expected.layer, expected.round))!r}) && t.textContent; }})()"
        )
        relative = float(re.findall(r"w·\|y\| ([-\d.e]+)\)", found)[0])
        assert relative == pytest.approx(float(row.relative[4]), rel=0.035)
        told.append(shades(tab))
        tab.hover("h1")
    assert len({first, *told}) == 4
    assert "token" in found and f"id {row.token_ids[4]}" in found and "12 to 15" in found
    assert "log-prob, reference-1.000" in found

    every = tab.value("explorer.state()")
    for name, by in (("coverage", "coverage"), ("entropy", "entropy"), ("disagreement", "apart")):
        chosen(tab, "sort", name)
        state = tab.value("explorer.state()")
        values = [state[by][pair] for pair in state["order"]]
        assert values == sorted(values, reverse=name == "disagreement") and len(set(values)) > 1
    rows, others = ([side.weights.numpy() for _, side in pairs[0][ExplorerView(*one)].sides] for one in SECOND)
    apart = np.mean([np.abs(a - b).sum() / 2 for a, b in zip(rows, others, strict=True)])
    assert every["apart"][0] == pytest.approx(apart, abs=0.02)
    entropy = np.mean([-sum(w * math.log(w) for w in row if w) / math.log(len(row)) for row in rows])
    assert every["entropy"][0] == pytest.approx(entropy, abs=0.01)

    tab.press("/")
    tab.type("البحر مساحة")
    tab.until("explorer.state().order.length === 1")
    assert tab.value("document.querySelector('#pair h2').textContent") == "pair pair-1"
    assert tab.value("getComputedStyle(document.querySelector('#pair .tokens')).direction") == "rtl"
    tab.press("Escape")
    assert tab.value("document.activeElement.id") == "list"
    tab.value("document.querySelector('#pair .tokens span').focus()")
    tab.press("ArrowLeft")  # onwards, from right to left
    assert tab.value("document.activeElement.dataset.place + document.getElementById('tip').hidden") == "1false"
    assert tab.problems == []
    assert tab.requests == [page.as_uri()]


def test_keys_lead_through_the_list(tab: Browser, tmp_path: Path) -> None:
    page = write_explorer(tmp_path / "explorer.html", many(60, 20, 1))
    tab.look(dark=True)
    tab.open(page)
    tab.until("document.documentElement.dataset.ready")
    tab.click("#list .row:nth-child(3)")
    for key, place in (("ArrowDown", 3), ("j", 4), ("k", 3), ("End", 59), ("ArrowDown", 59), ("Home", 0)):
        tab.press(key)
        assert tab.value("explorer.state().shown") == place, key
        assert tab.value("document.querySelector('.row[aria-selected=true]').id") == f"row-{place}"
    assert tab.value("document.querySelectorAll('.row').length") < 40, "rows that are not seen are not drawn"
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 20, 24)"
    assert tab.problems == []


def test_the_script_shows_what_acts_as_the_heat_map_does(tab: Browser, tmp_path: Path) -> None:
    from attnpo.display.heat import make_visible

    tab.open(write_explorer(tmp_path / "explorer.html", hard(1)))
    tab.until("document.documentElement.dataset.ready")
    for text in ("   ", " a b ", "\n\t\r\x00\x1b\x7f\x85", "\u200e\u202e\u2066\u061c\u2028\u2029", "ab\ufeff👩‍🚀é"):
        assert tab.value(f"explorer.visible({json.dumps(text)})") == make_visible(text), ascii(text)
    assert tab.value('explorer.visible("\\ud800")') == make_visible("\ud800")
