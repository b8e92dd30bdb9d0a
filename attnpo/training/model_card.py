"""Model card of an exported policy: Markdown with the Hub's metadata, rendered from plain ``Facts``."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard, ModelCardData

from attnpo.system.credentials import redact

TEMPLATE = Path(__file__).parent / "templates" / "card.md.jinja"

Facts = Mapping[str, Any]
"""Contents of the card; missing parts are omitted.

``base``, ``data``: name, path, hub (the Hub's id or None) and revision. The base also has a fingerprint (digests by
name), the data a subset and splits (rows read, pairs kept, counts of dropped and noted pairs by reason). ``method``:
objective, weights and judge with name and settings, and shares of the judge's verdicts by name. ``statistics``: values
by split and name. ``hyperparameters``, ``versions``: values by name. ``command``: list of arguments. ``reward``: true
for a reward model. ``overlap``: remark if validation pairs were also trained on.
"""


def model_card(
    facts: Facts,
    metrics: Mapping[str, float],
    *,
    step: int | None = None,
    dtype: str = "float32",
    notes: Sequence[str] = (),
) -> str:
    """Returns the text of README.md, with the validation metrics from ``metrics``, measured at ``step``.

    ``notes``: remarks for the usage section.
    """
    facts = cast(Facts, redact(facts))
    base, method = facts.get("base", {}), facts.get("method", {})
    objective, weights = method.get("objective"), method.get("weights")
    title = f"{base.get('name', 'A base model')}, trained with {_component_name(objective)}"
    validated = {name: value for name, value in sorted(metrics.items()) if name.startswith("val/")}
    remark = f"\n\n{facts['overlap']}." if validated and facts.get("overlap") else ""
    sections = {
        "Base model": _origin_table(
            {**base, **{f"fingerprint: {k}": v for k, v in base.get("fingerprint", {}).items()}}
        ),
        "Data": _data_section(facts.get("data", {})),
        "Method": _method_section(method),
        "Token weights": _statistics_table(facts.get("statistics", {})),
        "Hyperparameters": _value_table("setting", facts.get("hyperparameters", {})),
        f"Validation at step {step}" if step is not None else "Validation": _value_table("metric", validated) + remark,
    }
    given: dict[str, Any] = {
        "reward": facts.get("reward", False),
        "step": step,
        "dtype": dtype,
        "sections": sections,
        "title": " ".join(title.split()),
        "objective": _component_name(objective),
        "weights": _component_name(weights) if weights else None,
        "notes": [f"{note[0].upper()}{note[1:]}" for note in notes],
        "versions": ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items()),
        "command": shlex.join(facts.get("command", ())),
    }
    return f"{ModelCard.from_template(hub_metadata(facts), template_path=str(TEMPLATE), **given)}\n"


def hub_metadata(facts: Facts) -> ModelCardData:
    """Returns the card's metadata. Names base and data only if they are on the Hub, which rejects unknown names."""
    method, hub, datasets = (facts.get("method", {}), *(facts.get(part, {}).get("hub") for part in ("base", "data")))
    names = [_component_name(part).lower() for part in (method.get("objective"), method.get("weights")) if part]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if facts.get("reward", False) else "text-generation",
        base_model=hub,
        base_model_relation="finetune" if hub else None,
        datasets=[datasets] if datasets else None,
        tags=["preference-optimization", "attnpo", *names],
    )


def _origin_table(place: Facts) -> str:
    shown = ("path", "subset", "revision")
    rows = {k: v for k, v in place.items() if (k in shown or k.startswith("fingerprint: ")) and v is not None}
    return _value_table("", rows)


def _data_section(data: Facts) -> str:
    splits = data.get("splits", {})
    read = [(name, one.get("read"), one.get("kept")) for name, one in splits.items()]
    text = [_origin_table(data), _markdown_table(("split", "rows read", "pairs kept"), read)]
    for word in ("dropped", "noted"):
        counts = [(name, reason, n) for name, one in splits.items() for reason, n in one.get(word, {}).items()]
        text.append(_markdown_table(("split", word, "count"), counts))
    return "\n\n".join(filter(None, text))


def _method_section(method: Facts) -> str:
    text = []
    for title in ("Objective", "Weights", "Judge"):
        if part := method.get(title.lower()):
            text.append(
                f"{title}: {_escape_cell(_component_name(part))}\n\n"
                + _value_table("setting", part.get("settings", {}))
            )
    if verdicts := method.get("verdicts"):
        text.append("The judge's verdicts on the pairs\n\n" + _value_table("verdicts", verdicts))
    return "\n\n".join(part.rstrip() for part in text)


def _statistics_table(statistics: Facts) -> str:
    names = list(dict.fromkeys(name for values in statistics.values() for name in values))
    rows = [(split, *(values.get(name) for name in names)) for split, values in statistics.items()]
    return _markdown_table(("split", *names), rows if names else [])


# ------------------------------------------------------------------------------------------------ text


def format_value(value: object) -> str:
    """Formats a value for the card: floats with six significant digits, lists joined by commas, None as ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)


def _component_name(part: Facts | None) -> str:
    return str(part["name"]) if part else "an unnamed objective"


def _value_table(head: str, values: Mapping[str, object]) -> str:
    return _markdown_table((head, "value"), list(values.items()))


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_escape_cell(format_value(value)) for value in line) + " |" for line in lines)


def _escape_cell(text: str) -> str:
    for mark in ("\\", "|", "<", ">", "`", "*", "["):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
