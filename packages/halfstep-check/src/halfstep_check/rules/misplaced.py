"""Rules about decorators, optimizers and tensors in the wrong place."""

from __future__ import annotations

from halfstep_check.findings import Severity
from halfstep_check.rules.rule import Rule

MISPLACED_RULES = (
    Rule(
        name="custom-fwd-on-function",
        severity=Severity.ERROR,
        title="custom_fwd or custom_bwd on a plain function",
        why="The two decorators keep the autocast state of forward in the context that a torch.autograd.Function hands "
        "to its backward. A plain function has no such context: custom_bwd raises AttributeError when called, and "
        "autograd never calls it.",
        fix="Decorate forward and backward of a torch.autograd.Function.",
        bad="""
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
            def custom_forward(x):
                return my_kernel(x)
        """,
        good="""
            class MyKernel(torch.autograd.Function):
                @staticmethod
                @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
                def forward(ctx, x):
                    return my_kernel(x)

                @staticmethod
                @torch.amp.custom_bwd(device_type="cuda")
                def backward(ctx, grad):
                    return my_gradient(grad)
        """,
    ),
    Rule(
        name="optimizer-not-made",
        severity=Severity.ERROR,
        title="a trainer steps an optimizer that it never makes",
        why="The class makes its scaler, but nothing assigns the optimizer that it unscales and steps: the first step "
        "raises AttributeError, after the data were loaded and the loss was computed.",
        fix="Make the optimizer in __init__.",
        bad="""
            class Trainer:
                def __init__(self, model):
                    self.model = model
                    self.scaler = torch.amp.GradScaler("cuda")

                def training_step(self, x, y):
                    with torch.autocast("cuda", dtype=torch.float16):
                        loss = criterion(self.model(x), y)
                    self.scaler.scale(loss).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """,
        good="""
            class Trainer:
                def __init__(self, model):
                    self.model = model
                    self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
                    self.scaler = torch.amp.GradScaler("cuda")

                def training_step(self, x, y):
                    self.optimizer.zero_grad()
                    with torch.autocast("cuda", dtype=torch.float16):
                        loss = criterion(self.model(x), y)
                    self.scaler.scale(loss).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """,
    ),
    Rule(
        name="cpu-timesteps",
        severity=Severity.WARNING,
        title="timesteps of a diffusion model are drawn on the CPU",
        why="torch.randint without a device draws on the CPU. The time embedding of the network is on the GPU and "
        "raises, or waits for a copy at every step.",
        fix="Draw on the latents' device.",
        bad="""
            def training_step(latents, noise):
                timesteps = torch.randint(0, 1000, (latents.shape[0],))
                noisy = scheduler.add_noise(latents, noise, timesteps)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return F.mse_loss(unet(noisy, timesteps), noise)
        """,
        good="""
            def training_step(latents, noise):
                timesteps = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
                noisy = scheduler.add_noise(latents, noise, timesteps)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return F.mse_loss(unet(noisy, timesteps), noise)
        """,
    ),
)
