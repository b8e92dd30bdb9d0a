"""Everything that a run has before its policy, for tests that look at its parts."""

from dataclasses import dataclass

from attnpo.run.inputs import Inputs, read_inputs
from attnpo.run.resolve import BaseModel, Readers, resolve
from attnpo.run.run_config import RunConfig


@dataclass(frozen=True)
class Made:
    """A resolved configuration with its model, what its weights are read with, and its inputs."""

    cfg: RunConfig
    base: BaseModel
    readers: Readers
    inputs: Inputs


def make_inputs(cfg: RunConfig) -> Inputs:
    """The inputs alone."""
    return make(cfg).inputs


def make(cfg: RunConfig) -> Made:
    """Does what a run does before it loads its policy."""
    cfg, base, readers, _ = resolve(cfg)
    return Made(cfg, base, readers, read_inputs(cfg, base, readers))
