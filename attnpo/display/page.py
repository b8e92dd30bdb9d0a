"""Report pages: one self-contained HTML file of sections with tables, images, key-value lists and fragments."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from attnpo.display.tables import DEFAULT_DIGITS, Cell, format_cell, table_html
from attnpo.display.tables import TableBlock as TableBlock  # a block of a page like those below
from attnpo.display.templating import render
from attnpo.schema import UserError

_PNG = b"\x89PNG\r\n\x1a\n"


def svg_beside(path: Path) -> Path:
    """Returns where the SVG of a PNG lies."""
    return path.with_suffix(".svg")


@dataclass(frozen=True)
class Paragraph:
    """Plain text; a ``warning`` has a background of its own."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Banner:
    """Verdict in a few words, large: ``good`` and not are told apart by colour and by a mark."""

    text: str
    good: bool


@dataclass(frozen=True)
class KeyValues:
    """Names and values, floats with ``digits`` decimals."""

    values: Mapping[str, Cell]
    digits: int = DEFAULT_DIGITS


@dataclass(frozen=True)
class Image:
    """PNG file, with what it shows in words; a page shows the SVG that lies beside it, where there is one."""

    source: Path
    caption: str = ""


@dataclass(frozen=True)
class Preformatted:
    """Text in a fixed-width font with its own line breaks: a config, a command; folded under its ``title``, if any."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Fragment:
    """HTML that is put in unescaped (``heatmap_html(rows, page=False)``); never text from data."""

    html: str


@dataclass(frozen=True)
class Links:
    """Paths of files relative to the page, by the words for them and by what they belong to.

    They are folded under ``title``, which stands open where they are few.
    """

    title: str
    rows: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Beside:
    """Texts side by side, that of each name by its heading: the answers of several models to one prompt."""

    prompt: str
    texts: Mapping[str, str]


Block = Paragraph | Banner | KeyValues | TableBlock | Image | Preformatted | Fragment | Links | Beside


@dataclass(frozen=True)
class Section:
    """Heading and what stands below it."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def report_page(title: str, sections: Sequence[Section]) -> str:
    """Returns a whole HTML page: title, links to the sections, the sections in order.

    Images are embedded; style and script stand in the page; it needs nothing from the net, follows the reader's light
    or dark setting, and fits a phone and paper. The script sorts tables by a press on a head; without it all can be
    read. All text is escaped, fragments excepted. UserError for an image that is missing or no PNG.
    """
    return render(
        "page.html",
        title=title,
        sections=sections,
        kind_of=lambda block: type(block).__name__,
        format_cell=format_cell,
        table_of=table_html,
        url_of=_data_url,
        link_of=lambda path: quote(path, safe="/=,.-_"),
    )


def _data_url(source: Path) -> str:
    try:
        data = source.read_bytes()
    except OSError as error:
        raise UserError(f"report image {source}: cannot be read ({error.strerror}); draw the figure first") from error
    if not data.startswith(_PNG):
        raise UserError(f"report image {source}: expected a PNG, got something that starts with {data[:8]!r}")
    drawing = svg_beside(source)
    kind, data = ("svg+xml", drawing.read_bytes()) if drawing.is_file() else ("png", data)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
