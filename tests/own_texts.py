"""Preference pairs of our own texts: a few written here, and the paragraphs of this repository's pages."""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"

# prompt, better answer, worse answer
WRITTEN = [
    ("Why do leaves fall in autumn?", "A tree saves water in winter, so it lets its leaves go.", "They are tired."),
    ("Name three rivers.", "1. Elbe\n2. Loire\n3. Po\n", "I know no river"),
    ("Was ist ein Zaunkönig?", "Ein sehr kleiner Singvogel mit kurzem, aufgestelltem Schwanz.", "Ein König."),
    ("用一句话介绍茶。", "茶是用茶树的叶子泡成的饮料,味道清香。", "不知道。"),
    ("お茶は好きですか?", "はい、毎朝飲みます。とくに緑茶が好きです。", "いいえ"),
    ("Что такое радуга?", "Это свет солнца, разложенный каплями дождя на цвета.", "Мост."),
    ("ما هو الشاي؟", "الشاي مشروب يحضّر من أوراق نبات الشاي.", "لا أعرف."),
    ("Cheer me up 🙂", "You did well today! 🎉 Rest now, 👩🏽‍🔬 of the house.", "ok"),
    ("Print the squares up to 9.", "```python\nfor n in range(4):\n    print(n * n)\n```", "print(0, 1, 4, 9)"),
    ("Which HTML makes a line break?", "`<br>` does; it has no end tag &mdash; none is needed.", "<p></p>"),
    ("\nSay yes.\n", " Yes.", "\tYes, of course I will say it: yes!\n\n"),
    ("Write a table.", "| a | b |\n|---|---|\n| 1 | 2 |", "a, b: 1, 2"),
    ("Is {this} a placeholder?", "No: {this} is plain text, and so is {{ that }}.", "{question}"),
    ("Solve x² = 2.", "x = ±√2 ≈ ±1.4142", "x = 1"),
]


def paragraphs(least: int = 60) -> list[str]:
    """Returns the paragraphs, lists, tables and code blocks of the pages that have ``least`` characters."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]
    return [part.strip("\n") for page in pages for part in page.split("\n\n") if len(part) >= least]


def rows(count: int) -> list[dict[str, Any]]:
    """``count`` rows in the conventions of the hub's preference sets.

    Every fourth has a dialogue, every eighth a system message before its prompt.
    """
    found: list[dict[str, Any]] = []
    parts = paragraphs()
    texts = WRITTEN + [
        (f"What do the pages say of this: {first[:50]}?", first, second)
        for first, second in zip(parts[::2], parts[1::2], strict=False)
        if first != second
    ]
    assert count <= len(texts)
    for place, (prompt, chosen, rejected) in enumerate(texts[:count]):
        before = [{"role": "user", "content": prompt}]
        if place % 4 == 3:
            before = [
                {"role": "user", "content": "May I ask something?"},
                {"role": "assistant", "content": "Do. What is it?"},
                *before,
            ]
        if place % 8 == 7:
            before = [{"role": "system", "content": "Answer shortly."}, *before]
        sides = {
            side: [*before, {"role": "assistant", "content": text}]
            for side, text in (("chosen", chosen), ("rejected", rejected))
        }
        found.append({"prompt": prompt, "prompt_id": f"own{place}", **sides})
    return found


def write_rows(file: Path, count: int, start: int = 0) -> Path:
    """Writes rows ``start`` to ``count`` as JSON Lines."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(count)[start:]]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
