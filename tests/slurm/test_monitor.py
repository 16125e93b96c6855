"""The trackers' servers as jobs: started, opened in a browser, stopped."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import variants

from .cluster import wait_for
from .conftest import MakeProject
from .jobs import Project

SERVERS = sorted({*variants.SERVERS} & {*variants.INSTALLED})
# Prints the HTTP status of a request.
STATUS = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}")
TINY = ("--dataset=synthetic", "--max-steps=20", "--log-every=5", "--experiment=seen")


@pytest.fixture(scope="module")
def project(make_project: MakeProject) -> Project:
    """A project with all servers."""
    return make_project(launch_modes=["cpu"], trackers=SERVERS, monitoring_servers=SERVERS)


@pytest.fixture(autouse=True)
def _forget(project: Project) -> Iterator[None]:
    """Leave no records to the next test; its jobs are cancelled anyway."""
    yield
    shutil.rmtree(project.root / "runs/.servers-root", ignore_errors=True)


# Runs a command, and ends it by Ctrl-C once it has said something.
INTERRUPT = """
set -m
said=$(mktemp)
"${@:2}" >"$said" 2>&1 &
until grep -qF "$1" "$said" || ! kill -0 $! 2>/dev/null; do sleep 0.2; done
kill -INT $!
wait $!
code=$?
cat "$said"
exit $code
"""


def monitor(project: Project, *words: str, code: int = 0, until: str = "") -> str:
    """Run `monitor` on the login node until it prints something; return its output."""
    command = [".venv/bin/python", "-m", "demo", "monitor", *words]
    if until:
        command = ["bash", "-c", INTERRUPT, "bash", until, *command]
    done = project.cluster.run(*command, cwd=project.root, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def records(project: Project) -> list[dict]:
    """The records that there are; nobody else may read them."""
    folder = project.root / "runs/.servers-root"
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in sorted(folder.iterdir()) if path.name != "lock"]
    assert {path.stat().st_mode & 0o777 for path in files} <= {0o600}
    return [json.loads(path.read_text()) for path in files if path.suffix == ".json"]


def only_record(project: Project, server: str) -> dict:
    """The record of a server."""
    (record,) = (record for record in records(project) if record["server"] == server)
    return record


def queue(project: Project) -> set[str]:
    """The jobs that there are."""
    return set(project.cluster.run("squeue", "--noheader", "--format=%i").stdout.split())


def on_node(project: Project, record: dict, *command: str, **env: str) -> str:
    """Run a command in a server's job; return its output."""
    step = ("srun", "--overlap", f"--jobid={record['job']}", *command)
    done = project.cluster.run(*step, cwd=project.root, check=False, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetch(project: Project, record: dict, path: str) -> dict:
    """Fetch a page of JSON on the server's node."""
    where = ("--unix-socket", record["socket"]) if record["socket"] else ()
    url = f"http://127.0.0.1:{record['port']}{path}"
    return json.loads(on_node(project, record, "curl", "--silent", "--fail", *where, url))


def look(project: Project, record: dict, path: str, text: str, *login: str) -> None:
    """See a text on a page with a browser, through a tunnel as a user's."""
    from matplotlib.image import imread

    picture = project.root / f"{record['server']}.png"
    browser = (".venv/bin/python", str(Path(__file__).with_name("browser.py")))
    place = (str(record["port"]), record["socket"])
    on_node(project, record, *browser, *place, path, text, str(picture), *login)
    pixels = imread(picture)[::7, ::7, :3].reshape(-1, 3)
    assert len({tuple(pixel) for pixel in pixels}) > 20, "the page is blank"


def train(project: Project, *flags: str, **env: str) -> Path:
    """Train on another node than the servers'; return the run's folder."""
    options = ("--nodelist=n2", "--ntasks-per-node=1")
    job = project.sbatch(*options, "slurm/train_cpu.sbatch", *TINY, *flags, **env).wait()
    assert job.state == "COMPLETED", job.log
    return project.root / "runs/seen" / job.id


def ids(run: Path) -> dict[str, str]:
    """Return the ids that trackers gave to a run."""
    return json.loads((run / "trackers.json").read_text())


def processes(project: Project, *servers: dict) -> list[psutil.Process]:
    """The processes of some servers' jobs, oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except psutil.Error:  # it ended meanwhile
            continue
        here = env.get("SLURM_CONF") == f"{project.cluster.folder}/slurm.conf"
        if here and env.get("SLURM_JOB_ID") in {record["job"] for record in servers}:
            found.append(process)
    return found


def check_gone(project: Project, *stopped: dict) -> None:
    """Check that servers leave nothing: no job, process, record, secret or socket."""
    ids = {record["job"] for record in stopped}
    assert not queue(project) & ids
    assert not processes(project, *stopped)
    folder = project.root / "runs/.servers-root"
    assert not [path for path in folder.iterdir() if path.name.partition(".")[0] in ids]
    assert not [record for record in stopped if Path(record["socket"]).is_socket()]


@pytest.mark.shows(
    "python -m tensorboard.main *",
    "aim up *",
    "TRACKIO_DIR=*/bin/trackio show",
    "python -m demo monitor start",
)
@pytest.mark.slow
def test_a_run_of_another_node_is_on_every_page(project: Project) -> None:
    said = monitor(project, "start", "--experiment=seen", "--", "--nodelist=n1")
    servers = {record["server"]: record for record in records(project)}
    assert list(servers) == SERVERS
    for record in servers.values():
        assert (record["node"], record["listen"]) == ("n1", "socket")
        tunnel = f"ssh -N -L {record['port']}:{record['socket']} -J root@login root@n1\n"
        assert tunnel in said and f"open http://127.0.0.1:{record['port']}\n" in said
    assert len({record["port"] for record in servers.values()}) == len(SERVERS)

    # A second start finds them, and says the same.
    again = monitor(project, "start", "--experiment=seen")
    assert "submitted" not in again
    assert re.findall("ssh .*", again) == re.findall("ssh .*", said)
    assert {record["server"]: record for record in records(project)} == servers
    assert monitor(project, "status").count(" answers ") == len(SERVERS)
    assert monitor(project, "url", "mlflow").count("ssh") == 1

    run = train(project, "--trackers", *SERVERS)
    given = ids(run)
    name = f"seen/{run.name}"
    assert fetch(project, servers["tensorboard"], "/data/runs") == [f"{run.name}/tensorboard"]
    look(project, servers["tensorboard"], "/#timeseries", f"{run.name}/tensorboard")
    found = fetch(project, servers["mlflow"], f"/api/2.0/mlflow/runs/get?run_id={given['mlflow']}")
    assert found["run"]["info"]["run_name"] == name
    if "aim" in servers:
        info = fetch(project, servers["aim"], f"/api/runs/{given['aim']}/info/")
        assert info["props"]["name"] == name
    for server in [name for name in SERVERS if name != "tensorboard"]:
        said = monitor(project, "view", str(run), server)
        page = re.search(r"the run's page is http://127.0.0.1:\d+(\S+)", said)
        look(project, servers[server], page.group(1), name)

    # TensorBoard over one run is a server of its own.
    said = monitor(project, "view", str(run.relative_to(project.root)), "tensorboard")
    assert f"tensorboard of {name} answers" in said
    (alone,) = (record for record in records(project) if record["run"])
    assert fetch(project, alone, "/data/runs") == ["."]
    (run.parent / "other").mkdir()
    said = monitor(project, "view", "runs/seen/other", "mlflow", code=1)
    assert "to no tracker" in said
    said = monitor(project, "view", "runs/seen", code=1)
    assert f"name one in {project.root}/runs/EXPERIMENT" in said

    monitor(project, "stop")
    check_gone(project, *servers.values(), alone)


def exported(record: dict) -> dict[str, str]:
    """Return the variables in the file that a server's record names."""
    return dict(line.split("=", 1) for line in Path(record["exports"]).read_text().split())


def check_secret(project: Project, record: dict, said: str, secret: str) -> None:
    """Check that a secret is in no log, no command line and no record."""
    commands = on_node(project, record, "ps", "-e", "-o", "args")
    assert "demo.tools.monitor" in commands or "mlflow server" in commands
    logs = "".join(path.read_text() for path in project.root.glob("logs/*.out"))
    assert secret not in said + commands + logs + json.dumps(record)


def tls(project: Project) -> list[str]:
    """Flags for a certificate of node n1's."""
    key, certificate = project.root / "key.pem", project.root / "certificate.pem"
    project.cluster.run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=n1"),
        *("-addext", "subjectAltName=DNS:n1", "-keyout", str(key), "-out", str(certificate)),
    )
    return [f"--certificate={certificate}", f"--key={key}"]


@pytest.mark.shows("python -m demo monitor start mlflow *")
def test_jobs_log_to_a_server_with_a_login(project: Project) -> None:
    said = monitor(
        *(project, "start", "mlflow", "--experiment=seen", "--listen=node", *tls(project)),
        *("--", "--nodelist=n1"),
    )
    record = only_record(project, "mlflow")
    address = f"https://n1:{record['port']}"
    assert f"ssh -N -L {record['port']}:n1:{record['port']} root@login\n" in said
    assert f"set -a; . {record['exports']}; set +a" in said
    exports = exported(record)
    assert exports["MLFLOW_TRACKING_URI"] == address

    # Without the password, or by a name of the attacker's choosing, nobody comes in.
    password = exports["MLFLOW_TRACKING_PASSWORD"]
    trusted = ("curl", "--silent", "--cacert", "certificate.pem", "--write-out", "%{http_code}")
    page = f"{address}/api/2.0/mlflow/experiments/search?max_results=9"
    for code, *options in (
        ("401",),
        ("401", "--user", "root:guess"),
        ("403", "--user", f"root:{password}", "--header", "Host: evil.example"),
        ("200", "--user", f"root:{password}"),
    ):
        shown = project.cluster.run(
            *trusted, "--output", "/dev/null", *options, page, cwd=project.root, check=False
        )
        assert shown.stdout == code, shown.stderr
    # The user's end of the tunnel has this name.
    tunnel = ("--insecure", "--user", f"root:{password}", "--header", "Host: 127.0.0.1:20123")
    assert (
        project.cluster.run(*trusted, *tunnel, f"{address}/health", cwd=project.root).stdout
        == "OK200"
    )

    # As after loading the file, before sbatch.
    run = train(project, "--trackers=mlflow", **exports)
    run_id = ids(run)["mlflow"]
    page = f"{address}/api/2.0/mlflow/runs/get?run_id={run_id}"
    shown = project.cluster.run(
        *trusted[:-2], "--user", f"root:{password}", page, cwd=project.root
    ).stdout
    metrics = json.loads(shown)["run"]["data"]["metrics"]
    assert {each["key"]: each["step"] for each in metrics}["train/loss"] == 20

    check_secret(project, record, said, password)
    monitor(project, "stop", "mlflow")
    check_gone(project, record)


@pytest.mark.shows("python -m demo monitor start aim-server")
@pytest.mark.skipif("aim" not in SERVERS, reason="Aim has no builds for this Python")
@pytest.mark.slow
def test_jobs_log_to_aims_server(project: Project) -> None:
    said = monitor(
        *(project, "start", "aim-server", "--experiment=seen", *tls(project)),
        *("--", "--nodelist=n1"),
    )
    record = only_record(project, "aim-server")
    assert "there is no login" not in said and f"set -a; . {record['exports']}; set +a" in said
    exports = exported(record)
    address = re.fullmatch(r"aim://root:(\S+)@n1:(\d+)", exports["AIM_REPO"])
    assert address and int(address.group(2)) == record["port"]
    shown = (*STATUS, "--insecure")
    page = f"https://n1:{record['port']}/client/get-version/"
    for code, *options in (("401",), ("401", "--user", "root:guess")):
        done = project.cluster.run(*shown, *options, page, cwd=project.root, check=False)
        assert done.stdout == code
    trust = dict.fromkeys(("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), record["certificate"])
    run = train(project, "--trackers=aim", **exports, **trust)
    check_secret(project, record, said, address.group(1))
    everything = [path for path in run.rglob("*") if path.is_file()]
    everything += [path for path in (run.parent / ".aim").rglob("*") if path.is_file()]
    assert not [path for path in everything if address.group(1).encode() in path.read_bytes()]
    run_id = ids(run)["aim"]
    monitor(project, "restart", "aim-server", "--", "--nodelist=n3")
    again = only_record(project, "aim-server")
    assert (again["node"], again["certificate"]) == ("n3", record["certificate"])
    monitor(project, "stop")
    check_gone(project, record)
    # Aim's own readers make the index again, and read the run from it.
    python, folder = (".venv/bin/python", "-c"), "runs/seen"
    index = "from aim.cli.cli import cli_entry_point as aim; aim()"
    words = ("storage", f"--repo={folder}", "reindex", "--yes")
    project.cluster.run(*python, index, *words, cwd=project.root)
    read = "import aim, sys; run = aim.Run(sys.argv[1], repo=sys.argv[2], read_only=True);"
    read += "print(run.name, *{metric.name for metric in run.metrics()})"
    shown = project.cluster.run(*python, read, run_id, folder, cwd=project.root).stdout.split()
    assert shown[0] == f"seen/{run.name}" and "train/loss" in shown


@pytest.mark.parametrize("server", [name for name in SERVERS if name in ("aim", "trackio")])
@pytest.mark.slow
def test_a_page_on_a_port_asks_for_a_password(project: Project, server: str) -> None:
    run = train(project, f"--trackers={server}")
    said = monitor(
        *(project, "start", server, "--experiment=seen", "--listen=loopback"),
        *("--", "--nodelist=n1"),
    )
    record = only_record(project, server)
    assert f"pages are in {record['exports']}" in said
    assert "there is no login" not in said and "set -a" not in said
    login = exported(record)
    user, password = login["MONITOR_USER"], login["MONITOR_PASSWORD"]
    check_secret(project, record, said, password)
    page = f"http://127.0.0.1:{record['port']}/"
    shown = (*STATUS, page)
    mine, elsewhere = ("--user", f"{user}:{password}"), ("--header", "Sec-Fetch-Site: cross-site")
    for code, *options in (
        ("401",),
        ("401", "--user", f"{user}:guess"),
        ("403", *mine, *elsewhere),
        ("200", *mine),
    ):
        assert on_node(project, record, *shown, *options) == code
    path = "/runs" if server == "trackio" else f"/runs/{ids(run)[server]}"
    look(project, record, path, f"seen/{run.name}", user, password)
    monitor(project, "stop")
    check_gone(project, record)


@pytest.mark.skipif("aim" not in SERVERS, reason="Aim has no builds for this Python")
@pytest.mark.slow
def test_other_sites_do_not_reach_a_socket_through_the_browser(project: Project) -> None:
    monitor(project, "start", "aim", "--experiment=one")
    record = only_record(project, "aim")
    page = f"http://127.0.0.1:{record['port']}/api/projects/"
    for code, *options in (
        ("200",),
        ("403", "--header", "Sec-Fetch-Site: cross-site"),
        ("403", "--header", "Host: evil.example"),
    ):
        place = ("--unix-socket", record["socket"], page)
        assert on_node(project, record, *STATUS, *options, *place) == code
    monitor(project, "stop")


def test_stop_ends_its_own_jobs_alone(project: Project) -> None:
    said = monitor(
        *(project, "start", "tensorboard", "--experiment=one", "--listen=loopback"),
        *("--", "--nodelist=n1"),
    )
    assert "no login" in said
    # The other one is submitted by hand.
    job = project.sbatch("--nodelist=n1", "slurm/monitoring/tensorboard.sbatch", "--experiment=two")
    wait_for(lambda: len(records(project)) == 2, lambda: job.log)
    assert "ssh -N -L" in job.log
    one, two = sorted(records(project), key=lambda record: record["experiment"])
    assert fetch(project, one, "/data/runs") == fetch(project, two, "/data/runs") == []
    said = monitor(project, "start", "tensorboard", "--experiment=two", "--listen=loopback", code=1)
    assert "runs with --listen socket" in said

    # Another job of the same name, even under the number of a server that is gone.
    sleep = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1000")
    foreign = project.cluster.run(*sleep, "--job-name=demo-tensorboard").stdout.strip()
    reused = project.cluster.run(*sleep, "--job-name=other").stdout.strip()
    folder = project.root / "runs/.servers-root"
    file = folder / f"{reused}.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps({**two, "job": reused, "experiment": "three"}))

    monitor(project, "stop", "--experiment=one")
    check_gone(project, one)
    assert queue(project) == {two["job"], foreign, reused}
    said = monitor(project, "status")
    assert re.search(rf"^tensorboard +three +{reused} +gone", said, re.MULTILINE)
    monitor(project, "stop")
    assert queue(project) == {foreign, reused}
    assert not records(project)


def test_a_server_that_was_killed_is_noticed(project: Project) -> None:
    monitor(project, "start", "tensorboard", "--experiment=one")
    record = only_record(project, "tensorboard")
    for process in processes(project, record):
        process.kill()
    wait_for(lambda: not queue(project), lambda: f"{queue(project)}")
    assert records(project) == [record]
    assert "no server answers" in monitor(project, "url", code=1)
    with Path(record["log"]).open("a") as log:
        log.write("a run is called \x1b]0;owned\x07\n")
    said = monitor(project, "logs", "tensorboard")
    assert "owned" in said and not {"\x1b", "\x07"} & set(said)
    monitor(project, "start", "tensorboard", "--experiment=one")
    assert record["job"] not in queue(project)
    said = monitor(project, "status")
    assert said.count(" gone ") == 1 and said.count(" answers ") == 1
    assert monitor(project, "status").count("\n") == 2


def test_a_server_that_dies_is_shown_with_its_log(project: Project) -> None:
    folder = project.root / "runs/broken"
    folder.mkdir()
    (folder / "mlflow.db").write_text("no database" * 1000)
    said = monitor(project, "start", "mlflow", "--experiment=broken", code=1)
    assert "not a database" in said
    error = said.splitlines()[-1]
    assert re.match(r"error: job \d+ ended", error)
    assert "server ended with" in said or "DatabaseError" in said
    assert not records(project) and not queue(project)


def test_a_job_that_waits_says_why(project: Project) -> None:
    later = ("start", "tensorboard", "--", "--begin=now+1hour")
    # Several times at once: the others find what one has submitted.
    start = partial(monitor, project, *later, code=130, until="waits (BeginTime)")
    with ThreadPoolExecutor(4) as pool:
        all_said = list(pool.map(lambda _: start(), range(4)))
    (record,) = records(project)
    assert sum("runs already" in said for said in all_said) == 3
    for said in all_said:
        assert "waits (BeginTime)" in said and f"job {record['job']} stays" in said
    assert "pending (BeginTime)" in monitor(project, "status")
    assert "has not started" in monitor(project, "logs")
    assert queue(project) == {record["job"]}
    monitor(project, "stop", "tensorboard")
    check_gone(project, record)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("start grafana", "there is no server 'grafana': this project has "),
        ("start tensorboard --listen=node", "tensorboard does not support --listen node"),
        (
            "start mlflow --certificate=README.md",
            "--certificate and --key are for aim-server and mlflow on a port",
        ),
        (
            "start mlflow --listen=node --certificate=README.md",
            "TLS needs --certificate and --key",
        ),
        ("start tensorboard -- --partition=nowhere", "sbatch failed: .*nowhere"),
        ("restart", "there is no server to restart"),
        ("serve aim", "'monitor serve' is for the jobs of servers"),
        ("logs", "no server runs"),
    ],
)
def test_what_cannot_be_is_said_on_one_line(project: Project, words: str, error: str) -> None:
    said = monitor(project, *shlex.split(words), code=1)
    assert re.match(f"error: {error}", said) and said.count("\n") == 1, said
