import evaluate
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

MODEL = "bert-base-cased"


def get_dataloaders(tok, batch_size):
    raw = load_dataset("glue", "mrpc")

    def tokenize(ex):
        return tok(ex["sentence1"], ex["sentence2"], truncation=True)

    data = raw.map(tokenize, batched=True, remove_columns=["idx", "sentence1", "sentence2"])
    data = data.rename_column("label", "labels")
    collate = DataCollatorWithPadding(tok)
    return (
        DataLoader(data["train"], batch_size, shuffle=True, collate_fn=collate),
        DataLoader(data["validation"], 64, collate_fn=collate),
    )


def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    tok = AutoTokenizer.from_pretrained(MODEL)
    train_dl, eval_dl = get_dataloaders(tok, 16)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 100, len(train_dl) * 3 // 4)
    model, optimizer, train_dl, eval_dl, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, lr_scheduler
    )
    metric = evaluate.load("glue", "mrpc")
    for epoch in range(3):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                logits = model(**batch).logits
            preds, refs = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            metric.add_batch(predictions=preds, references=refs)
        accelerator.print(epoch, metric.compute())
        accelerator.save_state(f"ckpt/{epoch}")


if __name__ == "__main__":
    main()
