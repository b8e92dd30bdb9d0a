"""``python -m attnpo.show``: a pair token by token, typed in or out of data, a run or a saved step."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from attnpo.cli.progress import importing
from attnpo.cli.terminal import guarded, hear_signals, reporting

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
    """0; the pairs are printed or written. ``texts`` are those of a typed pair."""
    for key, text in texts.items():
        cfg = cfg.with_value(key, text)
    with importing("loading transformers"):
        from attnpo.run.show import show

    show(cfg)
    return 0


def entry(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit status."""
    from attnpo.cli.entry import run_entry
    from attnpo.cli.typed_texts import take_texts

    taken: dict[str, str] = {}
    rest: list[str] = []

    def take() -> int:
        texts, words = take_texts(sys.argv[1:] if argv is None else argv)
        taken.update(texts)
        rest.extend(words)
        return 0

    with reporting():
        status = guarded(take)
    return status or run_entry(partial(main, taken), "show", rest, DESCRIPTION, EXAMPLES)


if __name__ == "__main__":
    hear_signals()
    sys.exit(entry())
