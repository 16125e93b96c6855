"""Checks a pixi.toml of the template against pixi's rules.

The schema is schema/schema.json of https://github.com/prefix-dev/pixi, 0.77. The page
docs/workspace/multi_platform_configuration.md there explains what names refer to.
"""

import re

from renderer import tomllib

WORKSPACE = {"name", "channels", "platforms", "requires-pixi"}
TABLES = {"workspace", "dependencies", "pypi-dependencies", "feature", "environments"}
SUBDIRS = {"linux-64", "linux-aarch64", "osx-arm64", "win-64"}
SPEC = r"\d+\.\d+\.\*|>=\d+(\.\d+)*,<\d+(\.\d+)*"
# An inline table of TOML 1.0, which older versions of pixi read too, is on one line.
TABLE_OF_LINES = re.compile(r"=\s*\{[^}\n]*\n")


def check_manifest(text: str) -> dict[str, list[str]]:
    """Check a pixi.toml.

    Returns:
        The names of the platforms of each environment.

    Raises:
        AssertionError: it breaks a rule of the schema, or uses a name that it does not define.
    """
    assert not TABLE_OF_LINES.search(text)
    manifest = tomllib.loads(text)
    assert manifest.keys() <= TABLES and manifest["workspace"].keys() <= WORKSPACE, manifest
    assert manifest["workspace"]["channels"] == ["conda-forge"]
    platforms = {}
    for entry in manifest["workspace"]["platforms"]:
        table = {"name": entry, "platform": entry} if isinstance(entry, str) else entry
        assert table.keys() <= {"name", "platform", "cuda"}, table
        assert table["platform"] in SUBDIRS, table
        # A platform with the name of a subdir is that subdir, without further properties.
        assert table["name"] not in SUBDIRS or "cuda" not in table, table
        assert re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]{0,62}[a-zA-Z0-9]", table["name"]), table
        platforms[table["name"]] = table
    features = manifest.get("feature", {})
    for table in (manifest, *features.values()):
        for name, spec in table["dependencies"].items():
            assert re.fullmatch(SPEC, spec), (name, spec)
    for feature in features.values():
        assert feature.keys() == {"platforms", "dependencies"}, feature
        assert set(feature["platforms"]) <= platforms.keys(), feature
        if "pytorch-gpu" in feature["dependencies"]:
            assert all("cuda" in platforms[name] for name in feature["platforms"])
    for project in manifest["pypi-dependencies"].values():
        assert project == {"path": ".", "editable": True, "extras": ["dev"]}
    found = {}
    for name, used in {"default": [], **manifest.get("environments", {})}.items():
        tables = [features[feature] for feature in used]
        found[name] = [p for p in platforms if all(p in table["platforms"] for table in tables)]
        packages = {package for t in (manifest, *tables) for package in t["dependencies"]}
        assert len(packages & {"pytorch-cpu", "pytorch-gpu"}) == 1 and "python" in packages
    return found
