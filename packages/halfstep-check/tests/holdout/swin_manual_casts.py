import torch
import torch.nn as nn
from timm import create_model
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy

from data import build_loader


class Head(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x):
        return self.fc(self.norm(x.mean(1)))


class Classifier(nn.Module):
    def __init__(self, name, classes):
        super().__init__()
        self.backbone = create_model(name, pretrained=True, num_classes=0, global_pool="")
        self.head = Head(self.backbone.num_features, classes)

    def forward(self, x):
        return self.head(self.backbone(x).flatten(1, 2))


def train(cfg):
    train_loader, val_loader = build_loader(cfg)
    model = Classifier(cfg.name, cfg.classes).cuda()
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=cfg.classes)
    criterion = SoftTargetCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(cfg.epochs):
        model.train()
        for samples, targets in train_loader:
            samples, targets = mixup(samples.cuda(), targets.cuda())
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(samples.half())
                loss = criterion(out.half(), targets.half())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        print(epoch, loss.item(), validate(model, val_loader))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    n = ok = 0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            pred = model(x.cuda()).argmax(1).cpu()
        ok += (pred == y).sum().item()
        n += y.numel()
    return ok / n
