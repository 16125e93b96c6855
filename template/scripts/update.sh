#!/usr/bin/env bash
# Brings the newest version of the template into this project: `make update`. Arguments go to `copier update`.
# Copier works in a temporary clone, which also gets the edits that git does not see: those in ignored files,
# and in files with the flags skip-worktree or assume-unchanged. This folder changes only after the update has
# succeeded, so an update that fails or is interrupted leaves it as it was.
set -euo pipefail
unset CDPATH && cd "$(dirname "$0")/.."
fail() {
    echo "error: $*; nothing has changed" >&2
    exit 1
}
git() { command git -c core.quotePath=off -c core.hooksPath=/dev/null -c user.name=update -c user.email=update "$@"; }
recorded() { sed -nE "s/^$1: *'?([^']*)'?$/\1/p" .copier-answers.yml; }
# note LIST NAME and tell LIST TITLE: adds a file to a list, and prints a list that is not empty.
note() { echo "$2" >>"$folder/$1"; }
tell() { [[ ! -s $folder/$1 ]] || { echo "$2:" && sed 's/^/    /' "$folder/$1"; }; }

command -v copier >/dev/null || fail "copier is missing: run 'pipx install copier' first"
edits=$(git status --porcelain) || fail "this folder is not in a git repository: run 'git init' first"
[[ -z $edits ]] || fail "some changes are not committed: run 'git add --all' and 'git commit' first"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'fail "interrupted"' INT TERM HUP

top=$(git rev-parse --show-toplevel) clone=$folder/clone/$(git rev-parse --show-prefix)
GIT_LFS_SKIP_SMUDGE=1 git clone --quiet --shared "$top" "$folder/clone" || fail "git can't clone this folder"
{
    git ls-files -v | sed -n 's/^[a-zS] //p'
    # Ignored files where the template has some, except secrets and what other programs write.
    git ls-files --others --ignored --exclude-standard -- ':(glob)*' .github configs container docs scripts slurm \
        src tests ':!.env' ':!slurm/site.sh' ':!*.tar*' ':!*.pyc' ':!*.sif' ':!container/env'
} >"$folder/hidden"
while IFS= read -r name; do
    [[ ! -f $name || -L $name ]] || { mkdir -p "$clone/$(dirname "$name")" && cp -p "$name" "$clone/$name"; }
done <"$folder/hidden"
# Copier refuses to write through links that lead outside the project.
find "$clone" -name .git -prune -o -type l -exec rm {} +
git -C "$clone" add --all --force
git -C "$clone" commit --quiet --no-gpg-sign --allow-empty --message "The project as it is"

[[ ! -t 0 ]] && ask=--defaults || ask=--skip-answered # ask the new questions, if somebody is there
(cd "$clone" && exec copier update "$ask" "$@") 2>"$folder/log" ||
    fail "copier update failed: $(grep '^[^ ]' "$folder/log" | tail -n 1)"
git -C "$clone" ls-files --unmerged --full-name >"$folder/unmerged"
git -C "$clone" add --all --force
git -C "$clone" diff --cached --no-renames --relative --name-status HEAD >"$folder/changes"
[[ -s $folder/changes ]] || { echo "this project has the newest version of the template: $(recorded _commit)" && exit; }
! grep -q '^D' "$folder/changes" || # which of these files were edited?
    copier copy --quiet --defaults --vcs-ref "$(recorded _commit)" --data-file .copier-answers.yml \
        "$(recorded _src_path)" "$folder/old" 2>"$folder/why" || fail "copier copy failed: $(tail -n 1 "$folder/why")"

trap '' INT TERM HUP # from here on, the update is brought into this folder
while IFS=$'\t' read -r status name; do
    hidden='' path=$name saved=$(git rev-parse --git-path "before-update/$name")
    ! grep -qxF -- "$name" "$folder/hidden" || hidden=yes
    until [[ $path != */* || -L ${path%/*} ]]; do path=${path%/*}; done
    if [[ $path == */* || $status$hidden == Dyes || ($status == A && (-e $name || -L $name)) ]]; then
        note kept "$name"
    elif [[ $status == D ]]; then
        cmp -s "$name" "$folder/old/$name" || note gone "$name"
        rm -f "$name"
    else
        [[ $status != A || -z $(git log -1 --format=%h -- "$name") ]] || note back "$name"
        [[ -z $hidden ]] || { mkdir -p "${saved%/*}" && cp -p "$name" "$saved" && note merged "$name"; }
        rm -f "$name" && mkdir -p "$(dirname "$name")" && cp -p "$clone/$name" "$name" # bash may be reading the old file
    fi
done <"$folder/changes"
# git then shows the conflicts, and commits only after they are settled.
cut -f 2 "$folder/unmerged" | sort -u >"$folder/conflicts"
while read -r _ blob _; do
    git -C "$clone" cat-file blob "$blob" | git hash-object -w --stdin >/dev/null
done <"$folder/unmerged"
{ sed "s/^/0 $(printf %040d 0)\t/" "$folder/conflicts" && cat "$folder/unmerged"; } | git -C "$top" update-index --index-info
sed '1,/^ *To undo the update/d' "$folder/log" # the template's advice on your answers
tell conflicts "you and the template changed the same lines: look for <<<<<<< in"
tell gone "deleted, with your edits: 'git checkout HEAD -- FILE' brings one back"
tell back "made again, because these files are yours"
tell kept "left as they were, because git does not see your edits in them, or a link leads there"
tell merged "changed where git does not look; $(git rev-parse --git-path before-update) has what you had"
echo "updated to $(recorded _commit): read 'git diff', run 'make setup test', and commit"
