import argparse

import torch
from torch.utils.data import DataLoader

from yolo.data import DetectionSet, collate
from yolo.loss import ComputeLoss
from yolo.metrics import mean_ap
from yolo.model import Model


def evaluate(model, loader, device):
    model.eval()
    preds, gts = [], []
    for imgs, targets in loader:
        imgs = imgs.to(device)
        out = model(imgs)
        preds.extend(o.detach().cpu() for o in out)
        gts.extend(targets)
    return mean_ap(preds, gts)


def run(opt):
    device = torch.device("cuda", opt.gpu)
    model = Model(opt.cfg, nc=opt.nc).to(device)
    compute_loss = ComputeLoss(model)
    g = [[], []]
    for name, p in model.named_parameters():
        g["bias" in name or ".bn." in name].append(p)
    optimizer = torch.optim.SGD(g[0], lr=opt.lr0, momentum=0.937, weight_decay=5e-4, nesterov=True)
    optimizer.add_param_group({"params": g[1], "weight_decay": 0.0})
    lf = lambda e: (1 - e / opt.epochs) * 0.99 + 0.01  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)
    loss_scaler = torch.amp.GradScaler("cuda", enabled=True)
    loader = DataLoader(DetectionSet(opt.train, 640), opt.bs, shuffle=True, collate_fn=collate, num_workers=8)
    val = DataLoader(DetectionSet(opt.val, 640), opt.bs, collate_fn=collate)

    for epoch in range(opt.epochs):
        model.train()
        mloss = torch.zeros(3, device=device)
        for i, (imgs, targets) in enumerate(loader):
            imgs = imgs.to(device, non_blocking=True).float() / 255
            with torch.amp.autocast("cuda", dtype=torch.float16):
                pred = model(imgs)
                loss, items = compute_loss(pred, targets.to(device))
            loss_scaler.scale(loss).backward()
            optimizer.step()
            loss_scaler.update()
            optimizer.zero_grad()
            mloss = (mloss * i + items) / (i + 1)
        scheduler.step()
        print(epoch, mloss.tolist(), "mAP", evaluate(model, val, device))
        torch.save({"model": model.state_dict(), "epoch": epoch}, opt.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg", default="yolov5s.yaml")
    parser.add_argument("--train", default="coco/train.txt")
    parser.add_argument("--val", default="coco/val.txt")
    parser.add_argument("--nc", type=int, default=80)
    parser.add_argument("--bs", type=int, default=16)
    parser.add_argument("--lr0", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--out", default="last.pt")
    run(parser.parse_args())
