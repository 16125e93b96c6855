"""Decides which samples each rank reads, in which order, and runs the loading workers."""
