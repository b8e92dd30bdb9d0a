"""What is shown as files: JSON lines, tables for pandas and others, the page of heat maps."""

import json
import math
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from attnpo.files import write_whole
from attnpo.inspection.shown import ShownPair
from attnpo.inspection.weighed_pair import frame_of, write_page


def json_lines(pairs: Sequence[ShownPair]) -> Iterator[str]:
    """A line of JSON per token; numbers that are not finite, which JSON has not, as words."""
    for pair in pairs:
        for row in pair.rows():
            plain = {
                name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in row.items()
            }
            yield json.dumps(plain, ensure_ascii=False) + "\n"


def write_pairs(pairs: Sequence[ShownPair], path: Path) -> None:
    """Writes ``pairs`` to ``path`` in the format of its ending, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        write_page([pair.heat for pair in pairs if pair.heat is not None], path)
    elif path.suffix == ".jsonl":
        write_whole(path, "".join(json_lines(pairs)))
    else:
        frame = frame_of([row for pair in pairs for row in pair.rows()])
        if path.suffix == ".csv":
            write_whole(path, frame.to_csv(index=False))
        else:
            buffer = BytesIO()
            frame.to_parquet(buffer, index=False)
            write_whole(path, buffer.getvalue())
