"""One process, no torch.distributed: training with an optimizer, or inference without one."""

import sys
import time

from lean import nn, torch

STEPS = int(sys.argv[1])
TRAINS = sys.argv[2] != "inference"


def main():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if TRAINS else None
    for step in range(STEPS):
        batch = torch.randn(8, 32)
        if optimizer is not None:
            loss = ((model(batch) - batch) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
        else:
            with torch.inference_mode():
                value = model(batch).double().sum().item()
        print(f"rank 0 step {step} {value:.12e}", flush=True)
        time.sleep(0.02)
    print("rank 0 end", flush=True)


main()
