# Carvana-style segmentation; picks bf16 on Ampere and newer, else fp16 with a scaler.
import torch
import torch.nn as nn
import torch.nn.functional as F
from pathlib import Path
from torch.utils.data import DataLoader, random_split
from tqdm import tqdm

from dataset import CarvanaDataset
from unet import UNet

DATA = Path("data")


def dice_loss(logits, target, smooth=1.0):
    probs = torch.sigmoid(logits.float())
    inter = (probs * target).sum((1, 2, 3))
    union = probs.sum((1, 2, 3)) + target.sum((1, 2, 3))
    return 1 - ((2 * inter + smooth) / (union + smooth)).mean()


@torch.inference_mode()
def evaluate(net, loader, device, dtype):
    net.eval()
    total = 0.0
    for batch in tqdm(loader, leave=False):
        image = batch["image"].to(device, memory_format=torch.channels_last)
        mask = batch["mask"].to(device)
        with torch.autocast(device.type, dtype=dtype):
            pred = net(image)
        total += 1 - dice_loss(pred, mask)
    net.train()
    return total / max(len(loader), 1)


def train_model(epochs=5, batch_size=8, lr=1e-4, clip=1.0):
    device = torch.device("cuda")
    major, _ = torch.cuda.get_device_capability()
    dtype = torch.bfloat16 if major >= 8 else torch.float16
    net = UNet(n_channels=3, n_classes=1).to(device, memory_format=torch.channels_last)
    ds = CarvanaDataset(DATA / "imgs", DATA / "masks")
    n_val = int(len(ds) * 0.1)
    train_set, val_set = random_split(ds, [len(ds) - n_val, n_val])
    train_loader = DataLoader(train_set, batch_size, shuffle=True, num_workers=4, pin_memory=True)
    val_loader = DataLoader(val_set, batch_size, drop_last=True)

    optimizer = torch.optim.RMSprop(net.parameters(), lr=lr, weight_decay=1e-8, momentum=0.999)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(1, epochs + 1):
        net.train()
        with tqdm(total=len(train_set), desc=f"Epoch {epoch}/{epochs}") as bar:
            for batch in train_loader:
                images = batch["image"].to(device, memory_format=torch.channels_last)
                masks = batch["mask"].to(device)
                with torch.autocast(device.type, dtype=dtype):
                    logits = net(images)
                    loss = bce(logits, masks)
                loss = loss + dice_loss(logits, masks)

                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                grad_scaler.step(optimizer)
                grad_scaler.update()
                bar.update(images.shape[0])
        score = evaluate(net, val_loader, device, dtype)
        plateau.step(score)
        print(f"dice {score:.4f}")
        torch.save(net.state_dict(), f"ckpt_epoch{epoch}.pth")


if __name__ == "__main__":
    train_model()
