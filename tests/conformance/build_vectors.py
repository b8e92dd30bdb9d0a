"""``python -m tests.conformance.build_vectors FOLDER...``: the numbers of an extraction folder, by plain means.

FOLDER holds texts with their tokens and spans (``pairs.json``), ``tokenizer/`` and ``model/`` with ``config.json`` and
``drawn.json``. Every judge prompt goes through transformers' eager attention in float64, one at a time; the sink rule
is that of ``experiments/minimal.py``. Written are ``expected.safetensors`` and the verdicts of ``pairs.json``, which
says under ``made`` what every quantity comes from.
"""

import argparse
import json
from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from experiments.minimal import SIDES, fix_sink
from tests.conformance.drawn import DRAWN, digest, draw, model_folder

ROUNDS = ("cr", "rc")
PER_HEAD = (0, 2)  # of these pairs the rows of every layer and head are stored

AUTHORS = (
    "the functions compute_attention_weights and find_start_end (self_judging.py), get_weights (run_tw_dpo.py) and "
    "tokenize_row (tw_dpo_trainer.py) of HCY123902/AttentionPO, run with this wording and tokenizer"
)
MADE = {
    "texts": "written for this project",
    "judge_ids, spans, content, training ids, partners, span_cases, unit_cases": AUTHORS,
    "argmax_token_id, rows": "transformers, eager attention in float64 on the judge_ids (build_vectors.py)",
    "rollout": "r <- r / 2 + r A / 2 from the last layer to the first over the same maps (build_vectors.py)",
    "normalised, mean, fixed": "each round by its sum, experiments/minimal.py: fix_sink",
    "aligned": "fixed of the last layer times the judge's tokens, moved along partners",
}


class Judged(TypedDict):
    """Of one judge prompt: rows [layers heads T], rollout [T], the likeliest token."""

    rows: Tensor
    rollout: Tensor
    verdict: int


@torch.no_grad()
def read_judge(model: nn.Module, ids: list[int]) -> Judged:
    """Reads the attention of the last position."""
    out = model(input_ids=torch.tensor([ids]), output_attentions=True)
    rollout = torch.zeros(len(ids), dtype=torch.float64)
    rollout[-1] = 1
    for layer in reversed(out.attentions):
        rollout = rollout / 2 + rollout @ layer[0].mean(dim=0) / 2
    rows = torch.stack([layer[0, :, -1] for layer in out.attentions])
    return Judged(rows=rows, rollout=rollout, verdict=int(out.logits[0, -1].argmax()))


def weights_of(rows: dict[str, Tensor], pair: dict, side: str) -> dict[str, Tensor]:  # type: ignore[type-arg]
    """Of one source and side: each round normalised, their mean, and that with the sink rule."""
    found = {}
    for order, row in rows.items():
        info = pair["rounds"][order]
        start, end = info["span_a" if info["answer_a"] == side else "span_b"]
        part = row[start:end]
        found[f"{order}/{side}"] = part / part.sum() if part.sum() > 0 else torch.full_like(part, 1 / len(part))
    mean = torch.stack([found[f"{order}/{side}"] for order in ROUNDS]).mean(dim=0)
    return found | {f"mean/{side}": mean, f"fixed/{side}": fix_sink(mean)}


def build(folder: Path) -> None:
    """Writes the numbers of one folder."""
    told = json.loads((folder / "model" / DRAWN).read_text(encoding="utf-8"))
    told["sha256"] = digest(draw(folder / "model", told["seed"], told["sizes"]))
    _write(folder / "model" / DRAWN, told)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder(folder / "model"), dtype=torch.float64, attn_implementation="eager"
    )
    content = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
    content["made"] = MADE
    expected: dict[str, Tensor] = {}
    for pair in content["pairs"]:
        found = {order: read_judge(model, pair["rounds"][order]["judge_ids"]) for order in ROUNDS}
        values: dict[str, Tensor] = {}
        for order, one in found.items():
            pair["rounds"][order]["argmax_token_id"] = one["verdict"]
            if pair["index"] in PER_HEAD:
                values[f"all_layers/{order}/rows_per_head"] = one["rows"]
                values[f"all_layers/{order}/rows"] = one["rows"].mean(dim=1)
        for source in content["sources"]:
            rows = {
                order: one["rollout"] if source == "rollout" else one["rows"][int(source[1:]) - 1].mean(dim=0)
                for order, one in found.items()
            }
            values |= {f"{source}/{order}/row": row for order, row in rows.items()}
            for side in SIDES:
                values |= {f"{source}/{name}": row for name, row in weights_of(rows, pair, side).items()}
        last = f"L{model.config.num_hidden_layers:02d}"
        for side in SIDES:
            trained, fixed = pair["training"][side], values[f"{last}/fixed/{side}"]
            carried = torch.zeros(len(trained["completion_ids"]), dtype=torch.float64)
            for i, j in trained["partners"]:
                carried[j] = fixed[i] * len(fixed)
            values[f"aligned/{side}"] = carried
        expected |= {f"{pair['index']:02d}/{name}": row.float().contiguous() for name, row in values.items()}
    save_file(expected, folder / "expected.safetensors")
    _write(folder / "pairs.json", content)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for given in parser.parse_args().folders:
        build(given)
