#!/bin/sh
# install.sh FOLDER PROJECT: makes an environment in FOLDER with the dependencies of the project that the
# image lacks. `make image` runs this in the image. The environment imports the code of a job from CODE_DIR
# (slurm/snapshot.sh), else from the folder PROJECT, which can be `.` for the current one. Variables:
#   TORCH        the PyTorch to install; by default the image's, else the newest tested one
#   TORCH_INDEX  the index that has it
#   PYTHON       the image's Python
set -eu
env=$1 base=${PYTHON:-python3}
unset PYTHONPATH
export PYTHONNOUSERSITE=1

# The environment sees the packages of the image, so it keeps the image's PyTorch. It also uses the
# image's pip, because some images cannot install another one.
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
