# plain float32, no AMP anywhere
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.backends.cuda.matmul.allow_tf32 = True
df = pd.read_parquet("clicks.parquet")
X = torch.tensor(df.drop(columns="y").values, dtype=torch.float32)
y = torch.tensor(df["y"].values, dtype=torch.float32)
Xtr, Xva, ytr, yva = train_test_split(X, y, test_size=0.1, random_state=0)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(X.shape[1], 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 1), nn.Sigmoid()).to(device)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, epochs=20, steps_per_epoch=len(Xtr) // 1024 + 1)
criterion = nn.BCELoss()

for epoch in range(20):
    model.train()
    for xb, yb in DataLoader(TensorDataset(Xtr, ytr), 1024, shuffle=True):
        xb, yb = xb.to(device), yb.to(device)
        p = model(xb).squeeze(1)
        loss = criterion(p, yb)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
    model.eval()
    with torch.no_grad():
        pv = torch.cat([model(xb.to(device)).squeeze(1).cpu() for (xb,) in DataLoader(TensorDataset(Xva), 4096)])
    print(epoch, criterion(pv, yva).item())
torch.save(model.state_dict(), "tabular.pt")
