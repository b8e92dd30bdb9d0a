"""No call lets a model folder, a repository or a stored file bring code of its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADERS = {
    "from_pretrained",
    "from_config",
    "load_dataset",
    "load_dataset_builder",
    "pipeline",
    "get_class_from_dynamic_module",
}
WANTED = {**dict.fromkeys(LOADERS, ("trust_remote_code", False)), "load": ("weights_only", True)}


def calls(source: str) -> Iterator[tuple[str, int, dict[str, object]]]:
    """Name, line and constant keywords of every call of a loader; ``load`` is torch's."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if name in WANTED and (name != "load" or owner == "torch"):
            yield name, node.lineno, {str(item.arg): getattr(item.value, "value", None) for item in node.keywords}


def unsafe(source: str) -> list[int]:
    """Lines of the calls that do not say that nothing of the loaded may be run."""
    return [line for name, line, given in calls(source) if given.get(WANTED[name][0], "absent") is not WANTED[name][1]]


FILES = sorted((ROOT / "attnpo").rglob("*.py"))


def test_every_call_refuses_foreign_code() -> None:
    found = {file: [*calls(file.read_text(encoding="utf-8"))] for file in FILES}
    assert sum(map(len, found.values())) >= 10
    assert {str(file): lines for file in FILES if (lines := unsafe(file.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trust)",
        "load_dataset(path, **more)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_a_call_that_does_not_is_found(source: str) -> None:
    assert unsafe(source) == [1]
    assert unsafe("json.load(path)\nAutoConfig.from_pretrained(path, trust_remote_code=False)") == []
