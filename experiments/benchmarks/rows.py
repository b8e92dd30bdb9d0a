"""Writes preference pairs at the paper's size: unique synthetic conversations with the lengths of a small sample.

    python -m experiments.benchmarks.rows FILE [--rows 20000] [--seed 0] [--sample SAMPLE.jsonl]

Each row takes its lengths from a row of the sample and is filled with sentences from the whole sample, drawn by the
seed. Without a sample, lengths match the paper's data on average and sentences come from the project's own pages.
"""

import json
import random
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attnpo.schema import SIDES
from experiments.benchmarks.harness import ROOT
from experiments.benchmarks.pipeline import row
from experiments.benchmarks.shapes import typical_lengths

PER_TOKEN = 4  # characters, about
Row = Mapping[str, str]
"""Texts of a pair: prompt, chosen and rejected response."""


def read_sample(file: Path | None) -> list[Row]:
    """Reads the texts of a file of single-turn pairs, or of the project's pages without a file."""
    if file is None:
        pages = " ".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
        rng, names = random.Random(0), ("prompt", *SIDES)
        drawn = [[PER_TOKEN * count for count in counts] for counts in typical_lengths(200, 4, 0)]
        starts = [[rng.randrange(len(pages) - most) for most in counts] for counts in drawn]
        return [
            {name: pages[start : start + count] for name, start, count in zip(names, *both, strict=True)}
            for both in zip(starts, drawn, strict=True)
        ]
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["prompt"], **{side: row[side][-1]["content"] for side in SIDES}} for row in rows]


def make_rows(sample: Sequence[Row], count: int, seed: int) -> Iterator[Row]:
    """Yields ``count`` rows; a number at the start of each prompt makes it unique."""
    rng = random.Random(seed)
    sentences = {
        part: [one for row in sample for side in sides for one in re.split(r"(?<=[.!?:\n])(?=\s)", row[side])]
        for part, sides in {"prompt": ("prompt",), "answer": SIDES}.items()
    }

    def fill(text: str, part: str) -> str:
        drawn = ""
        while len(drawn) < len(text):
            drawn += rng.choice(sentences[part])
        return drawn[: len(text)].strip() or text

    for number in range(count):
        lengths = rng.choice(sample)
        answers = {side: fill(lengths[side], "answer") for side in SIDES}
        yield {"prompt": f"{number}. {fill(lengths['prompt'], 'prompt')}", **answers}


def write_rows(file: Path, sample: Path | None, count: int, seed: int) -> None:
    """Writes the given number of rows as conversations."""
    with file.open("w", encoding="utf-8") as out:
        for texts in make_rows(read_sample(sample), count, seed):
            out.write(json.dumps(row(*(texts[name] for name in ("prompt", *SIDES)))) + "\n")


def main() -> None:
    """Writes the file."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=Path)
    options = parser.parse_args()
    write_rows(options.file, options.sample, options.rows, options.seed)


if __name__ == "__main__":
    main()
