"""``python -m tests.conformance.build_alpaca FOLDER``: drawn judgments in AlpacaEval's form, and what its library says.

Difficulties, lengths and preferences of 805 instructions come from numpy's generator: no row is of a real model. The
raw figures are written out below, the length-controlled rate is that of the package ``alpaca_eval``, called as it is.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pandas

from attnpo.evaluation.alpaca_library import import_alpaca_eval, silence_alpaca_eval

COUNT, SEED = 805, 3
# Of each model: how good it is, how much an answer of one spread more helps it, and its length beside the baseline's.
MODELS = {"short": (-1.6, 1.9, 0.5), "long": (0.3, 1.2, 1.4), "close": (-0.2, 0.8, 1.0), "baseline": (0.0, 0.0, 1.0)}


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-values)))


def main(folder: Path) -> None:
    """Writes a CSV per model, the auxiliary file and ``expected.json``."""
    draw = np.random.default_rng(SEED)
    hard = draw.normal(0, 1.5, COUNT)
    lengths = np.exp(draw.normal(7.3, 0.6, COUNT)).astype(int) + 20
    gamed = []
    for name, shift, mean in (("verbose", 0.6, -0.7), ("concise", -1.4, 1.4)):
        delta = draw.normal(mean, 1, COUNT)
        won = sigmoid(shift + draw.normal(0, 1, COUNT))
        columns = {"index": range(COUNT), "model": name, "preference": won.round(6), "std_delta_len": delta.round(6)}
        gamed.append(
            pandas.DataFrame({**columns, "instruction_difficulty": hard.round(6), "not_gamed_baseline": False})
        )
    auxiliary = folder / "df_gamed_drawn.csv"
    pandas.concat(gamed).to_csv(auxiliary, index=False)
    expected = {}
    for name, (skill, length, share) in MODELS.items():
        itself = name == "baseline"
        own = lengths if itself else (lengths * share * np.exp(draw.normal(0, 0.4, COUNT))).astype(int)
        delta = (lengths - own) / max(1.0, float(np.std(lengths - own, ddof=1)))
        noise = draw.normal(0, 2, COUNT)
        won = sigmoid(skill - length * np.tanh(delta) + 0.8 * hard + noise) if not itself else np.full(COUNT, 0.5)
        won[:2] = 0.5  # ties
        preference = (1 + won).round(8)
        table = pandas.DataFrame({"index": range(COUNT), "preference": preference})
        table.assign(len_baseline=lengths, len_model=own).to_csv(folder / f"{name}.csv", index=False)
        expected[name] = {"leaderboard": raw(preference), "library_with_reconstructed_aux": control_length(
            preference, lengths, own, "baseline" if itself else "model", auxiliary
        )}  # fmt: skip
    made = (
        "leaderboard: plain numpy; library_with_reconstructed_aux: alpaca_eval 0.6.6; judgments drawn (build_alpaca.py)"
    )
    (folder / "made.txt").write_text(made + "\n", encoding="utf-8")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def raw(preference: np.ndarray) -> dict[str, float]:
    """Means in percent of preferences from 1 to 2, and the standard error of the first."""
    won = preference - 1
    whole = np.where(won == 0.5, 0.5, won > 0.5)
    error = 100 * won.std(ddof=1) / np.sqrt(COUNT)
    return {
        "win_rate": 100 * float(won.mean()),
        "standard_error": float(error),
        "discrete_win_rate": 100 * float(whole.mean()),
        "n_total": COUNT,
    }


def control_length(
    preference: np.ndarray, lengths: np.ndarray, own: np.ndarray, generator: str, auxiliary: Path
) -> dict[str, float]:
    """Returns the library's length-controlled win rate."""
    rows = {
        "instruction": "",
        "output_1": ["x" * count for count in lengths],
        "output_2": ["x" * count for count in own],
        "generator_1": "baseline",
        "generator_2": generator,
        "preference": preference,
    }
    module = import_alpaca_eval().metrics.glm_winrate
    with silence_alpaca_eval(), mock.patch.object(module, "hf_hub_download", lambda **asked: str(auxiliary)):
        found = import_alpaca_eval().metrics.get_length_controlled_winrate(
            pandas.DataFrame(rows), glm_name="length_controlled_v1", save_weights_dir=None
        )
    return {"length_controlled_winrate": float(found["length_controlled_winrate"])}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
