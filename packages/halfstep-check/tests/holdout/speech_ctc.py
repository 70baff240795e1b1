import torch
import torchaudio
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from asr.conformer import ConformerEncoder
from asr.data import LibriSpeech, pad_batch
from asr.metrics import wer


class CTCModel(nn.Module):
    def __init__(self, vocab, dim=256):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(n_mels=80)
        self.encoder = ConformerEncoder(80, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, wav, lengths):
        # features need full precision: power spectra overflow half
        with autocast("cuda", enabled=False):
            feats = torch.log(self.mel(wav.float()) + 1e-6).transpose(1, 2)
        hidden, out_lengths = self.encoder(feats, lengths // 200)
        return self.head(hidden), out_lengths


def ctc_loss(logits, in_len, targets, tgt_len):
    log_probs = torch.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    return nn.functional.ctc_loss(log_probs, targets, in_len, tgt_len, zero_infinity=True)


def run_epoch(model, loader, optimizer, scaler, scheduler, device):
    model.train()
    for n, batch in enumerate(loader):
        wav, wav_len, txt, txt_len = (t.to(device) for t in batch)
        with autocast("cuda", dtype=torch.float16):
            logits, out_len = model(wav, wav_len)
        loss = ctc_loss(logits, out_len, txt, txt_len)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        old = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < old
        if not skipped:
            scheduler.step()
        if n % 50 == 0:
            print(n, loss.item())


def evaluate(model, loader, device, tokenizer):
    model.eval()
    hyps, refs = [], []
    with torch.no_grad():
        for batch in loader:
            wav, wav_len, txt, txt_len = (t.to(device) for t in batch)
            with autocast("cuda", dtype=torch.float16):
                logits, out_len = model(wav, wav_len)
            hyps += tokenizer.decode_ctc(logits.argmax(-1), out_len)
            refs += tokenizer.decode(txt, txt_len)
    return wer(hyps, refs)


def main():
    device = torch.device("cuda")
    train = LibriSpeech("train-clean-360")
    model = CTCModel(len(train.tokenizer)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-3)
    loader = DataLoader(train, 16, shuffle=True, collate_fn=pad_batch, num_workers=4)
    test = DataLoader(LibriSpeech("dev-clean"), 16, collate_fn=pad_batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=50 * len(loader))
    scaler = GradScaler("cuda")
    for epoch in range(50):
        run_epoch(model, loader, optimizer, scaler, scheduler, device)
        print(epoch, "wer", evaluate(model, test, device, train.tokenizer))


main()
