"""Settings: defaults < YAML < flags. They are checked, and saved as they were used."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .conftest import Launch, clean_environment


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    """A path for a file of settings."""
    return tmp_path / "settings.yaml"


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(
    project: Path, yaml_file: Path
) -> None:
    from demo.settings import Settings

    yaml_file.write_text("epochs: 7\nlr: 1e-2\ntags: [a, b]\n")  # 1e-2 is text in YAML 1.1
    settings = Settings.parse([f"--config={yaml_file}", "--epochs", "9"])
    assert (settings.epochs, settings.lr, settings.tags) == (9, 0.01, ("a", "b"))
    assert settings.batch_size == Settings().batch_size
    assert Settings.parse(["--config", str(yaml_file), "--tags", "c"]).tags == ("c",)
    assert Settings.parse([f"--config={yaml_file}", "--compile"]).compile


def test_the_projects_own_file_is_the_default(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from demo.settings import Settings

    monkeypatch.chdir(project)
    assert Settings.parse([]).experiment == "demo"
    assert Settings.parse([]).trackers == ("tensorboard",)
    monkeypatch.chdir(tmp_path)
    assert Settings.parse([]).experiment == "default"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("batch_size: 010", 10),
        ("batch_size: 0x1F", 31),
        ("batch_size: +12", 12),
        ("lr: 1e-3", 0.001),
        ("lr: 1.5e3", 1500.0),
        ("lr: .5", 0.5),
        ("experiment: 010", "010"),
        ("experiment: 1:30", "1:30"),
        ("experiment: 1e-3", "1e-3"),
        ("experiment: 2026-01-30", "2026-01-30"),
        ("experiment: off", "off"),
        ("compile: yes", True),
        ("compile: off", False),
        ("max_steps: ~", None),
    ],
)
def test_values_are_what_they_look_like(
    project: Path, yaml_file: Path, line: str, value: object
) -> None:
    """YAML 1.1 takes 010 for 8, 1:30 for 90 and off for a boolean, whatever the setting is."""
    from demo.settings import Settings

    yaml_file.write_text(line)
    read = getattr(Settings.from_yaml(yaml_file), line.partition(":")[0])
    assert read == value and type(read) is type(value)


def test_settings_that_pyyaml_wrote_read_the_same(project: Path, yaml_file: Path) -> None:
    """The config.yaml of runs: PyYAML quotes what YAML 1.1 needs."""
    from demo.settings import Settings

    words = "010 08 0o17 0b11 0x1F 1_000 1:30 1e-3 1.5e3 -.5 .5 +1 ~ null on Yes true 2026-01-30"
    for word in (*words.split(), "<<", "=", "a: b", "'", "ä", "1.0e-05"):
        settings = Settings(experiment=word, tags=(word, "x"), lr=1e16, weight_decay=1e-05)
        yaml_file.write_text(yaml.safe_dump(settings.as_dict(), sort_keys=False))
        assert Settings.from_yaml(yaml_file) == settings, word


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: 1:30", "batch_size is '1:30'"),
        ("batch_size: 0o17", "batch_size is '0o17'"),
        ("lr: 1:30.5", "lr is '1:30.5'"),
        ("epoch: 3", "did you mean 'epochs'?"),
        ("epochs: many", "epochs is 'many'"),
        ("workers: -1", "workers is -1"),
        ("epochs: 1.5", "epochs is 1.5"),
        ("epochs: 0", "epochs is 0"),
        ("meet_timeout: 0", "meet_timeout is 0"),
        ("meet_timeout: .nan", "meet_timeout is nan"),
        ("meet_timeout: 9999999999", "less than 2147483648"),
        ("device: gpu", "device is 'gpu'"),
        ("compile: 7", "compile is 7"),
        ("batch_size: true", "batch_size is true"),
        ("clip_norm: true", "clip_norm is true"),
        ("workers: true", "workers is true"),
        ("seed: 9223372036854775808", "less than 9223372036854775808"),
        ("tags: 3", "tags is 3"),
        ("lr: .nan", "lr is nan"),
        ("warmup: 1.0", "warmup is 1.0"),
        ("- a\n- b", "lines of 'setting: value'"),
        ("a: [", "is not YAML"),
        ("lr: 0.1\nseed: 1\nlr: 0.2", "has 'lr' twice"),
    ],
)
def test_a_wrong_file_is_one_line_that_says_what_is_right(
    project: Path, yaml_file: Path, text: str, message: str
) -> None:
    from demo.engine.errors import UsageError
    from demo.settings import Settings

    yaml_file.write_text(text)
    with pytest.raises(UsageError) as caught:
        Settings.parse([f"--config={yaml_file}"])
    assert str(yaml_file) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_may_hold_variables_and_begin_with_the_home_folder(
    project: Path, yaml_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.engine.config import PATHS, read_flags
    from demo.engine.errors import UsageError
    from demo.settings import Settings
    from demo.tools.report import Flags

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.delenv("UNSET", raising=False)
    yaml_file.write_text("run_root: $SCRATCH/runs\nresume: auto\ninit_from: ~/a\ntags: [$UNSET]\n")
    monkeypatch.chdir(tmp_path)
    settings = Settings.parse(
        ["--config=${SCRATCH}/../settings.yaml", "--data-dir=~/data", "--run-dir", "a~/$$"]
    )
    found = tuple(getattr(settings, name) for name in PATHS)
    root, home = f"{tmp_path}/scratch/runs", f"{tmp_path}/home"
    assert found == (root, "a~/$$", "auto", f"{home}/data", f"{home}/a")
    assert settings.tags == ("$UNSET",) and settings.config == Path(
        f"{tmp_path}/scratch/../settings.yaml"
    )
    for path, message in (
        ("$UNSET/runs", "$UNSET/runs, but $UNSET is unknown"),
        ("~no-such-user/runs", "~no-such-user is unknown"),
    ):
        # A flag overrides the file, so the file's variables need not be set.
        yaml_file.write_text(f"run_root: {path}\n")
        assert Settings.parse([f"--config={yaml_file}", "--run-root=a"]).run_root == "a"
        for argv in ([f"--config={yaml_file}"], [f"--init-from={path}"], [f"--config={path}"]):
            with pytest.raises(UsageError) as caught:
                Settings.parse(argv)
            assert message in str(caught.value) and "\n" not in str(caught.value)
    flags = read_flags(Flags, ["$SCRATCH/a", "b", "--output=~/x.png"], "report")
    assert flags.folders == (tmp_path / "scratch/a", Path("b"))
    assert flags.output == tmp_path / "home/x.png"


def test_effective_settings_are_saved(launch: Launch, yaml_file: Path, tmp_path: Path) -> None:
    yaml_file.write_text("seed: 3\nglobal_batch_size: 100\n")
    launch(2, f"--config={yaml_file}", "--seed=4", "--max-steps=1")
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["seed"], saved["batch_size"], saved["momentum"]) == (4, 50, 0.9)
    # They can be used as they are.
    again = launch(2, f"--config={tmp_path}/run/config.yaml", "--max-steps=1", name="again")
    assert again.summary["global_step"] == 1


SURFACE = (
    *("--config", "--epochs", "--max-steps", "--batch-size", "--test-batch-size", "--lr"),
    *("--seed", "--device", "--backend", "--dataset", "--data-dir", "--run-dir", "--resume"),
    *("--checkpoint-every", "--dry-run", "--trackers", "--experiment", "--tags"),
)


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["train", "--epochs", "x"]])
def test_help_and_wrong_flags_answer_without_torch(project: Path, command: list[str]) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['demo', *{command!r}]\n"
        "try: runpy.run_module('demo', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('\\nheavy:', {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=project,
        env={**clean_environment(project), "COLUMNS": "200"},
        check=True,
    )
    assert done.stdout.endswith("heavy: set()\n"), done.stdout
    if command == ["train", "--help"]:
        assert set(re.findall(r"--[a-z][a-z-]+", done.stdout)) >= {*SURFACE}


def test_learning_rate_follows_its_schedule_and_scaling(project: Path) -> None:
    from demo.engine.config import Settings
    from demo.engine.schedule import lr_factor, scaling

    settings = Settings(warmup=0.25, schedule="linear")
    factors = [lr_factor(settings, progress) for progress in (0, 0.125, 0.25, 0.625, 1.0)]
    assert factors == pytest.approx([0.04, 0.52, 1.0, 0.5, 0.0])
    cosine = Settings(warmup=0.0, schedule="cosine")
    assert [lr_factor(cosine, p) for p in (0, 0.5, 1)] == pytest.approx([1.0, 0.5, 0.0])
    constant = Settings(warmup=0.1, schedule="constant")
    assert [lr_factor(constant, p) for p in (0.1, 0.5, 1)] == [1.0, 1.0, 1.0]

    for name, factor in (("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)):
        settings = Settings(lr_scaling=name, lr_reference_batch=64)
        assert scaling(settings, 256) == pytest.approx(factor)
