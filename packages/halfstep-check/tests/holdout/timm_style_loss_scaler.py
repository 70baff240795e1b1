import argparse
import math
import sys

import timm
import torch
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cuda"):
        self._scaler = torch.amp.GradScaler(device=device)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            assert parameters is not None
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def train_one_epoch(model, criterion, loader, optimizer, device, epoch, loss_scaler, max_norm):
    model.train()
    for step, (samples, targets) in enumerate(loader):
        samples, targets = samples.to(device), targets.to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(samples), targets)
        if step % 50 == 0:
            value = loss.item()
            if not math.isfinite(value):
                sys.exit(f"loss is {value}, stopping")
            print(epoch, step, value)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=max_norm, parameters=model.parameters())


@torch.no_grad()
def evaluate(loader, model, device):
    model.eval()
    hits = count = 0
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(images)
        hits += (out.argmax(-1) == target).sum()
        count += target.shape[0]
    return hits.item() / count


def main(args):
    device = torch.device("cuda")
    model = timm.create_model(args.model, num_classes=1000).to(device)
    loader = create_loader(timm.data.create_dataset("", args.data, split="train"), (3, 224, 224), args.batch)
    val = create_loader(timm.data.create_dataset("", args.data, split="val"), (3, 224, 224), args.batch)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    loss_scaler = NativeScaler()
    if args.resume:
        ck = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["optimizer"])
        loss_scaler.load_state_dict(ck["scaler"])
    for epoch in range(args.epochs):
        train_one_epoch(model, LabelSmoothingCrossEntropy(), loader, opt, device, epoch, loss_scaler, args.clip)
        sched.step()
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "scaler": loss_scaler.state_dict(),
                    "epoch": epoch}, "last.pth")
        print("acc", evaluate(val, model, device))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data")
    ap.add_argument("--model", default="deit_small_patch16_224")
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--epochs", type=int, default=300)
    ap.add_argument("--resume", default="")
    main(ap.parse_args())
