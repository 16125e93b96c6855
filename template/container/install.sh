#!/bin/sh
# install.sh FOLDER PROJECT: makes an environment of what this project depends on and the image that
# this runs in lacks. It finds the code of a job in CODE_DIR (slurm/snapshot.sh), and other code in the
# folder PROJECT; `.` is where it is started. `make image` runs this. TORCH is the PyTorch to
# install instead of that of the image, or of the newest that the template is tested with; TORCH_INDEX is
# the index that has it, PYTHON the image's Python.
set -eu
env=$1 base=${PYTHON:-python3}
unset PYTHONPATH
export PYTHONNOUSERSITE=1

# The environment sees the packages of the image, so that a PyTorch that came with it is kept; its
# pip too, since some images lack what is needed to install another.
"$base" -m pip --version || { echo "error: the image has no pip for $base: choose one that has" >&2; exit 1; }
[ -e "$env/bin/python" ] || "$base" -m venv --system-site-packages --without-pip "$env"
wanted=$(mktemp -d)
"$env/bin/python" - "$wanted" <<'END'
import re
import sys
from importlib.util import find_spec
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

folder = Path(sys.argv[1])
constraints = Path("constraints.txt").read_text().splitlines()
if find_spec("torch"):
    constraints = [line for line in constraints if not re.match(r"torch\s*[=<>~!]", line)]
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
(folder / "constraints.txt").write_text("\n".join(constraints))
(folder / "requirements.txt").write_text("\n".join(project["dependencies"]))
(tested,) = project["optional-dependencies"].get("tested", ["torch"])
(folder / "torch").write_text("torch" if find_spec("torch") else tested)
END
install="$env/bin/python -m pip install --no-cache-dir --constraint $wanted/constraints.txt"
$install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-$(cat "$wanted/torch")}"
$install --requirement "$wanted/requirements.txt"
rm -r "$wanted"
"$env/bin/python" - "$2" >"$(echo "$env"/lib/python3*/site-packages)/project.pth" <<'END'
import sys

code = f"os.environ.get('CODE_DIR', {sys.argv[1]!r}) + '/src'"
print(f"import os, sys; sys.path.append(os.path.abspath({code}))")
END
