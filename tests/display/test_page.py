"""Report pages: everything in one file, escaped, in order."""

import base64
import re
import subprocess
from pathlib import Path

import pytest

from attnpo.display.heatmap import heatmap_html
from attnpo.display.page import (
    CodeBlock,
    Image,
    KeyValues,
    Links,
    Paragraph,
    RawHtml,
    Section,
    SideBySide,
    TableBlock,
    report_page,
    svg_path,
)
from attnpo.schema import UserError
from tests.display.browser import chromium
from tests.display.sides import pair_of, response
from tests.display.test_heat import Reader


def picture(folder: Path) -> Path:
    """Returns the beginning of a PNG, by which it is known."""
    (folder / "layers.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder / "layers.png"


def test_a_page_of_everything(tmp_path: Path) -> None:
    png = picture(tmp_path)
    svg_path(png).write_text("<svg/>", encoding="utf-8")
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
                    CodeBlock("a:\n  b: <1>"),
                    RawHtml(heatmap_html([pair_of(response(("x", 1.0)))], page=False)),
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
    assert drawn == svg_path(png).read_bytes()
    links = [attrs["href"] for tag, attrs in read.seen if tag == "a"]
    assert links == ["#s1", "#s2", "#s3"]
    assert [attrs["id"] for tag, attrs in read.seen if tag == "section" and "id" in attrs] == ["s1", "s2", "s3"]
    assert not {tag for tag, _ in read.seen} & {"link", "iframe"} and "http" not in code
    assert [attrs for tag, attrs in read.seen if tag == "script"] == [{}], "one script, which loads no file"
    assert ("p", {"class": "warning"}) in read.seen
    assert 'name="viewport"' in code and "prefers-color-scheme:dark" in code and "@media print" in code


def test_text_cannot_act() -> None:
    hostile = "</p><script>x</script>\u202e"
    read = Reader(report_page(hostile, [Section(hostile, [Paragraph(hostile), CodeBlock(hostile)])]))
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
    blocks = [Links("few", dict(list(files.items())[:12])), Links("many", files), CodeBlock("lr: 1", "the config")]
    code = report_page("t", [Section("s", blocks)])
    opened = {words: "open" in start for start, words in re.findall(r"<details([^>]*)><summary>([^<]*)<", code)}
    assert opened == {"few": True, "many": False, "the config": False}


def test_a_page_of_one_section_has_no_links() -> None:
    assert "<nav>" not in report_page("t", [Section("s")])


def test_a_picture_without_a_drawing_beside_it_is_shown_as_it_is(tmp_path: Path) -> None:
    assert "data:image/png;base64," in report_page("t", [Section("s", [Image(picture(tmp_path))])])


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
        SideBySide(f"asked {HOSTILE}", {"base": "one", f"arm {HOSTILE}": f"two {HOSTILE}"}),
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


SCRIPT = """<script>
const table = document.querySelectorAll("table")[0], seen = [];
const column = () => [...table.tBodies[0].rows].map(row => row.cells[1].textContent).join(" ");
for (let press = 0; press < 3; press += 1) { table.querySelectorAll("th button")[1].click(); seen.push(column()); }
document.title = seen.join("|");
</script>"""


def test_a_browser_sorts(tmp_path: Path) -> None:
    rows = [["a", "0.5 [0.1, 0.9]"], ["b", "-"], ["c", "-2.0 [x]"], ["d", "10.0 [y]"]]
    code = report_page("t", [Section("s", [TableBlock(["arm", "reward"], rows)])]).replace(
        "</body>", f"{SCRIPT}</body>"
    )
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
    ]
