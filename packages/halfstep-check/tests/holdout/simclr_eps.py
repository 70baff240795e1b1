from argparse import Namespace

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from augment import TwoCrops

hp = Namespace(bs=512, lr=0.3, tau=0.1, epochs=200, dim=128)


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = torchvision.models.resnet18(num_classes=512)
        self.g = nn.Sequential(nn.ReLU(), nn.Linear(512, hp.dim))

    def forward(self, x):
        z = self.g(self.f(x))
        return z


def nt_xent(z1, z2, tau):
    z = F.normalize(torch.cat([z1, z2]).half(), dim=1)
    z1, z2 = z.chunk(2)
    sim = z @ z.t() / tau
    sim.fill_diagonal_(-1e4)
    e = torch.exp(sim)
    pos = torch.exp((z1 * z2).sum(1) / tau).repeat(2)
    return -torch.log(pos / (e.sum(1) + 1e-8)).mean()


def main():
    ds = torchvision.datasets.CIFAR10("data", transform=TwoCrops(32), download=True)
    loader = DataLoader(ds, hp.bs, shuffle=True, drop_last=True, num_workers=8)
    model = SimCLR().cuda()
    optimizer = torch.optim.SGD(model.parameters(), hp.lr, momentum=0.9, weight_decay=1e-4)
    scaler = GradScaler("cuda")
    for epoch in range(hp.epochs):
        total = torch.zeros((), device="cuda")
        for (x1, x2), _ in loader:
            with autocast("cuda", dtype=torch.float16):
                z1, z2 = model(x1.cuda()), model(x2.cuda())
            with autocast("cuda", enabled=False):
                loss = nt_xent(z1, z2, hp.tau)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        print(epoch, (total / len(loader)).item())
        torch.save(model.f.state_dict(), "simclr.pt")


if __name__ == "__main__":
    main()
