"""Ranks: how they start, meet, talk and stop; their device; DDP and FSDP."""
