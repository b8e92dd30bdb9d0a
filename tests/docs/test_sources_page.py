"""docs/sources.md against the headers of configs/weights: one place for what a source assumes and costs."""

import re
from pathlib import Path

from attnpo.config.compose import CONFIG_DIR, list_groups

PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")


def header(option: str) -> tuple[str, str]:
    """What the header of an option says that it assumes, and costs."""
    lines = (CONFIG_DIR / "weights" / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[: lines.index(next_key(lines))])
    found = re.fullmatch(r".* Assumes: (.+) Costs: (.+)", comment)
    assert found, f"configs/weights/{option}.yaml: its header must end with `# Assumes: ...` and `# Costs: ...`"
    return found[1], found[2]


def next_key(lines: list[str]) -> str:
    return next(line for line in lines if not line.startswith("#"))


def row(option: str) -> str:
    assumes, costs = header(option)
    return f"| `{option}` | {assumes} | {costs} |"


def test_the_table_is_what_the_headers_say() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = [line.split("`")[1] for line in rows]
    assert sorted(named) == list_groups()["weights"]
    assert rows == [row(option) for option in named], "\n".join(row(option) for option in named)
