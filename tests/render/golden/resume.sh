# Handles ranks that were stopped or killed: the job starts them again, or goes back to the queue. slurm/common.sh
# sources this file.
# shellcheck shell=bash

# Starts a step that requeues the job if this shell is killed. In an allocation of salloc, nothing can.
guard() {
    local said="" line
    [[ ${0##*/} == slurm_script ]] || return 0
    exec {guarded}< <(unset "${!SLURM_GPUS@}" "${!SLURM_MEM@}" SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK
        exec srun --overlap --mem=0 --gres=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --mpi=none bash "${slurm_dir:?}/guard.sh" 2>&1)
    # Start-up files may print something first.
    while [[ $said != ready ]] && read -rt 60 line <&"$guarded"; do said=$line; done
    [[ $said == ready ]] || echo "warning: this job is not requeued if its batch shell is killed: ${said:-srun does not answer}"
    export FIRST_STEP=1
}

# Since 24.05, Slurm requeues a preempted job when it ends. Up to 25.11, a second request would start
# the job again after its end.
slurm_requeues() {
    local version
    version=$(scontrol --version | tr -dc 0-9)
    [[ $1 != N/A && ${version:0:4} -ge 2405 ]] &&
        [[ $(scontrol show config) == *preempt/partition_prio* ]] &&
        [[ $(scontrol show partition "$SLURM_JOB_PARTITION") =~ PreemptMode=[A-Z,]*REQUEUE ]]
}

# requeue STOPPED: puts the job back into the queue unless it was cancelled, sets `back` if that worked,
# and prints the result after the text STOPPED.
requeue() {
    local config pause state restarts preempted reason before=${SLURM_RESTART_COUNT:-0}
    local end="but Slurm did not confirm a requeue: if 'squeue --me' lacks the job, $resubmit"
    # Try several times, because Slurm's controller may be too busy to answer.
    for pause in 0 5 30; do
        sleep "$pause"
        read -r state restarts preempted reason < <(squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:10,PreemptTime:20,Reason:60) || continue
        if ((restarts > before)); then
            back=1
        elif [[ $state != RUNNING && $reason != TimeLimit* ]]; then
            end="and not requeued: the job was cancelled"
        elif slurm_requeues "$preempted"; then
            back=1
        elif ((before >= ${MAX_REQUEUES:-10})); then
            end="and not requeued: that was done $before times; $resubmit, or with a larger MAX_REQUEUES"
        elif scontrol requeue "$job"; then
            back=1
        else
            continue
        fi
        break
    done
    [[ -z $back ]] || end="and back to the queue"
    # While the job still runs, squeue does not know when it can start again.
    if [[ -n $back ]] && config=$(scontrol show config) &&
        [[ $config =~ requeue_delay=([0-9]+) || $config =~ cred_expire=([0-9]+) || $config == *AuthInfo* ]]; then
        end+=" for at least ${BASH_REMATCH[1]:-120} seconds"
    fi
    echo "$1, $end"
}

# read_log: sets `srun_said` to srun's messages about tasks in the log, after its first `size` bytes, and
# `first` to the exit code of the first rank that ended, unless a signal ended it.
read_log() {
    srun_said=$(tail --bytes="+$((size + 1))" "$log" | grep -E '^srun: error: [^ ]+: tasks? [0-9,-]+: ') || true
    first=$(sed -nE '1s/.*exit code ([0-9]+)$/\1/p' <<<"$srun_said")
}

# note_death: sets `died` to the node on which the first rank died. After two deaths, a node is bad.
note_death() {
    local deaths=${BAD_NODES_FILE/bad-nodes/died}
    # Other ranks end because of it: with their own exit code, by SIGTERM, or later.
    died=$(sed -nE '/(exit code ([0-9]{1,2}|143)|Terminated)$/d; s/^srun: error: ([^][ ]+): task.*/\1/p; T; q' <<<"$srun_said")
    [[ -n $died ]] || return 0
    echo "$died" >>"$deaths"
    (($(grep -cxF "$died" "$deaths") != 2)) || echo "$died" >>"$BAD_NODES_FILE"
}

# gpus_work: succeeds unless a GPU of the job has a fault. Its node is then bad.
gpus_work() {
    local faults nodes=$SLURM_JOB_NUM_NODES
    faults=$(srun --overlap --mem=0 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=1 --mpi=none bash "${slurm_dir:?}/preflight.sh") || true
    [[ -n $faults ]] || return 0
    printf '%s\n' "$faults"
    cut --delimiter=: --fields=1 <<<"$faults" >>"$BAD_NODES_FILE"
    return 1
}

# may_restart COMMAND: succeeds if the ranks can start again in this allocation; else sets `why`.
may_restart() {
    local state restarts preempted end seconds nodes=$SLURM_JOB_NUM_NODES
    why="Slurm is ending the job, or does not answer"
    read -r state restarts preempted end < <(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:10,PreemptTime:20,EndTime:20) &&
        [[ $state == RUNNING && $restarts == "${SLURM_RESTART_COUNT:-0}" && $preempted == N/A ]] || return
    note_death
    why=""
    if ((restarted >= ${RESTARTS_IN_JOB:-2})); then
        why="the ranks started again $restarted times"
    elif [[ $1 != srun || -z $srun_said ]]; then
        why="srun did not say that the ranks are gone"
    elif [[ ${EXCLUDE_BAD_NODES:-0} == 1 && -s $BAD_NODES_FILE ]] && grep -qxFf "$BAD_NODES_FILE" < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); then
        why="a rank died twice on one of its nodes"
    elif [[ $end == [0-9]* ]] && seconds=$((end - $(date +%s))) && ((seconds < 300)); then # else N/A
        why="its time ends in $seconds seconds"
    elif ! timeout --kill-after=5 60 srun --overlap --mem=0 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --mpi=none true; then
        why="not all of its nodes answer"
    fi
    [[ -z $why ]]
}

# treat_bad_nodes: excludes the bad nodes from a job that is back in the queue. Slurm accepts this only
# while the job waits; if it does not wait yet, the next requeue excludes them.
treat_bad_nodes() {
    local nodes excluded left
    nodes=$(sort -u "$BAD_NODES_FILE" | paste -sd ,)
    if [[ -n $back ]]; then
        excluded=$(squeue --noheader --jobs="$job" --format=%x) || return 0
        excluded=${excluded//(null)/}
        excluded=$nodes${excluded:+,$excluded}
        left=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%N |
            sort -u | grep -cvxFf <(scontrol show hostnames "$excluded")) || true
        if ((left < SLURM_JOB_NUM_NODES)); then
            echo "bad nodes: $nodes; the job may use them again, as its partition has too few others"
        elif [[ ${EXCLUDE_BAD_NODES:-0} == 1 ]]; then
            scontrol update JobId="$job" ExcNodeList="$excluded" || return 0
            echo "the job avoids $nodes from now on"
            rm -f "$BAD_NODES_FILE"
        else
            echo "bad nodes: $nodes; for this job to avoid them: scontrol update JobId=$job ExcNodeList=$excluded; for all later ones: EXCLUDE_BAD_NODES=1 in slurm/site.sh"
        fi
        return
    fi
    echo "bad nodes: $nodes; to avoid them: sbatch --exclude=$nodes"
}

# The costs of a training are counted from the start of the job or the end of the training before it.
paid_since=${SLURM_JOB_START_TIME:-$((EPOCHSECONDS - SECONDS))}
# Advice for a job that was stopped and is not in the queue.
resubmit="submit again with --run-dir and the run's folder, and the same flags"

# run_resumable COMMAND...: runs a command that Slurm may stop, and returns its exit code. The job ends
# with this code unless it is 0.
#   75          a signal stopped the ranks, and they saved a checkpoint
#   76          a rank lost another rank
#   above 128   a signal killed a rank, for example when memory ran out
# After 76 and above 128, the ranks start again in the same allocation, at most RESTARTS_IN_JOB times.
# The job goes back to the queue after 75, and after a code above 128 if the ranks do not start again. The
# run then resumes from its newest checkpoint.
run_resumable() {
    local status=0 log size begun error why="" died="" srun_said="" first="" restarted=0 job end unfit=""
    if [[ ${command:-train} != train ]]; then # other commands save no checkpoint
        FAILURE_FILE='' BAD_NODES_FILE='' "$@"
        return
    fi
    [[ ${MAX_REQUEUES:-10} =~ ^(0|[1-9][0-9]*)$ ]] || fail "MAX_REQUEUES is '$MAX_REQUEUES', not a number such as 10"
    [[ ${EXCLUDE_BAD_NODES:-0} =~ ^[01]$ ]] || fail "EXCLUDE_BAD_NODES is '$EXCLUDE_BAD_NODES': it must be 0 or 1"
    [[ ${PREFLIGHT:-0} =~ ^[01]$ ]] || fail "PREFLIGHT is '$PREFLIGHT': it must be 0 or 1"
    [[ ${RESTARTS_IN_JOB:-2} =~ ^(0|[1-9][0-9]*)$ ]] || fail "RESTARTS_IN_JOB is '$RESTARTS_IN_JOB', not a number such as 2"
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    # The first rank that fails writes its error to FAILURE_FILE. The ranks that wait for it are then
    # stopped, and srun returns their exit code. BAD_NODES_FILE has a line for each node that a later
    # start should not use.
    export FAILURE_FILE=$PWD/logs/failed-${origin:?}-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    export BAD_NODES_FILE=$PWD/logs/bad-nodes-${origin:?}-$SLURM_JOB_ID
    # In seconds, for the costs of the run. A job may have no limit.
    export TIME_LIMIT='' SIGNAL_LEAD=120
    read -r begun end < <(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$job" --format="%S %e") || true
    [[ ! "${begun:-} ${end:-}" =~ ^[0-9]+\ [0-9]+$ ]] || TIME_LIMIT=$((end - begun))
    trainings=$((${trainings:--1} + 1))
    # Slurm also signals the ranks. This shell must run until they have ended.
    trap : TERM
    log=$(readlink /proc/self/fd/2)
    ((${gpus:-0} == 0 || ${PREFLIGHT:-0} == 0)) || gpus_work || status=76 unfit=1
    while [[ -z $unfit ]]; do
        [[ -f $log ]] || log=/dev/null
        size=$(stat --format=%s "$log") begun=$SECONDS status=0
        PAID_SINCE=$paid_since RUN_NUMBER=$trainings RESTART_IN_JOB=$restarted "$@" || status=$?
        read_log
        if [[ -e $FAILURE_FILE ]]; then
            # Slurm may lose the last output of a rank, or stop the rank before it prints the error.
            error=$(<"$FAILURE_FILE")
            [[ -z $error ]] || grep -qF -e "$error" < <(tail --bytes="+$((size + 1))" "$log") || echo "the first rank that failed said: $error"
            rm "$FAILURE_FILE"
            ((status <= 75)) || status=1
        elif [[ $1 == srun && -z $srun_said ]] && ((status == 255)); then
            status=1 # srun refuses its options
        elif [[ $1 == srun && -n $first ]] && ((status > 75 && first < 128 && first != 76)); then
            status=$first # a fault of this rank, or its stop, after which the others were stopped
        fi
        ((status > 128 || status == 76)) || break
        may_restart "$1" || break
        restarted=$((restarted + 1))
        echo "a rank was lost (exit code $status${died:+, on $died}) $((SECONDS - begun)) seconds after the start: restart $restarted of ${RESTARTS_IN_JOB:-2} in this allocation"
    done
    paid_since=$EPOCHSECONDS
    [[ -z $why || ${RESTARTS_IN_JOB:-2} == 0 ]] || echo "no restart in this allocation: $why"
    # When Slurm requeues the job, it also signals the commands of this shell.
    trap '' TERM
    if ((status == 75)); then
        requeue "stopped after a checkpoint"
    elif ((status > 128)); then
        requeue "a rank or its launcher was killed (exit code $status)"
    elif [[ -n $unfit && ${EXCLUDE_BAD_NODES:-0} == 1 ]]; then
        requeue "not started because of a bad GPU"
    fi
    [[ ! -s $BAD_NODES_FILE ]] || treat_bad_nodes
    [[ -n $back ]] || rm -f "$BAD_NODES_FILE" "${BAD_NODES_FILE/bad-nodes/died}"
    trap - TERM
    return "$status"
}
