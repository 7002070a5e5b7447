"""What the jobs train on."""

from lean import Dataset, torch


class Numbers(Dataset):
    """Numbers at random, 64 in each item, that depend on its index and the rank alone."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.randn(64, generator=torch.Generator().manual_seed(index * 100 + self.rank))
