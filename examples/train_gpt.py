"""A small character GPT in plain PyTorch, trained on the sources of Python's standard library.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 40

Runs on CPUs (gloo) and on GPUs (NCCL), with data-parallel ranks, DataLoader workers and dropout.
Prints one line a step with rank 0's loss to every digit, so that two runs can be compared exactly.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text with the same windows one character on."""

    def __init__(self, size_bytes: int, window: int) -> None:
        text = b""
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= size_bytes:
                break
        self.text = torch.frombuffer(bytearray(text[:size_bytes]), dtype=torch.uint8)
        self.window = window

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.window

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.window
        piece = self.text[start : start + self.window + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to earlier characters, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, window, width = x.shape
        query, key, value = (
            part.view(batch, window, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention(self.before_attention(x)).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, window, width))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """Predicts the next character at every place of a window."""

    def __init__(self, width: int, layers: int, heads: int, window: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(256, width)
        self.places = nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.characters(text) + self.places(places)))


def endless(loader: DataLoader[tuple[Tensor, Tensor]], sampler: object) -> Iterator[list[Tensor]]:
    """Yield batches, epoch after epoch."""
    epoch = 0
    while True:
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="windows a rank and step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=1, help="DataLoader workers a rank")
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)

    dataset = Characters(options.text_bytes, options.window)
    sampler = DistributedSampler(dataset, world_size, rank, seed=options.seed)
    loader = DataLoader(
        dataset,
        options.batch,
        sampler=sampler,
        num_workers=options.workers,
        pin_memory=on_gpu,
        drop_last=True,
        persistent_workers=options.workers > 0,
    )

    model: nn.Module = GPT(
        options.width, options.layers, options.heads, options.window, options.dropout
    ).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(options.seed + rank)  # each rank drops other neurons

    if rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size} parameters, {world_size} ranks, {len(dataset)} windows", flush=True)
    batches = endless(loader, sampler)
    for step in range(1, options.steps + 1):
        text, following = (part.to(device, non_blocking=True) for part in next(batches))
        loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.17g}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
