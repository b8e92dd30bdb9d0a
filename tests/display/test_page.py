"""Report pages: everything in one file, escaped, in order."""

import base64
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attnpo.display.figures import LayerPoint, layer_curve
from attnpo.display.heat import HeatRow, HeatSide, HeatToken, RoundView, SideView
from attnpo.display.heatmap import heatmap_html
from attnpo.display.page import (
    Beside,
    Fragment,
    Image,
    KeyValues,
    Links,
    Paragraph,
    Preformatted,
    Section,
    TableBlock,
    report_page,
    svg_beside,
)
from attnpo.schema import UserError
from tests.display.browser import chromium


class Reader(HTMLParser):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(code)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.stack and self.stack[-1] not in ("style", "script") else ""


def test_a_page_of_everything(tmp_path: Path) -> None:
    png = layer_curve([LayerPoint(1, 0.4)], tmp_path / "layers.png")
    side = HeatSide((HeatToken("x", 1.0),))
    code = report_page(
        "Run <1>",
        [
            Section("Setup & cost", [KeyValues({"beta": 0.1, "lr": 5e-7, "seed": 3, "<k>": "<v>"}, digits=2)]),
            Section(
                "Results", [TableBlock(["arm", "reward"], [["<b>", 0.456]], caption="c"), Image(png, 'a "caption"')]
            ),
            Section(
                "Rest",
                [
                    Paragraph("lost control", warning=True),
                    Preformatted("a:\n  b: <1>"),
                    Fragment(heatmap_html([HeatRow("p", (), side, side)], page=False)),
                ],
            ),
        ],
    )
    read = Reader(code)
    for part in ("Run <1>", "Setup & cost", "0.10", "5.0e-07", "<k>", "<v>", "<b>", "0.456", "a:\n  b: <1>", "chosen"):
        assert part in read.text, part
    images = [attrs for tag, attrs in read.seen if tag == "img"]
    assert len(images) == 1 and images[0]["alt"] == 'a "caption"'
    drawn = base64.b64decode((images[0]["src"] or "").removeprefix("data:image/svg+xml;base64,"))
    assert drawn == svg_beside(png).read_bytes()
    links = [attrs["href"] for tag, attrs in read.seen if tag == "a"]
    assert links == ["#s1", "#s2", "#s3"]
    assert [attrs["id"] for tag, attrs in read.seen if tag == "section" and "id" in attrs] == ["s1", "s2", "s3"]
    assert not {tag for tag, _ in read.seen} & {"link", "iframe"} and "http" not in code
    assert [attrs for tag, attrs in read.seen if tag == "script"] == [{}], "one script, which loads no file"
    assert ("p", {"class": "warning"}) in read.seen
    assert 'name="viewport"' in code and "prefers-color-scheme:dark" in code and "@media print" in code


def test_text_cannot_act() -> None:
    hostile = "</p><script>x</script>\u202e"
    read = Reader(report_page(hostile, [Section(hostile, [Paragraph(hostile), Preformatted(hostile)])]))
    assert len([tag for tag, _ in read.seen if tag == "script"]) == 1, "the page's own"
    assert read.text.count("</p><script>x</script>[U+202E]") == 5  # page title, heading, section heading, two blocks


def test_images_must_be_there_and_be_png(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.png: cannot be read"):
        report_page("t", [Section("s", [Image(tmp_path / "none.png")])])
    (tmp_path / "drawing.png").write_bytes(b"<svg>")
    with pytest.raises(UserError, match=r"drawing\.png: expected a PNG"):
        report_page("t", [Section("s", [Image(tmp_path / "drawing.png")])])


def test_what_is_long_is_folded_and_what_is_short_is_open() -> None:
    files = {f"run {number}": {"page": f"points/{number}/report.html"} for number in range(13)}
    blocks = [Links("few", dict(list(files.items())[:12])), Links("many", files), Preformatted("lr: 1", "the config")]
    code = report_page("t", [Section("s", blocks)])
    opened = {words: "open" in start for start, words in re.findall(r"<details([^>]*)><summary>([^<]*)<", code)}
    assert opened == {"few": True, "many": False, "the config": False}


def test_a_page_of_one_section_has_no_links() -> None:
    assert "<nav>" not in report_page("t", [Section("s")])


def test_a_picture_without_a_drawing_beside_it_is_shown_as_it_is(tmp_path: Path) -> None:
    png = layer_curve([LayerPoint(1, 0.4)], tmp_path / "layers.png")
    svg_beside(png).unlink()
    assert "data:image/png;base64," in report_page("t", [Section("s", [Image(png)])])


HOSTILE = "</script><script>x</script>\"'<b>"


def test_heads_say_what_they_hold_over_them_and_in_a_list_below() -> None:
    table = TableBlock(
        ["arm", "KL"], [["a", 1.0], [HOSTILE, 2.0]], notes={"KL": f"nats {HOSTILE}", "gone": "no column"}
    )
    read = Reader(report_page("t", [Section("s", [table])]))
    heads = [attrs for tag, attrs in read.seen if tag == "th"]
    assert [head.get("title") for head in heads] == [None, f"nats {HOSTILE}"]
    assert all(head["scope"] == "col" for head in heads)
    assert [tag for tag, _ in read.seen if tag in ("summary", "dt", "dd")] == ["summary", "dt", "dd"]
    assert f"nats {HOSTILE}" in read.text and "no column" not in read.text
    assert len([tag for tag, _ in read.seen if tag == "script"]) == 1


def test_answers_stand_side_by_side_and_files_are_linked() -> None:
    blocks = [
        Beside(f"asked {HOSTILE}", {"base": "one", f"arm {HOSTILE}": f"two {HOSTILE}"}),
        Links(
            "files of 2 runs", {f"run {HOSTILE}": {"result": 'points/a b"c=0.1#/result.json', "log": "points/log.txt"}}
        ),
    ]
    read = Reader(report_page("t", [Section("s", blocks)]))
    for words in (f"asked {HOSTILE}", "one", f"two {HOSTILE}", f"run {HOSTILE}", "files of 2 runs"):
        assert words in read.text
    links = [attrs["href"] for tag, attrs in read.seen if tag == "a"]
    assert links == ["points/a%20b%22c=0.1%23/result.json", "points/log.txt"]
    assert len([tag for tag, _ in read.seen if tag == "script"]) == 1


def switched(text: str = "x") -> HeatRow:
    """A row that can be switched to two layers of one round."""
    token = HeatToken(text, 0.5, token_id=7, begins=0, ends=1, policy_logp=-1.25, reference_logp=-1.5)
    view = SideView(((text, 9, 0, 1),), ((2.0,), (0.25,)))
    side = HeatSide((token,))
    return HeatRow("p", (), side, side, rounds=(RoundView("1, chosen is A", ("1", "2"), view, view),))


def test_a_pair_carries_what_it_can_be_switched_to_and_tokens_say_what_they_are() -> None:
    code = heatmap_html([switched(HOSTILE)])
    read = Reader(code)
    kinds = [attrs.get("type") for tag, attrs in read.seen if tag == "script"]
    assert kinds == ["application/json", None], "what is hostile opened none"
    data = json.loads(code.partition('<script type="application/json">')[2].partition("</script>")[0])
    assert data[0]["layers"] == ["1", "2"] and data[0]["rejected"]["rows"] == [[2.0], [0.25]]
    assert data[0]["chosen"]["tokens"] == [[HOSTILE, 9, 0, 1]]
    told = [attrs["title"] for tag, attrs in read.seen if tag == "span" and "title" in attrs]
    assert told[0] == "0.50, weight 0.5, id 7, characters 0 to 1, log-prob: policy -1.250, reference -1.500"
    assert "<script" not in heatmap_html([HeatRow("p", (), switched().chosen, switched().chosen)])


SCRIPT = """<script>
const table = document.querySelectorAll("table")[0], seen = [];
const column = () => [...table.tBodies[0].rows].map(row => row.cells[1].textContent).join(" ");
for (let press = 0; press < 3; press += 1) { table.querySelectorAll("th button")[1].click(); seen.push(column()); }
const layer = document.querySelector(".heat-switch select");
layer.value = "1"; layer.dispatchEvent(new Event("change"));
seen.push(document.querySelector(".heat-side.chosen .heat-tokens span").title);
layer.value = ""; layer.dispatchEvent(new Event("change"));
seen.push(document.querySelector(".heat-side.chosen .heat-tokens span").title.slice(0, 4));
document.title = seen.join("|");
</script>"""


def test_a_browser_sorts_and_switches(tmp_path: Path) -> None:
    rows = [["a", "0.5 [0.1, 0.9]"], ["b", "-"], ["c", "-2.0 [x]"], ["d", "10.0 [y]"]]
    blocks = [TableBlock(["arm", "reward"], rows), Fragment(heatmap_html([switched()], page=False))]
    code = report_page("t", [Section("s", blocks)]).replace("</body>", f"{SCRIPT}</body>")
    (tmp_path / "page.html").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}/p",
         f"file://{tmp_path}/page.html"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = done.stdout.partition("<title>")[2].partition("</title>")[0].split("|")
    assert found == [
        "-2.0 [x] 0.5 [0.1, 0.9] 10.0 [y] -",
        "10.0 [y] 0.5 [0.1, 0.9] -2.0 [x] -",
        "0.5 [0.1, 0.9] - -2.0 [x] 10.0 [y]",
        "0.25, id 9, characters 0 to 1, as the source read it",
        "0.50",
    ]
