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
        fix="Divide the loss by the number of micro-batches before backward().",
        bad="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        good="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        threads=("huggingface/transformers#35438", "OpenNMT/OpenNMT-py#2209"),
    ),
    Rule(
        name="accumulation-divided-twice",
        severity=Severity.WARNING,
        title="the accumulated loss is divided by the number of micro-batches twice",
        why="Accelerator(gradient_accumulation_steps=N) divides the loss by N in backward(). A division by hand makes "
        "the gradient N times too small: clipping never sets in, and SGD crawls.",
        fix="Divide once: leave it to Accelerate, or do it by hand.",
        bad="""
            accelerator = Accelerator(gradient_accumulation_steps=4)
            accelerator.backward(loss / 4)
        """,
        good="""
            accelerator = Accelerator(gradient_accumulation_steps=4)
            accelerator.backward(loss)
        """,
    ),
    Rule(
        name="accumulation-drops-tail",
        severity=Severity.WARNING,
        title="the last, partial window is dropped",
        why="Batches after the last full window are computed, and the next epoch's zero_grad throws them away: the "
        "same samples may never be learned from.",
        fix="Step at the last batch too.",
        bad="""
            for epoch in range(epochs):
                optimizer.zero_grad()
                for i, (x, y) in enumerate(loader):
                    loss = criterion(model(x), y) / 4
                    loss.backward()
                    if (i + 1) % 4 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        good="""
            for epoch in range(epochs):
                optimizer.zero_grad()
                for i, (x, y) in enumerate(loader):
                    loss = criterion(model(x), y) / 4
                    loss.backward()
                    if (i + 1) % 4 == 0 or i + 1 == len(loader):
                        optimizer.step()
                        optimizer.zero_grad()
        """,
    ),
    Rule(
        name="gradients-not-cleared",
        severity=Severity.ERROR,
        title="gradients are never cleared",
        why="backward() adds to what is there. Without zero_grad every step uses the sum of all gradients since the "
        "start; under fp16 the sum overflows and steps are skipped.",
        fix="Call optimizer.zero_grad() once per step.",
        bad="""
            optimizer = torch.optim.AdamW(model.parameters())
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        """,
        good="""
            optimizer = torch.optim.AdamW(model.parameters())
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        """,
    ),
    Rule(
        name="cleared-within-window",
        severity=Severity.ERROR,
        title="gradients are cleared between micro-batches",
        why="The step waits for N micro-batches, zero_grad does not: all gradients but the last are thrown away.",
        fix="Clear the gradients where the optimizer steps.",
        bad="""
            for i, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = criterion(model(x), y) / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
        """,
        good="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    ),
    Rule(
        name="stepped-within-window",
        severity=Severity.ERROR,
        title="the optimizer steps at every micro-batch, the gradients are cleared at the window's end",
        why="Each step uses the gradients of all micro-batches so far again. With a scaler it is worse: step() has "
        "divided the old ones by the scale already, and the new, scaled ones are added to them.",
        fix="Step and clear the gradients together, at the end of a window.",
        bad="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / accumulation_steps
                loss.backward()
                optimizer.step()
                if (i + 1) % accumulation_steps == 0:
                    optimizer.zero_grad()
        """,
        good="""
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / accumulation_steps
                loss.backward()
                if (i + 1) % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    ),
    Rule(
        name="step-never-due",
        severity=Severity.ERROR,
        title="the step waits for a counter that only the step moves",
        why="With a window of two or more the counter stops at a value for which the test fails: nothing is trained "
        "from then on, and the loss is logged as if it were.",
        fix="Count micro-batches for the test, and steps separately.",
        bad="""
            step = 0
            for x, y in loader:
                loss = criterion(model(x), y) / 4
                loss.backward()
                if (step + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
        """,
        good="""
            batch = 0
            for x, y in loader:
                loss = criterion(model(x), y) / 4
                loss.backward()
                batch += 1
                if batch % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    ),
    Rule(
        name="step-without-backward",
        severity=Severity.ERROR,
        title="one branch steps without a backward",
        why="The branch with AMP runs backward, the one without only steps: it trains nothing, or on old gradients.",
        fix="Call backward() on every path that steps, and zero_grad() before it.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                if scaler is None:
                    loss = criterion(model(x), y)
                    optimizer.step()
                else:
                    loss = criterion(model(x), y)
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                if scaler is None:
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()
                else:
                    loss = criterion(model(x), y)
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        """,
    ),
    Rule(
        name="engine-step-gated",
        severity=Severity.WARNING,
        title="a DeepSpeed engine's step() is called at the window's end only",
        why="The engine counts micro-batches in step() and steps by itself at gradient_accumulation_steps; it divides "
        "the loss too. Called every n-th time it waits n times as long, and what is clipped by hand is still scaled.",
        fix="Call engine.step() after every engine.backward(); the engine counts the window itself.",
        bad="""
            import deepspeed

            engine, _, _, _ = deepspeed.initialize(model=model, config=config)
            for i, batch in enumerate(loader):
                engine.backward(engine(batch))
                if (i + 1) % accumulation_steps == 0:
                    engine.step()
        """,
        good="""
            import deepspeed

            engine, _, _, _ = deepspeed.initialize(model=model, config=config)
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
        """,
    ),
    Rule(
        name="gradients-not-reduced",
        severity=Severity.ERROR,
        title="the backward before the step runs in no_sync()",
        why="no_sync() leaves out DDP's reduction over ranks. The backward of a window's last micro-batch reduces what "
        "has been gathered; without it every rank steps on its own gradients, and the replicas drift apart.",
        fix="Run the last micro-batch of a window outside no_sync().",
        bad="""
            def train_window(model, optimizer, window):
                optimizer.zero_grad()
                for x in window:
                    with model.no_sync():
                        loss = model(x) / len(window)
                        loss.backward()
                optimizer.step()
        """,
        good="""
            def train_window(model, optimizer, window):
                optimizer.zero_grad()
                with model.no_sync():
                    for x in window[:-1]:
                        (model(x) / len(window)).backward()
                (model(window[-1]) / len(window)).backward()
                optimizer.step()
        """,
    ),
    Rule(
        name="clip-not-sharded",
        severity=Severity.ERROR,
        title="torch's clip_grad_norm_ on FSDP's parameters",
        why="Under FullyShardedDataParallel a rank holds a shard. torch.nn.utils.clip_grad_norm_ computes the norm of "
        "that shard alone, so ranks clip by different factors; FSDP's own method reduces the norm first.",
        fix="Call the method of the FSDP model: model.clip_grad_norm_(limit).",
        bad="""
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

            model = FSDP(Net())
            for x in loader:
                optimizer.zero_grad()
                model(x).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        """,
        good="""
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

            model = FSDP(Net())
            for x in loader:
                optimizer.zero_grad()
                model(x).backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
        """,
    ),
    Rule(
        name="backward-again",
        severity=Severity.ERROR,
        title="backward runs a second time on one graph",
        why="backward() frees the graph it walked. A second one on the same loss raises, at once or in the second "
        "micro-batch.",
        fix="Compute the loss again before each backward().",
        bad="""
            for x in loader:
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                loss.backward()
                optimizer.step()
        """,
        good="""
            for x in loader:
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                optimizer.step()
        """,
    ),
    Rule(
        name="clip-after-step",
        severity=Severity.ERROR,
        title="gradients are clipped after the step, or before backward",
        why="The optimizer has used them as they were; what is clipped is thrown away by the next zero_grad.",
        fix="Clip between backward() and the step; with a scaler, after unscale_.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        """,
    ),
    Rule(
        name="clip-twice",
        severity=Severity.WARNING,
        title="gradients are clipped twice",
        why="Scaling by max_norm / norm after clip_grad_norm_ uses the norm from before the clip: the step shrinks "
        "with the square of the norm.",
        fix="Keep one clip, at the end of the window.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        """,
    ),
    Rule(
        name="nan-hidden",
        severity=Severity.WARNING,
        title="NaN is replaced instead of explained",
        why="nan_to_num, zeroed gradients and zero losses let training go on with garbage, hide the first bad module, "
        "and in DDP spread what one rank made up to all.",
        fix="Skip the step on every rank alike and count the skips, then find the module that makes the first NaN.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss = torch.nan_to_num(loss)
                loss.backward()
                optimizer.step()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                if not torch.isfinite(loss):
                    num_skipped += 1
                    continue
                loss.backward()
                optimizer.step()
        """,
        threads=("OpenBMB/BMTrain#108", "Lightning-AI/pytorch-lightning#5243", "karpathy/nanoGPT#227"),
    ),
    Rule(
        name="item-every-step",
        severity=Severity.INFO,
        title=".item() on the loss at every step",
        why="It makes the CPU wait for the GPU, so no work is queued ahead; small models pay most.",
        fix="Sum detached losses on the device and read the sum once in a while.",
        bad="""
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                total += loss.item()
        """,
        good="""
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                total += loss.detach()
        """,
        threads=("huggingface/accelerate#1714",),
    ),
)
