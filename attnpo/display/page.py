"""Report pages: one self-contained HTML file of sections with tables, images, key-value lists and fragments."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnpo.display.heat import readable
from attnpo.display.tables import DEFAULT_DIGITS, Cell, Digits, Row, format_cell, table_html
from attnpo.schema import UserError

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Paragraph:
    """Plain text; ``warning`` sets it off."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class KeyValues:
    """Names and values, floats with ``digits`` decimals."""

    values: Mapping[str, Cell]
    digits: int = DEFAULT_DIGITS


@dataclass(frozen=True)
class TableBlock:
    """A table as ``attnpo.display.tables`` takes it."""

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    digits: Digits = DEFAULT_DIGITS


@dataclass(frozen=True)
class Image:
    """A PNG from a file or from its bytes, with what it shows in words."""

    source: Path | bytes
    caption: str = ""


@dataclass(frozen=True)
class Preformatted:
    """Text in a fixed-width font with its own line breaks: a config, a command."""

    text: str


@dataclass(frozen=True)
class Fragment:
    """HTML put in as it is (``heatmap_html(rows, page=False)``); never text from data."""

    html: str


Block = Paragraph | KeyValues | TableBlock | Image | Preformatted | Fragment


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


_STYLE = """
:root { --ink:#1d1f24; --soft:#5d636e; --line:#d9dde4; --page:#f4f5f7; --card:#fff; --accent:#0072b2; --warn:#fff3d6; }
@media screen and (prefers-color-scheme:dark) {
  :root { --ink:#e6e8ec; --soft:#9aa1ad; --line:#363b45; --page:#121418; --card:#1c1f25; --accent:#6fb7e6;
    --warn:#43360f; } }
* { box-sizing:border-box; }
body { margin:0 auto; padding:24px 20px 60px; max-width:1180px; background:var(--page); color:var(--ink);
  font:16px/1.55 system-ui,sans-serif; }
h1 { font-size:26px; line-height:1.25; margin:0 0 14px; }
h2 { font-size:19px; margin:0 0 10px; }
nav { margin:0 0 20px; font-size:14px; display:flex; flex-wrap:wrap; gap:2px 16px; }
a { color:var(--accent); }
body > section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:16px 18px;
  margin:0 0 18px; }
p { max-width:75ch; white-space:pre-line; overflow-wrap:anywhere; }
.warning { background:var(--warn); border-radius:6px; padding:8px 12px; }
.wide { overflow-x:auto; }
table { border-collapse:collapse; font-size:14px; font-variant-numeric:tabular-nums; margin:6px 0 12px; }
caption { text-align:left; color:var(--soft); padding:0 0 6px; }
th, td { padding:5px 12px 5px 0; text-align:left; border-bottom:1px solid var(--line); vertical-align:top; }
thead th { border-bottom:2px solid var(--soft); white-space:nowrap; }
.num { text-align:right; white-space:nowrap; }
dl { display:grid; grid-template-columns:max-content 1fr; gap:3px 18px; margin:6px 0 12px; font-size:15px; }
dt { color:var(--soft); } dd { margin:0; overflow-wrap:anywhere; font-variant-numeric:tabular-nums; }
figure { margin:8px 0 14px; } figcaption { color:var(--soft); font-size:14px; }
img { max-width:100%; height:auto; background:#fff; border-radius:6px; display:block; }
pre { overflow-x:auto; font-size:13px; line-height:1.45; background:var(--page); border-radius:6px; padding:10px 12px; }
@media (max-width:600px) { body { padding:14px 10px; } body > section { padding:12px; }
  dl { grid-template-columns:1fr; gap:0; } dd { margin-bottom:6px; } }
@media print { body { background:none; max-width:none; padding:0; font-size:11pt; } nav { display:none; }
  body > section { border:none; padding:0; } pre { white-space:pre-wrap; } .wide { overflow:visible; }
  figure, tr { break-inside:avoid; } h2 { break-after:avoid; } }
"""


def report_page(title: str, sections: Sequence[Section]) -> str:
    """A whole HTML page: title, links to the sections, the sections in order.

    Images are embedded; style stands in the page; it needs no script and nothing from the net, follows the reader's
    light or dark setting, and fits a phone and paper. All text is escaped, fragments excepted. UserError for an image
    that is missing or no PNG.
    """
    name = _text(title)
    links = "".join(f'<a href="#s{number}">{_text(section.title)}</a>' for number, section in enumerate(sections, 1))
    body = "\n".join(
        f'<section id="s{number}"><h2>{_text(section.title)}</h2>\n'
        + "\n".join(_block_html(block) for block in section.blocks)
        + "</section>"
        for number, section in enumerate(sections, 1)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{name}</h1>\n{f'<nav>{links}</nav>' if len(sections) > 1 else ''}\n{body}\n</body></html>\n"
    )


def _block_html(block: Block) -> str:
    match block:
        case Paragraph(text, warning):
            mark = ' class="warning"' if warning else ""
            return f"<p{mark}>{_text(text)}</p>"
        case KeyValues(values, digits):
            pairs = (
                f"<dt>{_text(key)}</dt><dd>{_text(format_cell(value, digits))}</dd>" for key, value in values.items()
            )
            return f"<dl>{''.join(pairs)}</dl>"
        case TableBlock(columns, rows, caption, digits):
            return f'<div class="wide">{table_html(columns, rows, digits=digits, caption=caption)}</div>'
        case Image(source, caption):
            below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
            return f'<figure><img alt="{_text(caption)}" src="{_data_url(source)}">{below}</figure>'
        case Preformatted(text):
            return f"<pre>{_text(text)}</pre>"
        case Fragment(code):
            return code


def _data_url(source: Path | bytes) -> str:
    if isinstance(source, bytes):
        data, name = source, "bytes"
    else:
        name = str(source)
        try:
            data = source.read_bytes()
        except OSError as error:
            raise UserError(f"report image {name}: cannot be read ({error.strerror}); draw the figure first") from error
    if not data.startswith(_PNG):
        raise UserError(f"report image {name}: expected a PNG, got something that starts with {data[:8]!r}")
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


def _text(text: str) -> str:
    """``text`` escaped, with plain line breaks and spaces."""
    return html.escape(readable(text))
