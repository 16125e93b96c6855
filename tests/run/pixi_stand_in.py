"""A stand-in for pixi, which no package index has. It does `pixi lock` and `pixi install`.

It solves, installs and writes pixi.lock with pixi's own library (py-rattler), from a channel that
the tests make. In this channel, Python is the tests' Python with their packages, and PyTorch is
empty. The stand-in installs the project with pip, whereas pixi uses uv.
"""

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import rattler
from rattler.index import index_fs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK = Path("pixi.lock")
# The virtual packages that pixi assumes for a platform that does not list them.
UNIX = {"__unix": "0"}
ASSUMED = {
    "linux": {**UNIX, "__linux": "4.18", "__glibc": "2.28"},
    "osx": {**UNIX, "__osx": "13.0"},
    "win": {"__win": "0"},
}
# The packages of the channel: name, version, dependencies.
PACKAGES = [
    ("python", "3.12.9", []),
    ("python", "3.13.5", []),
    ("pytorch", "2.13.0", ["python"]),
    ("pytorch-cpu", "2.13.0", ["pytorch"]),
    ("pytorch-gpu", "2.13.0", ["pytorch", "__cuda >=12"]),
]


class Platform(NamedTuple):
    """A platform of pixi.toml: its name and its virtual packages."""

    name: str
    subdir: str
    has: dict[str, str]

    def virtual(self) -> list[rattler.GenericVirtualPackage]:
        """Return its virtual packages for the solver."""
        return [
            rattler.GenericVirtualPackage(
                rattler.PackageName(name), rattler.Version(version), rattler.BuildString("0")
            )
            for name, version in self.has.items()
        ]


class Environment(NamedTuple):
    """An environment of pixi.toml: its platforms, and its conda packages."""

    name: str
    platforms: list[Platform]
    specs: list[str]


def platform_of(entry: str | Mapping[str, str]) -> Platform:
    """Return the platform of an entry of `platforms`."""
    table = {"platform": entry, "name": entry} if isinstance(entry, str) else entry
    has = dict(ASSUMED[table["platform"].partition("-")[0]])
    if "cuda" in table:
        has["__cuda"] = table["cuda"]
    return Platform(table["name"], table["platform"], has)


def environments(manifest: Mapping[str, Any]) -> Iterator[Environment]:
    """Yield the environments of a pixi.toml."""
    for name, features in {"default": [], **manifest.get("environments", {})}.items():
        tables = [manifest, *(manifest["feature"][feature] for feature in features)]
        platforms = [platform_of(entry) for entry in manifest["workspace"]["platforms"]]
        for table in tables:
            wanted = table.get("platforms", [platform.name for platform in platforms])
            assert set(wanted) <= {platform.name for platform in platforms}, (name, wanted)
            platforms = [platform for platform in platforms if platform.name in wanted]
        specs = [f"{each} {spec}" for t in tables for each, spec in t["dependencies"].items()]
        yield Environment(name, platforms, specs)


async def lock(channel: Path, wanted: list[Environment]) -> dict[str, list[rattler.RepoDataRecord]]:
    """Solve each environment on each platform, and write pixi.lock.

    Returns:
        The packages, by environment and platform.
    """
    named = {platform.name: platform for each in wanted for platform in each.platforms}
    locked = {
        name: rattler.LockPlatform(
            name, rattler.Subdir(subdir), [f"{n}={version}" for n, version in has.items()]
        )
        for name, subdir, has in named.values()
    }
    file = rattler.LockFile(list(locked.values()))
    solved = {}
    for name, platforms, specs in wanted:
        file.set_channels(name, [rattler.LockChannel(channel.as_uri())])
        for platform in platforms:
            records = await rattler.solve(
                [rattler.Channel(channel.as_uri())],
                specs,
                platforms=[rattler.Subdir(platform.subdir), rattler.Subdir("noarch")],
                virtual_packages=platform.virtual(),
            )
            for record in records:
                file.add_conda_package(name, locked[platform.name], record)
            solved[f"{name} {platform.name}"] = records
    file.to_path(LOCK)
    return solved


async def install(channel: Path, name: str, wanted: list[Environment]) -> None:
    """Make the environment with this name, or complete it."""
    solved = await lock(channel, wanted)
    (environment,) = (each for each in wanted if each.name == name)
    overrides = rattler.VirtualPackageOverrides.from_env()
    here = {
        package.name.normalized: package.version
        for each in rattler.VirtualPackage.detect(overrides)
        for package in [each.into_generic()]
    }
    fit = [
        platform
        for platform in environment.platforms
        if platform.subdir == str(rattler.Subdir.current())
        and all(n in here and here[n] >= rattler.Version(v) for n, v in platform.has.items())
    ]
    if not fit:
        sys.exit(f"pixi: this machine is no platform of {name}: it has {sorted(here)}")
    prefix = Path(".pixi/envs", name).absolute()
    cache = Path(os.environ.get("PIXI_CACHE_DIR", channel.with_name("cache")))
    records = solved[f"{name} {fit[0].name}"]
    await rattler.install(records, prefix, cache_dir=cache, show_progress=False)


def install_project(name: str, table: Mapping[str, Any]) -> None:
    """Install the project itself, as [pypi-dependencies] says."""
    assert table.pop("editable") is True
    what = f"{table.pop('path')}[{','.join(table.pop('extras'))}]"
    assert not table
    # Like uv, ignore pip.conf.
    pip = [f".pixi/envs/{name}/bin/python", "-m", "pip", "--isolated", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-build-isolation", "--editable", what], check=True)


def make(folder: Path) -> Path:
    """Make a channel, and a program `pixi` that installs from it; return the program's path."""
    for name, version, depends in PACKAGES:
        add_package(folder / "channel", name, version, depends)
    asyncio.run(index_fs(folder / "channel"))
    program = folder / "pixi"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {folder}/channel "$@"\n')
    program.chmod(0o755)
    return program


def add_package(channel: Path, name: str, version: str, depends: list[str]) -> None:
    """Write a conda package. For Python, it is a virtual environment with the tests' packages."""
    files, links = {}, {}
    if name == "python":
        library = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        base = Path(sys.executable).resolve()
        borrowed = f"{sysconfig.get_path('purelib')}\n"
        files = {"pyvenv.cfg": f"home = {base.parent}\n", f"{library}/borrowed.pth": borrowed}
        links = {"bin/python": str(base)}
    paths = [
        {"_path": path, "path_type": kind, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        for kind, texts in (("hardlink", files), ("softlink", links))
        for path, text in texts.items()
    ]
    about = {"name": name, "version": version, "depends": depends, "build": "0", "build_number": 0}
    files["info/index.json"] = json.dumps({**about, "subdir": "noarch", "noarch": "generic"})
    files["info/paths.json"] = json.dumps({"paths": paths, "paths_version": 1})
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    with tarfile.open(channel / f"noarch/{name}-{version}-0.tar.bz2", "w:bz2") as package:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            package.addfile(member, io.BytesIO(text.encode()))
        for path, target in links.items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            package.addfile(member)


def main(channel: Path, words: list[str]) -> None:
    """Run the command line, and write it to pixi.log."""
    with open("pixi.log", "a") as log:
        print(*words, file=log)
    manifest = tomllib.loads(Path("pixi.toml").read_text())
    wanted = list(environments(manifest))
    match words:
        case ["lock"]:
            asyncio.run(lock(channel, wanted))
        case ["install", "--environment", name]:
            asyncio.run(install(channel, name, wanted))
            ((_, project),) = manifest["pypi-dependencies"].items()
            install_project(name, project)
        case _:
            sys.exit(f"pixi: no stand-in for {words}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
