"""Distributed training with PyTorch: one command for a laptop, one node, or many."""
