"""Plans: what they may say, and how what is wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf import config
from expanse_ebpf.bench import plan_checks
from expanse_ebpf.bench.plan import Arm, ArmKind, Plan, Stopping, Workload, WorkloadKind, load, parse
from expanse_ebpf.errors import ConfigError

PLANS = Path(__file__).resolve().parents[2] / "bench/plans"
LEAST = """
[workloads.resnet]
kind = "resnet50"
[arms.near]
kind = "collection"
"""
WHOLE = r"""
name = "mine"
seed = 7
interval_s = 5
settle_s = 0.5
controller = "[::1]:4317"
[stopping]
min_pairs = 5
max_pairs = 9
centres = 2
within_points = 1
[workloads.own]
kind = "command"
command = ["./train.sh", "--shape={a,b}", ""]
time_pattern = '(?:took|for) (\d+) s'
limit_s = 60
[workloads.resnet]
kind = "resnet50"
device = "cuda"
images = "images"
python = "python3"
[workloads.launches]
kind = "launches"
library = "lib/libcuda.so.1"
rate_hz = 100
[arms.plain]
kind = "collection"
cpu_counters = false
settings.cpu.bpf_stats_every = 10
settings.jobs.units = ["a*", "b"]
[arms.rules]
kind = "traces_by_rule"
rules = "rules.yaml"
[arms."py-spy"]
kind = "command"
command = ["py-spy", "record", "{print $1}", "-o", "{folder}/stacks", "--pid", "{pid}"]
"""


def test_a_plan_that_says_little_has_the_defaults() -> None:
    assert parse(LEAST, "a plan.toml") == Plan(
        "a-plan", (Workload("resnet", "resnet50"),), (Arm("near", "collection"),)
    )


def test_a_plan_that_says_everything(tmp_path: Path) -> None:
    said = parse(WHOLE, "other.toml")
    assert (said.name, said.seed, said.interval_s, said.settle_s) == ("mine", 7, 5, 0.5)
    assert said.controller == "[::1]:4317"
    assert said.stopping == Stopping(5, 9, 2, 1)
    assert [each.name for each in said.workloads] == ["own", "resnet", "launches"]
    assert said.workloads[0].command == ("./train.sh", "--shape={a,b}", "")
    assert [each.name for each in said.arms] == ["plain", "rules", "py-spy"]
    assert not said.arms[0].cpu_counters
    assert said.arms[0].settings == {"cpu": {"bpf_stats_every": 10}, "jobs": {"units": ["a*", "b"]}}


def test_files_are_looked_for_from_the_plans_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/mine.toml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    found = load(Path("plans/mine.toml"))
    own, resnet, launches = found.workloads
    assert own.command == (str(tmp_path / "plans/train.sh"), "--shape={a,b}", "")
    assert resnet.images == str(tmp_path / "plans/images")
    assert (resnet.python, resnet.library) == ("python3", "libcuda.so.1")
    assert launches.library == str(tmp_path / "plans/lib/libcuda.so.1")
    assert launches.images == ""
    assert [arm.rules for arm in found.arms] == ["", str(tmp_path / "plans/rules.yaml"), ""]
    assert found.arms[2].command[0] == "py-spy"


def test_a_path_that_is_absolute_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(LEAST.replace("[arms", 'images = "/data/../images"\n[arms'))
    assert load(file).workloads[0].images == "/data/../images"


def workload(text: str) -> str:
    return f"[workloads.resnet]\n{text}\n[arms.near]\nkind = 'collection'\n"


def arm(text: str, name: str = "near") -> str:
    return f"[workloads.resnet]\nkind = 'resnet50'\n[arms.{name}]\n{text}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name =", "not valid TOML: "),
        ("seed = " + "1" * 5000, "not valid TOML: "),
        ("a = " + "[" * 5000, "not valid TOML: "),
        ("seed = 0x1" + "0" * 5000 + LEAST, "a number in it is too large"),
        ("colour = 1" + LEAST, "colour: no such key; there are name, workloads, arms, seed, "),
        ('"a\\u001b" = 1' + LEAST, "'a\\x1b': no such key"),
        ("name = 'a b'" + LEAST, "name: a name has 1 to 64 of the characters"),
        ("name = 3" + LEAST, "name: 3 is not a string"),
        ("seed = -1" + LEAST, "seed: -1 is not between 0 and 4.29497e+09"),
        ("interval_s = 0" + LEAST, "interval_s: 0 is not between 0.1 and 3600"),
        ("interval_s = nan" + LEAST, "interval_s: nan is not between"),
        ("settle_s = true" + LEAST, "settle_s: True is not a number"),
        ("controller = 'node'" + LEAST, "controller: 'node' is not HOST:PORT"),
        ("stopping = 3" + LEAST, "stopping: 3 is not a table"),
        ("[stopping]\npairs = 3" + LEAST, "stopping.pairs: no such key; there are min_pairs, max_pairs"),
        ("[stopping]\nmin_pairs = 2" + LEAST, "stopping.min_pairs: 2 is not between 5 and 10000"),
        ("[stopping]\nmax_pairs = 5" + LEAST, "stopping.max_pairs: 5 is not at least min_pairs, 8"),
        ("[stopping]\nwithin_points = 0" + LEAST, "stopping.within_points: 0 is not between"),
        ("workloads = 3\n[arms.near]\nkind = 'both'", "workloads: 3 is not a table"),
        ("[arms.near]\nkind = 'both'", "workloads: there is none; write a table [workloads.NAME]"),
        ("[workloads.resnet]\nkind = 'resnet50'", "arms: there is none; write a table [arms.NAME]"),
        ("arms = {}\n[workloads.resnet]\nkind = 'resnet50'", "arms: there is none"),
        ("[workloads]\nresnet = 1\n[arms.near]\nkind = 'both'", "workloads.resnet: 1 is not a table"),
        (workload(""), "workloads.resnet.kind: is missing"),
        (workload("kind = 'vgg'"), "workloads.resnet.kind: 'vgg' is not one of resnet50, data_loader, "),
        (workload("kind = ['resnet50']"), "workloads.resnet.kind: ['resnet50'] is not one of resnet50, "),
        (workload("kind = 'resnet50'\nname = 'a'"), "workloads.resnet.name: no such key; there are kind, "),
        (workload("kind = 'resnet50'\nsteps = 'x'"), "workloads.resnet.steps: 'x' is not a whole number"),
        (workload("kind = 'resnet50'\nsteps = 1.5"), "workloads.resnet.steps: 1.5 is not a whole number"),
        (workload("kind = 'resnet50'\nsteps = true"), "workloads.resnet.steps: True is not a whole number"),
        (workload("kind = 'resnet50'\ncpus = -1"), "workloads.resnet.cpus: -1 is not between 0 and 65536"),
        (
            workload("kind = 'resnet50'\ndevice = 'tpu'"),
            "workloads.resnet.device: 'tpu' is not one of cpu, cuda",
        ),
        (workload("kind = 'resnet50'\nlimit_s = inf"), "workloads.resnet.limit_s: inf is not between"),
        (
            workload("kind = 'switches'\nimages = '/a'"),
            "workloads.resnet.images: does not go with the kind 'switches'",
        ),
        (
            workload("kind = 'resnet50'\ncommand = ['a']"),
            "workloads.resnet.command: does not go with the kind 'resnet50'",
        ),
        (workload("kind = 'command'"), "workloads.resnet.command: is missing; give the program"),
        (workload("kind = 'command'\ncommand = []"), "workloads.resnet.command: is missing"),
        (workload("kind = 'command'\ncommand = ['']"), "workloads.resnet.command: is missing"),
        (
            workload("kind = 'command'\ncommand = 'a b'"),
            "workloads.resnet.command: 'a b' is not a list of strings",
        ),
        (
            workload("kind = 'command'\ncommand = [1]"),
            "workloads.resnet.command: [1] is not a list of strings",
        ),
        (
            workload('kind = "command"\ncommand = ["a", "\\u0000"]'),
            "workloads.resnet.command: '\\x00' is not something that an argument can be",
        ),
        (
            workload("kind = 'command'\ncommand = ['a']\ntime_pattern = '('"),
            "workloads.resnet.time_pattern: '(' is not a regular expression: ",
        ),
        (
            workload("kind = 'command'\ncommand = ['a']\ntime_pattern = 'took'"),
            "workloads.resnet.time_pattern: 'took' is not a regular expression with one group, for the "
            "seconds; it has 0",
        ),
        (
            workload("kind = 'command'\ncommand = ['a']\ntime_pattern = '(a)(b)'"),
            "workloads.resnet.time_pattern: '(a)(b)' is not a regular expression with one group",
        ),
        (workload("kind = 'switches'").replace("resnet", "'a b'"), "workloads.'a b': a name has 1 to 64"),
        (arm("kind = 'both'", "off"), "arms.off: this is what every arm is compared with"),
        (arm("kind = 'both'", "a" * 65), f"arms.'{'a' * 59}: a name has 1 to 64 of the characters"),
        (arm("kind = 'both'\nrules = 'a'"), "arms.near.rules: does not go with the kind 'both'"),
        (arm("kind = 'both'\ncpu_counters = 1"), "arms.near.cpu_counters: 1 is not true or false"),
        (arm("kind = 'command'"), "arms.near.command: is missing"),
        (
            arm("kind = 'command'\ncommand = ['a']\ncpu_counters = true"),
            "arms.near.cpu_counters: does not go with the kind 'command'",
        ),
        (
            arm("kind = 'command'\ncommand = ['a', '-u{user}{pid}']"),
            "arms.near.command: '-u{user}{pid}' is not filled in: only {pid} and {folder} are",
        ),
        (
            arm("kind = 'command'\ncommand = ['{folder}/a']"),
            "arms.near.command: '{folder}/a' is not a program; placeholders stand in its arguments",
        ),
        (arm("kind = 'both'\nsettings = 1"), "arms.near.settings: 1 is not a table"),
        (arm("kind = 'both'\nsettings.cpu = 1"), "arms.near.settings.cpu: 1 is not a table"),
        (
            arm("kind = 'both'\nsettings.gpus.a = 1"),
            "arms.near.settings.gpus: no such table of the configuration; there are agent, controller, ",
        ),
        (arm("kind = 'both'\nsettings.cpu.a = 1"), "arms.near.settings.cpu.a: no such setting; [cpu] has"),
        (
            arm("kind = 'both'\nsettings.python.rate_hz = 0"),
            "arms.near.settings.python.rate_hz: 0 is not between 1 and 999",
        ),
        (
            arm("kind = 'both'\nsettings.cpu.counters = ['heat']"),
            "arms.near.settings.cpu.counters: 'heat' is not one of",
        ),
        (
            arm("kind = 'both'\nsettings.agent.interval_s = 3"),
            "arms.near.settings.agent.interval_s: the bench sets this one itself",
        ),
        (
            arm("kind = 'both'\nsettings.agent.node_name = 'a'"),
            "arms.near.settings.agent.node_name: the bench sets this one itself",
        ),
        (
            arm("kind = 'both'\nsettings.python.rate_hz = 2026-12-01"),
            "arms.near.settings.python.rate_hz: datetime.date(2026, 12, 1) is not a setting",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, "cpu.toml")
    assert str(raised.value).startswith(f"cpu.toml: {said}")
    assert "\n" not in str(raised.value)


def test_a_plan_is_read_the_same_whatever_the_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPANSE_PYTHON_RATE_HZ", "nonsense")
    monkeypatch.setattr(config, "DEFAULT_FILE", PLANS / "cpu.toml")  # which is no configuration
    assert parse(arm("kind = 'both'\nsettings.python.rate_hz = 99"), "a").arms[0].settings == {
        "python": {"rate_hz": 99}
    }


def test_what_cannot_be_read_is_told_with_its_file(tmp_path: Path) -> None:
    for content, said in ((b"\xff", "not valid TOML"), (b"#" * (1 << 21), "too long for a plan")):
        (tmp_path / "a.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            load(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)


def test_every_kind_and_every_number_has_its_rules() -> None:
    assert plan_checks.OF_WORKLOADS.keys() == set(get_args(WorkloadKind))
    assert plan_checks.OF_ARMS.keys() == set(get_args(ArmKind))
    numbers = {
        name
        for cls in (Plan, Workload, Arm, Stopping)
        for name, field in cls.__dataclass_fields__.items()
        if str(field.type).split(" ")[0] in ("int", "float")
    }
    assert numbers == plan_checks.LIMITS.keys()


@given(st.text(alphabet="[]{}=.'\"\n a1worklsm-", max_size=80))
def test_no_text_makes_anything_but_a_plan_or_an_error_for_people(text: str) -> None:
    for document in (text, text + LEAST, LEAST + text):
        try:
            assert isinstance(parse(document, "a.toml"), Plan)
        except ConfigError as error:
            assert str(error).startswith("a.toml: ")  # noqa: PT017


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_plans_that_come_with_the_kit_are_read(path: Path) -> None:
    assert load(path).name == path.stem


def test_peers_look_as_often_as_the_collector_does() -> None:
    rate = config.PythonConfig().rate_hz
    peers = {
        each.command[0]: " ".join(each.command) for each in load(PLANS / "cpu.toml").arms if each.command
    }
    assert f"--rate {rate} " in peers["py-spy"]
    assert f"--interval={1_000_000 // rate}us " in peers["austin"]


def test_the_quick_plan_has_few_runs() -> None:
    quick = load(PLANS / "quick.toml")
    # Of some 7 s each, with 6 to warm up: make bench-quick is to end within 10 minutes.
    assert len(quick.workloads) * len(quick.arms) * quick.stopping.max_pairs * 2 < 60
