"""Transparent checkpoint, suspend and migration of unmodified multi-GPU PyTorch jobs.

Importing the package costs nothing and does not import torch.
"""

__version__ = "0.1.0"
