"""Lightning without logger, checkpoints and progress bar, with tensors in memory."""

import os
import warnings

import lightning
import torch
from clock import Clock, batch_size, device
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from workload import SETTINGS, images, loss, network, optimizer


class Module(lightning.LightningModule):
    """The project's network, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.clock = network(), Clock()

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        inputs, targets = batch
        return loss(self.network, inputs, targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.network)

    def on_train_batch_end(self, *_arguments: object) -> None:
        self.clock.step()


warnings.filterwarnings("ignore")
gpu = device().type == "cuda"
loader = DataLoader(
    TensorDataset(*images()), batch_size(), shuffle=True, drop_last=True, pin_memory=gpu
)
module = Module()
trainer = lightning.Trainer(
    accelerator="gpu" if gpu else "cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    gradient_clip_val=SETTINGS.clip_norm,
    max_steps=module.clock.total,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)
os._exit(0)
