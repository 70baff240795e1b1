import json
import time
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader


class Learner:
    """Small fastai-like learner."""

    def __init__(self, net, train_dl: DataLoader, valid_dl: DataLoader, loss_func, lr=1e-3, workdir="runs"):
        self.net = net.cuda()
        self.train_dl, self.valid_dl, self.loss_func = train_dl, valid_dl, loss_func
        self.opt = optim.AdamW(self.net.parameters(), lr=lr)
        self.sched = optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=100)
        self.amp_scaler = torch.amp.GradScaler("cuda")
        self.dir = Path(workdir)
        self.dir.mkdir(exist_ok=True)
        self.epoch = 0

    def one_batch(self, xb, yb):
        xb, yb = xb.cuda(non_blocking=True), yb.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss_func(self.net(xb), yb)
        self.opt.zero_grad(set_to_none=True)
        self.amp_scaler.scale(loss).backward()
        self.amp_scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.amp_scaler.step(self.opt)
        self.amp_scaler.update()
        return loss.detach()

    def one_epoch(self):
        self.net.train()
        losses = [self.one_batch(x, y) for x, y in self.train_dl]
        return torch.stack(losses).mean().item()

    def validate(self):
        self.net.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            vals = [self.loss_func(self.net(x.cuda()), y.cuda()) for x, y in self.valid_dl]
        return torch.stack(vals).mean().item()

    def fit(self, epochs):
        while self.epoch < epochs:
            t = time.time()
            tr, va = self.one_epoch(), self.validate()
            self.sched.step()
            self.epoch += 1
            self.save()
            with open(self.dir / "log.jsonl", "a") as fh:
                fh.write(json.dumps({"epoch": self.epoch, "train": tr, "valid": va, "s": time.time() - t}) + "\n")

    def save(self):
        torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                    "scaler": self.amp_scaler.state_dict(), "epoch": self.epoch}, self.dir / "last.pt")

    def resume(self):
        st = torch.load(self.dir / "last.pt", map_location="cuda")
        self.net.load_state_dict(st["net"])
        self.opt.load_state_dict(st["opt"])
        self.sched.load_state_dict(st["sched"])
        self.epoch = st["epoch"]
