import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from nmt import Transformer, WMT, pad_collate

PAD = 0


def clip_gradients(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train_step(model, batch, criterion, optimizer, grad_scaler, max_norm):
    src, tgt = batch["src"].cuda(), batch["tgt"].cuda()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        out = model(src, tgt[:, :-1])
        loss = criterion(out.flatten(0, 1), tgt[:, 1:].flatten())
    grad_scaler.scale(loss).backward()
    norm = clip_gradients(model, max_norm)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    return loss.detach(), norm


@torch.no_grad()
def dev_loss(model, loader, criterion):
    model.eval()
    losses = []
    for batch in loader:
        src, tgt = batch["src"].cuda(), batch["tgt"].cuda()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            losses.append(criterion(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten()))
    model.train()
    return torch.stack(losses).mean().item()


def save_checkpoint(path, model, optimizer, scheduler, epoch):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        },
        path,
    )


def main(data="wmt14", epochs=30, path="ckpt/last.pt"):
    train = DataLoader(WMT(data, "train"), 64, shuffle=True, collate_fn=pad_collate)
    dev = DataLoader(WMT(data, "dev"), 64, collate_fn=pad_collate)
    model = Transformer(vocab=32000).cuda()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    grad_scaler = torch.amp.GradScaler("cuda")
    start = 0
    if os.path.exists(path):
        ck = torch.load(path, map_location="cuda")
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        scheduler.load_state_dict(ck["scheduler"])
        start = ck["epoch"] + 1
    for epoch in range(start, epochs):
        for i, batch in enumerate(train):
            loss, norm = train_step(model, batch, criterion, optimizer, grad_scaler, 1.0)
            if i % 100 == 0:
                print(f"{epoch}/{i} {loss.item():.3f} |g| {norm.item():.2f}")
        scheduler.step()
        print("dev", dev_loss(model, dev, criterion))
        save_checkpoint(path, model, optimizer, scheduler, epoch)


if __name__ == "__main__":
    main()
