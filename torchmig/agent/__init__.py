"""The process of a node: torchelastic's agent, with ranks that can be saved and restored."""
