"""ImageNet ResNet-50 on several GPUs. torchrun --nproc_per_node 8 imagenet_ddp_resnet.py DATA"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import datasets, models


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--lr", type=float, default=0.4)
    p.add_argument("--resume", default="")
    return p.parse_args()


def train(loader, model, criterion, optimizer, scaler, epoch, args):
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to(args.local_rank, non_blocking=True, memory_format=torch.channels_last)
        target = target.to(args.local_rank, non_blocking=True)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            output = model(images)
            loss = criterion(output, target)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 100 == 0 and args.rank == 0:
            print(f"[{epoch}][{i}/{len(loader)}] loss {loss.item():.4f} time {time.time() - end:.3f}")
            end = time.time()


@torch.no_grad()
def validate(loader, model, criterion, args):
    model.eval()
    correct = torch.zeros(2, device=args.local_rank)
    for images, target in loader:
        images = images.to(args.local_rank, non_blocking=True, memory_format=torch.channels_last)
        target = target.to(args.local_rank, non_blocking=True)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            output = model(images)
        correct[0] += (output.argmax(1) == target).sum()
        correct[1] += target.numel()
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


def main():
    args = parse()
    args.local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    args.rank = dist.get_rank()
    torch.cuda.set_device(args.local_rank)
    torch.backends.cudnn.benchmark = True

    model = models.resnet50().to(args.local_rank, memory_format=torch.channels_last)
    model = DDP(model, device_ids=[args.local_rank])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda")
    start, best = 0, 0.0
    if args.resume:
        ckpt = torch.load(args.resume, map_location=f"cuda:{args.local_rank}")
        start, best = ckpt["epoch"], ckpt["best"]
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        scaler.load_state_dict(ckpt["scaler"])

    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    tr = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    va = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])
    train_set = datasets.ImageFolder(os.path.join(args.data, "train"), tr)
    val_set = datasets.ImageFolder(os.path.join(args.data, "val"), va)
    sampler = torch.utils.data.distributed.DistributedSampler(train_set)
    train_loader = torch.utils.data.DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=8)
    val_loader = torch.utils.data.DataLoader(
        val_set, args.batch_size, sampler=torch.utils.data.distributed.DistributedSampler(val_set, shuffle=False)
    )
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, scaler, epoch, args)
        acc = validate(val_loader, model, criterion, args)
        scheduler.step()
        if args.rank == 0:
            best = max(best, acc)
            torch.save(
                {"epoch": epoch + 1, "best": best, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()},
                "checkpoint.pt",
            )


if __name__ == "__main__":
    main()
