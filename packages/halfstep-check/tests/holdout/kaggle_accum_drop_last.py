import gc

import numpy as np
import pandas as pd
import timm
import torch
import torch.nn as nn
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader

from plant import PlantDataset, get_transforms


class CFG:
    model_name = "tf_efficientnet_b4_ns"
    size = 512
    epochs = 10
    accumulation = 8
    lr = 1e-4
    batch_size = 8
    n_fold = 5


device = torch.device("cuda")
df = pd.read_csv("train.csv")
skf = StratifiedKFold(CFG.n_fold, shuffle=True, random_state=42)
for f, (_, v) in enumerate(skf.split(df, df.label)):
    df.loc[v, "fold"] = f


def train_fn(loader, model, criterion, optimizer, scaler):
    model.train()
    seen, total = 0, torch.zeros((), device=device)
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            y_preds = model(images)
            loss = criterion(y_preds, labels)
        total += loss.detach() * len(labels)
        seen += len(labels)
        scaler.scale(loss).backward()
        if (step + 1) % CFG.accumulation == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1000)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return (total / seen).item()


def valid_fn(loader, model):
    model.eval()
    preds = []
    for images, _ in loader:
        with torch.no_grad(), torch.amp.autocast("cuda", dtype=torch.float16):
            preds.append(model(images.to(device)).softmax(1).float().cpu().numpy())
    return np.concatenate(preds)


def train_loop(fold):
    tr, va = df[df.fold != fold], df[df.fold == fold]
    train_loader = DataLoader(PlantDataset(tr, get_transforms("train")), CFG.batch_size, shuffle=True, num_workers=4)
    valid_loader = DataLoader(PlantDataset(va, get_transforms("valid")), CFG.batch_size * 2)
    model = timm.create_model(CFG.model_name, pretrained=True, num_classes=5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG.lr, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=CFG.epochs)
    scaler = torch.amp.GradScaler("cuda")
    best = 0
    for epoch in range(CFG.epochs):
        avg = train_fn(train_loader, model, nn.CrossEntropyLoss(), optimizer, scaler)
        acc = (valid_fn(valid_loader, model).argmax(1) == va.label.values).mean()
        scheduler.step()
        print(f"fold {fold} epoch {epoch} loss {avg:.4f} acc {acc:.4f}")
        if acc > best:
            best = acc
            torch.save(model.state_dict(), f"fold{fold}_best.pth")
    del model, optimizer
    gc.collect()


for fold in range(CFG.n_fold):
    train_loop(fold)
