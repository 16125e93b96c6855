# Runs as a step of a training's job. It requeues the job if nothing else would: if the batch shell was
# killed, or will be killed because the time limit is over.
# shellcheck shell=bash

# These variables filter and format what Slurm's commands print.
unset "${!SQUEUE_@}" "${!SCONTROL_@}" SLURM_CLUSTERS
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
before=${SLURM_RESTART_COUNT:-0}
# Slurm sends signals near the time limit, before a preemption, and when the batch shell has ended.
trap : TERM USR1 USR2
echo ready
state=RUNNING
while [[ $state == RUNNING ]]; do
    sleep infinity &
    wait "$!"
    # The controller may be too busy to answer.
    until read -r state restarts reason < <(squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:10,Reason:60); do
        sleep 2
    done
done
# Newer versions of Slurm call a killed shell RaisedSignal.
if [[ $reason =~ ^(JobLaunchFailure|RaisedSignal|TimeLimit) ]] && ((restarts == before && before < ${MAX_REQUEUES:-10})); then
    scontrol requeue "$job"
fi
