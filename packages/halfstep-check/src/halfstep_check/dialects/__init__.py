"""The config dialects of other frameworks, one file each; a config is recognised by its content, not by its name."""

from __future__ import annotations

from collections.abc import Callable

from halfstep_check.declarations import Source
from halfstep_check.dialects import (
    accelerate,
    composer,
    deepspeed,
    diffusion_trainer,
    lightning,
    own,
    torchtitan,
    transformers,
)
from halfstep_check.document import Node

DIALECTS: tuple[tuple[Callable[[Node], bool], Callable[[Node], Source]], ...] = (
    (own.recognises, own.read),
    (deepspeed.recognises, deepspeed.read),
    (torchtitan.recognises, torchtitan.read),
    (composer.recognises, composer.read),
    (diffusion_trainer.recognises, diffusion_trainer.read),
    (accelerate.recognises, accelerate.read),
    (own.recognises_flat, own.read_flat),
    (transformers.recognises, transformers.read),
)
"""In this order: the first that recognises a file reads it. Lightning comes last: it needs the pinned version."""


def read_source(root: Node, *, lightning_version: str = "") -> Source | None:
    """Read a config in the first dialect that recognises it; None if none does."""
    if not isinstance(root.value, dict):
        return None
    if lightning.is_trainer_group(root):
        return lightning.read(root, version=lightning_version, section="")
    if root.has("trainer.precision") and not root.has("workload"):
        return lightning.read(root, version=lightning_version)
    if (section := lightning.find_nested_section(root)) is not None:
        return lightning.read(root, version=lightning_version, section=section)
    for recognises, read in DIALECTS:
        if recognises(root):
            return read(root)
    if lightning.speaks_at_the_top(root):
        return lightning.read(root, version=lightning_version, section="")
    return lightning.read(root, version=lightning_version) if lightning.recognises(root) else None
