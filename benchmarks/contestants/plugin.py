"""A plug-in for the project's plugins/: it times the steps with the clock of the others."""

from clock import Clock


class Plugin:
    """Counts each step."""

    def __init__(self, _training: object) -> None:
        self.clock = Clock()

    def on_step(self, _training: object) -> None:
        """Count a step, after everything that belongs to it."""
        self.clock.step()
