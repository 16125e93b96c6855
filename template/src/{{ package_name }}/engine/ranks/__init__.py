"""Ranks: how they start, meet, communicate and stop; their devices; DDP and FSDP."""
