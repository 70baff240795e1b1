"""Rules about numbers, dtypes and torch's API."""

from __future__ import annotations

from halfstep_check.findings import Severity
from halfstep_check.rules.rule import Rule

NUMERIC_RULES = (
    Rule(
        name="bce-under-autocast",
        severity=Severity.ERROR,
        title="binary_cross_entropy under autocast",
        why="CUDA autocast raises: the gradient of BCE on probabilities can leave fp16's range.",
        fix="Use binary_cross_entropy_with_logits on the logits.",
        bad="""
            import torch.nn.functional as F

            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)
        """,
        good="""
            import torch.nn.functional as F

            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.binary_cross_entropy_with_logits(model(x), y)
        """,
    ),
    Rule(
        name="half-weights-optimizer",
        severity=Severity.ERROR,
        title="half-precision weights with a plain optimizer",
        why="An update below 1/2048 of an fp16 weight (1/256 in bf16) is rounded away, Adam's eps 1e-8 is zero in "
        "fp16, and GradScaler refuses: Attempting to unscale FP16 gradients.",
        fix="Keep fp32 weights and compute under autocast.",
        bad="""
            model = Net().cuda().half()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x.half()), y)
                loss.backward()
                optimizer.step()
        """,
        good="""
            model = Net().cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        """,
        threads=("bitsandbytes-foundation/bitsandbytes#945", "pytorch/torchtune#2254"),
    ),
    Rule(
        name="bf16-check-too-low",
        severity=Severity.WARNING,
        title="bf16 is chosen for GPUs without bf16 units",
        why="Tensor cores take bf16 from compute capability 8.0 (Ampere) on. On Volta (7.0) and Turing (7.5) bf16 is "
        "emulated: slower than fp32.",
        fix="Ask for compute capability 8.0.",
        bad="""
            dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 7 else torch.float16
            context = torch.autocast("cuda", dtype=dtype)
        """,
        good="""
            dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
            context = torch.autocast("cuda", dtype=dtype)
        """,
    ),
    Rule(
        name="deprecated-amp",
        severity=Severity.INFO,
        title="torch.cuda.amp is deprecated",
        why="Since torch 2.4 it warns at every use; torch.amp takes the device as its first argument.",
        fix='Use torch.amp.autocast("cuda") and torch.amp.GradScaler("cuda").',
        bad="""
            with torch.cuda.amp.autocast(dtype=torch.bfloat16):
                loss = model(x)
        """,
        good="""
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
        """,
    ),
    Rule(
        name="manual-cast",
        severity=Severity.WARNING,
        title="an input is cast to half by hand under autocast",
        why="Autocast casts each op's inputs as that op needs. A hand cast rounds once more, also for the ops that "
        "autocast would have run in fp32.",
        fix="Pass the input as it is.",
        bad="""
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x.half())
        """,
        good="""
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x)
        """,
    ),
)
