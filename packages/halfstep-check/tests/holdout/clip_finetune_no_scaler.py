"""Notebook export: fine-tune CLIP's image tower on flowers."""
# %%
import open_clip
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import Flowers102

model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", pretrained="laion2b_s34b_b79k")
model = model.visual.cuda()
head = torch.nn.Linear(512, 102).cuda()
train_dl = DataLoader(Flowers102("data", "train", transform=preprocess, download=True), 64, shuffle=True)
val_dl = DataLoader(Flowers102("data", "val", transform=preprocess, download=True), 64)

# %%
params = list(model.parameters()) + list(head.parameters())
opt = torch.optim.AdamW(params, lr=1e-5)


def logits_of(x):
    return head(model(x))


# %%
for epoch in range(10):
    model.train()
    for x, y in train_dl:
        x, y = x.cuda(), y.cuda()
        with torch.autocast("cuda"):
            loss = F.cross_entropy(logits_of(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    # validation
    model.eval()
    right = 0
    for x, y in val_dl:
        with torch.autocast("cuda"):
            right += (logits_of(x.cuda()).argmax(1).cpu() == y).sum().item()
    print(f"epoch {epoch}: val acc {right / len(val_dl.dataset):.3f}")

# %%
torch.save(model.state_dict(), "clip_flowers.pt")
