# Keeps the code that a job runs as it was submitted. slurm/common.sh and slurm/submit.sh source this file.
# shellcheck shell=bash

# Succeeds unless CODE_SNAPSHOT=0 in the environment, or a line of slurm/site.sh, lets jobs run the folder's code.
wants_snapshot() {
    local given=${CODE_SNAPSHOT:-$(sed -nE 's/^(export )?CODE_SNAPSHOT=([^ #]*).*/\2/p' slurm/site.sh 2>/dev/null)}
    [[ ${given:-1} =~ ^[01]$ ]] || fail "CODE_SNAPSHOT is '$given': it must be 0 or 1"
    [[ ${given:-1} == 1 ]]
}

# Lists the code, each name with a null byte behind it: what git knows, and new files that it does not
# ignore. Without git, all but caches.
list_code() {
    local parts=(src configs slurm/*.sh .copier-answers.yml) path
    if [[ -n $(git ls-files -co --exclude-standard src 2>/dev/null | head -n 1) ]]; then
        git ls-files -coz --exclude-standard -- "${parts[@]}" | LC_ALL=C sort -zu
    else
        find "${parts[@]}" \( -name __pycache__ -o -name '.*_cache' -o -name '*.egg-info' \) -prune -o \
            ! -type d -print0 2>/dev/null || true
    fi | while IFS= read -r -d '' path; do
        if [[ -d $path && ! -L $path ]]; then # a repository in this one
            git -C "$path" ls-files -coz --exclude-standard | xargs -0r -I {} printf '%s\0' "$path{}"
        elif [[ -e $path ]]; then
            printf '%s\0' "$path"
        fi
    done
}

# describe_code FOLDER: writes there what git says about the code.
describe_code() {
    local parts=(src configs slurm ':!slurm/site.sh') # which may hold a key
    # With its time, by which git knows of edits in the second of a commit.
    cp -p "$(git rev-parse --git-path index)" "$1/index" || return
    export GIT_INDEX_FILE=$PWD/$1/index # new files are added to it
    git rev-parse HEAD >"$1/commit" && git describe --always --dirty --abbrev=12 >"$1/describe" &&
        git status --short -- "${parts[@]}" >"$1/changes" &&
        git add --intent-to-add -- "${parts[@]}" &&
        git diff --no-ext-diff --no-color HEAD -- "${parts[@]}" >"$1/diff" && rm "$1/index"
}

# refuse FOLDER WHY: ends the job, which cannot take its snapshot.
refuse() {
    rm -rf "$1" "$1.tar.gz"
    fail "cannot keep the code in $PWD/.snapshots: ${2%%$'\n'*}: make room, or set CODE_SNAPSHOT=0 to run the code of this folder"
}

# Copies the code to .snapshots/HASH and sets `snapshot` to that hash, of its content.
take_snapshot() {
    local new=.snapshots/new-$HOSTNAME-$$ size said
    size=$(list_code | du -bcL --files0-from=- | tail -n 1 | cut -f 1)
    ((size < 50 * 2 ** 20)) ||
        fail "the code has $((size >> 20)) MiB, and 50 are the most that is kept for a job: move data out of src/ and configs/, or set CODE_SNAPSHOT=0"
    said=$({ mkdir -p "$new/git" && list_code | xargs -0 cp -rpL --parents -t "$new"; } 2>&1) ||
        refuse "$new" "$said"
    (describe_code "$new/git") 2>/dev/null || rm -r "$new/git" # there is no git, or no commit
    snapshot=$(cd "$new" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)
    snapshot=${snapshot:0:12}
    # For the folders of runs. slurm/site.sh stays here.
    said=$({ tar -czf "$new.tar.gz" -C "$new" --exclude=./slurm/site.sh --exclude=./git . && mv "$new.tar.gz" "$new/code.tar.gz"; } 2>&1) ||
        refuse "$new" "$said"
    find "$new" -type f -exec chmod a-w {} + # other jobs may run the same code
    # Another job may have it, or be as fast.
    mv -T "$new" ".snapshots/$snapshot" 2>/dev/null || rm -r "$new"
}

# Sets CODE_DIR to the snapshot that this job runs; its first start takes one, unless submit.sh did.
find_code() {
    local link=logs/code-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
    unset CODE_DIR
    if [[ ! -L $link ]]; then
        wants_snapshot || return 0
        take_snapshot
        # If another task of an array was faster, its code counts.
        ln -s "../.snapshots/$snapshot" "$link" 2>/dev/null
    fi
    CODE_DIR=$PWD/.snapshots/$(basename "$(readlink "$link")")
    export CODE_DIR
    [[ -d $CODE_DIR ]] || fail "$CODE_DIR, the code of this job, is gone: submit the job again"
}
