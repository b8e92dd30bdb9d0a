"""Sections of a report as text: on a terminal and in Markdown, beside the HTML page they are made for."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from attnpo.display.page import Block, Image, KeyValues, Paragraph, Preformatted, Section, TableBlock
from attnpo.display.tables import format_cell, table_markdown, table_rich


def print_sections(console: Console, title: str, sections: Sequence[Section]) -> None:
    """Nothing; prints the sections as text, the first under ``title``; figures by where they lie."""
    for number, section in enumerate(sections):
        head = section.title if number else title
        if not any(isinstance(block, TableBlock) for block in section.blocks):
            console.print(head, highlight=False, markup=False)
        for block in section.blocks:
            if isinstance(block, TableBlock):
                name = block.caption or head
                console.print(table_rich(block.columns, block.rows, digits=block.digits, title=name))
            else:
                for line in _lines(block):
                    console.print(f"  {line}", highlight=False, markup=False)


def markdown(sections: Sequence[Section]) -> Iterator[str]:
    """The sections in Markdown, part by part."""
    for section in sections:
        yield f"## {section.title}"
        notes: list[str] = []
        for block in section.blocks:
            if isinstance(block, TableBlock):
                yield from ["\n".join(f"- {line}" for line in notes)] if notes else []
                notes = []
                yield from [block.caption] if block.caption else []
                yield table_markdown(block.columns, block.rows, digits=block.digits)
            else:
                notes += _lines(block)
        yield from ["\n".join(f"- {line}" for line in notes)] if notes else []


def _lines(block: Block) -> list[str]:
    """A block without a table as lines of text; nothing for HTML."""
    match block:
        case Paragraph(text):
            return [text]
        case KeyValues(values, digits):
            return [f"{name}: {format_cell(value, digits)}" for name, value in values.items()]
        case Preformatted(text):
            return text.splitlines()
        case Image(source, caption) if not isinstance(source, bytes):
            return [f"{caption}: {source}" if caption else str(source)]
        case _:
            return []
