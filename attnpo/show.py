"""``python -m attnpo.show``: shows pairs token by token, typed in or loaded from data, a run or a saved step."""

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.cli.progress import import_phase
from attnpo.cli.terminal import install_signal_handlers, log_to_terminal, run_guarded
from attnpo.system.errors import UserError

if TYPE_CHECKING:
    from attnpo.run.show_config import ShowConfig

DESCRIPTION = """\
Show pairs token by token, chosen and rejected side by side: weights, log-probs, parts of the margin.
prompt=, chosen= and rejected= take text; @FILE reads a file, - standard input, and @@ is a literal @.
column= selects the number: relative, weight, logp, reference_logp, log_ratio or contribution;
layers=[all] rounds=[mean,1,2] stages=[all] split it by layer, judge round and processing step;
rows= and ids= select pairs of data.path or run=, ids= also those of bad_batch=; out= writes a file."""
EXAMPLES = """\
python -m attnpo.show model.path=MODEL prompt='Why?' chosen='Because, as 2=2.' rejected=@answer.txt
python -m attnpo.show run=outputs/RUN rows=3 column=contribution
python -m attnpo.show run=outputs/RUN rows=100 layers=[all] out=weights.parquet"""


def main(texts: dict[str, str], cfg: "ShowConfig") -> int:
    """Prints the pairs or writes them to a file; returns 0. ``texts``: prompt and responses of a typed pair."""
    for key, text in texts.items():
        cfg = cfg.with_value(key, text)
    with import_phase("loading transformers"):
        from attnpo.run.show import show

    show(cfg)
    return 0


def run_show(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    from attnpo.cli.entry import run_entry

    taken: dict[str, str] = {}
    rest: list[str] = []

    def split_arguments() -> int:
        texts, words = parse_pair_texts(sys.argv[1:] if argv is None else argv)
        taken.update(texts)
        rest.extend(words)
        return 0

    with log_to_terminal():
        status = run_guarded(split_arguments)
    return status or run_entry(partial(main, taken), "show", rest, DESCRIPTION, EXAMPLES)


# ------------------------------------------------------------------------------------------------ texts as typed

KEYS = ("prompt", "chosen", "rejected")


def parse_pair_texts(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Extracts the texts given as KEY=TEXT for ``KEYS``; returns them and the remaining arguments in order.

    ``@FILE`` reads a file and ``-`` reads standard input, both without the final line break. ``@@`` at the start is a
    literal @.

    Raises:
        UserError: a key is given twice, standard input is used twice, a file is not readable UTF-8, or only some of
            the three texts are given.
    """
    given: dict[str, str] = {}
    rest = []
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals or key not in KEYS:
            rest.append(word)
        elif key in given:
            raise UserError(f"{key}= is set twice: set only one {key} per pair")
        else:
            given[key] = text
    asked = [key for key, text in given.items() if text == "-"]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(f'{key}=-' for key in asked)}: standard input can be read only once; use files")
    _check_pair_is_complete(given, rest)
    return {key: _read_text(key, text) for key, text in given.items()}, rest


def _check_pair_is_complete(given: Mapping[str, str], rest: Sequence[str]) -> None:
    """Checks that a typed pair has all three texts.

    Raises:
        UserError: some texts are missing; the message names words in ``rest`` that look like a misspelled key.
    """
    lacking = [key for key in KEYS if key not in given]
    if not given or not lacking:
        return
    words = [word.partition("=")[0] for word in rest if "=" in word]
    near = [f"{close[0]}= looks like {key}=" for key in lacking if (close := get_close_matches(key, words, 1))]
    wanted = " ".join(f"{key}=TEXT" for key in lacking)
    raise UserError(
        f"a pair needs {', '.join(f'{key}=' for key in KEYS)}; got only {', '.join(f'{key}=' for key in given)}: "
        f"add {wanted}{''.join(f' ({words})' for words in near)}"
    )


def _read_text(key: str, text: str) -> str:
    if text.startswith("@@"):
        return text[1:]
    if text != "-" and not text.startswith("@"):
        return text
    try:
        read = sys.stdin.read() if text == "-" else Path(text[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(
            f"{key}={text} cannot be read as UTF-8 text ({problem}); for literal text starting with @, use @{text}"
        ) from problem
    return read.removesuffix("\n")


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(run_show())
