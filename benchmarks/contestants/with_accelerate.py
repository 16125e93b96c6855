"""Hugging Face Accelerate, used as in its quick tour, with tensors in memory."""

import os

from accelerate import Accelerator
from clock import Clock, batch_size, device
from torch.utils.data import DataLoader, TensorDataset
from workload import SETTINGS, images, loss, network, optimizer

accelerator = Accelerator(cpu=device().type == "cpu")
gpu = accelerator.device.type == "cuda"
loader = DataLoader(
    TensorDataset(*images()), batch_size(), shuffle=True, drop_last=True, pin_memory=gpu
)
model = network()
update = optimizer(model)
model, update, loader = accelerator.prepare(model, update, loader)
clock, done = Clock(), False
while not done:
    for inputs, targets in loader:
        update.zero_grad()
        accelerator.backward(loss(model, inputs, targets))
        accelerator.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        update.step()
        if done := clock.step():
            break
accelerator.wait_for_everyone()
os._exit(0)
