"""The model card of an exported policy: Markdown with the Hub's metadata, from plain facts alone (``Facts``)."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from huggingface_hub import ModelCard, ModelCardData

from attnpo.system.credentials import redact

TEMPLATE = Path(__file__).parent / "templates" / "card.md.jinja"


class SplitFacts(TypedDict, total=False):
    """Rows read and pairs kept of a split; counts of the dropped and the noted ones by reason."""

    read: int
    kept: int
    dropped: Mapping[str, int]
    noted: Mapping[str, int]


class OriginFacts(TypedDict, total=False):
    """Where the base model or the data come from; ``hub`` is the id there or None.

    The base has a ``fingerprint`` (digests by name), the data have a ``subset`` and ``splits``.
    """

    name: str
    path: str
    hub: str | None
    revision: str | None
    fingerprint: Mapping[str, str]
    subset: str | None
    splits: Mapping[str, SplitFacts]


class PartFacts(TypedDict):
    """A component of the method and its settings."""

    name: str
    settings: NotRequired[Mapping[str, object]]


class MethodFacts(TypedDict, total=False):
    """How the policy was trained; ``verdicts`` are shares of the judge's verdicts by name."""

    objective: PartFacts | None
    weights: PartFacts | None
    judge: PartFacts | None
    verdicts: Mapping[str, object] | None


class Facts(TypedDict, total=False):
    """What the card tells; a part that is missing is left out. ``statistics`` are numbers by split and name.

    ``reward``: the model is a reward model. ``overlap``: a remark where validation is not of unseen pairs.
    """

    reward: bool
    base: OriginFacts
    data: OriginFacts
    method: MethodFacts
    statistics: Mapping[str, Mapping[str, float | None]]
    hyperparameters: Mapping[str, object]
    versions: Mapping[str, str]
    command: Sequence[str]
    overlap: str | None


def model_card(
    facts: Facts,
    metrics: Mapping[str, float],
    *,
    step: int | None = None,
    dtype: str = "float32",
    notes: Sequence[str] = (),
) -> str:
    """Returns the text of README.md. ``metrics``: those of validation at ``step`` (others are left out).

    ``notes`` are remarks for the section on use.
    """
    facts = cast(Facts, redact(facts))
    base, method, reward = facts.get("base", {}), facts.get("method", {}), facts.get("reward", False)
    objective, weights = method.get("objective"), method.get("weights")
    title = f"{base.get('name', 'A base model')}, trained with {_name(objective)}"
    validated = {name: value for name, value in sorted(metrics.items()) if name.startswith("val/")}
    remark = facts.get("overlap")
    sections = {
        "Base model": _base(base),
        "Data": _data(facts.get("data", {})),
        "Method": _method(method),
        "Token weights": _statistics(facts.get("statistics", {})),
        "Hyperparameters": _pairs("setting", facts.get("hyperparameters", {})),
        f"Validation at step {step}" if step is not None else "Validation": _pairs("metric", validated)
        + (f"\n\n{remark}." if validated and remark else ""),
    }
    more: dict[str, Any] = {"reward": reward, "step": step, "dtype": dtype, "sections": sections}
    card = ModelCard.from_template(
        metadata(facts),
        template_path=str(TEMPLATE),
        title=" ".join(title.split()),
        objective=_name(objective),
        weights=_name(weights) if weights else None,
        notes=[f"{note[0].upper()}{note[1:]}" for note in notes],
        versions=", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()),
        command=shlex.join(facts.get("command", ())),
        **more,
    )
    return f"{card}\n"


def metadata(facts: Facts) -> ModelCardData:
    """Returns the Hub's metadata. Base and data are named only if they are on the Hub: it refuses cards with others."""
    base, data, method = facts.get("base", {}), facts.get("data", {}), facts.get("method", {})
    hub, datasets = base.get("hub"), data.get("hub")
    names = [_name(part).lower() for part in (method.get("objective"), method.get("weights")) if part]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if facts.get("reward", False) else "text-generation",
        base_model=hub,
        base_model_relation="finetune" if hub else None,
        datasets=[datasets] if datasets else None,
        tags=["preference-optimization", "attnpo", *names],
    )


def _base(base: OriginFacts) -> str:
    rows = [("path", base.get("path")), ("revision", base.get("revision"))]
    rows += [(f"fingerprint: {name}", digest) for name, digest in base.get("fingerprint", {}).items()]
    return _table(("", "value"), [row for row in rows if row[1] is not None])


def _data(data: OriginFacts) -> str:
    rows = [("path", data.get("path")), ("subset", data.get("subset")), ("revision", data.get("revision"))]
    text = [_table(("", "value"), [row for row in rows if row[1] is not None])]
    splits = data.get("splits", {})
    read = [(name, one.get("read"), one.get("kept")) for name, one in splits.items()]
    text.append(_table(("split", "rows read", "pairs kept"), read))
    for word in ("dropped", "noted"):
        by_split = {name: cast(Mapping[str, int], one.get(word, {})) for name, one in splits.items()}
        counts = [(name, reason, n) for name, reasons in by_split.items() for reason, n in reasons.items()]
        text.append(_table(("split", word, "count"), counts))
    return "\n\n".join(filter(None, text))


def _method(method: MethodFacts) -> str:
    text = []
    parts = {"Objective": method.get("objective"), "Weights": method.get("weights"), "Judge": method.get("judge")}
    for title, part in parts.items():
        if part:
            text.append(f"{title}: {_cell(_name(part))}\n\n" + _pairs("setting", part.get("settings", {})))
    if verdicts := method.get("verdicts"):
        text.append("The judge's verdicts on the pairs\n\n" + _pairs("verdicts", verdicts))
    return "\n\n".join(part.rstrip() for part in text)


def _statistics(statistics: Mapping[str, Mapping[str, float | None]]) -> str:
    names = list(dict.fromkeys(name for values in statistics.values() for name in values))
    rows = [(split, *(values.get(name) for name in names)) for split, values in statistics.items()]
    return _table(("split", *names), rows if names else [])


# ------------------------------------------------------------------------------------------------ text


def show(value: object) -> str:
    """Returns a value as text of the card: floats with six significant digits, lists joined, None as ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(show, value)) or "none"
    return str(value)


def _name(part: PartFacts | None) -> str:
    return str(part["name"]) if part else "an unnamed objective"


def _pairs(head: str, values: Mapping[str, object]) -> str:
    return _table((head, "value"), list(values.items()))


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(show(value)) for value in line) + " |" for line in lines)


def _cell(text: str) -> str:
    for mark in ("\\", "|", "<", ">", "`", "*", "["):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
