"""Eight ranks as a 2x2x2 grid: data, pipeline and tensor parallel, by hand.

Microbatches go through two stages, one forward one backward (1F1B), with isend and irecv posted
ahead. Each layer is split over the tensor group and summed there. Gradients are summed over the
data group asynchronously and waited for one step late, so that they are on their way over a step
boundary. Three ranks from all over the grid have a group of their own, used every third step; now
and then they make another one of the same ranks, of which the others hear nothing.

Each line holds a digest of all that the rank has received so far, in order. Each message carries
its number, so that one that is lost or comes twice ends the job.
"""

import ctypes
import hashlib
import sys
from pathlib import Path

from descent import Descent
from lean import dist, torch
from torch.distributed.device_mesh import init_device_mesh

STEPS = int(sys.argv[1])
# Where the ranks look for orders, which change nothing of what they compute: until there is a file
# 'optimizer' they update their weights by hand, so that no step boundary shows; once there is a
# file 'end' they end. All look together at each step that CHECK_EVERY divides: more often would
# keep them at one pace.
ORDERS = Path(sys.argv[2]) if len(sys.argv) > 2 else None

CHECK_EVERY = 8
RATE = 0.05
MICROBATCHES = 4
ROWS = 4
WIDTH = 16
UNEVEN = [1, 3, 6]
UNEVEN_GROUPS = 5
NEW_GROUP_EVERY = 24


class Stage:
    """One rank: half the width of one layer of one stage of one copy of the model."""

    def __init__(self):
        self.rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
        self.data = mesh.get_group("data")
        self.pipeline = mesh.get_group("pipeline")
        self.tensor = mesh.get_group("tensor")
        self.is_last = mesh.get_local_rank("pipeline") == 1
        self.other = self.rank + (-2 if self.is_last else 2)  # the other end of the pipeline
        # The first one is asked for by all ranks, of which torch sends the others away.
        self.uneven = [dist.new_group(UNEVEN, use_local_synchronization=True)]
        begin = mesh.get_local_rank("tensor") * (WIDTH // 2)
        self.half = slice(begin, begin + WIDTH // 2)
        torch.manual_seed(self.rank)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH // 2, WIDTH) / WIDTH)
        self.by_hand = True
        self.optimizer = Descent([self.weight], lr=RATE, momentum=0)
        self.seen = hashlib.blake2b(digest_size=8)
        self.messages = {"sent": 0, "received": 0}
        self.late = None

    def step(self, step):
        self.weight.grad = None
        total = self.last_stage(step) if self.is_last else self.first_stage(step)
        if self.rank in UNEVEN and step % 3 == 0:
            self.mix(step)
        gradient = self.weight.grad
        work = dist.all_reduce(gradient, group=self.data, async_op=True)
        # What was begun a step ago is waited for and applied now.
        if self.late is not None:
            before, begun = self.late
            begun.wait()
            self.take(before)
            self.update(before)
        self.late = (gradient, work)
        print(f"rank {self.rank} step {step} {total:.9e} {self.seen.hexdigest()}", flush=True)

    def update(self, gradient):
        if self.by_hand:
            self.weight.data.add_(gradient, alpha=-RATE)
        else:
            self.weight.grad = gradient
            self.optimizer.step()

    def mix(self, step):
        if step % NEW_GROUP_EVERY == 0 and len(self.uneven) < UNEVEN_GROUPS:
            self.uneven.append(dist.new_group(UNEVEN, use_local_synchronization=True))
        mixed = self.weight.detach().sum(dim=0)
        dist.all_reduce(mixed, group=self.uneven[step % len(self.uneven)])
        self.take(mixed)
        self.weight.data[0] += 1e-3 * torch.tanh(mixed)

    def first_stage(self, step):
        """One forward ahead, then one backward and one forward in turn."""
        sent, forwards, total = [], [], 0.0
        answers = [self.receive() for _ in range(2)]
        for micro in range(MICROBATCHES + 1):
            if micro < MICROBATCHES:
                inputs = torch.sin(torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) * (step + micro))
                forwards.append(self.forward(inputs))
                sent.append(self.send(forwards[-1][2]))
            if micro >= 1:
                gradient = self.received(answers.pop(0))
                if micro + 2 <= MICROBATCHES:
                    answers.append(self.receive())
                self.backward(*forwards[micro - 1], gradient)
                total += gradient.sum().item()
        for work, _ in sent:
            work.wait()
        return total

    def last_stage(self, step):
        sent, total = [], 0.0
        posted = [self.receive() for _ in range(2)]
        for micro in range(MICROBATCHES):
            inputs = self.received(posted.pop(0))
            if micro + 2 < MICROBATCHES:
                posted.append(self.receive())
            kept = self.forward(inputs)
            outputs = kept[2]
            total += outputs.square().sum().item()
            sent.append(self.send(self.backward(*kept, 2 * outputs)))
        for work, _ in sent:
            work.wait()
        return total

    def forward(self, inputs):
        """Return what backward needs, the last of it the stage's output."""
        mine = inputs[:, self.half].clone().requires_grad_()
        partial = mine @ self.weight
        outputs = torch.tanh(self.all_reduce(partial.detach().clone()))
        return mine, partial, outputs

    def backward(self, mine, partial, outputs, gradient):
        """Add to the gradient of the weight and return that of the stage's input."""
        partial.backward(gradient * (1 - outputs.square()))
        whole = torch.zeros(ROWS, WIDTH)
        whole[:, self.half] = mine.grad
        return self.all_reduce(whole)

    def all_reduce(self, tensor):
        dist.all_reduce(tensor, group=self.tensor)
        self.take(tensor)
        return tensor

    def send(self, tensor):
        number = self.messages["sent"]
        self.messages["sent"] += 1
        message = torch.cat([torch.tensor([float(number)]), tensor.flatten()])
        return dist.isend(message, self.other, group=self.pipeline, tag=number % 3), message

    def receive(self):
        number = self.messages["received"]
        self.messages["received"] += 1
        message = torch.empty(1 + ROWS * WIDTH)
        work = dist.irecv(message, self.other, group=self.pipeline, tag=number % 3)
        return work, message, number

    def received(self, posted):
        work, message, number = posted
        work.wait()
        assert message[0].item() == number, f"message {message[0].item()} instead of {number}"
        self.take(message)
        return message[1:].reshape(ROWS, WIDTH)

    def take(self, tensor):
        size = tensor.numel() * tensor.element_size()
        self.seen.update(ctypes.string_at(tensor.contiguous().data_ptr(), size))


def ordered():
    """Return which of the two files some rank has seen."""
    seen = torch.tensor([int((ORDERS / name).exists()) for name in ("optimizer", "end")])
    dist.all_reduce(seen)
    return (bool(count) for count in seen)


def main():
    dist.init_process_group("gloo")
    stage = Stage()
    for step in range(STEPS):
        if ORDERS is not None and step % CHECK_EVERY == 0:
            optimizer, end = ordered()
            stage.by_hand = not optimizer
            if end:
                break
        stage.step(step)
    _, work = stage.late
    work.wait()
    print(f"rank {stage.rank} end {stage.weight.double().sum().item():.15e}", flush=True)
    dist.destroy_process_group()


main()
