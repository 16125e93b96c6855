#!/bin/bash
# Slurm runs this after each task of a training, on the task's node. It requeues the job if nothing
# else would: if the batch shell was killed, or will be killed because the time limit is over.
[[ $SLURM_PROCID == 0 ]] || exit 0
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
unset "${!SQUEUE_@}" "${!SCONTROL_@}" SLURM_CLUSTERS # they filter and format what the commands print
before=${SLURM_RESTART_COUNT:-0}
read -r state restarts reason < <(squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:10,Reason:60)
# Newer versions of Slurm call a killed shell RaisedSignal.
if [[ $state != RUNNING && $reason =~ ^(JobLaunchFailure|RaisedSignal|TimeLimit) ]] &&
    ((restarts == before && before < ${MAX_REQUEUES:-10})); then
    scontrol requeue "$job"
fi
exit 0
