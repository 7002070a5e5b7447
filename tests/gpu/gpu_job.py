"""A one-GPU training of the named kind, whose log says every loss bit for bit.

    python gpu_job.py KIND STEPS FOLDER

Kinds: fill16, fill32 (GiB of live tensors), gpt (GPT-2 small, AMP, fused AdamW, DataLoader workers,
pinned memory), compile (the same, compiled), graph (a CUDA graph replayed), oom (runs out of memory
and catches it), streams (side streams and events). After the step that FOLDER/park names the job
stands still, does what the files FOLDER/ask.N say, and goes on when told to.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from torchmig import _C
from torchmig.worker import device as rank_device

GIB = 1 << 30


class Ask:
    """The other side of `suspension.Job`: one question after the other, each a file."""

    def __init__(self, folder):
        self.folder = folder
        self.number = 0

    def pause(self, step):
        park = self.folder / "park"
        if not park.exists() or int(park.read_text()) > step:
            return
        rank_device.settle()
        self.answer("parked", os.getpid())
        while True:
            path = self.folder / f"ask.{self.number}"
            while not path.exists():
                time.sleep(0.001)
            question = json.loads(path.read_text())
            self.answer(
                f"answer.{self.number}", getattr(self, question["name"])(**question["args"])
            )
            self.number += 1
            if question["name"] == "go":
                return

    def answer(self, name, value):
        part = self.folder / f".{name}"
        part.write_text(json.dumps(value))
        part.rename(self.folder / name)

    def describe(self):
        return {**rank_device.describe(), "refused": rank_device.refused()}

    def live(self):
        return rank_device.live_blocks()

    def copy(self, out, staging, pieces):
        rank_device.copy(out, staging, pieces)

    def leave(self):
        released = rank_device.release()
        rank_device.close_nvml()
        return {"released": released}

    def close_nvml(self):
        rank_device.close_nvml()

    def reopen_nvml(self):
        rank_device.reopen_nvml()

    def come_back(self):
        self.reopen_nvml()
        rank_device.regain()

    def go(self):
        return None


class Fill:
    def __init__(self, gib):
        self.big = [
            torch.randint(0, 1 << 30, (GIB // 8,), device="cuda", dtype=torch.int64)
            for _ in range(gib)
        ]
        self.x = torch.randn(512, 512, device="cuda")

    def step(self):
        self.x = torch.tanh(self.x @ self.x / 10)
        for tensor in self.big:
            tensor[::4096] += 1
        return self.x.sum() + sum(t[::65536].sum() for t in self.big).float()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=50304, width=768, layers=12, heads=12, length=512):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.randint(0, 50304, (513,), generator=torch.Generator().manual_seed(index))


class GptJob:
    def __init__(self, compiled=False, workers=2, batch=8):
        self.model = Gpt().cuda()
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.scaler = torch.amp.GradScaler("cuda")
        self.batches = iter(
            torch.utils.data.DataLoader(Tokens(), batch, num_workers=workers, pin_memory=True)
        )

    def step(self):
        tokens = next(self.batches).cuda(non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            scores = self.run(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class GraphJob:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), capturable=True, lr=torch.tensor(1e-3, device="cuda")
        )
        self.x = torch.randn(64, 512, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.once()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.once()

    def once(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = ((self.model(self.x) - self.x) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def step(self):
        self.x.add_(torch.randn(64, 512, device="cuda") * 0.01)
        self.graph.replay()
        return self.loss.detach().clone()


class OomJob(GptJob):
    """Runs out of memory at every step and catches it."""

    def __init__(self):
        super().__init__(workers=0)

    def step(self):
        loss = super().step()
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(free * 2, dtype=torch.uint8, device="cuda")
        return loss


class StreamJob:
    def __init__(self):
        self.streams = [torch.cuda.Stream() for _ in range(4)]
        self.events = [torch.cuda.Event() for _ in range(4)]
        self.parts = [torch.randn(1024, 1024, device="cuda") for _ in range(4)]
        self.pinned = torch.randn(1024, 1024).pin_memory()

    def step(self):
        for stream, event, part in zip(self.streams, self.events, self.parts, strict=True):
            with torch.cuda.stream(stream):
                noise = self.pinned.to("cuda", non_blocking=True)
                part.copy_(torch.sin(part @ noise / 30 + torch.rand(1, device="cuda")))
                noise.record_stream(stream)
                event.record()
        for event in self.events:
            event.wait()
            event.synchronize()  # the copies from pinned memory are done before it changes
        total = sum(part.sum() for part in self.parts)
        self.pinned.add_(0.001)
        return total


def make(kind):
    if kind.startswith("fill"):
        return Fill(int(kind.removeprefix("fill")))
    return {
        "gpt": GptJob,
        "compile": lambda: GptJob(compiled=True),
        "graph": GraphJob,
        "oom": OomJob,
        "streams": StreamJob,
        "expandable": lambda: GptJob(workers=0),
    }[kind]()


def digest(job):
    """Return what tells the job's tensors apart, worked out where they lie: there may be 32 GiB."""
    tensors = (
        list(job.model.state_dict().values()) if hasattr(job, "model") else list(vars(job).values())
    )
    flat = [t for item in tensors for t in (item if isinstance(item, list) else [item])]
    return [checksum(tensor) for tensor in flat if isinstance(tensor, torch.Tensor)]


def checksum(tensor):
    """Return a sum over all bytes, each with a weight of its own, modulo 2^64."""
    if not tensor.numel():
        return 0
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    weights = torch.arange(1, 2 * len(data), 2, device=data.device) * 0x5851F42D4C957F2D
    return ((data ^ (data >> 29)) * weights).sum().item()


def main():
    kind, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    _C.install_fork_cuda()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    job, ask = make(kind), Ask(folder)
    with (folder / "log").open("w", buffering=1) as log:
        for number in range(steps):
            loss = job.step().item()
            log.write(f"{number} {float(loss).hex()}\n")
            ask.pause(number)
        log.write(f"end {digest(job)}\n")


if __name__ == "__main__":
    main()
