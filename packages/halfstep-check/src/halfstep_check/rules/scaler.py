"""Rules about the scaler and the order of an fp16 step."""

from __future__ import annotations

from halfstep_check.findings import Severity
from halfstep_check.rules.rule import Rule

SCALER_RULES = (
    Rule(
        name="clip-before-unscale",
        severity=Severity.ERROR,
        title="gradients are clipped before they are unscaled",
        why="Scaled gradients are up to 65536 times too large, so every step is clipped to the limit and then divided "
        "by the scale: training crawls, and the clip value means nothing.",
        bad="scaler.scale(loss).backward()\nclip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)",
        good="scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)",
        threads=(
            "milesial/Pytorch-UNet#468",
            "pytorch/examples#1196",
            "Lightning-AI/pytorch-lightning#9606",
            "rwth-i6/returnn#1595",
            "k2-fsa/icefall#2081",
        ),
    ),
    Rule(
        name="unscale-twice",
        severity=Severity.ERROR,
        title="unscale_ is called twice before update",
        why="GradScaler raises: unscale_() has already been called on this optimizer since the last update().",
        bad="scaler.unscale_(optimizer)\nclip(...)\nscaler.unscale_(optimizer)\nscaler.step(optimizer)",
        good="scaler.unscale_(optimizer)\nclip(...)\nscaler.step(optimizer)\nscaler.update()",
        threads=("huggingface/transformers#23905", "huggingface/transformers#24449", "espnet/espnet#2362"),
    ),
    Rule(
        name="update-skipped",
        severity=Severity.ERROR,
        title="a path unscales the gradients and leaves out update",
        why="update() is what allows the next unscale_. Where an accumulation window, a large norm or a NaN skips the "
        "step by hand and update() with it, the next unscale_ raises, and the scale that overflowed never falls.",
        bad="scaler.unscale_(optimizer)\nif norm < limit:\n    scaler.step(optimizer)\n    scaler.update()",
        good="scaler.unscale_(optimizer)\nif norm < limit:\n    scaler.step(optimizer)\nscaler.update()",
        threads=("huggingface/transformers#23905", "Haian-Jin/LVSM#19", "microsoft/Swin-Transformer#311"),
    ),
    Rule(
        name="overflow-raises",
        severity=Severity.ERROR,
        title="a gradient that is not finite ends the run",
        why="An fp16 run overflows now and then, at its start above all: the scale begins at 65536. step() skips "
        "such a step and update() halves the scale; an exception before it ends the run instead.",
        bad="scaler.unscale_(optimizer)\nnorm = clip_grad_norm_(params, 1.0, error_if_nonfinite=True)",
        good="scaler.unscale_(optimizer)\nnorm = clip_grad_norm_(params, 1.0)\nscaler.step(optimizer)",
    ),
    Rule(
        name="step-without-update",
        severity=Severity.ERROR,
        title="the scaler steps but is never updated",
        why="update() adjusts the scale and clears the record of infs. Without it one overflow blocks all later steps.",
        bad="scaler.scale(loss).backward()\nscaler.step(optimizer)",
        good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    ),
    Rule(
        name="update-between-steps",
        severity=Severity.ERROR,
        title="update() runs between the steps of two optimizers",
        why="Both optimizers' gradients come from one backward and carry one scale. update() may change it, and the "
        "second step then divides by the wrong one; it also clears the record of infs.",
        bad="scaler.step(optimizer_a)\nscaler.update()\nscaler.step(optimizer_b)\nscaler.update()",
        good="scaler.step(optimizer_a)\nscaler.step(optimizer_b)\nscaler.update()",
    ),
    Rule(
        name="step-bypasses-scaler",
        severity=Severity.ERROR,
        title="optimizer.step() on scaled gradients",
        why="The loss was scaled, the gradients are too, and nothing divides them back or checks them for inf.",
        bad="scaler.scale(loss).backward()\noptimizer.step()",
        good="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        threads=("huggingface/lerobot#4652",),
    ),
    Rule(
        name="backward-in-autocast",
        severity=Severity.WARNING,
        title="backward() runs inside autocast",
        why="PyTorch advises against it: backward ops use the dtype autocast chose in forward anyway, and code that "
        "runs in backward (hooks, checkpointing, custom functions) is cast a second time.",
        bad="with torch.autocast('cuda'):\n    loss = f(model(x), y)\n    loss.backward()",
        good="with torch.autocast('cuda'):\n    loss = f(model(x), y)\nloss.backward()",
    ),
    Rule(
        name="scaler-with-bf16",
        severity=Severity.WARNING,
        title="a GradScaler runs with bf16",
        why="bf16 has fp32's range: nothing underflows that scaling could save. The scaler costs a pass over all "
        "gradients per step, and may skip steps for its own overflow.",
        bad="scaler = GradScaler('cuda')\nwith torch.autocast('cuda', dtype=torch.bfloat16): ...",
        good="with torch.autocast('cuda', dtype=torch.bfloat16): ...\nloss.backward()\noptimizer.step()",
    ),
    Rule(
        name="fp16-without-scaler",
        severity=Severity.ERROR,
        title="fp16 autocast without a GradScaler",
        why="Gradients below 6e-8 become zero in fp16. `autocast('cuda')` without a dtype is fp16.",
        bad="with torch.autocast('cuda'):\n    loss = f(model(x), y)\nloss.backward()",
        good="with torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = f(model(x), y)\nloss.backward()",
        threads=("huggingface/lerobot#4652",),
    ),
    Rule(
        name="scheduler-ignores-skip",
        severity=Severity.WARNING,
        title="the learning-rate schedule advances on skipped steps",
        why="scaler.step() does not say whether it stepped. Each skip moves the schedule without a step: warm-up ends "
        "early, and torch warns that the scheduler ran before the optimizer.",
        bad="scaler.step(optimizer)\nscaler.update()\nscheduler.step()",
        good="before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
        "if scaler.get_scale() >= before:\n    scheduler.step()",
        threads=("pytorch/pytorch#44511", "pytorch/pytorch#55585", "pytorch/pytorch#67590", "pytorch/pytorch#152279"),
    ),
    Rule(
        name="ema-ignores-skip",
        severity=Severity.INFO,
        title="the weight average moves on skipped steps",
        why="A skipped step leaves the weights as they were, but the average is pulled towards them again, and its "
        "warm-up counts a step that never was.",
        bad="scaler.step(optimizer)\nscaler.update()\nema.update(model)",
        good="if scaler.get_scale() >= before:\n    ema.update(model)",
        threads=("huggingface/lerobot#4652",),
    ),
    Rule(
        name="scaler-not-saved",
        severity=Severity.WARNING,
        title="the checkpoint holds the optimizer but not the scaler",
        why="After resume the scale starts at 65536 again: a run of skipped steps and a bump in the loss.",
        bad="torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, path)",
        good="torch.save({..., 'scaler': scaler.state_dict()}, path)",
        threads=(
            "facebookresearch/co-tracker#101",
            "ultralytics/ultralytics#22189",
            "huggingface/transformers#11663",
            "mosaicml/composer#1376",
        ),
    ),
    Rule(
        name="scaler-not-loaded",
        severity=Severity.WARNING,
        title="resume loads the optimizer but not the scaler",
        why="The optimizer goes on where it stopped, the scale starts at 65536 again and skips steps until it fits.",
        bad="optimizer.load_state_dict(checkpoint['optimizer'])",
        good="optimizer.load_state_dict(checkpoint['optimizer'])\nscaler.load_state_dict(checkpoint['scaler'])",
        threads=("ultralytics/ultralytics#22189", "facebookresearch/co-tracker#101"),
    ),
    Rule(
        name="scaler-remade",
        severity=Severity.WARNING,
        title="the scaler is made again every epoch",
        why="A scaler learns its scale by skipping steps. One that is made in the loop over epochs starts at 65536 "
        "each time: every epoch begins with skipped steps, and the scale never grows beyond one epoch's worth.",
        bad="for epoch in range(epochs):\n    scaler = GradScaler('cuda')\n    for batch in loader: ...",
        good="scaler = GradScaler('cuda')\nfor epoch in range(epochs):\n    for batch in loader: ...",
    ),
    Rule(
        name="step-result-tested",
        severity=Severity.ERROR,
        title="a skip is read from the result of scaler.step()",
        why="scaler.step() returns what optimizer.step() returns: None without a closure, skipped or not. What the "
        "test guards happens always or never.",
        bad="if scaler.step(optimizer) is not None:\n    scheduler.step()",
        good="before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
        "if scaler.get_scale() >= before:\n    scheduler.step()",
    ),
    Rule(
        name="framework-bypassed",
        severity=Severity.ERROR,
        title="backward or step goes round the framework that scales the loss",
        why="Trainer, Lightning, Accelerate, DeepSpeed and apex scale in their own backward and unscale in their own "
        "step. A plain call beside them leaves the loss unscaled, or runs backward twice.",
        bad="engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)\nengine.backward(loss)\n"
        "optimizer.step()",
        good="engine.backward(loss)\nengine.step()",
    ),
    Rule(
        name="penalty-unscaled",
        severity=Severity.WARNING,
        title="a gradient penalty's inner gradient is not scaled",
        why="torch.autograd.grad() under fp16 autocast gives fp16 gradients, and the scaler has no part in it: what is "
        "below 6e-8 is zero before the penalty sees it.",
        bad="grads = torch.autograd.grad(out.sum(), x, create_graph=True)[0]",
        good="scaled = torch.autograd.grad(scaler.scale(out.sum()), x, create_graph=True)[0]\n"
        "grads = scaled / scaler.get_scale()",
    ),
    Rule(
        name="scaler-misused",
        severity=Severity.ERROR,
        title="the scaler is asked for what it does not have",
        why="GradScaler scales, unscales, steps and updates. It clips nothing and keeps no list of optimizers: the "
        "line raises AttributeError when it runs, often only at the first window's end.",
        bad="scaler.unscale_(optimizer)\nscaler.clip_grad_norm_(model.parameters(), 1.0)",
        good="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    Rule(
        name="amp-switch-stuck",
        severity=Severity.ERROR,
        title="a switch of mixed precision that does not switch",
        why='argparse calls bool("False"), which is True. A torch.device never equals a string, so '
        '`device == "cuda"` leaves AMP off without a word.',
        bad="parser.add_argument('--amp', type=bool, default=True)\nenabled = torch.device('cuda') == 'cuda'",
        good="parser.add_argument('--amp', action=argparse.BooleanOptionalAction)\nenabled = device.type == 'cuda'",
    ),
    Rule(
        name="autocast-dtype-differs",
        severity=Severity.WARNING,
        title="a bf16 model under fp16 autocast",
        why="CUDA autocast without a dtype is fp16, whatever the weights are: bf16 weights are cast to fp16 at every "
        "matmul, and what exceeds 65504 becomes inf.",
        bad="model.to(torch.bfloat16)\nwith torch.autocast('cuda'):\n    loss = model(x)",
        good="with torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = model(x)",
    ),
    Rule(
        name="model-outside-autocast",
        severity=Severity.WARNING,
        title="the model runs outside autocast, the loss inside",
        why="Only what is called inside the block is cast. The model computes in fp32, and the scaler has nothing to "
        "protect: no memory and no time is saved.",
        bad="out = model(x)\nwith torch.autocast('cuda'):\n    loss = criterion(out, y)",
        good="with torch.autocast('cuda'):\n    out = model(x)\n    loss = criterion(out, y)",
    ),
    Rule(
        name="scaler-not-sharded",
        severity=Severity.ERROR,
        title="a plain GradScaler with FSDP",
        why="Under FSDP each rank holds a shard of the gradients. GradScaler looks for inf in that shard alone, so one "
        "rank skips a step that the others make: weights part in silence. ShardedGradScaler reduces the verdict.",
        bad="model = FSDP(model)\nscaler = GradScaler()",
        good="model = FSDP(model)\nscaler = ShardedGradScaler()",
    ),
)
