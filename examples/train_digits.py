"""Train a small network on 1,797 real handwritten digits, which aioload reads from PNG files."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import aioload

EPOCHS = 8


def write_digits(root: Path) -> None:
    """Write ``root/{train,test}/<digit>/<number>.png``; every fifth digit is kept for the test."""
    digits = load_digits()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = root / ("test" if number % 5 == 0 else "train") / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(folder / f"{number:04}.png")


def to_tensor(image: np.ndarray[Any, Any]) -> torch.Tensor:
    """Turn a grey image of bytes, height x width x channels, into 1 x height x width floats from 0 to 1."""
    return torch.from_numpy(image[None, :, :, 0].astype(np.float32) / 255)


def measure(model: nn.Module, test: aioload.DataLoader[Any]) -> float:
    """Return the share of the samples that the model gets right."""
    with torch.inference_mode():
        return torch.cat([model(images).argmax(1) == labels for images, labels in test]).float().mean().item()


def main(root: Path) -> float:
    """Train on the digits below ``root`` and return the accuracy on those of ``root/test``."""
    torch.set_num_threads(1)  # the network is tiny; the other cores read and decode
    torch.manual_seed(0)
    order = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10)),
    )
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=EPOCHS)
    digits = aioload.ImageFolder(root / "train", transform=to_tensor)
    unseen = aioload.ImageFolder(root / "test", transform=to_tensor)
    train = aioload.DataLoader(digits, batch_size=32, shuffle=True, generator=order)
    test = aioload.DataLoader(unseen, batch_size=256)
    with train, test:
        for epoch in range(1, EPOCHS + 1):
            start, waited, loss_sum = time.perf_counter(), train.stats().wait_s, 0.0
            for images, labels in train:
                loss = loss_of(model.train()(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * len(labels)
            seconds, waited = time.perf_counter() - start, train.stats().wait_s - waited
            schedule.step()
            accuracy = measure(model.eval(), test)
            print(f"epoch {epoch}  loss {loss_sum / len(digits):.4f}  accuracy {accuracy:.2%}", end="  ")
            print(f"{len(digits) / seconds:.0f} samples/s  waiting for data {waited / seconds:.1%}")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        reached = main(Path(folder))
    if reached < 0.97:
        sys.exit(f"the test accuracy, {reached:.2%}, is below 97 %")
