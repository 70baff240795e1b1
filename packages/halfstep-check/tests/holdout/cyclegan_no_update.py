import itertools

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast

from cyclegan import Discriminator, ImagePool, ResnetGenerator, UnpairedFolder


class CycleGAN:
    def __init__(self, lr=2e-4, lam=10.0):
        self.G_AB, self.G_BA = ResnetGenerator().cuda(), ResnetGenerator().cuda()
        self.D_A, self.D_B = Discriminator().cuda(), Discriminator().cuda()
        self.gan_loss = nn.MSELoss()
        self.l1 = nn.L1Loss()
        self.lam = lam
        self.opt_G = torch.optim.Adam(itertools.chain(self.G_AB.parameters(), self.G_BA.parameters()), lr, (0.5, 0.999))
        self.opt_D = torch.optim.Adam(itertools.chain(self.D_A.parameters(), self.D_B.parameters()), lr, (0.5, 0.999))
        self.scaler = GradScaler()
        self.pool_A, self.pool_B = ImagePool(50), ImagePool(50)

    def _target(self, pred, real):
        return torch.ones_like(pred) if real else torch.zeros_like(pred)

    def step_G(self, a, b):
        self.opt_G.zero_grad()
        with autocast():
            fake_b, fake_a = self.G_AB(a), self.G_BA(b)
            pa, pb = self.D_A(fake_a), self.D_B(fake_b)
            adv = self.gan_loss(pa, self._target(pa, True)) + self.gan_loss(pb, self._target(pb, True))
            cyc = self.l1(self.G_BA(fake_b), a) + self.l1(self.G_AB(fake_a), b)
            loss = adv + self.lam * cyc
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_G)
        return fake_a.detach(), fake_b.detach(), loss.detach()

    def step_D(self, a, b, fake_a, fake_b):
        self.opt_D.zero_grad()
        fake_a, fake_b = self.pool_A.query(fake_a), self.pool_B.query(fake_b)
        with autocast():
            loss = 0.0
            for net, real, fake in ((self.D_A, a, fake_a), (self.D_B, b, fake_b)):
                r, f = net(real), net(fake)
                loss = loss + 0.5 * (self.gan_loss(r, self._target(r, True)) + self.gan_loss(f, self._target(f, False)))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_D)
        return loss.detach()


def main():
    loader = torch.utils.data.DataLoader(UnpairedFolder("horse2zebra"), 1, shuffle=True, num_workers=4)
    gan = CycleGAN()
    for epoch in range(200):
        for i, (a, b) in enumerate(loader):
            a, b = a.cuda(), b.cuda()
            fa, fb, lg = gan.step_G(a, b)
            ld = gan.step_D(a, b, fa, fb)
            if i % 100 == 0:
                print(epoch, i, lg.item(), ld.item())


if __name__ == "__main__":
    main()
