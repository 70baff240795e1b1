import math
import sys

import torch
import torchvision
from torch.utils.data import DataLoader

import utils
from coco import CocoDetection, coco_eval


def train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq, scaler=None):
    model.train()
    logger = utils.MetricLogger(delimiter="  ")
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(1000, len(data_loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=warmup_iters)

    for images, targets in logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]"):
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())

        reduced = utils.reduce_dict(loss_dict)
        loss_value = sum(reduced.values()).item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)

        optimizer.zero_grad()
        if scaler is not None:
            before = scaler.get_scale()
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= before
        else:
            losses.backward()
            optimizer.step()
            stepped = True

        if lr_scheduler is not None and stepped:
            lr_scheduler.step()
        logger.update(loss=loss_value, lr=optimizer.param_groups[0]["lr"])
    return logger


@torch.inference_mode()
def evaluate(model, data_loader, device, amp):
    model.eval()
    results = {}
    for images, targets in data_loader:
        images = [img.to(device) for img in images]
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            outputs = model(images)
        for t, o in zip(targets, outputs):
            results[int(t["image_id"])] = {k: v.cpu() for k, v in o.items()}
    return coco_eval(data_loader.dataset, results)


def main(args):
    device = torch.device(args.device)
    model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights_backbone="DEFAULT", num_classes=91).to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [16, 22], 0.1)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    train = DataLoader(CocoDetection("train2017"), 2, shuffle=True, collate_fn=utils.collate_fn)
    val = DataLoader(CocoDetection("val2017"), 1, collate_fn=utils.collate_fn)
    first = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["lr_scheduler"])
        first = ckpt["epoch"] + 1
        if args.amp:
            scaler.load_state_dict(ckpt["scaler"])
    for epoch in range(first, args.epochs):
        train_one_epoch(model, optimizer, train, device, epoch, 50, scaler)
        scheduler.step()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                      "lr_scheduler": scheduler.state_dict(), "epoch": epoch}
        if args.amp:
            checkpoint["scaler"] = scaler.state_dict()
        utils.save_on_master(checkpoint, f"model_{epoch}.pth")
        print(evaluate(model, val, device, args.amp))


if __name__ == "__main__":
    main(utils.get_args_parser().parse_args())
