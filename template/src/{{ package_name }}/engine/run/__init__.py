"""The run folder: its lock, log, metrics, status and provenance."""
