"""Report pages: everything in one file, escaped, in order."""

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attnpo.display.figures import LayerPoint, layer_curve
from attnpo.display.heat import HeatRow, HeatSide, HeatToken
from attnpo.display.heatmap import heatmap_html
from attnpo.display.page import Fragment, Image, KeyValues, Paragraph, Preformatted, Section, TableBlock, report_page
from attnpo.schema import UserError


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
        self.text += data if self.stack and self.stack[-1] != "style" else ""


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
    assert base64.b64decode((images[0]["src"] or "").removeprefix("data:image/png;base64,")) == png.read_bytes()
    links = [attrs["href"] for tag, attrs in read.seen if tag == "a"]
    assert links == ["#s1", "#s2", "#s3"]
    assert [attrs["id"] for tag, attrs in read.seen if tag == "section" and "id" in attrs] == ["s1", "s2", "s3"]
    assert not {tag for tag, _ in read.seen} & {"script", "link", "iframe"} and "http" not in code
    assert ("p", {"class": "warning"}) in read.seen
    assert 'name="viewport"' in code and "prefers-color-scheme:dark" in code and "@media print" in code


def test_text_cannot_act() -> None:
    hostile = "</p><script>x</script>\u202e"
    read = Reader(report_page(hostile, [Section(hostile, [Paragraph(hostile), Preformatted(hostile)])]))
    assert "script" not in {tag for tag, _ in read.seen}
    assert read.text.count("</p><script>x</script>[U+202E]") == 5  # page title, heading, section heading, two blocks


def test_images_must_be_there_and_be_png(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.png: cannot be read"):
        report_page("t", [Section("s", [Image(tmp_path / "none.png")])])
    (tmp_path / "drawing.png").write_bytes(b"<svg>")
    with pytest.raises(UserError, match=r"drawing\.png: expected a PNG"):
        report_page("t", [Section("s", [Image(tmp_path / "drawing.png")])])


def test_a_page_of_one_section_has_no_links() -> None:
    assert "<nav>" not in report_page("t", [Section("s")])
