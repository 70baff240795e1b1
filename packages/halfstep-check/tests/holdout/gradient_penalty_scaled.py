"""Gradient penalty with a scaler, after the PyTorch AMP examples."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader


def penalised_step(net, x, y, loss_fn, opt, scaler, lam):
    x.requires_grad_(True)
    opt.zero_grad()
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        output = net(x)
        loss = loss_fn(output, y)

    # gradients for the penalty come out scaled; bring them back by hand
    scaled_grads = torch.autograd.grad(outputs=scaler.scale(loss), inputs=net.parameters(), create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    grads = [g * inv_scale for g in scaled_grads]

    with torch.autocast(device_type="cuda", dtype=torch.float16):
        norm = sum(g.pow(2).sum() for g in grads).sqrt()
        loss = loss + lam * norm

    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach()


class Net(nn.Sequential):
    def __init__(self, d=784, h=1024, k=10):
        super().__init__(nn.Flatten(), nn.Linear(d, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, k))


def accuracy(net, loader):
    net.eval()
    good = seen = 0
    with torch.inference_mode(), torch.autocast(device_type="cuda", dtype=torch.float16):
        for x, y in loader:
            good += (net(x.cuda()).argmax(1).cpu() == y).sum().item()
            seen += len(y)
    net.train()
    return good / seen


def fit(train_set, test_set, epochs=10, lam=0.1):
    net = Net().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler()
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        total = torch.zeros((), device="cuda")
        for x, y in DataLoader(train_set, 256, shuffle=True):
            total += penalised_step(net, x.cuda(), y.cuda(), loss_fn, opt, scaler, lam)
        print(epoch, total.item(), accuracy(net, DataLoader(test_set, 1024)))
    return net
