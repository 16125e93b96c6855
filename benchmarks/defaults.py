"""Images per second with and without the choices that make the example fast."""

from collections.abc import Callable
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import Setting, copied, project
from .steps import BATCHES, STEPS, ours

# Changes of model.py, by name: the old text and the new text.
CHANGES = {
    "channels first": ("torch.channels_last", "torch.contiguous_format"),
    "fused optimizer": (
        "momentum=self.settings.momentum,",
        "momentum=self.settings.momentum, fused=True,",
    ),
}
FLAGS = {
    "torch.compile": "--compile",
    "bf16": "--precision=bf16",
    "no clipping": "--clip-norm=None",
}


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the rendered project with each change of it."""
    batch, steps = BATCHES[setting.device][0], STEPS[setting.device]

    def measured(flag: str | None = None, folder: Path | None = None) -> Callable[[], float]:
        flags = [flag] if flag else []
        return lambda: ours(setting, batch, steps, *flags, folder=folder)["figure"]

    contestants = {"as rendered": measured()}
    contestants |= {name: measured(flag=flag) for name, flag in FLAGS.items()}
    contestants |= {name: measured(folder=changed(*change)) for name, change in CHANGES.items()}
    return [
        Comparison(
            title=f"Images per second with other settings, batches of {batch}",
            unit="images/s",
            baseline="as rendered",
            figures=in_turns(contestants, repeats),
        )
    ]


def changed(old: str, new: str) -> Path:
    """Return a project with a changed model.py.

    Raises:
        ValueError: model.py does not have the old text.
    """
    folder = copied(project())
    path = folder / "src" / "demo" / "model.py"
    text = path.read_text("utf-8")
    if old not in text:
        raise ValueError(f"model.py has no '{old}' any more: change {Path(__file__).name}")
    path.write_text(text.replace(old, new), "utf-8")
    return folder
