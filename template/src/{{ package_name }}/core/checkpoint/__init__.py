"""Checkpoints: written aside and renamed, checked, removed, restored."""
