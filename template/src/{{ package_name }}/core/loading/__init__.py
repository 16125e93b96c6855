"""Which samples each rank reads, in which order, by which processes."""
