# What a job does when its ranks are stopped or killed: it goes back to the queue. slurm/common.sh sources this file.
# shellcheck shell=bash

# From 24.05 on, Slurm requeues a job that leaves while it is preempted. To ask for it, too, would
# make the job start once more after its end, up to 25.11.
slurm_requeues() {
    local version
    version=$(scontrol --version | tr -dc 0-9)
    [[ $1 != N/A && ${version:0:4} -ge 2405 ]] &&
        [[ $(scontrol show config) == *preempt/partition_prio* ]] &&
        [[ $(scontrol show partition "$SLURM_JOB_PARTITION") =~ PreemptMode=[A-Z,]*REQUEUE ]]
}

# requeue STOPPED: puts the job back into the queue, unless somebody cancelled it, and says so.
requeue() {
    local config job before pause state restarts preempted reason
    local end="but Slurm did not confirm a requeue: if 'squeue --me' lacks the job, $resubmit"
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    before=${SLURM_RESTART_COUNT:-0}
    # More than once: Slurm's controller may be too busy to answer.
    for pause in 0 5 30; do
        sleep "$pause"
        read -r state restarts preempted reason < <(squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:10,PreemptTime:20,Reason:60) || continue
        if ((restarts > before)); then
            end="and back to the queue"
        elif [[ $state != RUNNING && $reason != TimeLimit* ]]; then
            end="and not requeued: the job was cancelled"
        elif slurm_requeues "$preempted"; then
            end="and back to the queue"
        elif ((before >= ${MAX_REQUEUES:-10})); then
            end="and not requeued: that was done $before times; $resubmit, or with a larger MAX_REQUEUES"
        elif scontrol requeue "$job"; then
            end="and back to the queue"
        else
            continue
        fi
        break
    done
    # Until the job has ended, squeue does not know when it may start again.
    if [[ $end == "and back"* ]] && config=$(scontrol show config) &&
        [[ $config =~ requeue_delay=([0-9]+) || $config =~ cred_expire=([0-9]+) || $config == *AuthInfo* ]]; then
        end+=", where it waits for ${BASH_REMATCH[1]:-120} seconds at least"
    fi
    echo "$1, $end"
}

# What to do with a job that was stopped and is not in the queue.
resubmit="submit again with --run-dir and the run's folder, and the same flags"

# run_resumable COMMAND...: runs what Slurm may stop, and returns its exit code, which ends the job
# unless it is 0. 75: a signal stopped it, after a checkpoint.
# Above 128: a signal killed a rank, as when memory runs out. In both cases the job goes back to the
# queue, and on from its newest checkpoint when it starts again.
run_resumable() {
    local status=0
    if [[ ${command:-train} != train ]]; then # it saves no checkpoint
        export MAX_REQUEUES=0 # for slurm/task_epilog.sh
        "$@"
        return
    fi
    [[ ${MAX_REQUEUES:-10} =~ ^(0|[1-9][0-9]*)$ ]] || fail "MAX_REQUEUES is '$MAX_REQUEUES', not a number such as 10"
    # A rank that fails makes this file. Those that wait for it are stopped then, and srun's exit code
    # tells of them alone.
    export FAILURE_FILE=$PWD/logs/failed-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    # Slurm signals the ranks by itself. This shell only has to outlive them.
    trap : TERM
    "$@" || status=$?
    if rm "$FAILURE_FILE" 2>/dev/null && ((status > 128)); then
        status=1
    fi
    if ((status == 75)); then
        requeue "stopped after a checkpoint"
    elif ((status > 128)); then
        requeue "a rank or its launcher was killed (exit code $status)"
    fi
    trap - TERM
    return "$status"
}
