"""Renders HTML from ``templates/``: text is escaped, and invisible or control characters are made visible."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attnpo.display.heat import make_readable, make_visible


def render(template: str, **values: object) -> str:
    """Renders a template file with ``values``."""
    return _TEMPLATES.get_template(template).render(values)


def _escape_value(value: object) -> object:
    return value if isinstance(value, Markup) else make_readable(str(value))


def _with_line_breaks(text: str) -> Markup:
    return Markup("<br>").join(make_readable(line) for line in text.split("\n"))


def _escape_visible(text: str) -> Markup:
    return escape(make_visible(text))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    finalize=_escape_value,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"lines": _with_line_breaks, "visible": _escape_visible}
