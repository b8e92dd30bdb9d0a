"""``python -m attnpo.show``: a pair token by token, typed in or out of data, a run or a saved step."""

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
prompt=, chosen= and rejected= take a text as typed; @FILE reads a file, - standard input, @@ is an @.
column= is the number shown: relative, weight, logp, reference_logp, log_ratio or contribution;
layers=[all] rounds=[mean,1,2] stages=[all] show it by layer, judge round and step of processing;
rows= and ids= choose pairs of data.path, of run= or (ids=) of bad_batch=; out= writes a file."""
EXAMPLES = """\
python -m attnpo.show model.path=MODEL prompt='Why?' chosen='Because, as 2=2.' rejected=@answer.txt
python -m attnpo.show run=outputs/RUN rows=3 column=contribution
python -m attnpo.show run=outputs/RUN rows=100 layers=[all] out=weights.parquet"""


def main(texts: dict[str, str], cfg: "ShowConfig") -> int:
    """Returns 0; the pairs are printed or written. ``texts`` are those of a typed pair."""
    for key, text in texts.items():
        cfg = cfg.with_value(key, text)
    with import_phase("loading transformers"):
        from attnpo.run.show import show

    show(cfg)
    return 0


def entry(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit status."""
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
    """Returns the texts given as KEY=TEXT for ``KEYS``, and the other words of ``argv`` in their order.

    ``@FILE`` reads a file, ``-`` standard input, both without the line break at their end. A text that begins with @ is
    typed with two.

    Raises:
        UserError: a text is given twice, standard input is asked for twice, a file cannot be read as UTF-8, or some of
            the three are given and others are not.
    """
    given: dict[str, str] = {}
    rest = []
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals or key not in KEYS:
            rest.append(word)
        elif key in given:
            raise UserError(f"{key}= is given twice; a pair has one {key}")
        else:
            given[key] = text
    asked = [key for key, text in given.items() if text == "-"]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(f'{key}=-' for key in asked)}: standard input can be read once; name files")
    _check_pair_is_complete(given, rest)
    return {key: _read_text(key, text) for key, text in given.items()}, rest


def _check_pair_is_complete(given: Mapping[str, str], rest: Sequence[str]) -> None:
    """Raises UserError where a pair is typed in part, naming words among ``rest`` that may be the missing key."""
    lacking = [key for key in KEYS if key not in given]
    if not given or not lacking:
        return
    words = [word.partition("=")[0] for word in rest if "=" in word]
    near = [f"{close[0]}= looks like {key}=" for key in lacking if (close := get_close_matches(key, words, 1))]
    wanted = " ".join(f"{key}=TEXT" for key in lacking)
    raise UserError(
        f"a pair is {', '.join(f'{key}=' for key in KEYS)}: got {', '.join(f'{key}=' for key in given)}; "
        f"give {wanted} as well{''.join(f' ({words})' for words in near)}"
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
            f"{key}={text}: cannot be read as UTF-8 text ({problem}); a text that begins with @ is typed as @{text}"
        ) from problem
    return read.removesuffix("\n")


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(entry())
