"""The commands other than `train` and `download`. A project can be made without any of them."""


def program(command: str) -> str:
    """Return the words that run a command, for its `--help`: `python -m <package> COMMAND`."""
    return f"python -m {__package__.partition('.')[0]} {command}"
