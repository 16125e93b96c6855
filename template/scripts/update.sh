#!/usr/bin/env bash
# Brings the newest version of the template into this project: `make update`. Arguments go to `copier update`.
# Copier works in a temporary clone, which also gets the edits that git does not see: those in ignored files,
# and in files with the flags skip-worktree or assume-unchanged. This folder changes after that has succeeded.
set -Eeuo pipefail
unset CDPATH && cd "$(dirname "$0")/.."
fail() {
    echo "error: $*; ${undo:-nothing has changed}" >&2
    exit 1
}
trap 'fail "$BASH_COMMAND failed, see above"' ERR
git() { command git -c core.quotePath=off -c core.hooksPath=/dev/null -c user.name=update -c user.email=update "$@"; }
recorded() { sed -nE "/^$1: */{s///;s/^'(.*)'$/\1/;s/''/'/g;p}" .copier-answers.yml; }
note() { echo "$2" >>"$folder/$1"; }
tell() { [[ ! -s $folder/$1 ]] || { echo "$2:" && sed 's/^/    /' "$folder/$1"; }; }
edits() { git status --porcelain --untracked-files=normal --ignore-submodules=dirty; }
check_edits() { [[ -z $(edits) ]] || fail "some changes are not committed: run 'git add --all' and 'git commit'"; }
case $(type -P copier uvx pipx | head -n 1 || true) in
*/uvx) copier() { uvx copier "$@"; } ;;
*/pipx) copier() { pipx run copier "$@"; } ;;
"") fail "copier is missing, and uvx and pipx too: install one of them first" ;;
esac
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_PREFIX GIT_OBJECT_DIRECTORY # git sets them in hooks and aliases
home=$(git rev-parse --absolute-git-dir) || fail "this folder is not in a git repository: run 'git init' first"
[[ -z $(edits) || -z $(compgen -G "$home/update-*") ]] || undo="'git add --all && git stash' undoes it" fail "an update was killed"
check_edits && rm -rf "$home"/update-* && old=$(git rev-parse HEAD) top=$(git rev-parse --show-toplevel)
folder=$(mktemp -d "$home/update-XXXXXX") # on this disk: a file moves to its place even if it is full
trap 'rm -rf "$folder"' EXIT
trap 'fail "interrupted"' INT TERM HUP
clone=$folder/clone/$(git rev-parse --show-prefix)
# With some settings of yours, git would drop edits, and hide conflicts from Copier.
GIT_LFS_SKIP_SMUDGE=1 git clone -c apply.whitespace=nowarn -c status.showUntrackedFiles=normal -q --shared "$top" "$folder/clone"
{
    git ls-files -v | sed -n 's/^[a-zS] //p' | tee "$folder/flagged"
    # Ignored files where the template has some, except secrets and what other programs write.
    git ls-files --others --ignored --exclude-standard -- ':(glob)*' .github configs container docs scripts slurm \
        src tests ':!.env' ':!slurm/site.sh' ':!*.pyc' ':!container/env'
} | while IFS= read -r name; do find "./$name" -maxdepth 0 -type f -size -1024k 2>/dev/null || true; done >"$folder/hidden"
tar -cf - -T "$folder/hidden" | tar -xpf - -C "$clone"
find "$clone" -name .git -prune -o -type l -exec rm {} + # Copier refuses links that lead outside
git -C "$clone" add --all --force
git -C "$clone" commit --quiet --no-gpg-sign --allow-empty --message "The project as it is"

[[ ! -t 0 ]] && ask=--defaults || ask=--skip-answered # ask the new questions, if somebody is there
(cd "$clone" && copier update "$ask" "$@") 2>"$folder/log" ||
    fail "copier update failed: $(grep '^[^ ]' "$folder/log" | tail -n 1)"
git -C "$clone" ls-files --unmerged --full-name >"$folder/unmerged"
git -C "$clone" add --all --force
git -C "$clone" diff --cached --no-renames --relative --name-status HEAD | LC_ALL=C sort -rk 2 >"$folder/changes" # the answers last
[[ -s $folder/changes ]] || { echo "nothing has changed: this project has $(recorded _commit) of the template" && exit; }
copier copy -q --defaults --vcs-ref "$(recorded _commit)" --data-file .copier-answers.yml "$(recorded _src_path)" "$folder/old" 2>"$folder/why" ||
    fail "copier copy failed: $(tail -n 1 "$folder/why")"
check_edits && [[ $(git rev-parse HEAD) == "$old" ]] || fail "there are new commits: run it again"
trap '' INT TERM HUP # from here on, this folder changes
undo="'git add --all && git stash' undoes what was done" saved=$(git rev-parse --git-path before-update)/$(date +%F-%H-%M-%S)
mkdir -p "$saved" && tar -cf - -T "$folder/hidden" | tar -xpf - -C "$saved"
while IFS=$'\t' read -r status name; do
    hidden='' path=$name
    ! grep -qxF "./$name" "$folder/hidden" || hidden=yes
    until [[ $path != */* || -L ${path%/*} || -e ${path%/*}/.git ]]; do path=${path%/*}; done
    if [[ $path == */* || -d $name || $status$hidden == Dyes || ($status == A && (-e $name || -L $name)) ]] ||
        { [[ -z $hidden ]] && grep -qxF "$name" "$folder/flagged"; }; then # a link, or too large
        note kept "$name"
    elif [[ $status == D ]]; then
        cmp -s "$name" "$folder/old/$name" || note gone "$name"
        rm -f "./$name"
    else
        [[ $status != A || -z $(git log -1 --format=%h -- "$name") ]] || note back "$name"
        [[ -z $hidden ]] || note merged "$name"
        [[ -n $hidden ]] || cmp -s "$name" "$folder/old/$name" || [[ $(git -C "$clone" diff --cached --numstat HEAD -- "$name") != -* ]] || note gone "$name" # binary
        mkdir -p "$(dirname "./$name")" && mv -f "$clone/$name" "./$name"
    fi
done <"$folder/changes"
cut -f 2 "$folder/unmerged" | sort -u >"$folder/conflicts" # git commits only after they are settled
while read -r _ blob _; do git -C "$clone" cat-file blob "$blob" | git hash-object -w --stdin; done <"$folder/unmerged" >/dev/null
{ sed "s/^/0 $(printf %040d 0)\t/" "$folder/conflicts" && cat "$folder/unmerged"; } | git -C "$top" update-index --index-info
sed '1,/^ *To undo the update/d' "$folder/log" # the template's advice on your answers
tell conflicts "you and the template changed the same lines: look for <<<<<<< in"
tell gone "deleted or replaced, with your edits: 'git checkout HEAD -- FILE' brings one back"
tell back "made again, because these files are yours, or new under a name that you deleted"
tell kept "not changed, because git does not see your edits in them, or a link or repository of yours is there"
tell merged "changed where git does not look; $saved has what you had"
git diff --unified=0 --no-color --no-ext-diff -- .copier-answers.yml | sed -n 's/^\([-+]\([a-z]\|- \)\)/answers: \1/p'
[[ -z $(edits) && ! -s $folder/merged ]] || echo "updated to $(recorded _commit): read 'git status' and 'git diff', run 'make setup test', and commit"
