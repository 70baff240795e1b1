"""Environment variables that change precision behind every file's back."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep_check.declarations import Draft, Source
from halfstep_check.document import Node
from halfstep_check.spellings import ACCELERATE_WORDS

NAME = "environment"


def read(environment: Mapping[str, str]) -> Source:
    """Return what the variables of this environment say."""
    nothing = (0, 0)
    nodes = {key: Node(value=text, path=NAME, start=nothing, end=nothing) for key, text in environment.items()}
    draft = Draft(Node(value=nodes, path=NAME, start=nothing, end=nothing), NAME)
    key = "ACCELERATE_MIXED_PRECISION"
    draft.read_word(key, ACCELERATE_WORDS, "accelerate", str(draft.root.scalar_at(key)).lower())
    draft.say_number("accumulate", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if draft.root.scalar_at("NVIDIA_TF32_OVERRIDE") == "0":
        draft.say("tf32", "off", "NVIDIA_TF32_OVERRIDE")
        message = "NVIDIA_TF32_OVERRIDE=0 switches TF32 off in every NVIDIA library, regardless of the code"
        draft.find("tf32-off", message, "NVIDIA_TF32_OVERRIDE", fix="unset it, unless strict fp32 is what you want")
    elif draft.root.scalar_at("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1":
        draft.say("tf32", "on", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    return draft.freeze()
