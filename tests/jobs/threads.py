"""A background thread and an asyncio loop beside two gloo ranks."""

import asyncio
import sys
import threading

from lean import dist, torch

STEPS = int(sys.argv[1])


async def train(rank, ticks):
    state = torch.ones(8) * (rank + 1)
    for step in range(STEPS):
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, dist.all_reduce, state)
        state = torch.cos(state) + rank
        print(f"rank {rank} step {step} {state.double().sum().item():.12e}", flush=True)
    return state


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stop = threading.Event()
    ticks = []

    def tick():
        while not stop.wait(0.005):
            ticks.append(len(ticks))

    thread = threading.Thread(target=tick)
    thread.start()
    asyncio.run(train(rank, ticks))
    stop.set()
    thread.join()
    assert ticks == list(range(len(ticks)))
    print(f"rank {rank} end {bool(ticks)}", flush=True)
    dist.destroy_process_group()


main()
