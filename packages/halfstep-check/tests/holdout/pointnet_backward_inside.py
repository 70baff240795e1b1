import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function

import ball_query_ext as ext
from modelnet import ModelNet40


class GroupPoints(Function):
    @staticmethod
    def forward(ctx, features, idx):
        ctx.save_for_backward(idx)
        ctx.n = features.shape[2]
        return ext.group_points(features, idx)

    @staticmethod
    def backward(ctx, grad_out):
        (idx,) = ctx.saved_tensors
        return ext.group_points_grad(grad_out.contiguous(), idx, ctx.n), None


group_points = GroupPoints.apply


class SetAbstraction(nn.Module):
    def __init__(self, cin, cout, k=32):
        super().__init__()
        self.k = k
        self.mlp = nn.Sequential(nn.Conv2d(cin, cout, 1), nn.BatchNorm2d(cout), nn.ReLU(), nn.Conv2d(cout, cout, 1))

    def forward(self, xyz, feats):
        idx = torch.cdist(xyz.float(), xyz.float()).topk(self.k, largest=False).indices.int()
        return self.mlp(group_points(feats, idx)).amax(-1)


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.stem = nn.Conv1d(3, 64, 1)
        self.sa1, self.sa2 = SetAbstraction(64, 128), SetAbstraction(128, 256)
        self.fc = nn.Linear(256, classes)

    def forward(self, xyz):
        f = self.stem(xyz.transpose(1, 2))
        f = self.sa2(xyz, self.sa1(xyz, f))
        return self.fc(f.amax(-1))


def train():
    net = PointNet().cuda()
    optim = torch.optim.Adam(net.parameters(), 1e-3)
    amp_scaler = torch.amp.GradScaler("cuda")
    loader = torch.utils.data.DataLoader(ModelNet40("train"), 32, shuffle=True, drop_last=True)
    for epoch in range(200):
        for pts, label in loader:
            optim.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                logits = net(pts.cuda())
                loss = F.cross_entropy(logits, label.cuda())
                amp_scaler.scale(loss).backward()
            amp_scaler.step(optim)
            amp_scaler.update()
        print(epoch, loss.item())


if __name__ == "__main__":
    train()
