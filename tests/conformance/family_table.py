"""Outcomes of families: as lines of the terminal, as records that survive a stopped run, and as a page."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attnpo.schema import UserError
from attnpo.system.files import parse_json, write_atomically

EQUAL, NO_JUDGE, REFUSED, NOT_BUILT, FAILED = "equal", "policy only", "refused", "not built", "FAIL"
OWN = (
    (r"^(error: )?((judge|model\.path|model\.lora): )?", ""),
    (r"^\w+ cannot follow segments of a row \(\w+: (.*)\)$", r"\1"),
    (r"\. (Install|You can install) .*", ""),
    (r" \(final states differ by [^)]*\)", ""),
    (r" by [0-9.e+-]+(, | with | \()", r"\1"),
    (r" ?\(?rounding (allows|explains at most) [0-9.e+-]+\)", ""),
    (r"[;:] (take|name|choose) another model.*|[;:] (take|choose) a causal .*", ""),
    (r"(Unrecognized configuration class).*", r"\1"),
)
STATUSES = (EQUAL, NO_JUDGE, REFUSED, NOT_BUILT, FAILED)
PAGE = """\
# Every causal language model of transformers

Shows for every type of causal language model whether its attention can weigh tokens, and how fast it trains: one tiny
random model of each, and of some variants, went through the loader, the numbers and the commands.

```bash
. .venv/bin/activate
{command}
```

Versions: {versions}. {summary}.{commits}

- **equal**: the judge's rows of every layer with softmax attention, verdict logits, log-probabilities and gradients are
  those of eager attention, one sequence at a time, and so is rollout where every layer has softmax attention. A run of
  two steps, a stopped run resumed to the same weights, an export that transformers loads, answers and a step with LoRA
  went through the commands. The memory estimate counts the parameters that there are.
- **policy only**: all of this without the judge: name another model as `judge.path`.
- **refused**: the command ends with the reason. **not built**: transformers cannot build or load the class here.

*Judge*: the layers that can be read, of all; `sdpa` and `blocks` recompute single rows beside the kernel, `maps` reads
eager attention, one prompt at a time. *Layout*: what `batch.layout=auto` takes: `shared_prefix` is the fastest,
`padded` the slowest. A trial at the start of a run decides it for the model at hand. *Why*: what refused the faster
layouts, or the judge.

| types | outcome | judge | layout | why |
|---|---|---|---|---|
{rows}
Models that mix attention with a recurrence are padded on a CPU: the torch code that transformers has in place of the
kernels refuses packed rows. With the packages causal_conv1d, flash-linear-attention and mamba_ssm on a GPU, the classes
that hand on where sequences begin (`seq_idx`, `cu_seq_lens_q`) can be packed: Qwen3-Next, Qwen3.5, OLMo-hybrid, Bamba,
Granite-hybrid, Falcon-H1, Nemotron-H, Zamba-2, Mamba-2, LFM2 and LFM2-MoE in transformers 5.23. Doubles of the kernels
that cut there give the numbers of padded rows (`tests/models/test_boundaries.py`); the kernels themselves were not run.
"""


@dataclass(frozen=True)
class Family:
    """What became of one type: its class, the layout that ``auto`` takes, how its layers are read ("sdpa, 4 of 4").

    ``commit``: that of the package at the time, where there is one.
    """

    name: str
    model: str
    status: str
    layout: str = ""
    read: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    commit: str = ""

    def took(self, seconds: float, more: Sequence[str]) -> "Family":
        """The same with its time, and more notes."""
        return replace(self, seconds=seconds, notes=(*self.notes, *more))

    def line(self) -> str:
        """One line of the terminal."""
        said = f"  ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.name:<26} {self.status:<12} {self.layout:<14} {self.seconds:5.1f} s{said}"

    @property
    def attends(self) -> bool | None:
        """Whether every layer has softmax attention; None where that is not known."""
        if not self.read:
            return None
        some, _, every = self.read.partition(", ")[2].partition(" of ")
        return some == every if every.isdigit() else None


def summary(done: Sequence[Family]) -> str:
    """How many families there are of each status."""
    counts = Counter(one.status for one in done)
    return f"{len(done)} families: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES)


def share(done: Sequence[Family]) -> str:
    """How many of the families with softmax attention in every layer are equal."""
    attending = [one for one in done if one.attends]
    equal = sum(one.status == EQUAL for one in attending)
    return f"Of the {len(attending)} with softmax attention in every layer {equal} are equal"


def commits(done: Sequence[Family]) -> str:
    """At which commits the outcomes were made, with how many each; where records of several runs make one page."""
    counts = Counter(one.commit for one in done if one.commit)
    return f" Run at commit {', '.join(f'{at} ({count})' for at, count in counts.items())}." if counts else ""


def append(file: Path, family: Family) -> None:
    """Adds an outcome to a file of records, one JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(family)) + "\n")


def recorded(file: Path) -> dict[str, Family]:
    """The outcomes of a file of records by name, the last of each; none where there is no file.

    Raises:
        UserError: the file holds something else.
    """
    if not file.is_file():
        return {}
    try:
        rows = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found = [Family(**{**row, "notes": tuple(row["notes"])}) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"families: records={file} holds no outcomes of families ({error}); name another") from error
    return {one.name: one for one in found}


def require_page(file: Path) -> None:
    """Raises UserError for a file that is no such page, which its heading tells."""
    heading = PAGE.partition("\n")[0]
    if file.exists() and not (file.is_file() and file.read_bytes().startswith(heading.encode())):
        raise UserError(
            f"families: table={file} is a file without the heading {heading!r}: move it away, or name another"
        )


def write_page(file: Path, done: Sequence[Family], versions: Mapping[str, str], command: str) -> None:
    """Writes the outcomes as a Markdown page, one row for all types that share one. UserError where another file is in
    its place.
    """
    require_page(file)
    groups: dict[tuple[str, ...], list[str]] = {}
    for one in done:
        read, _, layers = one.read.partition(", ")
        judge = f"{read} {layers}".strip()
        groups.setdefault((one.status, judge, one.layout, shared_reason(one)), []).append(one.name)
    order = sorted(groups, key=lambda group: (STATUSES.index(group[0]), -len(groups[group])))
    rows = "".join(f"| {', '.join(f'`{name}`' for name in groups[group])} | {' | '.join(group)} |\n" for group in order)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = {"summary": f"{summary(done)}. {share(done)}", "commits": commits(done), "rows": rows}
    write_atomically(file, PAGE.format(command=command, versions=named, **found))


def shared_reason(family: Family) -> str:
    """Returns the notes of a family without what is its own (names, measured differences, advice), each reason once."""
    steps: dict[str, list[str]] = {}
    for note in family.notes:
        step, colon, reason = note.partition(": ")
        if not colon or " " in step:  # said by transformers
            step, reason = "", note
        for pattern, put in OWN:
            reason = re.sub(pattern, put, reason)
        for own in filter(None, (f"{family.name}: ", f"{family.model}: ", f"{family.model} ")):
            reason = reason.removeprefix(own)
        reason = reason.replace(family.model, "the class") if family.model else reason
        steps.setdefault(reason.replace("|", "\\|"), []).append(step)
    return "; ".join(": ".join(filter(None, (", ".join(names), reason))) for reason, names in steps.items())
