"""Python blocks of the documents: every name they use is defined on the page or imported, and imports find it.

Blocks that need neither a large model nor TRL also run as printed: of docs/python_api.md in lab/test_results.py,
of docs/own_things.md and own_weights.md in their tests, of docs/objectives.md and docs/theory.md here.
"""

import ast
import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.config import compose as config
from tests.docs.commands import FENCE, PAGES, ROOT
from tests.run.worlds import build_world

BLOCKS = {
    path.relative_to(ROOT).as_posix(): [block for _, language, block in FENCE.findall(text) if language == "python"]
    for path in PAGES
    if "```python" in (text := path.read_text(encoding="utf-8"))
}
# Words in capitals that stand for something of the reader's, each explained on its page.
YOURS = {"MODEL", "PAIRS", "RUN", "STUDY"}


def undefined(code: str) -> set[str]:
    """Returns the names of F821, undefined names, that ruff finds in ``code``."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json", "-"]
    found = json.loads(subprocess.run(command, input=code, capture_output=True, text=True, check=False).stdout)
    assert [one["message"] for one in found if one["code"] != "F821"] == []  # what cannot be parsed
    return {one["message"].split("`")[1] for one in found}


@pytest.mark.parametrize("page", BLOCKS)
def test_every_name_is_defined_on_its_page_before_it_is_used(page: str) -> None:
    blocks = BLOCKS[page]
    text = (ROOT / page).read_text(encoding="utf-8")
    for number in range(len(blocks)):
        lacking = undefined("\n".join(blocks[: number + 1]))
        assert lacking <= YOURS, f"{page}: block {number + 1} needs {sorted(lacking - YOURS)}"
        assert all(f"`{name}`" in text for name in lacking), f"{page} does not say what {sorted(lacking)} stand for"


@pytest.mark.parametrize("page", BLOCKS)
def test_imports_find_what_they_name(page: str) -> None:
    for node in ast.walk(ast.parse("\n".join(BLOCKS[page]))):
        if isinstance(node, ast.ImportFrom) and node.module and find_spec(node.module.partition(".")[0]):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_a_formula_is_called_as_printed() -> None:
    names: dict[str, Any] = {}
    (block,) = BLOCKS["docs/objectives.md"]
    exec(compile(block, "objectives.md", "exec"), names)
    assert torch.allclose(names["output"].losses, torch.tensor([0.5544]), atol=1e-4)


def test_freedom_is_measured_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny world in place of the testbed, whose base takes minutes; its model stands in for both policies."""
    world = build_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("DPO", "WEIGHTED"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "best").symlink_to(world.model)
    monkeypatch.setattr(config, "load", lambda name, words: world.config(*words))
    names: dict[str, Any] = {}
    (block,) = BLOCKS["docs/theory.md"]
    exec(compile(block, "theory.md", "exec"), names)
    assert set(names["result"].of("kl")) == {"DPO", "AttentionPO"}
