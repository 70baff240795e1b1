import torch
import torch.nn as nn
from torch import amp, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms as tf
from torchvision.utils import save_image

from networks import Discriminator, Generator

nz, bs, n_epochs = 100, 128, 25
dev = torch.device("cuda:0")

ds = datasets.CelebA("data", transform=tf.Compose([tf.Resize(64), tf.CenterCrop(64), tf.ToTensor(),
                                                   tf.Normalize((0.5,) * 3, (0.5,) * 3)]))
dl = DataLoader(ds, bs, shuffle=True, num_workers=4, drop_last=True)
G, D = Generator(nz).to(dev), Discriminator().to(dev)
crit = nn.BCEWithLogitsLoss()
opt_g = optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
scaler = amp.GradScaler("cuda")
fixed = torch.randn(64, nz, 1, 1, device=dev)

for epoch in range(n_epochs):
    for i, (real, _) in enumerate(dl):
        real = real.to(dev)
        b = real.size(0)

        # discriminator
        D.zero_grad(set_to_none=True)
        noise = torch.randn(b, nz, 1, 1, device=dev)
        with amp.autocast("cuda", dtype=torch.float16):
            fake = G(noise)
            out_r = D(real).view(-1)
            out_f = D(fake.detach()).view(-1)
            loss_d = crit(out_r, torch.ones_like(out_r)) + crit(out_f, torch.zeros_like(out_f))
        scaler.scale(loss_d).backward()
        scaler.step(opt_d)

        # generator
        G.zero_grad(set_to_none=True)
        with amp.autocast("cuda", dtype=torch.float16):
            out = D(fake).view(-1)
            loss_g = crit(out, torch.ones_like(out))
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)

        # one update for both
        scaler.update()
        if i % 200 == 0:
            print(f"{epoch} {i} D {loss_d.item():.3f} G {loss_g.item():.3f}")
    with torch.no_grad(), amp.autocast("cuda", dtype=torch.float16):
        save_image(G(fixed).float(), f"samples/{epoch:03d}.png", normalize=True)
torch.save({"G": G.state_dict(), "D": D.state_dict()}, "dcgan.pt")
