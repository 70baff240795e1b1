import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.cuda.amp as amp
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from criteo import Criteo


class DeepFM(nn.Module):
    def __init__(self, fields, dim=16):
        super().__init__()
        self.emb = nn.Embedding(sum(fields), dim)
        self.lin = nn.Embedding(sum(fields), 1)
        self.mlp = nn.Sequential(nn.Linear(len(fields) * dim, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(),
                                 nn.Linear(400, 1))

    def forward(self, x):
        e = self.emb(x)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.lin(x).sum(1) + fm + self.mlp(e.flatten(1))).squeeze(1)


def auc(model, loader):
    model.eval()
    ys, ps = [], []
    with torch.no_grad():
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                ps.append(model(x.cuda()).float().cpu())
            ys.append(y)
    return roc_auc_score(torch.cat(ys), torch.cat(ps))


def main():
    train_set = Criteo("train")
    dl = DataLoader(train_set, 4096, shuffle=True, num_workers=8)
    test = DataLoader(Criteo("test"), 8192)
    model = DeepFM(train_set.fields).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = amp.GradScaler()
    for epoch in range(3):
        model.train()
        for i, (x, y) in enumerate(dl):
            x, y = x.cuda(), y.cuda().float()
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                prob = model(x)
                loss = F.binary_cross_entropy(prob, y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            if i % 500 == 0:
                print(epoch, i, loss.item())
        print("auc", auc(model, dl if epoch == 0 else test))


if __name__ == "__main__":
    main()
