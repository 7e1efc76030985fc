"""Steps: what a training loop does with a batch, of one that computes much and of one that is over in a millisecond."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.cards import Card

Step = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes uint8 images of shape (batch, 3, height, width) and int64 labels, on the device. Does not wait for it."""

NUM_CLASSES = 1000


class Bottleneck(nn.Module):
    """Three convolutions, the middle one of 3 x 3, around which the input goes as well."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.body = nn.Sequential(
            *_convolution(num_in, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, num_out, 1),
        )
        is_same = num_in == num_out and stride == 1
        self.around = nn.Identity() if is_same else nn.Sequential(*_convolution(num_in, num_out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def residual_network(width: int = 64, depths: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """Return a residual network; as it is, one of 50 layers and 26 million parameters."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    num_in = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(Bottleneck(num_in, width << stage, stride))
            num_in = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, NUM_CLASSES))


def network_step(card: Card) -> Step:
    """Return a step of training: forward in bfloat16, backward, and the optimizer."""
    torch.manual_seed(0)
    network = residual_network() if card.is_real else residual_network(4, (1, 1))
    network = network.to(card.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(card.device.type, torch.bfloat16):
            x = images.to(torch.bfloat16, memory_format=torch.channels_last).div_(255)
            loss = loss_of(network(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def short_step(card: Card, target_s: float = 1e-3) -> Step:
    """Return a step of products of matrices that takes the device about ``target_s``, and the host next to nothing."""
    size = 4096 if card.is_real else 8
    dtype = torch.bfloat16 if card.is_real else torch.float32
    torch.manual_seed(0)
    one, other = (torch.randn(size, size).to(card.device, dtype) for _ in range(2))
    product = torch.empty_like(one)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(one, other, out=product)

    count = num_to_take(_seconds(card, lambda: multiply(20)) / 20, target_s)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        multiply(count)
        images.sum(dtype=torch.float32)  # so that the batch is used
        labels.sum()

    return step


def num_to_take(each_s: float, target_s: float) -> int:
    """Return how many times a thing is to be done to take about ``target_s``."""
    return max(1, round(target_s / each_s))


def _seconds(card: Card, work: Callable[[], object]) -> float:
    for _ in range(3):  # the clock of the card rises, and the first time there is more to do
        work()
        card.synchronize()
    start = time.perf_counter()
    work()
    card.synchronize()
    return time.perf_counter() - start


def _convolution(num_in: int, num_out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(num_in, num_out, size, stride, size // 2, bias=False), nn.BatchNorm2d(num_out)]
