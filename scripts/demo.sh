#!/usr/bin/env bash
# Makes a project with the default answers and trains it on two CPU ranks.
#
# All files are in .demo/, which each run replaces. The data is MNIST if MNIST_DIR names its folder or the
# download works, else synthetic digits, which need no file.
set -euo pipefail
cd "$(dirname "$0")/.."

demo=$PWD/.demo
project=$demo/project
rm -rf "$demo"

step() { printf '\n==> %s\n' "$*"; }

step "Installing Copier"
"${PYTHON3:-python3}" -m venv "$demo/copier"
"$demo/copier/bin/python" -m pip install --quiet 'copier>=9.19,<10'

step "Making a project with the default answers"
"$demo/copier/bin/copier" copy --defaults --vcs-ref HEAD \
    --data project_name="MNIST demo" --data package_name=demo "$PWD" "$project"

step "Setting it up: make setup"
if [[ -z ${TORCH_INDEX:-} && $(uname) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
    echo "No NVIDIA driver is here: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes"
fi
make --no-print-directory -C "$project" setup TORCH="${TORCH:-torch==2.13.0}"

step "Getting the data"
arguments=
if [[ -d ${MNIST_DIR:-} ]]; then
    ln -s "$(cd "$MNIST_DIR" && pwd)" "$project/data"
    data="MNIST, from MNIST_DIR"
elif make --no-print-directory -C "$project" data; then
    data="MNIST, downloaded"
else
    arguments="--dataset synthetic"
    data="synthetic digits, because MNIST is missing"
fi
echo "Data: $data"

step "Training on two CPU ranks: make train"
make --no-print-directory -C "$project" train ARGS="--run-dir runs/demo $arguments"

step "Done"
DATA=$data "$project/.venv/bin/python" - "$project/runs/demo/summary.json" <<'PYTHON'
import json, os, sys

summary = json.load(open(sys.argv[1]))
print(
    f"Test accuracy: {summary['test_accuracy']:.2%} "
    f"(epochs: {summary['epochs']}, ranks: {summary['world_size']}, "
    f"device: {summary['device']}, data: {os.environ['DATA']})"
)
PYTHON
echo "The project is in .demo/project; its README.md says how to go on."
