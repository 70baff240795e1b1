import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from tts import LJSpeech, Tacotron, collate


def any_bad(params):
    return any(p.grad is not None and not torch.isfinite(p.grad).all() for p in params)


class TacoLoss(nn.Module):
    def forward(self, mel, gate, mel_t, gate_t):
        return nn.functional.mse_loss(mel, mel_t) + nn.functional.binary_cross_entropy_with_logits(gate, gate_t)


def train(epochs=500, lr=1e-3, device="cuda"):
    loader = DataLoader(LJSpeech("train"), 32, shuffle=True, collate_fn=collate, num_workers=2)
    model = Tacotron().to(device)
    criterion = TacoLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=1e-6)
    scaler = torch.amp.GradScaler("cuda")
    iteration = 0
    for epoch in range(epochs):
        for text, text_len, mel_t, gate_t in loader:
            text, mel_t, gate_t = text.to(device), mel_t.to(device), gate_t.to(device)
            with torch.autocast("cuda", dtype=torch.float16):
                mel, gate = model(text, text_len, mel_t)
                loss = criterion(mel.float(), gate.float(), mel_t, gate_t)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = torch.nan_to_num(p.grad, nan=0.0, posinf=1e4, neginf=-1e4)
            scaler.unscale_(optimizer)
            if any_bad(model.parameters()):
                for p in model.parameters():
                    p.grad.zero_()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            iteration += 1
            if iteration % 100 == 0:
                print(iteration, loss.item())
        torch.save(model.state_dict(), f"taco_{epoch}.pt")


if __name__ == "__main__":
    train()
