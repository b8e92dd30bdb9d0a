"""HTML from ``templates/``: every text put in is escaped, and invisible or control characters are named."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attnpo.display.heat import readable, visible


def render(template: str, **values: object) -> str:
    """Fills the template in the file of that name with ``values``."""
    return _TEMPLATES.get_template(template).render(values)


def _escape_value(value: object) -> object:
    return value if isinstance(value, Markup) else readable(str(value))


def _lines(text: str) -> Markup:
    return Markup("<br>").join(readable(line) for line in text.split("\n"))


def _visible(text: str) -> Markup:
    return escape(visible(text))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    finalize=_escape_value,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"lines": _lines, "visible": _visible}
