"""Lightning with JPEG files by class, without logger, checkpoints and progress bar."""

import os
import warnings

import lightning
import torch
from clock import Clock, device
from demo import model
from demo.settings import Settings
from image_loop import image_folder
from torch import Tensor


class Module(lightning.LightningModule):
    """The project's network, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.learner, self.clock = model.Model(Settings()), Clock()
        self.network = self.learner.build()

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        images, labels = batch
        return self.learner.loss(self.network, (images.permute(0, 2, 3, 1), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.learner.optimizers(self.network)

    def on_train_batch_end(self, *_arguments: object) -> None:
        self.clock.step()


warnings.filterwarnings("ignore")
module = Module()
trainer = lightning.Trainer(
    accelerator="gpu" if device().type == "cuda" else "cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_steps=module.clock.total,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, image_folder())
os._exit(0)
