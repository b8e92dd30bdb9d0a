"""What is shown as files: JSON lines, tables for pandas and others, the page of heat maps."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnpo.display.heatmap import heatmap_html
from attnpo.display.shown_pair import ShownPair
from attnpo.display.weighed_pair import frame_of
from attnpo.system.files import write_marked

MAKER = "attnpo.show"


def json_lines(pairs: Sequence[ShownPair]) -> Iterator[str]:
    """Yields a line of JSON per token; numbers that are not finite, which JSON has not, as words."""
    for pair in pairs:
        for row in pair.rows():
            plain = {
                name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in row.items()
            }
            yield json.dumps(plain, ensure_ascii=False) + "\n"


def write_pairs(pairs: Sequence[ShownPair], path: Path) -> None:
    """Writes ``pairs`` to ``path`` in the format of its ending, whole or not at all. UserError for a file not ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: str | bytes
    if path.suffix == ".html":
        content = heatmap_html([pair.heat for pair in pairs if pair.heat is not None])
    elif path.suffix == ".jsonl":
        content = "".join(json_lines(pairs))
    else:
        frame = frame_of([row for pair in pairs for row in pair.rows()])
        content = frame.to_csv(index=False) if path.suffix == ".csv" else frame.to_parquet(None, index=False)
    write_marked(f"out={path}", path, content, MAKER)
