import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dit import DiT
from latents import LatentDataset


class EMA:
    def __init__(self, model, decay=0.9999):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


class Diffusion:
    def __init__(self, T=1000, device="cuda"):
        betas = torch.linspace(1e-4, 0.02, T, device=device, dtype=torch.float64)
        self.abar = torch.cumprod(1 - betas, 0).float()
        self.T = T

    def q_sample(self, x0, t, noise):
        a = self.abar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


def save(path, step, model, ema, opt, sched, scaler):
    torch.save(
        dict(step=step, model=model.state_dict(), ema=ema.shadow.state_dict(), opt=opt.state_dict(),
             sched=sched.state_dict(), scaler=scaler.state_dict()),
        path,
    )


def main(steps=400_000, resume=None):
    device = "cuda"
    model = DiT().to(device)
    diff = Diffusion(device=device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 1000))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    ema = EMA(model)
    step = 0
    if resume is not None:
        state = torch.load(resume, map_location=device)
        model.load_state_dict(state["model"])
        ema.shadow.load_state_dict(state["ema"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        scaler.load_state_dict(state["scaler"])
        step = state["step"]
    loader = DataLoader(LatentDataset("latents"), 64, shuffle=True, drop_last=True, num_workers=8)
    Path("ckpt").mkdir(exist_ok=True)
    while step < steps:
        for x0 in loader:
            x0 = x0.to(device, non_blocking=True)
            t = torch.randint(0, diff.T, (x0.shape[0],), device=device)
            noise = torch.randn_like(x0)
            xt = diff.q_sample(x0, t, noise)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = model(xt, t)
            loss = F.mse_loss(pred.float(), noise)

            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale_before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= scale_before:
                sched.step()
                ema.update(model)
            step += 1
            if step % 1000 == 0:
                print(step, float(loss))
                save(f"ckpt/{step:07d}.pt", step, model, ema, opt, sched, scaler)


if __name__ == "__main__":
    main()
