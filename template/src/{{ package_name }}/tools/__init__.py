"""Commands around the training. Each can be left out."""


def program(command: str) -> str:
    """Return how a command is called, for its `--help`."""
    return f"python -m {__package__.partition('.')[0]} {command}"
