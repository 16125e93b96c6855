"""Ranks: who they are, how they meet and talk, their device, strategy and signals."""
