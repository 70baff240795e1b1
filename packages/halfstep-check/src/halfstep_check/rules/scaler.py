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
        fix="Call scaler.unscale_(optimizer) between backward() and the clip.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        threads=(
            "milesial/Pytorch-UNet#468",
            "pytorch/examples#1196",
            "Lightning-AI/pytorch-lightning#9606",
            "rwth-i6/returnn#1595",
            "k2-fsa/icefall#2081",
        ),
    ),
    Rule(
        name="update-skipped",
        severity=Severity.ERROR,
        title="a path unscales the gradients and leaves out update",
        why="update() is what allows the next unscale_. Where an accumulation window, a large norm or a NaN skips the "
        "step by hand and update() with it, the next unscale_ raises, and the scale that overflowed never falls.",
        fix="Move unscale_ to where step() and update() are, or update() out of the condition.",
        bad="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / 4
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if (i + 1) % 4 == 0:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        good="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / 4
                scaler.scale(loss).backward()
                if (i + 1) % 4 == 0:
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        threads=("huggingface/transformers#23905", "Haian-Jin/LVSM#19", "microsoft/Swin-Transformer#311"),
    ),
    Rule(
        name="overflow-raises",
        severity=Severity.ERROR,
        title="a gradient that is not finite ends the run",
        why="An fp16 run overflows now and then, at its start above all: the scale begins at 65536. step() skips "
        "such a step and update() halves the scale; an exception before it ends the run instead.",
        fix="Leave the step to the scaler, and test the loss instead of the gradients.",
        bad="""
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(norm):
                raise RuntimeError("gradient is not finite")
            scaler.step(optimizer)
            scaler.update()
        """,
        good="""
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
    Rule(
        name="step-without-update",
        severity=Severity.ERROR,
        title="the scaler steps but is never updated",
        why="update() adjusts the scale and clears the record of infs. Without it one overflow blocks all later steps.",
        fix="Call scaler.update() after the last scaler.step() of an iteration.",
        bad="""
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        """,
        good="""
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
    Rule(
        name="update-between-steps",
        severity=Severity.ERROR,
        title="update() runs between the steps of two optimizers",
        why="Both optimizers' gradients come from one backward and carry one scale. update() may change it, and the "
        "second step then divides by the wrong one; it also clears the record of infs.",
        fix="Step all optimizers first, then call update() once.",
        bad="""
            scaler.scale(loss).backward()
            scaler.step(optimizer_body)
            scaler.update()
            scaler.step(optimizer_head)
            scaler.update()
        """,
        good="""
            scaler.scale(loss).backward()
            scaler.step(optimizer_body)
            scaler.step(optimizer_head)
            scaler.update()
        """,
    ),
    Rule(
        name="step-bypasses-scaler",
        severity=Severity.ERROR,
        title="optimizer.step() on scaled gradients",
        why="The loss was scaled, the gradients are too, and nothing divides them back or checks them for inf.",
        fix="Step through the scaler: scaler.step(optimizer), scaler.update().",
        bad="""
            scaler.scale(loss).backward()
            optimizer.step()
        """,
        good="""
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        threads=("huggingface/lerobot#4652",),
    ),
    Rule(
        name="backward-in-autocast",
        severity=Severity.WARNING,
        title="backward() runs inside autocast",
        why="PyTorch advises against it: backward ops use the dtype autocast chose in forward anyway, and code that "
        "runs in backward (hooks, checkpointing, custom functions) is cast a second time.",
        fix="End the autocast block after the loss.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = criterion(model(x), y)
                    loss.backward()
                optimizer.step()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        """,
    ),
    Rule(
        name="scaler-with-bf16",
        severity=Severity.WARNING,
        title="a GradScaler runs with bf16",
        why="bf16 has fp32's range: nothing underflows that scaling could save. The scaler costs a pass over all "
        "gradients per step, and may skip steps for its own overflow.",
        fix="Remove the scaler, or enable it for fp16 only.",
        bad="""
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        good="""
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        """,
    ),
    Rule(
        name="fp16-without-scaler",
        severity=Severity.ERROR,
        title="fp16 autocast without a GradScaler",
        why="Gradients below 6e-8 become zero in fp16. `autocast('cuda')` without a dtype is fp16.",
        fix="Use bf16, or scale the loss with torch.amp.GradScaler.",
        bad="""
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        """,
        good="""
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        """,
        threads=("huggingface/lerobot#4652",),
    ),
    Rule(
        name="scheduler-ignores-skip",
        severity=Severity.WARNING,
        title="the learning-rate schedule advances on skipped steps",
        why="scaler.step() does not say whether it stepped. Each skip moves the schedule without a step: warm-up ends "
        "early, and torch warns that the scheduler ran before the optimizer.",
        fix="Step the schedule only where the scale did not fall.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= before:
                    scheduler.step()
        """,
        threads=("pytorch/pytorch#44511", "pytorch/pytorch#55585", "pytorch/pytorch#67590", "pytorch/pytorch#152279"),
    ),
    Rule(
        name="ema-ignores-skip",
        severity=Severity.INFO,
        title="the weight average moves on skipped steps",
        why="A skipped step leaves the weights as they were, but the average is pulled towards them again, and its "
        "warm-up counts a step that never was.",
        fix="Move the average only where the scale did not fall.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                ema.update(model)
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= before:
                    ema.update(model)
        """,
        threads=("huggingface/lerobot#4652",),
    ),
    Rule(
        name="scaler-not-saved",
        severity=Severity.WARNING,
        title="the checkpoint holds the optimizer but not the scaler",
        why="After resume the scale starts at 65536 again: a run of skipped steps and a bump in the loss.",
        fix="Save scaler.state_dict() with the optimizer's.",
        bad="""
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        """,
        good="""
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.load_state_dict(checkpoint["scaler"])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state, path)
        """,
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
        fix="Load the scaler's state where the optimizer's is loaded.",
        bad="""
            scaler = torch.amp.GradScaler("cuda")
            checkpoint = torch.load(path)
            optimizer.load_state_dict(checkpoint["optimizer"])
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
        """,
        good="""
            scaler = torch.amp.GradScaler("cuda")
            checkpoint = torch.load(path)
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.load_state_dict(checkpoint["scaler"])
            for x, y in loader:
                optimizer.zero_grad()
                scaler.scale(criterion(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
        """,
        threads=("ultralytics/ultralytics#22189", "facebookresearch/co-tracker#101"),
    ),
    Rule(
        name="scaler-remade",
        severity=Severity.WARNING,
        title="the scaler is made again every epoch",
        why="A scaler learns its scale by skipping steps. One that is made in the loop over epochs starts at 65536 "
        "each time: every epoch begins with skipped steps, and the scale never grows beyond one epoch's worth.",
        fix="Make one scaler before the loop over epochs.",
        bad="""
            for epoch in range(epochs):
                scaler = torch.amp.GradScaler("cuda")
                for x, y in loader:
                    optimizer.zero_grad()
                    scaler.scale(criterion(model(x), y)).backward()
                    scaler.step(optimizer)
                    scaler.update()
        """,
        good="""
            scaler = torch.amp.GradScaler("cuda")
            for epoch in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    scaler.scale(criterion(model(x), y)).backward()
                    scaler.step(optimizer)
                    scaler.update()
        """,
    ),
    Rule(
        name="step-result-tested",
        severity=Severity.ERROR,
        title="a skip is read from the result of scaler.step()",
        why="scaler.step() returns what optimizer.step() returns: None without a closure, skipped or not. What the "
        "test guards happens always or never.",
        fix="Compare the scale before and after update(): it falls where the step was skipped.",
        bad="""
            scaler.scale(loss).backward()
            stepped = scaler.step(optimizer)
            scaler.update()
            if stepped is not None:
                num_steps += 1
        """,
        good="""
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                num_steps += 1
        """,
    ),
    Rule(
        name="framework-bypassed",
        severity=Severity.ERROR,
        title="backward or step bypasses the framework that scales the loss",
        why="Trainer, Accelerate, DeepSpeed and apex scale in their own backward and unscale in their own step. A "
        "plain call next to them leaves the loss unscaled, or runs backward twice.",
        fix="Call the framework's own backward and step.",
        bad="""
            from transformers import Trainer


            class Tuner(Trainer):
                def compute_loss(self, model, inputs, return_outputs=False):
                    out = model(**inputs)
                    out.loss.backward()
                    return (out.loss, out) if return_outputs else out.loss
        """,
        good="""
            from transformers import Trainer


            class Tuner(Trainer):
                def compute_loss(self, model, inputs, return_outputs=False):
                    out = model(**inputs)
                    return (out.loss, out) if return_outputs else out.loss
        """,
    ),
    Rule(
        name="penalty-unscaled",
        severity=Severity.WARNING,
        title="a gradient penalty's inner gradient is not scaled",
        why="torch.autograd.grad() under fp16 autocast gives fp16 gradients, and the scaler has no part in it: what is "
        "below 6e-8 is zero before the penalty sees it.",
        fix="Scale the inner loss, divide the inner gradient by the scale, and build the penalty outside autocast.",
        bad="""
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                out = critic(x)
                grad = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
                loss = out.mean() + grad.square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        good="""
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                out = critic(x)
            grad = torch.autograd.grad(scaler.scale(out.sum()), x, create_graph=True)[0] / scaler.get_scale()
            loss = out.mean() + grad.square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
    Rule(
        name="scaler-misused",
        severity=Severity.ERROR,
        title="the scaler is asked for what it does not have",
        why="GradScaler scales, unscales, steps and updates. It clips nothing and keeps no list of optimizers: the "
        "line raises AttributeError when it runs, often only at the first window's end.",
        fix="Clip with torch.nn.utils after unscale_, and call step() before update(), once each.",
        bad="""
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        good="""
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
    Rule(
        name="amp-switch-stuck",
        severity=Severity.ERROR,
        title="a switch of mixed precision that does not switch",
        why='argparse calls bool("False"), which is True. A torch.device never equals a string, so '
        '`device == "cuda"` silently leaves AMP off.',
        fix="Use action=argparse.BooleanOptionalAction for a flag, and compare device.type with a string.",
        bad="""
            parser.add_argument("--amp", type=bool, default=True)
        """,
        good="""
            parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
        """,
    ),
    Rule(
        name="autocast-dtype-differs",
        severity=Severity.WARNING,
        title="a bf16 model under fp16 autocast",
        why="CUDA autocast without a dtype is fp16, whatever the weights are: bf16 weights are cast to fp16 at every "
        "matmul, and what exceeds 65504 becomes inf.",
        fix="Give autocast the dtype of the weights.",
        bad="""
            model = Net().to(torch.bfloat16)
            with torch.autocast("cuda"):
                loss = model(x)
            scaler.scale(loss).backward()
        """,
        good="""
            model = Net().to(torch.bfloat16)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
        """,
    ),
    Rule(
        name="model-outside-autocast",
        severity=Severity.WARNING,
        title="the model runs outside autocast, the loss inside",
        why="Only what is called inside the block is cast. The model computes in fp32, and the scaler has nothing to "
        "protect: no memory and no time is saved.",
        fix="Call the model inside the autocast block.",
        bad="""
            scaler = torch.amp.GradScaler("cuda")
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(out, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        good="""
            scaler = torch.amp.GradScaler("cuda")
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    out = model(x)
                    loss = criterion(out, y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
    ),
    Rule(
        name="scaler-not-sharded",
        severity=Severity.ERROR,
        title="a plain GradScaler with FSDP",
        why="Under FSDP each rank holds a shard of the gradients. GradScaler looks for inf in that shard alone, so one "
        "rank skips a step that the others make: weights part in silence. ShardedGradScaler reduces the verdict.",
        fix="Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.",
        bad="""
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

            model = FSDP(model)
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        good="""
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            model = FSDP(model)
            scaler = ShardedGradScaler()
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
)
