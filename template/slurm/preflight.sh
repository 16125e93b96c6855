# Runs on each node before the ranks of a job, if PREFLIGHT=1: asks the driver for faults of the job's
# GPUs. It prints a line for each fault, which starts with the name of the node.
# shellcheck shell=bash

node=${SLURMD_NODENAME:-$(hostname)}
ask() { timeout --kill-after=5 60 nvidia-smi "$@" --format=csv,noheader 2>&1; }

# After an uncorrected memory error, and if rows of memory wait to be replaced, results may be wrong until
# the GPU is reset. The last two make it slower.
fields=index,uuid,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure
fields+=,clocks_throttle_reasons.hw_thermal_slowdown,clocks_throttle_reasons.hw_power_brake_slowdown
status=0
gpus=$(ask --query-gpu="$fields") || status=$?
case $status in
    0) ;;
    2 | 12 | 13 | 127) # there is no nvidia-smi, or this version or the driver does not know a field
        echo "warning: $node: its GPUs were not checked: ${gpus##*$'\n'}" >&2
        exit ;;
    *) # the driver does not answer, or has lost a GPU
        echo "$node: nvidia-smi ends with exit code $status: ${gpus##*$'\n'}"
        exit ;;
esac
others=$(ask --query-compute-apps=gpu_uuid,pid) || others=
while IFS=, read -r index uuid errors pending failed hot braked; do
    gpu="$node: GPU $index (${uuid# })"
    [[ $errors != \ [1-9]* ]] || echo "$gpu has had$errors uncorrected memory error(s) since its driver started"
    [[ $pending != " Yes" ]] || echo "$gpu must be reset to replace bad memory"
    [[ $failed != " Yes" ]] || echo "$gpu can't replace its bad memory"
    [[ $hot != " Active" ]] || echo "$gpu is slowed down by its temperature"
    [[ $braked != " Active" ]] || echo "$gpu is slowed down by its power supply"
    sed -n "s/^${uuid# }, \(.*\)/$gpu is in use by another process (\1)/p" <<<"$others"
done <<<"$gpus"
