# Copies the code of a job, so that later edits do not change it. slurm/common.sh and slurm/submit.sh
# source this file.
# shellcheck shell=bash

# Functions of the user's shell may stand in for commands, such as a `cd` that lists its folder.
unset CDPATH GREP_OPTIONS TAR_OPTIONS GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_PREFIX # git sets these in its hooks
for name in $(compgen -A function); do
    [[ $name == module ]] || ! { type -P "$name" || compgen -b "$name"; } >/dev/null || unset -f "$name"
done
# Users filter and format with variables what Slurm's commands print.
for name in squeue scontrol scancel sinfo; do
    eval "$name() (unset \${!SQUEUE_@} \${!SCONTROL_@} \${!SCANCEL_@} \${!SINFO_@}; command $name \"\$@\")"
done

# Succeeds unless CODE_SNAPSHOT is 0, in the environment or in slurm/site.sh: jobs then run the code of
# the folder.
wants_snapshot() {
    local given=${CODE_SNAPSHOT:-$(sed -nE 's/^(export )?CODE_SNAPSHOT=([^ #]*).*/\2/p' slurm/site.sh 2>/dev/null)}
    [[ ${given:-1} =~ ^[01]$ ]] || fail "CODE_SNAPSHOT is '$given': it must be 0 or 1"
    [[ ${given:-1} == 1 ]]
}

# list_tracked FOLDER PATH...: lists files as git knows them, also those of repositories in this one.
list_tracked() {
    local path
    git -C "$1" ls-files -coz --exclude-standard -- "${@:2}" | while IFS= read -r -d '' path; do
        path=$1/${path%/}
        if [[ -d $path && ! -L $path ]]; then
            [[ ! -e $path/.git ]] || list_tracked "$path" . # else it is not checked out
        else
            printf '%s\0' "${path#./}"
        fi
    done
}

# Lists the files of the code, with a null byte after each name: those that git tracks, and new ones that
# it does not ignore. Without git, it lists all files except caches. Files that may hold secrets are left
# out, and links to folders above them.
list_code() {
    local parts=(src configs slurm/*.sh .copier-answers.yml) path
    [[ ! -L slurm ]] || parts=(src configs slurm .copier-answers.yml) # git does not look beyond links
    if [[ -n $(git ls-files -co --exclude-standard src 2>/dev/null | head -n 1) ]]; then
        list_tracked . "${parts[@]}" | LC_ALL=C sort -zu
    else
        find "${parts[@]}" \( -name .git -o -name __pycache__ -o -name '.*_cache' -o -name '*.egg-info' \) -prune -o \
            ! -type d -print0 2>/dev/null || true
    fi | while IFS= read -r -d '' path; do
        if [[ -d $path ]]; then # a link
            [[ $(realpath "$(dirname "$path")")/ == "$(realpath "$path")"/* ]] ||
                find "$path/" -name .git -prune -o -xtype f -print0 -o -type l -xtype d \
                    -fprintf /dev/stderr 'warning: %p, a link in a linked folder, is left out of the code of the job\n' || true
        elif [[ -e $path ]]; then
            printf '%s\0' "$path"
        fi
    done | LC_ALL=C grep -azvE '(^|/)(\.env(\.[^/]*)?|\.netrc|[^/]*\.(pem|key))(/|$)'
}

# describe_code FOLDER: writes the commit and the uncommitted changes to the folder.
describe_code() {
    local parts=(src configs slurm ':!slurm/site.sh') # site.sh may have a key, and so may others
    parts+=(':!*/.env' ':!*/.env.*' ':!*/.netrc' ':!*.pem' ':!*.key')
    # Keep its time: git uses it to see edits that were made within a second of a commit.
    cp -p "$(git rev-parse --git-path index)" "$1/index" || return
    export GIT_INDEX_FILE=$PWD/$1/index # new files are added to it
    git rev-parse HEAD >"$1/commit" && git describe --always --dirty --abbrev=12 >"$1/describe" &&
        git status --short -- "${parts[@]}" >"$1/changes" &&
        git add --intent-to-add -- "${parts[@]}" &&
        git diff --no-ext-diff --no-color HEAD -- "${parts[@]}" >"$1/diff" && rm "$1/index"
}

# refuse FOLDER WHY: removes an incomplete snapshot and ends the job.
refuse() {
    rm -rf "$1" "$1.tar.gz"
    fail "can't keep the code in $PWD/.snapshots: ${2%%$'\n'*}: make room, or set CODE_SNAPSHOT=0 to run the code of this folder"
}

# Copies the code to .snapshots/HASH and sets `snapshot` to that hash of its contents.
take_snapshot() {
    local new=.snapshots/new-$HOSTNAME-$$ size said
    said=$(LC_ALL=C git rev-parse 2>&1) || [[ $said != *safe.directory* ]] ||
        fail "git does not trust this folder, which another user owns: run 'git config --global --add safe.directory \"$PWD\"'"
    size=$(list_code | du -bcL --files0-from=- | tail -n 1 | cut -f 1)
    ((size < 50 * 2 ** 20)) ||
        fail "the code has $((size >> 20)) MiB, and 50 are the most that is kept for a job: move data out of src/ and configs/, or set CODE_SNAPSHOT=0"
    said=$({ mkdir -p "$new/git" && list_code | xargs -0 cp -rpL --parents -t "$new"; } 2>&1) ||
        refuse "$new" "$said"
    (describe_code "$new/git") 2>/dev/null || rm -r "$new/git" # no git, or no commit
    snapshot=$(cd "./$new" && {
        find . -type f -printf '%p %m\0' | LC_ALL=C sort -z
        find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum)
    snapshot=${snapshot:0:12}
    # Each run folder gets this archive. It leaves out slurm/site.sh, which may have a key.
    said=$({ tar -czf "$new.tar.gz" -C "$new" --exclude=./slurm/site.sh --exclude=./git . && mv "$new.tar.gz" "$new/code.tar.gz"; } 2>&1) ||
        refuse "$new" "$said"
    find "$new" -type f -exec chmod a-w {} + # other jobs may run the same code
    # Another job may have made the same snapshot.
    mv -T "$new" ".snapshots/$snapshot" 2>/dev/null || rm -r "$new"
}

# Sets CODE_DIR to the snapshot that this job runs. The first start of the job makes the snapshot, unless
# slurm/submit.sh has made it. Sets `origin` to what names the job for all time: its cluster, number and
# first time of submission. A later job, or one of another cluster, may have the same number.
find_code() {
    local facts pause found
    unset CODE_DIR
    for pause in 0 5 30; do # the controller may be too busy to answer
        sleep "$pause"
        ! facts=$(SLURM_TIME_FORMAT=%s scontrol show job "$SLURM_JOB_ID") || break
    done
    [[ $facts =~ SubmitTime=([0-9]+) ]] || fail "Slurm does not say when job $SLURM_JOB_ID was submitted, see above: submit it again"
    # A job that is submitted inside another job (salloc, JupyterHub) inherits these variables from it.
    [[ $facts == *ArrayJobId=* ]] || unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_{ID,COUNT,MAX,MIN,STEP}
    [[ $facts != *" Restarts=0 "* ]] || unset SLURM_RESTART_COUNT
    [[ $facts != *HetJobId=* ]] || fail "this is a heterogeneous job, and all ranks would be in its first part: submit it without ':' and hetjob"
    origin=${SLURM_CLUSTER_NAME:-slurm}-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
    # A requeue is a new submission of the job.
    found=$(printf '%s\n' "logs/code-$origin"-* | sort -V | tail -n 1)
    [[ -n ${SLURM_RESTART_COUNT:-} && -L $found ]] || found=logs/code-$origin-${BASH_REMATCH[1]}
    origin=${found#logs/code-}
    if [[ ! -L $found ]]; then
        snapshot=
        ! wants_snapshot || take_snapshot
        # If another task of the array was faster, this task runs the code of that one.
        ln -s "../${snapshot:+.snapshots/$snapshot}" "$found" 2>/dev/null
    fi
    found=$(readlink "$found")
    [[ $found != ../ ]] || return 0
    export CODE_DIR=$PWD/.snapshots/${found##*/}
    [[ -d $CODE_DIR ]] || fail "$CODE_DIR, the code of this job, is gone: submit the job again"
}
