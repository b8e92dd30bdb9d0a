"""Shared parts of the benchmarks: interleaved timing, medians, ratios, bars, peak memory, JSON results and tables.

    python -m experiments.benchmarks.harness RESULT.json ...

prints the bars of several results as one table. Only the standard library is imported at the top, so that workers in
other environments can use this file.
"""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PACKAGES = ("torch", "transformers", "lightning", "datasets", "tokenizers", "trl", "accelerate")

Competitors = Mapping[str, Callable[[], float]]
"""By name: does the work once and gives its seconds."""
Times = dict[str, list[float]]
"""Seconds of every competitor, a number per round; the n-th of all are of the same round."""


# ------------------------------------------------------------------------------------------------ time


def timed(work: Callable[[], object]) -> float:
    """Times ``work`` and returns its seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(competitors: Competitors, rounds: int) -> Times:
    """Times all competitors in turn for a number of rounds, rotating the order by one each round.

    An extra round is run first and discarded as a warm-up.
    """
    names = list(competitors)
    found: Times = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = competitors[name]()
            if turn > 0:
                found[name].append(seconds)
        say(f"round {turn} of {rounds}" + (" (discarded)" if turn == 0 else ""))
    return found


def median(times: Times, name: str) -> float:
    """Returns the median of a competitor's seconds."""
    return statistics.median(times[name])


def ratio(times: Times, above: str, below: str) -> float | None:
    """Returns the median over rounds of one competitor's seconds divided by another's; None if either did not run.

    Ratios are taken within rounds, when both had the same machine load.
    """
    if above not in times or below not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))


def say(line: str) -> None:
    """Prints progress to stderr, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ memory, growth


def peak(work: Callable[[], object]) -> int:
    """Returns the peak bytes that ``work`` allocates, including inside kernels. CPU only."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in results if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes), default=0)


def profiled(work: Callable[[], object], rows: int = 12) -> str:
    """Profiles ``work`` and returns a table of the operators with the largest CPU time of their own."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    found = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in found)
    lines = []
    for event in found[:rows]:
        own = event.self_cpu_time_total
        lines.append([f"`{event.key}`", str(event.count), f"{own / 1e3:.1f}", f"{100 * own / whole:.1f} %"])
    return table(("operator", "calls", "own ms", "share"), lines)


def slope(values: Sequence[float], sizes: Sequence[float]) -> float:
    """Returns the least-squares slope of log size over log value, which is the growth exponent."""
    xs, ys = [math.log(value) for value in values], [math.log(size) for size in sizes]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


# ------------------------------------------------------------------------------------------------ bars, tables, files


@dataclass(frozen=True)
class Bar:
    """Performance bar with its measured value, a minimum if ``at_least``, else a maximum.

    ``measured`` is None if it was not measured; ``why`` then gives the reason.
    """

    what: str
    bound: float
    measured: float | None
    at_least: bool
    why: str = ""
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """Returns whether the bar is met; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def row(self) -> tuple[str, str, str, str]:
        """Returns the bar as a row of ``bars_table``."""
        bound = f"{'>=' if self.at_least else '<='} {self.bound:g}{self.unit}"
        if self.measured is None:
            return self.what, bound, "not measured", self.why
        return self.what, bound, f"{self.measured:.2f}{self.unit}", "yes" if self.met else "**no**"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table with text in the first column and numbers in the others."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bars_table(bars: Sequence[Bar]) -> str:
    """Formats the bars as a Markdown table."""
    return table(("what", "bar", "measured", "met"), [bar.row() for bar in bars])


def times_rows(times: Times, base: str) -> list[list[str]]:
    """Returns each competitor's name, median seconds with minimum and maximum, and its time relative to ``base``."""
    rows = []
    for name, seconds in times.items():
        relative = ratio(times, name, base)
        spread = f"{median(times, name):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        rows.append([name, spread, "" if relative is None else f"{relative:.2f}"])
    return rows


def versions() -> dict[str, str]:
    """Returns the versions of Python and of installed packages that affect times."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    """Describes the machine on which the times were taken."""
    import torch

    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
    }


def commit() -> str | None:
    """Returns the checked-out commit; None without git or a repository."""
    with suppress(OSError):
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        return found.stdout.strip() or None
    return None


def new_parser(text: str | None, *, rounds: int) -> ArgumentParser:
    """Creates a parser with the options common to all benchmarks; ``text`` is the benchmark's docstring."""
    parser = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds over all competitors")
    parser.add_argument("--threads", type=int, help="CPU threads per process; default: torch's choice")
    parser.add_argument("--seed", type=int, default=0, help="seed of models, lengths and ids")
    parser.add_argument("--short", action="store_true", help="fewer rounds, pairs or competitors, a few minutes")
    parser.add_argument("--profile", action="store_true", help="also print the most expensive operators, if supported")
    parser.add_argument("--json", type=Path, help="write settings, versions and all numbers to this file")
    return parser


def parsed(parser: ArgumentParser, arguments: Sequence[str] | None) -> Namespace:
    """Parses the options and sets torch's number of threads accordingly."""
    import torch

    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return options


def finish(
    name: str,
    options: Namespace,
    results: Mapping[str, Any],
    bars: Sequence[Bar],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Prints the bars and writes the JSON file if requested.

    ``more``: versions in other environments, by name.
    """
    if bars:
        print(f"\n{bars_table(bars)}", flush=True)
    if options.json is not None:
        write_json(options.json, record(name, options, results, bars, more))


def record(
    name: str,
    options: Namespace,
    results: Mapping[str, Any],
    bars: Sequence[Bar],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the JSON record of a benchmark; arguments as for ``finish``."""
    return {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"experiments.benchmarks.{name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "versions": {**versions(), **(more or {})},
        "machine": machine(),
        "results": results,
        "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a file atomically, so that it is never left incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


class Sheet:
    """Table of one part, printed and saved row by row, so that an interrupted part keeps its rows.

    The file holds parts by name; saving replaces the part of the same name.
    """

    def __init__(self, name: str, options: Namespace, head: Sequence[str], more: Mapping[str, Any] | None = None):
        self.name, self.options, self.width = name, options, len(head)
        self.results: dict[str, Any] = {**(more or {}), "rows": [], "done": False}
        self.bars: Sequence[Bar] = ()
        self._record = record("gpu", options, self.results, ())
        first, second = table([*head, "note"], []).splitlines()
        print(f"\n{first}\n{second}", flush=True)
        self.save()

    def add(self, name: str, cells: Sequence[str], note: str = "", **numbers: Any) -> None:
        """Prints and saves a row; ``numbers`` are its unrounded values."""
        cells = [name, *cells, *["-"] * (self.width - 1 - len(cells)), note.replace("|", "/")]
        print(f"| {' | '.join(cells)} |", flush=True)
        self.results["rows"].append({"name": name, "note": note, **numbers})
        self.save()

    def finish(self, bars: Sequence[Bar] = ()) -> None:
        """Prints the bars and marks the part as done."""
        self.results["done"], self.bars = True, bars
        if bars:
            print(f"\n{bars_table(bars)}", flush=True)
        self.save()

    def save(self) -> None:
        """Writes the file with the current content of this part."""
        self._record["bars"] = [{**asdict(bar), "met": bar.met} for bar in self.bars]
        parts = {**saved_parts(self.options.json), self.name: self._record}
        write_json(
            self.options.json, {"parts": parts, "bars": [bar for part in parts.values() for bar in part["bars"]]}
        )


def saved_parts(path: Path) -> dict[str, Any]:
    """Reads the parts in a ``Sheet`` file; empty without the file."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["parts"]
        return parts
    return {}


# ------------------------------------------------------------------------------------------------ other processes


class Worker:
    """Process that answers requests, one JSON line each; ``serve`` is the other end.

    A context manager that stops the process on exit.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, request: str, **details: Any) -> Any:
        """Sends a request and returns the answer. Raises ``RuntimeError`` if the worker ended instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"request": request, **details}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(
                f"{shlex.join(self.command)} ended with status {status} at {request!r}; see its error above"
            )
        return json.loads(line)


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answers requests from stdin until it ends. All other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        details = json.loads(line)
        print(json.dumps(handlers[details.pop("request")](**details)), file=answers, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the bars of all given results; returns 0."""
    parser = ArgumentParser(description="The bars of several results in one table.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    bars = []
    for path in parser.parse_args(arguments).results:
        for saved in json.loads(path.read_text(encoding="utf-8"))["bars"]:
            del saved["met"]
            bars.append(Bar(**saved))
    print(bars_table(bars))
    return 0


if __name__ == "__main__":
    sys.exit(main())
