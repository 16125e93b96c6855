#!/bin/bash
# Submits a batch script with the code as it is now. `make submit` and `make chain` run this. A chain is
# N jobs that continue one run, one after another.
#   bash slurm/submit.sh N SCRIPT [OPTION OF SBATCH]... -- [ARGUMENT OF THE SCRIPT]...
set -eo pipefail
unset CDPATH
builtin cd "${BASH_SOURCE[0]%/*}/.."

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
# sbatch lists the options of the environment, the script and the command line.
given=$(sbatch --verbose --test-only "${options[@]}" "$script" "$@" 2>&1) || true
((count == 1)) || [[ ! $given =~ $'\n'"sbatch: array " ]] ||
    fail "a chain is one run, and each task of an array has its own: leave --array out"
mkdir -p logs
snapshot=
! wants_snapshot || take_snapshot

ids=()
trap '((${#ids[@]} == 0)) || scancel "${ids[@]}" || echo "error: cancel ${ids[*]} yourself" >&2' EXIT
while ((${#ids[@]} < count)); do
    # The first job is held until all files are written. Each other job waits for all jobs before it,
    # since some of them may be cancelled.
    until=--hold
    ((${#ids[@]} == 0)) || until=--dependency=afterany$(printf ':%s' "${ids[@]}")
    # With --wait, sbatch ends after the job.
    id=
    until [[ $id =~ ^[0-9]+(\;|$) ]]; do # a site's sbatch may print other lines before
        read -r id || fail "sbatch submits no $script, see its output above: what was submitted is cancelled"
    done < <(sbatch --parsable "${options[@]}" "$until" "$script" "$@")
    sbatch=$!
    ids+=("${id%%;*}")
    # The commands below, and the other jobs of a chain, are for the cluster of the first job.
    if [[ $id == *\;* ]]; then
        export SLURM_CLUSTERS=${id#*;}
        options+=(--clusters="$SLURM_CLUSTERS")
    fi
done
cluster=${SLURM_CLUSTERS:-$(scontrol show config | sed -n 's/^ClusterName *= //p')}
first=
for id in "${ids[@]}"; do
    facts=$(SLURM_TIME_FORMAT=%s scontrol show job "$id") || true
    [[ $facts =~ SubmitTime=([0-9]+) ]] || fail "Slurm does not know job $id, see its output above: what was submitted is cancelled"
    origin=$cluster-$id-${BASH_REMATCH[1]}
    first=${first:-$origin}
    ln -sfn "../${snapshot:+.snapshots/$snapshot}" "logs/code-$origin"
    ((count == 1)) || echo "$first ${ids[*]}" >"logs/chain-$origin"
done
held=
if [[ $given =~ $'\n'"sbatch: hold " ]]; then
    held=", held until 'scontrol release ${ids[*]}'"
else
    scontrol release "${ids[0]}" || fail "Slurm does not let job ${ids[0]} start, see its output above: what was submitted is cancelled"
fi
trap - EXIT
echo "submitted ${ids[*]}${snapshot:+, with the code in .snapshots/$snapshot}$held"
((count == 1)) || echo "the jobs share a run, named after the first one unless --run-dir says otherwise; to end it: scancel ${ids[*]}"
wait "$sbatch"
