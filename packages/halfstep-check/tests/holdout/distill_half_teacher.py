"""Distillation: the frozen teacher runs in pure fp16, the student trains with AMP."""
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from nlp_data import loaders


def kd_loss(student_logits, teacher_logits, labels, T=2.0, alpha=0.5):
    s, t = student_logits.float(), teacher_logits.float()
    soft = F.kl_div(F.log_softmax(s / T, -1), F.log_softmax(t / T, -1), log_target=True, reduction="batchmean") * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(s, labels)


def distill(epochs=3, lr=3e-5):
    teacher = AutoModelForSequenceClassification.from_pretrained("roberta-large-mnli").cuda().half().eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    student = AutoModelForSequenceClassification.from_pretrained("distilroberta-base", num_labels=3).cuda()
    optimizer = torch.optim.AdamW(student.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    train, dev = loaders("mnli", batch_size=32)

    for epoch in range(epochs):
        student.train()
        for batch in train:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            labels = batch.pop("labels")
            with torch.no_grad():
                t_logits = teacher(**batch).logits
            with torch.autocast("cuda", torch.float16):
                s_logits = student(**batch).logits
            loss = kd_loss(s_logits, t_logits, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        print(epoch, score(student, dev))
    student.save_pretrained("student")


@torch.inference_mode()
def score(model, loader):
    model.eval()
    ok = n = 0
    for batch in loader:
        batch = {k: v.cuda() for k, v in batch.items()}
        labels = batch.pop("labels")
        with torch.autocast("cuda", torch.float16):
            pred = model(**batch).logits.argmax(-1)
        ok += (pred == labels).sum()
        n += labels.numel()
    return (ok / n).item()


if __name__ == "__main__":
    distill()
