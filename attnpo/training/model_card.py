"""The model card of an exported policy: Markdown with the Hub's metadata, from plain facts alone (``Facts``)."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict, cast

from attnpo.system.credentials import redact


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


WORDS = (
    "`coverage`: share of a response's content tokens that found a partner among the tokens the weights were read "
    "from, mean over responses; `source_coverage`: share of those tokens that found one in turn; `kept_mass_chosen`, "
    "`kept_mass_rejected`: share of the weights that arrived on training tokens, mean over responses of that side; "
    "`effective_share`: effective number of weighted tokens over the number of tokens, mean over responses; "
    "`unmatched_share`: share of all content tokens without a partner."
)

PAPER = """@misc{attentionpo,
  title = {Token-weighted Direct Preference Optimization with Attention}
}"""

DPO = """@inproceedings{rafailov2023direct,
  title     = {Direct Preference Optimization: Your Language Model is Secretly a Reward Model},
  author    = {Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and Manning, Christopher D. and
               Ermon, Stefano and Finn, Chelsea},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023}
}"""

LIMITS = (
    "Not evaluated for safety, factual accuracy, bias or misuse. The numbers above are of the preference loss on the "
    "validation pairs, by which the policy may have been chosen; they do not say how good its answers are. The "
    "preferences are those of the data and of whoever labelled them, and the weights of tokens are estimates. The "
    "licences of the base model and of the data apply; none is stated here because none is known to the program that "
    "wrote this card."
)


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
    method = facts.get("method", {})
    base = facts.get("base", {})
    title = f"{base.get('name', 'A base model')}, trained with {_name(method.get('objective'))}"
    parts = [
        front_matter(facts),
        f"# {one_line(title)}",
        _summary(facts, step, dtype),
        _section("Use", _use(notes, facts.get("reward", False))),
        _section("Base model", _base(base)),
        _section("Data", _data(facts.get("data", {}))),
        _section("Method", _method(method)),
        _section("Token weights", _statistics(facts.get("statistics", {}))),
        _section("Hyperparameters", _pairs("setting", facts.get("hyperparameters", {}))),
        _section(
            f"Validation at step {step}" if step is not None else "Validation",
            _validation(metrics, facts.get("overlap")),
        ),
        _section("Limits", LIMITS),
        _section("Made with", _made(facts)),
        _section("Citation", f"```bibtex\n{PAPER}\n\n{DPO}\n```"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter(facts: Facts) -> str:
    """Returns the Hub's YAML metadata. Base and data are named only if they are on the Hub: it refuses cards with
    others.
    """
    base, data, method = facts.get("base", {}), facts.get("data", {}), facts.get("method", {})
    task = "text-classification" if facts.get("reward", False) else "text-generation"
    values: dict[str, str | list[str]] = {"library_name": "transformers", "pipeline_tag": task}
    if hub := base.get("hub"):
        values |= {"base_model": hub, "base_model_relation": "finetune"}
    if hub := data.get("hub"):
        values["datasets"] = [hub]
    names = [_name(part).lower() for part in (method.get("objective"), method.get("weights")) if part]
    values["tags"] = ["preference-optimization", "attnpo", *names]
    # JSON is YAML, whatever the strings hold.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


# ------------------------------------------------------------------------------------------------ sections


def _summary(facts: Facts, step: int | None, dtype: str) -> str:
    method = facts.get("method", {})
    weights = method.get("weights")
    by = f" with token weights of the source `{_name(weights)}`" if weights else ""
    when = "" if step is None else f" after {step} optimiser steps"
    kind = "reward model" if facts.get("reward", False) else "causal language model"
    return (
        f"A {kind} trained on preference pairs with the objective `{_name(method.get('objective'))}`"
        f"{by}{when}, weights in {dtype}. This card was written by the program that trained the model; every number in "
        "it comes from that run."
    )


def _use(notes: Sequence[str], reward: bool) -> str:
    kind = "AutoModelForSequenceClassification" if reward else "AutoModelForCausalLM"
    more = (
        "The reward is its logit at the last token of a conversation, written with the chat template in the folder. "
        if reward
        else "or `vllm serve FOLDER`. The chat template used in training is in the folder, and "
        "`generation_config.json` names the tokens that end a turn. "
    )
    use = (
        f"```python\nfrom transformers import {kind}, AutoTokenizer\n\n"
        f'model = {kind}.from_pretrained("FOLDER", dtype="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n\n'
        f"{more}A `state.ckpt`, if there is one, is for resuming the training; leave it out "
        "when you pass the model on."
    )
    return "\n\n".join([use, *(f"{note[0].upper()}{note[1:]}." for note in notes)])


def _base(base: OriginFacts) -> str:
    if not base:
        return ""
    rows = [("path", base.get("path")), ("revision", base.get("revision"))]
    rows += [(f"fingerprint: {name}", digest) for name, digest in base.get("fingerprint", {}).items()]
    return _table(("", "value"), [row for row in rows if row[1] is not None])


def _data(data: OriginFacts) -> str:
    if not data:
        return ""
    rows = [("path", data.get("path")), ("subset", data.get("subset")), ("revision", data.get("revision"))]
    text = [_table(("", "value"), [row for row in rows if row[1] is not None])]
    if splits := data.get("splits", {}):
        heads = ("split", "rows read", "pairs kept")
        text.append(_table(heads, [(name, one.get("read"), one.get("kept")) for name, one in splits.items()]))
    dropped = {name: one.get("dropped", {}) for name, one in splits.items()}
    noted = {name: one.get("noted", {}) for name, one in splits.items()}
    for word, by_split in (("dropped", dropped), ("noted", noted)):
        counts = [(name, reason, n) for name, reasons in by_split.items() for reason, n in reasons.items()]
        text += [_table(("split", word, "count"), counts)] if counts else []
    return "\n\n".join(text)


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
    if not names:
        return ""
    rows = [(split, *(values.get(name) for name in names)) for split, values in statistics.items()]
    return f"{WORDS}\n\n" + _table(("split", *names), rows)


def _validation(metrics: Mapping[str, float], overlap: str | None) -> str:
    table = _pairs("metric", {name: value for name, value in sorted(metrics.items()) if name.startswith("val/")})
    return f"{table}\n\n{overlap}." if table and overlap else table


def _made(facts: Facts) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    command = facts.get("command")
    made = f"In an environment with these:\n```\n{shlex.join(command)}\n```" if command else ""
    return f"{versions}\n\n{made}".strip()


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


def one_line(text: str) -> str:
    """``text`` without line breaks."""
    return " ".join(text.split())


def _name(part: PartFacts | None) -> str:
    return str(part["name"]) if part else "an unnamed objective"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _pairs(head: str, values: Mapping[str, object]) -> str:
    return _table((head, "value"), list(values.items())) if values else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(show(value)) for value in line) + " |" for line in lines)


def _cell(text: str) -> str:
    for mark in ("\\", "|", "<", ">", "`", "*", "["):
        text = text.replace(mark, "\\" + mark)
    return one_line(text)
