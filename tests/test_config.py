"""Where settings come from and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.config import TABLES, Config, load, split_address
from expanse_ebpf.errors import ConfigError


@pytest.fixture
def no_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text("")
    return file


def test_flags_win_over_the_environment_and_that_over_the_file(no_file: Path) -> None:
    no_file.write_text("[agent]\ninterval_s = 5\nnode_name = 'file'\nmax_jobs = 7\n")
    environment = {"EXPANSE_AGENT_INTERVAL_S": "4", "EXPANSE_AGENT_NODE_NAME": "environment"}
    config = load(no_file, environment, {"agent.interval_s": "3", "agent.node_name": None})
    assert (config.agent.interval_s, config.agent.node_name, config.agent.max_jobs) == (3.0, "environment", 7)


def test_lists_and_switches(no_file: Path) -> None:
    no_file.write_text("[jobs]\nunits = ['a*', 'b']\n[sources]\nnetwork = true\n")
    config = load(no_file, {"EXPANSE_CPU_COUNTERS": "cycles, instructions", "EXPANSE_SOURCES_CPU": "off"})
    assert config.jobs.units == ("a*", "b")
    assert config.cpu.counters == ("cycles", "instructions")
    assert (config.sources.network, config.sources.cpu) == (True, False)
    assert load(no_file, {"EXPANSE_CPU_COUNTERS": ""}).cpu.counters == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agent]\ninterval_s = 'soon'", "agent.interval_s: 'soon' is not valid"),
        ("[agent]\ninterval_s = 0.01", "not between 0.1 and 3600"),
        ("[agent]\ninterval_s = nan", "not between 0.1 and 3600"),
        ("[agent]\ninterval_s = true", "a number is wanted"),
        ("[agent]\nmax_jobs = 1.5", "a whole number is wanted"),
        ("[agent]\nmax_jobs = 0", "less than 1"),
        ("[agent]\nsocket = 3", "a string is wanted"),
        ("[agent]\ncolour = 'red'", "no such setting"),
        ("[paint]\ncolour = 'red'", "not one of the tables agent, controller"),
        ("agent = 3", "not one of the tables"),
        ("[cpu]\ncounters = 'bogus'", "'bogus' is not one of cycles"),
        ("[cpu]\ncounters = [1]", "a list of strings is wanted"),
        ("[cpu]\nmode = 'fast'", "not one of auto, hook"),
        ("[cpu]\nbpf_stats = 'maybe'", "not one of sampled"),
        ("[cpu]\nbpf_stats_every = 1", "less than 2"),
        ("[sources]\ncpu = 'perhaps'", "true or false is wanted"),
        ("[controller]\naddress = 'host'", "is not HOST:PORT"),
        ("[controller]\naddress = 'host:66000'", "is not HOST:PORT"),
        ("[controller]\nmax_unsent = 0", "less than 1"),
        ("[python]\nrate_hz = 0", "python.rate_hz: 0 is not between 1 and 999"),
        ("[python]\nrate_hz = 1000", "not between 1 and 999"),
        ("[python]\nrate_hz = 9.5", "a whole number is wanted"),
        ("[python]\nwaits_hz = -1", "python.waits_hz: -1 is not between 0 and 20"),
        ("[python]\nwaits_hz = 21", "not between 0 and 20"),
        ("[python]\njobs = '*'\nuser = 'ada'", "no such setting; [python] has rate_hz"),
        ("[bench]\nsend_url = 'example.org'", "bench.send_url: 'example.org' is not a URL that begins with"),
        ("[bench]\nsend_url = 'ftp://example.org/'", "bench.send_url: 'ftp://example.org/' is not a URL"),
        ("[bench]\nsend_url = 'https://'", "is not a URL that begins with https:// or http://"),
        ("[bench]\nsend_url = 'https://example.org:x/'", "is not a URL that begins with"),
        ("[bench]\nsend_url = 'https://[/'", "is not a URL that begins with"),
        ('[bench]\nsend_url = "https://example.org/a\\nb"', "is not a URL that begins with"),
        (
            "[bench]\nsend_url = 'https://ada:secret@example.org/'",
            "bench.send_url: the URL has a user's name",
        ),
        ("[agent", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: str, no_file: Path) -> None:
    no_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(no_file, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.toml", {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bytes.toml", {})


def test_every_setting_can_come_from_the_environment(no_file: Path) -> None:
    default = Config()
    for table, kind in TABLES.items():
        for field in fields(kind):
            value = getattr(getattr(default, table), field.name)
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            config = load(no_file, {f"EXPANSE_{table}_{field.name}".upper(): text})
            assert config == default, field.name


@given(
    st.dictionaries(
        st.sampled_from([f"{t}.{f.name}" for t, k in TABLES.items() for f in fields(k)]), st.text()
    )
)
def test_any_text_is_a_setting_or_a_config_error(overrides: dict[str, Any]) -> None:
    said = ""
    try:
        load(Path("/dev/null"), {}, overrides)
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize("url", ["https://example.org/in?kind=1", "http://[::1]:8080", ""])
def test_urls_to_which_results_can_be_sent(url: str, no_file: Path) -> None:
    assert load(no_file, {"EXPANSE_BENCH_SEND_URL": url}).bench.send_url == url


def test_addresses() -> None:
    assert split_address("host:1", "x") == ("host", 1)
    assert split_address("[::1]:9777", "x") == ("::1", 9777)
    for bad in ("host", ":1", "host:", "host:x", "host:٣"):
        with pytest.raises(ConfigError, match="x: "):
            split_address(bad, "x")


def test_the_example_file_shows_every_setting_with_its_default() -> None:
    import tomllib

    file = Path(__file__).parents[1] / "deploy/config.example.toml"
    assert load(file, {}) == Config()
    shown = tomllib.loads(file.read_text(encoding="utf-8"))
    assert {table: set(shown[table]) for table in shown} == {
        table: {f.name for f in fields(kind)} for table, kind in TABLES.items()
    }


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("window_s", value) for value in (0, 121, float("nan"), float("inf"))),
        *(("run_share", value) for value in (0, 1.1, float("nan"))),
        *(("cost_share", value) for value in (0, 1.1)),
        *(("max_window_s", value) for value in (0, 3601)),
        *(("max_events", value) for value in (0, 10_000_000)),
        ("pause_s", -1),
        ("over_cost", "never"),
    ],
)
def test_windows_are_within_reason(no_file: Path, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"tracing.{setting}"):
        load(no_file, {}, {f"tracing.{setting}": value})


def test_a_variable_with_a_typing_error_is_refused(no_file: Path) -> None:
    with pytest.raises(ConfigError, match="EXPANSE_AGENT_INTERVAL: no such setting"):
        load(no_file, {"EXPANSE_AGENT_INTERVAL": "5"})
