"""Report pages: self-contained HTML with sections of tables, images, key-value lists and HTML fragments."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from attnpo.display.tables import DEFAULT_DIGITS, Cell, format_cell, table_html
from attnpo.display.tables import TableBlock as TableBlock  # also a block of a page
from attnpo.display.templating import render
from attnpo.schema import UserError

_PNG = b"\x89PNG\r\n\x1a\n"


def svg_path(path: Path) -> Path:
    """Returns the path of the SVG that belongs to a PNG."""
    return path.with_suffix(".svg")


@dataclass(frozen=True)
class Paragraph:
    """Plain text; a ``warning`` is highlighted."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Banner:
    """Short verdict in large type; ``good`` determines its colour and mark."""

    text: str
    good: bool


@dataclass(frozen=True)
class KeyValues:
    """List of names with their values; floats are shown with ``digits`` decimals."""

    values: Mapping[str, Cell]
    digits: int = DEFAULT_DIGITS


@dataclass(frozen=True)
class Image:
    """PNG file with a caption; pages show the SVG of the same name instead, if there is one."""

    source: Path
    caption: str = ""


@dataclass(frozen=True)
class CodeBlock:
    """Fixed-width text that keeps its line breaks, e.g. a config or command; collapsed under ``title``."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class RawHtml:
    """HTML inserted without escaping (``heatmap_html(rows, page=False)``); must never contain text from data."""

    html: str


@dataclass(frozen=True)
class Links:
    """Links to files, grouped by row; each link text is mapped to a path relative to the page.

    The links are collapsed under ``title``, or expanded if there are few.
    """

    title: str
    rows: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class SideBySide:
    """Texts side by side under headings, e.g. several models' responses to one prompt."""

    prompt: str
    texts: Mapping[str, str]


Block = Paragraph | Banner | KeyValues | TableBlock | Image | CodeBlock | RawHtml | Links | SideBySide


@dataclass(frozen=True)
class Section:
    """Heading with blocks below it."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def report_page(title: str, sections: Sequence[Section]) -> str:
    """Renders a whole HTML page: title, links to the sections, and the sections in order.

    Images, style and script are embedded; the page needs no network, follows the reader's light or dark setting, and
    works on phones and on paper. The script sorts a table when its header is clicked; the page is readable without it.
    All text is escaped except ``RawHtml``.

    Raises:
        UserError: an image is missing or not a PNG.
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
        raise UserError(f"report image {source}: expected a PNG, got a file that starts with {data[:8]!r}")
    drawing = svg_path(source)
    kind, data = ("svg+xml", drawing.read_bytes()) if drawing.is_file() else ("png", data)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
