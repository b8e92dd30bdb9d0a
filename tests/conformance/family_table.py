"""Outcomes of families: as lines of the terminal, as records that survive a stopped run, and as a page."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attnpo.schema import UserError
from attnpo.system.files import parse_json, write_whole

EQUAL, NO_JUDGE, REFUSED, NOT_BUILT, FAILED = "equal", "policy only", "refused", "not built", "FAIL"
STATUSES = (EQUAL, NO_JUDGE, REFUSED, NOT_BUILT, FAILED)
PAGE = """\
# Every causal language model of transformers

One tiny random model of every type, and of some variants, through the loader, the numbers and the commands:

```bash
. .venv/bin/activate
{command}
```

Versions: {versions}. {summary}.{commits}

**equal**: the judge's rows of every layer with softmax attention (alone and in a batch), rollout where every layer
has it, verdict logits, log-probabilities and gradients of each layout are those of eager attention, one sequence at a
time (of the class's own kernel where the two round apart); the memory estimate counts the parameters that there are;
a run of two steps, one stopped by a signal and resumed to the same weights, an export that transformers loads,
answers, and a step with LoRA went through the commands. **policy only**: all of it but the judge's, with the reason.
**refused**: the loader, what lays out its sequences or the run gives the reason. **not built**: transformers cannot
build or load the class here.

*Read by*: `sdpa` and `blocks` recompute single rows beside the kernel; `maps` takes those of eager attention, one
prompt at a time. *Layout*: what `batch.layout=auto` takes. *Layers*: those with softmax attention that can be read,
of all.

*Hybrids* are packed where the class hands each sequence's beginning (`seq_idx`, `cu_seq_lens_q`) to kernels that keep
to it: those of the packages causal_conv1d, flash-linear-attention and mamba_ssm, on a GPU. The torch code that
transformers has in their place refuses a packed row, so this page, made on a CPU, has such models padded. Nothing is
known by name: the trial at the start of a run decides, on the GPU, in eval and in training mode. In transformers 5.23:

- Qwen3-Next, Qwen3.5, OLMo-hybrid (gated delta rule), Bamba, Granite-hybrid, Falcon-H1, Nemotron-H, Zamba-2, Mamba-2
  (its scan), LFM2, LFM2-MoE (convolutions) hand them on. With kernels' doubles that cut there, packed rows give the
  numbers of padded ones (`tests/models/test_boundaries.py`); no kernel itself was run.
- Kimi-Linear and Bailing-hybrid tell the convolution alone: their recurrence is handed another name than it takes.
  Mamba, Falcon-Mamba and Jamba tell nobody, and Mamba-1's scan has no place for it. LFM3, MiniMax, Zaya and
  RecurrentGemma have torch code only, which does not ask. The same doubles show that all of these stay padded.
- Zamba tells its convolution, and its scan, which is Mamba-1's, has no place for it. The scan of the tiny model carries
  too little to show that; the trial of a run sees what its own model carries.
- Inkling and Qwen4-exp build masks of their own for their attention, which no packed row can have.

| type | class | outcome | read by | layers | layout | notes |
|---|---|---|---|---|---|---|
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
    """Writes the outcomes as a Markdown page. UserError where another file is in its place."""
    require_page(file)
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    page = PAGE.format(command=command, versions=said, summary=f"{summary(done)}. {share(done)}", commits=commits(done))
    rows = []
    for one in done:
        read, _, layers = one.read.partition(", ")
        notes = "; ".join(one.notes).replace("|", "\\|")
        rows.append(f"| {one.name} | {one.model} | {one.status} | {read} | {layers} | {one.layout} | {notes} |\n")
    write_whole(file, page + "".join(rows))
