"""Guide 4's `trainer.amp` and `trainer.fp16`: the trainer family that overwrites Accelerate's own decision.

These trainers build `Accelerator(mixed_precision='fp16' if fp16 else 'no')` and then set `native_amp = amp`.
The explicit argument beats the accelerate file. With amp on and fp16 off the state is "no", yet autocast is entered
without a dtype, which is float16 on CUDA, and no GradScaler is made (accelerate `get_mixed_precision_context_manager`).
"""

from __future__ import annotations

from halfstep_check.declarations import Draft, Source, is_on
from halfstep_check.document import Node


def recognises(root: Node) -> bool:
    return root.has("trainer.amp") or (root.has("trainer.fp16") and not root.has("trainer.precision"))


def read(root: Node) -> Source:
    draft = Draft(root, "amp/fp16 trainer")
    amp, fp16 = (is_on(root.scalar_at(key)) for key in ("trainer.amp", "trainer.fp16"))
    key = "trainer.amp" if root.has("trainer.amp") else "trainer.fp16"
    precision = "fp16" if amp else "fp32"
    rewrites = {
        "fp16": draft.edit("trainer.amp", "True") + draft.edit("trainer.fp16", "True"),
        "fp32": draft.edit("trainer.amp", "False") + draft.edit("trainer.fp16", "False"),
    }
    draft.say("precision", precision, key, rewrites)
    draft.say("weights", "fp32", key)
    draft.say("scaling", "dynamic" if fp16 else "none", "trainer.fp16" if root.has("trainer.fp16") else key)
    draft.say_number("clip", "trainer.max_grad_norm")
    draft.say_number("accumulate", "trainer.gradient_accumulate_every")
    draft.say_number("batch", "data.batch_size")
    if amp and not fp16:
        message = "amp without fp16 enters autocast with no dtype: float16 on CUDA, without a GradScaler"
        fix = "set fp16: True for fp16 with loss scaling; for bf16 the trainer must pass mixed_precision='bf16' itself"
        draft.find("fp16-without-scaling", message, "trainer.amp", fix=fix, edits=draft.edit("trainer.fp16", "True"))
    if fp16 and not amp and root.has("trainer.amp"):
        message = "fp16 without amp: the scaler runs, but autocast is switched off, so everything runs in fp32"
        draft.find("ignored-key", message, "trainer.fp16", fix="set amp: True as well")
    return draft.freeze()
