#!/bin/bash
# Submits a batch script with the code as it is now. `make submit` and `make chain` run this. A chain is
# N jobs that continue one run, one after another.
#   bash slurm/submit.sh N SCRIPT [OPTION OF SBATCH]... -- [ARGUMENT OF THE SCRIPT]...
set -eo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

fail() {
    echo "error: $*" >&2
    exit 1
}
# shellcheck source=slurm/snapshot.sh
. slurm/snapshot.sh

count=$1 script=$2 options=()
shift 2
while [[ $1 != -- ]]; do
    options+=("$1")
    shift
done
shift
[[ $count =~ ^[1-9][0-9]{0,2}$ ]] || fail "N is '$count': it must be a number of jobs, such as N=5"
[[ -n $script ]] || fail "name a batch script, such as SCRIPT=$(printf '%s\n' slurm/train_*.sbatch | head -n 1)"
grep -qs '^#SBATCH' "$script" || fail "$script is not a batch script: it does not exist, or has no #SBATCH line"
((count == 1)) || [[ ! " ${options[*]} $(grep '^#SBATCH' "$script")" =~ \ (-a|--array) ]] ||
    fail "a chain is one run, and each task of an array has its own: leave --array out"
[[ ! " ${options[*]} " =~ \ (-W|--wait|--test-only)\  ]] || fail "${BASH_REMATCH[1]} is for sbatch itself: leave it out"
mkdir -p logs
snapshot=
! wants_snapshot || take_snapshot

ids=()
trap '((${#ids[@]} == 0)) || scancel "${ids[@]}"' EXIT
while ((${#ids[@]} < count)); do
    # The first job is held until all files are written. Each other job waits for the job before it.
    wait=--hold
    ((${#ids[@]} == 0)) || wait=--dependency=afterany:${ids[-1]}
    id=$(sbatch --parsable "${options[@]}" "$wait" "$script" "$@") ||
        fail "sbatch refuses $script, see its output above: no job is left in the queue"
    ids+=("${id%%;*}")
done
for id in "${ids[@]}"; do
    [[ -z $snapshot ]] || ln -sfn "../.snapshots/$snapshot" "logs/code-$id"
    ((count == 1)) || echo "${ids[*]}" >"logs/chain-$id"
done
scontrol release "${ids[0]}" || fail "Slurm does not let job ${ids[0]} start, see its output above: no job is left in the queue"
trap - EXIT
echo "submitted ${ids[*]}${snapshot:+, with the code in .snapshots/$snapshot}"
((count == 1)) || echo "the jobs share a run, named after the first one unless --run-dir says otherwise; to end it: scancel ${ids[*]}"
