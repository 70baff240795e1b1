"""Rules about the loop around the step: accumulation, clipping, evaluation, NaN handling."""

from __future__ import annotations

from halfstep_check.findings import Severity
from halfstep_check.rules.rule import Rule

LOOP_RULES = (
    Rule(
        name="accumulation-not-divided",
        severity=Severity.WARNING,
        title="the accumulated loss is not divided by the number of micro-batches",
        why="Gradients add up, so the step is N times larger than with one batch of the same size.",
        bad="loss.backward()\nif (i + 1) % 4 == 0:\n    optimizer.step()",
        good="(loss / 4).backward()\nif (i + 1) % 4 == 0:\n    optimizer.step()",
        threads=("huggingface/transformers#35438", "OpenNMT/OpenNMT-py#2209"),
    ),
    Rule(
        name="accumulation-divided-twice",
        severity=Severity.WARNING,
        title="the accumulated loss is divided by the number of micro-batches twice",
        why="Accelerator(gradient_accumulation_steps=N) divides the loss by N in backward(). A division by hand makes "
        "the gradient N times too small: clipping never sets in, and SGD crawls.",
        bad="accelerator = Accelerator(gradient_accumulation_steps=4)\naccelerator.backward(loss / 4)",
        good="accelerator = Accelerator(gradient_accumulation_steps=4)\naccelerator.backward(loss)",
    ),
    Rule(
        name="accumulation-drops-tail",
        severity=Severity.WARNING,
        title="the last, partial window is dropped",
        why="Batches after the last full window are computed, and the next epoch's zero_grad throws them away: the "
        "same samples may never be learned from.",
        bad="optimizer.zero_grad()\nfor i, batch in enumerate(loader):\n    ...\n    if (i + 1) % 4 == 0:\n"
        "        optimizer.step()\n        optimizer.zero_grad()",
        good="    if (i + 1) % 4 == 0 or i + 1 == len(loader):\n        optimizer.step()",
    ),
    Rule(
        name="gradients-not-cleared",
        severity=Severity.ERROR,
        title="gradients are never cleared",
        why="backward() adds to what is there. Without zero_grad every step uses the sum of all gradients since the "
        "start; under fp16 the sum overflows and steps are skipped.",
        bad="loss.backward()\noptimizer.step()",
        good="optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
    ),
    Rule(
        name="cleared-within-window",
        severity=Severity.ERROR,
        title="gradients are cleared between micro-batches",
        why="The step waits for N micro-batches, zero_grad does not: all gradients but the last are thrown away.",
        bad="for i, batch in enumerate(loader):\n    optimizer.zero_grad()\n    (loss / 4).backward()\n"
        "    if (i + 1) % 4 == 0:\n        optimizer.step()",
        good="    if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()",
    ),
    Rule(
        name="stepped-within-window",
        severity=Severity.ERROR,
        title="the optimizer steps at every micro-batch, the gradients are cleared at the window's end",
        why="Each step uses the gradients of all micro-batches so far again. With a scaler it is worse: step() has "
        "divided the old ones by the scale already, and the new, scaled ones are added to them.",
        bad="scaler.step(optimizer)\nscaler.update()\nif (i + 1) % accumulate == 0:\n    optimizer.zero_grad()",
        good="if (i + 1) % n == 0:\n    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()",
    ),
    Rule(
        name="step-never-due",
        severity=Severity.ERROR,
        title="the step waits for a counter that only the step moves",
        why="With a window of two or more the counter stops at a value for which the test fails: nothing is trained "
        "from then on, and the loss is logged as if it were.",
        bad="if (step + 1) % accumulate == 0:\n    optimizer.step()\n    step += 1",
        good="batch += 1\nif batch % accumulate == 0:\n    optimizer.step()\n    step += 1",
    ),
    Rule(
        name="step-without-backward",
        severity=Severity.ERROR,
        title="one branch steps without a backward",
        why="The branch with AMP runs backward, the one without only steps: it trains nothing, or on old gradients.",
        bad="if scaler is None:\n    optimizer.step()\nelse:\n    scaler.scale(loss).backward()",
        good="if scaler is None:\n    loss.backward()\n    optimizer.step()",
    ),
    Rule(
        name="engine-step-gated",
        severity=Severity.WARNING,
        title="a DeepSpeed engine's step() is called at the window's end only",
        why="The engine counts micro-batches in step() and steps by itself at gradient_accumulation_steps; it divides "
        "the loss too. Called every n-th time it waits n times as long, and what is clipped by hand is still scaled.",
        bad="engine.backward(loss / n)\nif (i + 1) % n == 0:\n    engine.step()",
        good="engine.backward(loss)\nengine.step()",
    ),
    Rule(
        name="gradients-not-reduced",
        severity=Severity.ERROR,
        title="the backward before the step runs in no_sync()",
        why="no_sync() leaves out DDP's reduction over ranks. The backward of a window's last micro-batch reduces what "
        "has been gathered; without it every rank steps on its own gradients, and the replicas drift apart.",
        bad="for batch in window:\n    with model.no_sync():\n        model(batch).backward()\noptimizer.step()",
        good="with model.no_sync():\n    for batch in window[:-1]:\n        model(batch).backward()\n"
        "model(window[-1]).backward()\noptimizer.step()",
    ),
    Rule(
        name="clip-not-sharded",
        severity=Severity.ERROR,
        title="torch's clip_grad_norm_ on FSDP's parameters",
        why="Under FullyShardedDataParallel a rank holds a shard. torch.nn.utils.clip_grad_norm_ computes the norm of "
        "that shard alone, so ranks clip by different factors; FSDP's own method reduces the norm first.",
        bad="model = FSDP(model)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        good="model = FSDP(model)\nmodel.clip_grad_norm_(1.0)",
    ),
    Rule(
        name="mean-of-means",
        severity=Severity.INFO,
        title="averages over masks are averaged again",
        why="Micro-batches hold different numbers of unmasked elements. The mean of their means is not the mean over "
        "all: short sequences weigh more, and the result depends on how the batch was cut.",
        bad="loss = (ce * mask).sum() / mask.sum() / accumulation_steps",
        good="loss = (ce * mask).sum() / tokens_in_window",
        threads=("huggingface/transformers#34191", "pytorch/torchtune#1875", "axolotl-ai-cloud/axolotl#1100"),
    ),
    Rule(
        name="backward-again",
        severity=Severity.ERROR,
        title="backward runs a second time on one graph",
        why="backward() frees the graph it walked. A second one on the same loss raises, at once or in the second "
        "micro-batch.",
        bad="for _ in range(4):\n    if i == 0:\n        loss = model(x) / 4\n    loss.backward()",
        good="for _ in range(4):\n    loss = model(x) / 4\n    loss.backward()",
    ),
    Rule(
        name="clip-after-step",
        severity=Severity.ERROR,
        title="gradients are clipped after the step, or before backward",
        why="The optimizer has used them as they were; what is clipped is thrown away by the next zero_grad.",
        bad="scaler.step(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nscaler.update()",
        good="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)\nscaler.update()",
    ),
    Rule(
        name="clip-twice",
        severity=Severity.WARNING,
        title="gradients are clipped twice",
        why="Scaling by max_norm / norm after clip_grad_norm_ uses the norm from before the clip: the step shrinks "
        "with the square of the norm.",
        bad="norm = clip_grad_norm_(params, 1.0)\nfor p in params:\n    p.grad.mul_(1.0 / norm)",
        good="clip_grad_norm_(params, 1.0)",
    ),
    Rule(
        name="nan-hidden",
        severity=Severity.WARNING,
        title="NaN is replaced instead of explained",
        why="nan_to_num, zeroed gradients and zero losses let training go on with garbage, hide the first bad module, "
        "and in DDP spread what one rank made up to all.",
        bad="loss = torch.nan_to_num(loss)\nloss.backward()",
        good="if not torch.isfinite(loss):\n    skipped += 1\n    continue   # on every rank alike",
        threads=("OpenBMB/BMTrain#108", "Lightning-AI/pytorch-lightning#5243", "karpathy/nanoGPT#227"),
    ),
    Rule(
        name="eval-without-no-grad",
        severity=Severity.INFO,
        title="evaluation records gradients",
        why="model.eval() changes dropout and batch norm only. Without no_grad every activation is kept: memory grows "
        "to that of training.",
        bad="model.eval()\nfor x, y in loader:\n    out = model(x)",
        good="model.eval()\nwith torch.no_grad():\n    for x, y in loader:\n        out = model(x)",
    ),
    Rule(
        name="eval-outside-autocast",
        severity=Severity.INFO,
        title="evaluation does not run under the autocast of training",
        why="It is slower, needs more memory, and does not measure the numerics that are trained and shipped.",
        bad="with torch.no_grad():\n    out = model(x)",
        good="with torch.no_grad(), torch.autocast('cuda', dtype=torch.bfloat16):\n    out = model(x)",
    ),
    Rule(
        name="item-every-step",
        severity=Severity.INFO,
        title=".item() on the loss at every step",
        why="It makes the CPU wait for the GPU, so no work is queued ahead; small models pay most.",
        bad="total += loss.item()",
        good="total += loss.detach()   # read it once, after the loop",
        threads=("huggingface/accelerate#1714",),
    ),
)
