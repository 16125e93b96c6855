"""Makes something once, although several processes run the tests."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

Made = TypeVar("Made")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """Return what `make` returns for a new folder. Only the first process that asks calls it."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with FileLock(shared / f"{name}.lock"):
        file = shared / f"{name}.pickle"
        if not file.exists():
            file.write_bytes(pickle.dumps(make(factory.mktemp(name))))
    return pickle.loads(file.read_bytes())
