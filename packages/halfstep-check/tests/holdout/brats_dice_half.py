import torch
import torch.nn as nn
from monai.data import DataLoader
from monai.networks.nets import UNet
from torch.optim import AdamW

from brats import BraTS


class SoftDice(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, logits, target):
        p = torch.softmax(logits, dim=1).half()
        target = target.half()
        num = 2 * (p * target).sum()
        den = (p * p).sum() + (target * target).sum()
        return 1 - num / (den + self.eps)


def validate(net, loader, device):
    net.eval()
    dice = SoftDice()
    scores = []
    with torch.no_grad():
        for vol, seg in loader:
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                out = net(vol.to(device))
            scores.append(1 - dice(out, seg.to(device)))
    net.train()
    return torch.stack(scores).float().mean().item()


def main():
    device = torch.device("cuda")
    net = UNet(3, 4, 4, channels=(32, 64, 128, 256), strides=(2, 2, 2), num_res_units=2).to(device)
    loss_fn = SoftDice()
    opt = AdamW(net.parameters(), lr=2e-4, weight_decay=1e-5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=300)
    scaler = torch.amp.GradScaler("cuda")
    train_dl = DataLoader(BraTS("train"), batch_size=2, shuffle=True, num_workers=4)
    val_dl = DataLoader(BraTS("val"), batch_size=1)
    best = 0.0
    for epoch in range(300):
        for vol, seg in train_dl:
            vol, seg = vol.to(device), seg.to(device)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                out = net(vol)
            loss = loss_fn(out, seg)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 12.0)
            scaler.step(opt)
            scaler.update()
        cosine.step()
        score = validate(net, val_dl, device)
        if score > best:
            best = score
            torch.save(net.state_dict(), "best.pt")
        print(epoch, score)


if __name__ == "__main__":
    main()
