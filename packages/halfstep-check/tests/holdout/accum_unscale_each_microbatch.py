# semantic segmentation, gradient accumulation over 4 crops
import torch
from torch.utils.data import DataLoader
from torchvision.models.segmentation import deeplabv3_resnet50

from voc import VOCSeg

ACCUM = 4
EPOCHS = 40

device = torch.device("cuda")
train_loader = DataLoader(VOCSeg("train"), batch_size=4, shuffle=True, num_workers=4)
val_loader = DataLoader(VOCSeg("val"), batch_size=4)
model = deeplabv3_resnet50(num_classes=21).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, EPOCHS, power=0.9)
criterion = torch.nn.CrossEntropyLoss(ignore_index=255)
scaler = torch.amp.GradScaler("cuda")


def miou(model):
    model.eval()
    cm = torch.zeros(21, 21, device=device)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        for x, y in val_loader:
            pred = model(x.to(device))["out"].argmax(1)
            y = y.to(device)
            keep = y != 255
            cm += torch.bincount(21 * y[keep] + pred[keep], minlength=441).view(21, 21)
    inter = cm.diag()
    return (inter / (cm.sum(0) + cm.sum(1) - inter).clamp(min=1)).mean().item()


for epoch in range(EPOCHS):
    model.train()
    optimizer.zero_grad(set_to_none=True)
    n_batches = len(train_loader)
    for idx, (img, lab) in enumerate(train_loader):
        img, lab = img.to(device), lab.to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(img)["out"], lab)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if (idx + 1) % ACCUM == 0 or idx + 1 == n_batches:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    print(epoch, miou(model))
torch.save(model.state_dict(), "deeplab.pt")
