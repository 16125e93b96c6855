"""Which samples each rank reads, in which order, with which loading workers."""
