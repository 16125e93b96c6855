#!/bin/bash
# Slurm runs this after each task of a training, on the task's node. It does nothing, unless the
# batch shell was killed: then nobody else would put the job back into the queue.
[[ $SLURM_PROCID == 0 ]] || exit 0
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
read -r state reason < <(squeue --noheader --jobs="$job" --Format=State:20,Reason:40)
# The second reason is that of newer versions of Slurm.
if [[ $state != RUNNING && $reason =~ ^(JobLaunchFailure|RaisedSignal) ]] &&
    ((${SLURM_RESTART_COUNT:-0} < ${MAX_REQUEUES:-10})); then
    scontrol requeue "$job"
fi
exit 0
