"""Models of vectors: no weights on disk, but a seed that numpy draws them from, and the digest that they must have."""

import hashlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from attnpo.schema import UserError

DRAWN = "drawn.json"
Weights = dict[str, npt.NDArray[np.float32]]


def model_folder(folder: Path) -> Path:
    """Returns ``folder`` where it holds weights, else one of this process with the weights that its seed gives."""
    return _materialised(folder.resolve()) if (folder / DRAWN).is_file() else folder


@cache
def _materialised(folder: Path) -> Path:
    told = json.loads((folder / DRAWN).read_text(encoding="utf-8"))
    weights = draw(folder, told["seed"], told["sizes"])
    if digest(weights) != told["sha256"]:
        raise UserError(
            f"{folder / DRAWN}: the drawn weights have another SHA-256 than {told['sha256']}, got {digest(weights)}"
        )
    made = Path(_space().name) / hashlib.sha256(bytes(folder)).hexdigest()[:16]
    shutil.copytree(folder, made)
    save_file(
        {name: torch.from_numpy(rows) for name, rows in weights.items()}, made / "model.safetensors", {"format": "pt"}
    )
    return made


@cache
def _space() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="drawn-")  # goes with the process


def draw(folder: Path, seed: int, sizes: dict[str, float]) -> Weights:
    """Draws every weight evenly from -size to size; those of norms are 1 and what is drawn.

    ``sizes``: by the last part of a weight's name but one, "" for the rest. Only the generator's raw bits are used and
    each number is a multiple of 2^-23, so that neither a version of numpy nor a processor changes a bit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(rows.shape) for name, rows in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    bits, weights = np.random.PCG64(seed), {}
    for name in sorted(shapes):
        raw = bits.random_raw(int(np.prod(shapes[name]))) >> 40
        even = ((raw.astype(np.int64) - 2**23) / 2**23).astype(np.float32).reshape(shapes[name])
        kind = name.split(".")[-2]
        size = np.float32(sizes.get(kind, sizes[""]))
        weights[name] = even * size + np.float32("norm" in kind)
    return weights


def digest(weights: Weights) -> str:
    """Returns the SHA-256 of names and little-endian numbers, by name."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + b"\0" + weights[name].astype("<f4").tobytes())
    return found.hexdigest()
