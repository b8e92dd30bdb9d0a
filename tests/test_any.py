"""Where a signature may hold ``Any``: each function by name, with its reason. Types elsewhere say what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "attnpo"
MOST = 45

ACCOUNT = "what became of a run's inputs, nested as result.json has it"
CARD = "facts of a model card, nested as the card's sections"
TURNS = "turns and function schemas as chat templates take them, whatever JSON they hold"
FOREIGN = "rows and constants of a benchmark's own repository, whose form is checked there"
PASSPORT = "the passport's numbers, nested as passport.json has them"
REASONS = {
    **{f"evaluation/checkout.py::read_{name}": FOREIGN for name in ("rows", "json", "rows_by", "constant")},
    "evaluation/checkout.py::_parse": FOREIGN,
    "evaluation/jsonl_store.py::read_lines": "rows as they were written, each of its own kind of file",
    **{
        f"lab/reports/passport.py::{name}": PASSPORT
        for name in (
            "_calibration_section",
            "_layer_cells",
            "measure_calibration",
            "measure_layer_attention",
            "measure_removal",
        )
    },
    "lab/studies/study.py::sections": "an Outcome, whose file reads this one",
    "lab/reports/passport.py::read": "the keywords of a judge's read, passed on as they come",
    "weights/faithfulness.py::faithfulness_score": "plain data of the analysis, read back from its file",
    "config/compose.py::_replace_at": "a copy of any dataclass or mapping",
    "config/compose.py::load": "the configuration's _target_ says which root it is",
    "config/compose.py::instantiate": "the node's _target_ says which component it is",
    **{
        f"system/files.py::{name}": "JSON of other rooms, which take it apart" for name in ("parse_json", "read_record")
    },
    **{
        f"run/show.py::{name}": "what torch reads of a saved step, checked there"
        for name in ("_load_saved_step", "_saved_pairs")
    },
    "display/look.py::line_colours": "keywords of matplotlib, passed on",
    "display/weighted_pair.py::rows": "columns of a frame, each of its own kind",
    "display/pair_record.py::from_dict": "JSON as it was read, taken apart and checked here",
    "display/weighted_pair.py::from_dict": "JSON as it was read, taken apart and checked here",
    "models/description.py::_rope_settings": "a model's own configuration, checked where it is read",
    "models/logps.py::forward": "torch gives the autograd context no public type",
    "models/logps.py::backward": "torch gives the autograd context no public type",
    "run/input_summary.py::example_statistics": ACCOUNT,
    "run/input_summary.py::describe_split": ACCOUNT,
    "run/result.py::from_json": "JSON as it was read, taken apart and checked here",
    **{f"run/report.py::{name}": CARD for name in ("card_facts", "_describe_source")},
    **{
        f"run/components.py::{name}": "a setting's own scorer: what it takes and gives is its own"
        for name in ("score", "base_answers")
    },
    **{
        f"{file}.py::{name}": "a part of the lab, which knows the run's types; the run, below it, does not"
        for file in ("lab/measures", "run/components")
        for name in ("resolve_layer", "measure")
    },
    "lab/studies/runner.py::study_record": "a testbed's digest of its world, whatever its form",
    "text/chat.py::_apply_template": TURNS,
    **{f"text/template.py::{name}": TURNS for name in ("check", "get_tools", "to_template_turns")},
    "training/loggers.py::experiment": "a class of wandb, which is imported inside functions only",
}


def annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    given = function.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None and argument.annotation is not None:
            yield argument.annotation
    if function.returns is not None:
        yield function.returns


def says_any(annotation: ast.AST) -> bool:
    """Whether ``Any`` is in an annotation, one that is quoted included."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name | ast.Attribute) and getattr(node, "id", getattr(node, "attr", "")) == "Any":
            return True
        quoted = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable()
        if quoted and any(name == "Any" for name in node.value.replace("[", " ").replace("]", " ").split()):
            return True
    return False


def functions_with_any(package: Path) -> set[str]:
    named = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(says_any, annotations(node))):
                named.add(f"{path.relative_to(package).as_posix()}::{node.name}")
    return named


def test_any_is_in_few_signatures_each_with_its_reason() -> None:
    assert functions_with_any(PACKAGE) == set(REASONS)
    assert len(REASONS) <= MOST and all(REASONS.values())


def test_any_is_found_wherever_it_stands(tmp_path: Path) -> None:
    source = {
        "plain": "def plain(x: Any): ...",
        "nested": "def nested(x: dict[str, Any]): ...",
        "returned": "def returned() -> list[Any]: ...",
        "quoted": "def quoted() -> 'dict[str, Any]': ...",
        "dotted": "def dotted(*, x: typing.Any): ...",
        "starred": "class C:\n    async def starred(self, *rest: Any, **named: int): ...",
    }
    (tmp_path / "file.py").write_text("\n".join([*source.values(), "def none(x: object, y: Anything): ..."]))
    assert functions_with_any(tmp_path) == {f"file.py::{name}" for name in source}
