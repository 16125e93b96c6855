"""The CI job of a project that looks for a newer template and opens a pull or merge request.

Copier, git, the remote and its push options are real. `gh` is a stand-in that records its
arguments.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pages
import pytest
import yaml
from histories import IDENTITY, commit, contents, git, render
from packaging.requirements import Requirement
from renderer import QUESTIONNAIRE, copy_template

KEPT = (
    "README.md.jinja",
    "updates.md.jinja",
    "train.yaml.jinja",
    "template.sh.jinja",
    "ci.yml.jinja",
    "template.yml",
    "Makefile.jinja",
    "update.sh",
    "with_words.py",
)
KEPT += (".gitlab-ci.yml.jinja", "{{ _copier_conf.answers_file }}.jinja", ".gitignore.jinja")
BRANCH = "template-update"
TOKEN = "the-token"
URL = "https://gitlab.example.org/ada/project"
GH = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" '--' >>"$GH_RECORD"
case "$1 $2" in
"auth git-credential") printf 'username=x\\npassword=%s\\n' "${GH_TOKEN:-}" ;;
"pr list") cat "$GH_RECORD.open" 2>/dev/null ;;
"pr create") [[ -z ${GH_REFUSES:-} ]] || { echo "$GH_REFUSES" >&2; exit 1; }
    echo 7 >"$GH_RECORD.open" ;;
esac
exit 0
"""
COPIER = """\
#!/usr/bin/env bash
# Copier, which writes down where it could read a token.
{ env && cat .git/config; } >>"$GH_RECORD.seen" 2>/dev/null
exec PYTHON -m copier "$@"
"""
GIT = """\
#!/usr/bin/env bash
# git, which writes down its arguments, as every program of the machine can read them.
echo "$@" >>"$GH_RECORD.git"
exec GIT "$@"
"""
HOOK = """\
#!/usr/bin/env bash
for ((i = 0; i < ${GIT_PUSH_OPTION_COUNT:-0}; i++)); do
    name=GIT_PUSH_OPTION_$i
    echo "${!name}" >>push-options
done
cat warning 2>/dev/null
exit 0
"""


class Site:
    """A template with releases, a project of it, and the project's remote."""

    def __init__(self, folder: Path, ci: str) -> None:
        self.template, self.ci = copy_template(folder / "template"), ci
        for path in (self.template / "template").rglob("*"):
            if path.is_file() and path.name not in KEPT:
                path.unlink()
        commit(self.template, "The first release", tag="v1.1.0")
        self.project, self.origin = folder / "project", folder / "origin.git"
        render(self.template, self.project, {"package_name": "demo", "ci": ci}, "v1.1.0")
        commit(self.project, "From the template")
        git(folder, "clone", "--quiet", "--bare", str(self.project), str(self.origin))
        git(self.project, "remote", "add", "origin", f"file://{self.origin}")
        git(self.origin, "config", "receive.advertisePushOptions", "true")
        programs = folder / "programs"
        programs.mkdir()
        for path, text in (
            (programs / "gh", GH),
            (programs / "copier", COPIER.replace("PYTHON", sys.executable)),
            (programs / "git", GIT.replace("GIT", str(shutil.which("git")))),
            (self.origin / "hooks/post-receive", HOOK),
        ):
            path.write_text(text)
            path.chmod(0o755)
        # What a job has: nobody's identity, and GitLab's address.
        self.record = folder / "gh.txt"
        configuration = folder / "gitconfig"
        configuration.write_text(f'[url "file://{self.origin}"]\n\tinsteadOf = {URL}.git\n')
        self.environment = os.environ | {
            "GIT_CONFIG_GLOBAL": str(configuration),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GH_RECORD": str(self.record),
            "CI_PROJECT_URL": URL,
        }

    def release(self, tag: str) -> None:
        """Release another version of the template: its .gitignore ends with the tag."""
        with (self.template / "template/.gitignore.jinja").open("a") as file:
            file.write(f"# {tag}\n")
        commit(self.template, tag, tag=tag)

    def edit(self, path: str, text: str, message: str = "Our own work") -> None:
        """Commit a file of the project, and push it."""
        (self.project / path).write_text(text)
        commit(self.project, message)
        git(self.project, "push", "--quiet", "origin", "HEAD:main")

    def run(self, *, propose: bool = False, **environment: str) -> tuple[int, str]:
        """Run the jobs' commands; return the exit code and what they say, checked for traces."""
        before, said, bundle = self.state(), "", self.record.with_name("update.bundle")
        artifact = bundle.parent / "update" / bundle.name  # where GitHub's second job has it
        seen = Path(f"{self.record}.seen")
        for path in (bundle, artifact):
            path.unlink(missing_ok=True)
        for command, token in jobs(self.project, propose=propose):
            if "pip" in command.partition("copier")[0]:
                assert TOKEN not in token.values()
                continue
            if bundle.exists():
                artifact.parent.mkdir(exist_ok=True)
                shutil.copy(bundle, artifact)
            done = subprocess.run(
                ["bash", "-ec", command.replace(" update.bundle", f" {bundle}")],
                cwd=self.project,
                env=self.environment | {"RUNNER_TEMP": str(bundle.parent)} | token | environment,
                capture_output=True,
                text=True,
            )
            said += done.stdout + done.stderr
            if done.returncode:
                break
        assert self.state() == before, "the job leaves the project as it was"
        assert not seen.exists() or TOKEN not in seen.read_text(), "Copier could read the token"
        assert not re.search(f"{TOKEN}|Authorization", Path(f"{self.record}.git").read_text())
        return done.returncode, said

    def state(self) -> tuple[object, ...]:
        """Return all that the job must not touch."""
        seen = [
            git(self.project, *words.split()) for words in ("branch", "status", "worktree list")
        ]
        return contents(self.project), seen

    def proposed(self, path: str) -> str:
        """Return a file on the job's branch of the remote."""
        return git(self.origin, "show", f"{BRANCH}:{path}")

    def requests(self) -> list[str]:
        """Return what GitHub or GitLab was asked for, a text each time; looking is left out."""
        if self.ci == "github":
            calls = self.record.read_text().split("--\n") if self.record.exists() else []
            return [call for call in calls if call and not call.startswith("pr\nlist")]
        options = self.origin / "push-options"
        said = options.read_text().split("merge_request.create\n") if options.exists() else [""]
        return said[1:]


def jobs(project: Path, *, propose: bool) -> list[tuple[str, dict[str, str]]]:
    """Return the commands of the CI jobs, each with the variables in which it has the token."""
    if (project / ".gitlab-ci.yml").exists():
        pipeline = yaml.safe_load((project / ".gitlab-ci.yml").read_text())
        chosen = [
            pipeline[name] for name in (("template", "propose") if propose else ("template",))
        ]
        asked = {"TEMPLATE_MERGE_REQUESTS": "true"} if propose else {}
        # GitLab gives the token to the jobs of its environment only.
        scoped = [
            asked | ({"TEMPLATE_TOKEN": TOKEN} if "environment" in each else {}) for each in chosen
        ]
        return [
            (line, token)
            for each, token in zip(chosen, scoped, strict=True)
            for line in each["script"]
        ]
    workflow = yaml.safe_load((project / ".github/workflows/template.yml").read_text())
    chosen = [workflow["jobs"][name] for name in (("prepare", "propose") if propose else ("tell",))]
    assert not any("env" in each for each in (workflow, *chosen)), (
        "a step's own, where it is needed"
    )
    steps = [step for each in chosen for step in each["steps"] if "run" in step]
    return [(step["run"], dict.fromkeys(step.get("env", {}), TOKEN)) for step in steps]


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    """A site with GitHub, or with what the test asks for."""
    return Site(tmp_path, getattr(request, "param", "github"))


both = pytest.mark.parametrize("site", ["github", "gitlab"], indirect=True)


@both
def test_the_job_installs_a_copier_and_runs_the_script(site: Site) -> None:
    for propose in (False, True):
        install, script, *_ = [line for line, _ in jobs(site.project, propose=propose)]
        requirement = Requirement(install.split('"')[1])
        assert QUESTIONNAIRE["_min_copier_version"] in requirement.specifier
        assert "9.0.0" not in requirement.specifier and "10.0.0" not in requirement.specifier
        assert "bash scripts/template.sh" in script
        assert (site.project / "scripts/template.sh").exists()


def test_only_the_job_that_proposes_may_write(site: Site) -> None:
    workflow = yaml.safe_load((site.project / ".github/workflows/template.yml").read_text())
    for name in ("tell", "prepare"):
        assert workflow["jobs"][name]["permissions"] == {"contents": "read"}
    assert "schedule" in workflow[True], "YAML 1.1 reads `on` as true"
    conditions = [workflow["jobs"][name]["if"] for name in ("tell", "prepare")]
    assert conditions == [f"vars.TEMPLATE_PULL_REQUESTS {sign} 'true'" for sign in ("!=", "==")]
    assert workflow["jobs"]["propose"]["needs"] == "prepare"


def test_the_commands_of_the_page_on_updates(site: Site) -> None:
    site.release("v2.0.0")
    page = (site.project / "docs/updates.md").read_text()
    typed = [command.line for command in pages.commands(page) if not command.needs]
    for line in (*typed, *re.findall(r"`(make update [^`]+)`", page)):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=site.project,
            env=site.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        if line == "git diff":
            assert b"+# v2.0.0" in done.stdout
        if line == "git diff" or "--data" in line:
            commit(site.project, "The update")
    assert "launcher: torchrun\n" in (site.project / ".copier-answers.yml").read_text()


@both
def test_it_tells(site: Site) -> None:
    code, said = site.run()
    assert (code, said.count("\n")) == (0, 1) and "has the newest" in said
    site.release("v2.0.0")
    code, said = site.run(GITHUB_ACTIONS="true")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("::error::") or site.ci == "gitlab"
    assert "has 1.1.0: run 'make update'" in said
    assert git(site.origin, "branch", "--list").split() == ["*", "main"]


@both
def test_a_proposal_is_one_commit_on_one_branch_with_one_request(site: Site) -> None:
    assert site.run(propose=True)[0] == 0 and not site.requests(), "nothing is new"
    site.release("v2.0.0")
    code, said = site.run(propose=True)
    assert code == 0 and f"the branch {BRANCH} brings" in said
    assert re.fullmatch(".* v2.0.0\n", git(site.origin, "log", "--format=%s", f"main..{BRANCH}"))
    assert site.proposed(".gitignore").endswith("# v2.0.0\n")
    assert len(site.requests()) == 1 and "template to v2.0.0" in site.requests()[0]
    assert "main" in site.requests()[0].split() or "merge_request.target=main" in site.requests()[0]

    # A week later, and with the work going on, there is nothing to add.
    first = git(site.origin, "rev-parse", BRANCH)
    site.edit("model.py", "ours = True\n")
    code, said = site.run(propose=True)
    assert code == 0 and "waits on" in said
    assert git(site.origin, "rev-parse", BRANCH) == first and len(site.requests()) == 1

    # The next version takes the place of the last one, on top of today's work.
    site.release("v2.1.0")
    code, said = site.run(propose=True)
    assert code == 0, said
    assert re.fullmatch(".* v2.1.0\n", git(site.origin, "log", "--format=%s", f"main..{BRANCH}"))
    assert site.proposed("model.py") == "ours = True\n"
    if site.ci == "github":
        assert [call.splitlines()[:2] for call in site.requests()] == [
            ["pr", "create"],
            ["api", "--silent"],
        ]
        assert "repos/{owner}/{repo}/pulls/7" in site.requests()[1]
    assert "template to v2.1.0" in site.requests()[1]
    assert len(site.requests()) == 2


def colleague(site: Site, path: str, text: str) -> str:
    """Push a commit to the job's branch, as somebody else; return it."""
    clone = site.project.with_name("clone")
    git(clone.parent, "clone", "--quiet", "--branch", BRANCH, f"file://{site.origin}", str(clone))
    (clone / path).write_text(text)
    commit(clone, "Settled")
    git(clone, "push", "--quiet", "origin", BRANCH)
    return git(clone, "rev-parse", "HEAD")


@both
def test_what_somebody_pushed_to_the_branch_stays(site: Site) -> None:
    site.release("v2.0.0")
    assert site.run(propose=True)[0] == 0
    theirs = colleague(site, "notes.txt", "theirs\n")
    code, said = site.run(propose=True)
    assert code == 0 and "waits on" in said
    site.release("v2.1.0")
    code, said = site.run(propose=True)
    assert code == 2 and "of somebody else" in said
    assert git(site.origin, "rev-parse", BRANCH) == theirs and len(site.requests()) == 1


@both
def test_conflicts_deletions_and_new_questions_are_named(site: Site) -> None:
    settings = (site.project / ".gitignore").read_text()
    site.edit(".gitignore", settings + "# ours\n")
    (site.template / "template/README.md.jinja").unlink()
    questionnaire = site.template / "copier.yml"
    questionnaire.write_text(questionnaire.read_text() + "\ncolour:\n  type: str\n  default: red\n")
    site.release("v2.0.0")
    assert site.run(propose=True)[0] == 0
    (text,) = site.requests()
    assert "CONFLICTS: update" in text
    assert "Draft: " in text or site.ci == "github"
    assert "not merge this" in text and "this branch: .gitignore" in text
    assert "in them: README.md." in text
    assert "their defaults: colour." in text
    assert "<<<<<<<" in site.proposed(".gitignore")
    assert "# ours" in site.proposed(".gitignore")


@pytest.mark.parametrize("propose", [False, True], ids=["tell", "propose"])
def test_a_template_out_of_reach(site: Site, propose: bool) -> None:
    site.template.rename(site.template.with_name("moved"))
    code, said = site.run(propose=propose)
    assert (code, said.count("\n")) == (1, 1)
    assert f"template, {site.template}: Checking is" in said
    answers, address = site.project / ".copier-answers.yml", "https://127.0.0.1:9/ada/template.git"
    site.edit(answers.name, answers.read_text().replace(str(site.template), address))
    code, said = site.run(propose=propose)
    assert (code, said.count("\n")) == (1, 1)
    assert f"template, {address}: fatal: unable" in said


def test_a_project_without_answers_or_remote(site: Site) -> None:
    site.release("v2.0.0")
    git(site.project, "remote", "set-url", "origin", "file:///nowhere")
    code, said = site.run(propose=True)
    assert code == 1 and "read the remote 'origin'" in said
    (site.project / ".copier-answers.yml").unlink()
    code, said = site.run()
    assert code == 1 and ".copier-answers.yml is missing" in said


def test_a_refused_push(site: Site) -> None:
    """As GitHub refuses a job's own token a change of workflows."""
    refusal = site.origin / "hooks/update"
    refusal.write_text("#!/bin/sh\nexit 1\n")
    refusal.chmod(0o755)
    site.release("v2.0.0")
    code, said = site.run(propose=True)
    assert code == 1 and "can't be pushed; docs/updates.md" in said
    assert not site.requests()


@both
def test_a_refused_request_is_tried_again(site: Site) -> None:
    site.release("v2.0.0")
    warning = site.origin / "warning"
    warning.write_text("WARNINGS: Error encountered with push options\n")
    code, said = site.run(propose=True, GH_REFUSES="GitHub Actions is not permitted to do this")
    told = {"github": "allows it: GitHub", "gitlab": "no merge request"}
    assert code == 1 and told[site.ci] in said
    assert git(site.origin, "branch", "--list").split() == ["*", "main"]
    warning.unlink()
    assert site.run(propose=True)[0] == 0
    assert "# v2.0.0" in site.proposed(".gitignore")


@both
def test_what_ci_runs_is_not_pushed(site: Site) -> None:
    """A Copier that is compromised writes what it likes, but without the token."""
    copier = site.record.with_name("programs") / "copier"
    path = {"github": ".github/workflows/theirs.yml", "gitlab": ".gitlab-ci.yml"}[site.ci]
    theirs = f"[[ $1 != update ]] || echo '# theirs' >>{path}\n"
    honest = copier.read_text()
    copier.write_text(f"{honest.replace('exec ', '')}{theirs}")
    site.release("v2.0.0")
    code, said = site.run(propose=True)
    assert code == 1 and f"v2.0.0 changes {path}, which CI" in said, said
    # An earlier commit of the bundle would be pushed too.
    theirs += "[[ $1 != update ]] || { git add --all && git commit --quiet --message Theirs; }\n"
    copier.write_text(honest.replace("exec ", f"{theirs}exec "))
    code, said = site.run(propose=True, **IDENTITY)
    assert code == 1 and "not one commit" in said, said
    assert git(site.origin, "branch", "--list").split() == ["*", "main"] and not site.requests()


def test_a_shallow_clone_is_enough(site: Site, tmp_path: Path) -> None:
    """As a job has it."""
    for name in ("one", "two"):
        site.edit("model.py", f"{name} = True\n")
    shutil.rmtree(site.project)
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{site.origin}", str(site.project))
    for release in ("v2.0.0", "v2.1.0"):
        site.release(release)
        code, said = site.run(propose=True)
        assert code == 0, said
    assert re.fullmatch(".* v2.1.0\n", git(site.origin, "log", "--format=%s", f"main..{BRANCH}"))


class Asks(BaseHTTPRequestHandler):
    """A server that asks for a login, and then refuses it."""

    logins: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Note the login."""
        login = self.headers.get("Authorization", "")
        if login:
            self.logins.append(base64.b64decode(login.removeprefix("Basic ")).decode())
        self.send_response(403 if login else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="git"')
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("site", ["gitlab"], indirect=True)
def test_git_asks_the_environment_for_gitlabs_token(site: Site) -> None:
    site.release("v2.0.0")
    Asks.logins.clear()
    with HTTPServer(("127.0.0.1", 0), Asks) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/ada/project"
        code, said = site.run(propose=True, CI_PROJECT_URL=address)
        server.shutdown()
    assert code == 1 and f"{BRANCH} can't be" in said
    assert Asks.logins == [f"template:{TOKEN}"]


def test_git_gets_the_token_from_gh(site: Site) -> None:
    """The checkout keeps none, so a private repository asks for it."""
    site.release("v2.0.0")
    Asks.logins.clear()
    with HTTPServer(("127.0.0.1", 0), Asks) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/ada/project.git"
        git(site.project, "remote", "set-url", "origin", address)
        code, said = site.run(propose=True)
        server.shutdown()
    assert code == 1 and "read the remote 'origin'" in said
    assert Asks.logins == [f"x:{TOKEN}"]
    assert TOKEN not in (site.project / ".git/config").read_text()
