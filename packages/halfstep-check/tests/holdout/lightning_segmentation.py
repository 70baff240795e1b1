import lightning.pytorch as pl
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader

from cityscapes import Cityscapes


class SegModule(pl.LightningModule):
    def __init__(self, arch="Unet", encoder="resnet34", lr=1e-3, classes=19):
        super().__init__()
        self.save_hyperparameters()
        self.net = smp.create_model(arch, encoder, classes=classes)

    def forward(self, x):
        return self.net(x)

    def _shared(self, batch, stage):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, ignore_index=255)
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=stage == "val")
        return loss

    def training_step(self, batch, idx):
        return self._shared(batch, "train")

    def validation_step(self, batch, idx):
        self._shared(batch, "val")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sch = torch.optim.lr_scheduler.OneCycleLR(
            opt, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sch, "interval": "step"}}


def cli_main():
    pl.seed_everything(0)
    torch.set_float32_matmul_precision("high")
    train = DataLoader(Cityscapes("train"), 8, shuffle=True, num_workers=8, pin_memory=True)
    val = DataLoader(Cityscapes("val"), 8, num_workers=8)
    trainer = pl.Trainer(
        max_epochs=60,
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        precision="16-mixed",
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()],
    )
    trainer.fit(SegModule(), train, val)


if __name__ == "__main__":
    cli_main()
