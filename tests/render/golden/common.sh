# Functions that the batch scripts share. Each script sources this file first. The file checks that the
# script runs as a job, resets the modules and reads slurm/site.sh.
# shellcheck shell=bash

fail() {
    echo "error: $*" >&2
    exit 1
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is not a Slurm job: submit it with 'sbatch ${0#"$PWD/"}'"
unset SLURM_CLUSTERS # the job's own cluster is the one to ask
if [[ ${BASH_SOURCE[0]} == slurm/common.sh ]]; then
    # The files may change while the job waits. The job runs a copy of the code, which `make submit` or
    # its first start has made, and continues with the copy of this file.
    # shellcheck source=slurm/snapshot.sh
    . slurm/snapshot.sh
    [[ $SLURM_JOB_ID == 0 ]] || find_code # the doctor has no job
    if [[ -n ${CODE_DIR:-} ]]; then
        # shellcheck source=/dev/null
        . "$CODE_DIR/slurm/common.sh" "$@"
        return
    fi
fi
# Slurm keeps a copy of a submitted script. Raise the number if older scripts, which may wait in the
# queue, cannot use this file any more.
[[ ${1:-} == 3 ]] || fail "slurm/common.sh has changed since this job was submitted: submit it again"
slurm_dir=${BASH_SOURCE[0]%/*}

# The names of functions that run at the end of the job, with its exit code as the argument. slurm/resume.sh
# and slurm/stage.sh add theirs.
at_end=forget
back= # not empty if the job is back in the queue
leave() {
    local status=$? each
    [[ $status:${in_site:-} != 0:1 ]] || { status=1; echo "error: slurm/site.sh ended the job: it must not use exit" >&2; }
    for each in $at_end; do "$each" "$status" || true; done
    exit "$status"
}
trap leave EXIT

forget() {
    [[ -z ${origin:-} || -n $back${SLURM_ARRAY_JOB_ID:-} ]] || (($1 > 128)) || rm -f logs/{code,chain}-"$origin"
}

# Cancels the waiting jobs of a chain after the end of its run or a fault of the program.
end_chain() {
    local waiting=" $CHAIN_JOBS " each
    read -ra waiting <<<"${waiting#* "$SLURM_JOB_ID" }"
    (($1 == 75 || $1 == 76 || $1 > 128)) && return
    for each in $CHAIN_JOBS; do rm -f logs/{code,chain}-"${SLURM_CLUSTER_NAME:-slurm}-$each"-*; done
    ((${#waiting[@]})) || return
    scancel --quiet --state=PENDING "${waiting[@]}" 2>/dev/null
    echo "the chain ends here: cancelled ${waiting[*]}"
}
# They may come from a job that submitted this one.
unset CHAIN_JOB{_ID,S} MASTER_{ADDR,PORT} STAGED FIRST_STEP FAILURE_FILE BAD_NODES_FILE RUN_NUMBER RESTART_IN_JOB PAID_SINCE
export RUN_ORIGIN=${origin:-}
if [[ -f logs/chain-$RUN_ORIGIN ]]; then
    read -r RUN_ORIGIN CHAIN_JOBS <"logs/chain-$RUN_ORIGIN"
    export CHAIN_JOBS CHAIN_JOB_ID=${CHAIN_JOBS%% *} # the first job names the run folder
    at_end+=" end_chain"
fi

# `module` is a shell function, which not every shell defines. A login shell may, but it may also end early.
for file in /etc/profile.d/{modules,lmod}.sh "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash"; do
    # shellcheck source=/dev/null
    command -v module >/dev/null || ! [[ -r $file ]] || . "$file"
done
command -v module >/dev/null || eval "$(bash -lc 'command -v module && { export -p; declare -f $(compgen -A function | grep -i mod); } >&3' \
    3>&1 >/dev/null 2>&1 </dev/null)"
command -v module >/dev/null ||
    fail "the module command is missing on $(hostname), also in a login shell: look for an exit, an exec or an error in ~/.bash_profile, or define it there"
module purge

# The options that the next job may change, for the costs of a run. sbatch refuses --mem if the script has
# --mem-per-cpu or --mem-per-gpu, and a site may refuse it where Slurm does not count memory.
export NEXT_OPTIONS="cpus-per-task"
[[ -z ${SLURM_MEM_PER_NODE:-}${SLURM_MEM_PER_CPU:-} ]] || grep -qs "^#SBATCH.* --mem-per-" "$0" || NEXT_OPTIONS+=" mem"

# A job that is submitted inside another job inherits the requests of that job, and srun would read them
# as its options. Without options, a step gets all resources of its job.
for name in MEM_PER_{CPU,GPU,NODE} GPUS{,_PER_NODE,_PER_SOCKET,_PER_TASK} CPUS_PER_GPU TRES_PER_TASK \
    GPU_BIND TRES_BIND HINT THREADS_PER_CORE NTASKS_PER_{CORE,GPU,SOCKET,TRES} \
    ${SLURM_SRUN_COMM_HOST:+CPU_BIND MEM_BIND DISTRIBUTION STEP_ID}; do
    option=--${name//_/-} given=SBATCH_$name
    [[ -n ${!given:-} ]] || grep -qs -- "^#SBATCH.* ${option,,}[ =]" "$0" || unset "SLURM_$name"
done
unset SLURM_TIMELIMIT PYTHONINSPECT # the first limits steps, the second changes exit codes
unset OMP_PROC_BIND OMP_PLACES {GOMP_CPU,KMP}_AFFINITY # they bind all threads to one core
ulimit -St "$(ulimit -Ht)" # Slurm passes on the limit of the login node
# Unless its options were given, salloc leaves these variables out. The values are srun's defaults.
export SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} SLURM_NTASKS=${SLURM_NTASKS:-${SLURM_JOB_NUM_NODES:-1}}
# The log of an array task gets a second name, with the numbers that squeue and the run folder have.
log=$(readlink /proc/$$/fd/1)
if [[ -n ${SLURM_ARRAY_JOB_ID:-} && $log == *-$SLURM_JOB_ID.out ]]; then
    ln -sf "${log##*/}" "${log%"$SLURM_JOB_ID.out"}${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.out"
fi

# Your file for this site, with settings such as its network interfaces.
if [[ -f $slurm_dir/site.sh ]]; then
    in_site=1
    # shellcheck source=/dev/null
    . "$slurm_dir/site.sh" || fail "slurm/site.sh ends with exit code $?: its last command must succeed"
    in_site=
fi
# The ranks get the environment of this shell, even after `sbatch --export=NONE`.
unset SLURM_EXPORT_ENV

# Some failures have exit code 0. The list of modules then has not changed and does not have the name.
load_module() {
    local before=${LOADEDMODULES:-} near
    module load "$1" && [[ ${LOADEDMODULES:-} != "$before" || :$before == *":$1"* ]] && return
    near=$(module -t avail "${1%%/*}" 2>&1 | grep -iF "${1%%/*}" | sed 's/[ (<].*//; /[:/]$/d' |
        sort -uV | tail -n 5 | paste -sd ' ')
    fail "module $1 can't be loaded; near it, 'module avail' has ${near:-nothing}"
}

# use_python PATH: sets `python` to the interpreter of the project. PROJECT_PYTHON chooses another one,
# such as your site's, which also keeps the packages of modules.
use_python() {
    local others=:${PYTHONPATH:-}
    [[ -n ${PROJECT_PYTHON:-} ]] || others=
    python=("${PROJECT_PYTHON:-$PWD/$1}")
    [[ -x ${python[0]} ]] || fail "${python[0]} does not exist: run 'make setup' first"
    # Import the code of this job, and no packages of modules or of ~/.local, as `make setup` does.
    unset PYTHONHOME
    export PYTHONPATH=${CODE_DIR:-$PWD}/src$others PYTHONNOUSERSITE=1
}

one_node_only() {
    ((SLURM_JOB_NUM_NODES == 1)) || fail "Slurm gave $SLURM_JOB_NUM_NODES nodes for a job of one: leave --nodes out"
}

# count_ranks cpu|gpu: checks the resources of the job, since options of sbatch override those of the
# script. Sets `world_size`.
count_ranks() {
    [[ -z ${RANK:-}${LOCAL_RANK:-}${WORLD_SIZE:-} ]] ||
        fail "RANK, LOCAL_RANK or WORLD_SIZE is set, but srun numbers the ranks: unset them (tasks of an array are jobs of their own, never ranks)"
    gpus=${SLURM_GPUS_ON_NODE:-0}
    [[ $1 == gpu ]] || gpus=0
    [[ $1 == cpu ]] || ((gpus > 0)) ||
        fail "Slurm gave no GPU on $(hostname): 'sinfo -o \"%P %G\"' shows which partitions have some"
    if ((gpus)); then
        [[ $SLURM_NTASKS == $((gpus * SLURM_JOB_NUM_NODES)) && $SLURM_TASKS_PER_NODE =~ ^$gpus(\(x[0-9]+\))?$ ]] ||
            fail "Slurm gave $SLURM_NTASKS tasks, but $gpus GPUs on each of $SLURM_JOB_NUM_NODES nodes: set --ntasks-per-node to the GPUs"
    fi
    cpus=$SLURM_CPUS_PER_TASK
    world_size=$SLURM_NTASKS
    export OMP_NUM_THREADS=$cpus
}

# Sets where the ranks meet: on the first node, at a port that each step chooses. First it unpacks the
# files that the ranks read from the nodes' own disks.
set_rendezvous() {
    [[ -z ${STAGE_FILES:-} ]] || stage "${STAGE_FILES[@]}"
    JOB_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ,)
    [[ -n ${MASTER_ADDR:-} ]] || MASTER_ADDR=${JOB_NODES%%,*}
    [[ -n $MASTER_ADDR ]] || fail "scontrol does not know the nodes $SLURM_JOB_NODELIST: see its output above"
    export JOB_NODES MASTER_ADDR ${MASTER_PORT:+MASTER_PORT}
    # If ranks hang, PyTorch writes a record of their last collectives.
    export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000
    export TORCH_FR_DUMP_TEMP_FILE="$PWD/logs/nccl-$SLURM_JOB_ID-rank-"
}

# Prints facts that help to find out why a job failed.
print_facts() {
    local version each="$gpus on each node"
    ((gpus)) || each=none
    local commit
    if [[ -n ${CODE_DIR:-} ]]; then
        commit=$(cat "$CODE_DIR/git/describe" 2>/dev/null || true)
    else
        commit=$(git describe --always --dirty --abbrev=12 2>/dev/null || true)
    fi
    version=$("${python[@]}" --version) || fail "${python[*]} does not start: load the module that it needs, or run 'make setup' again"
    cat <<END
job          $SLURM_JOB_ID ($SLURM_JOB_NAME), restart ${SLURM_RESTART_COUNT:-0}${SLURM_ARRAY_TASK_ID:+, task $SLURM_ARRAY_TASK_ID of an array: a job of its own}
nodes        $SLURM_JOB_NUM_NODES ($SLURM_JOB_NODELIST)
GPUs         $each
world size   $world_size, with $cpus CPU cores for each rank
master       $MASTER_ADDR
modules      ${LOADEDMODULES:-none}
interpreter  ${python[*]} ($version)
code         ${CODE_DIR:-$PWD}/src
commit       ${commit:-none}
END
}

# choose_command [COMMAND] FLAG...: sets `command`, by default train, and its `flags`. Each task of an
# array trains with its own seed.
# shellcheck disable=SC2034 # the scripts use flags
choose_command() {
    command=train
    [[ ${1:-} != [a-z]* ]] || { command=$1; shift; }
    flags=("$@")
    [[ $command == train ]] || return 0
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || flags=(--seed="$SLURM_ARRAY_TASK_ID" "$@")
    guard
}

# shellcheck source=slurm/resume.sh
. "$slurm_dir/resume.sh"
# shellcheck source=slurm/stage.sh
[[ -z ${STAGE_FILES:-} ]] || . "$slurm_dir/stage.sh"
