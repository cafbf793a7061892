"""Options from four sources: who wins, what is refused, and what a message says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_nightjar import config as module
from sglang_nightjar.config import NightjarConfig, load_config, make_config
from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.registry import PolicySpec


def complaint(call: Callable[..., Any], *arguments: Any) -> str:
    """The message of the `UserError` that `call` must raise; it is one line."""
    with pytest.raises(UserError) as raised:
        call(*arguments)
    message = str(raised.value)
    assert message
    assert "\n" not in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"policy": "static:1", "max_gamma": 4, "threads": 7}))
    return path


def test_defaults() -> None:
    assert load_config([], {}) == (NightjarConfig(), [])
    assert NightjarConfig().policy_spec() == PolicySpec("nightjar", 5)


def test_command_line_beats_environment_beats_file(file: Path) -> None:
    words = ["--nightjar-policy", "static:3", "--nightjar-config", str(file)]
    environ = {"NIGHTJAR_POLICY": "static:2", "NIGHTJAR_THREADS": "5"}
    assert load_config(words, environ)[0] == NightjarConfig(policy="static:3", threads=5, max_gamma=4)
    assert load_config(words[2:], environ)[0] == NightjarConfig(policy="static:2", threads=5, max_gamma=4)
    assert load_config(words[2:], {})[0] == NightjarConfig(policy="static:1", threads=7, max_gamma=4)


def test_the_environment_may_name_the_file(file: Path, tmp_path: Path) -> None:
    environ = {"NIGHTJAR_CONFIG": str(file)}
    assert load_config([], environ)[0].threads == 7
    other = tmp_path / "other.json"
    other.write_text('{"threads": 9}')
    assert load_config(["--nightjar-config", str(other)], environ)[0] == NightjarConfig(threads=9)


def test_keywords_stand_where_the_command_line_does(file: Path) -> None:
    environ = {"NIGHTJAR_POLICY": "static:2", "NIGHTJAR_THREADS": "5"}
    made = make_config({"policy": "off", "max_gamma": 3, "config": file}, environ)
    assert made == NightjarConfig(policy="off", max_gamma=3, threads=5)


def test_an_empty_variable_counts_as_unset() -> None:
    assert load_config([], {"NIGHTJAR_THREADS": "", "NIGHTJAR_CONFIG": ""})[0] == NightjarConfig()


def test_variables_of_others_are_left_alone() -> None:
    environ = {"NIGHTJAR_CACHE": "/somewhere", "PATH": "/bin", "MY_NIGHTJAR_POLICY": "off"}
    assert load_config([], environ)[0] == NightjarConfig()


def test_words_of_sglang_keep_their_order() -> None:
    words = ["--port", "3", "--chunked-prefill-size", "-1", "--json-model-override-args", '{"a": 1}', "--host=::", "-h"]
    mixed = [*words[:2], "--nightjar-threads=2", *words[2:7], "--nightjar-policy", "off", *words[7:]]
    assert load_config(mixed, {}) == (NightjarConfig(threads=2, policy="off"), words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nightjar-polcy", "off"], "unknown option --nightjar-polcy"),
        (["--nightjar-pol", "off"], "unknown option --nightjar-pol"),  # no abbreviations
        (["--nightjar-policy"], "--nightjar-policy: expected one argument"),
        (["--nightjar-threads", "two"], "--nightjar-threads 'two' is not valid: give a whole number"),
        (["--nightjar-threads", "1.5"], "give a whole number"),
        (["--nightjar-threads", "-1"], "--nightjar-threads is -1; choose a value from 0 to 1024"),
        (["--nightjar-max-gamma", "0"], "--nightjar-max-gamma is 0; choose a value from 1 to 16"),
        (["--nightjar-max-gamma", "17"], "choose a value from 1 to 16"),
        (["--nightjar-draft-bits", "2"], "--nightjar-draft-bits is 2; choose a value from 3 to 8"),
        (["--nightjar-draft-bits", "16"], "choose a value from 3 to 8"),
        (["--nightjar-elastic", "yes"], "--nightjar-elastic 'yes' is unknown; use one of: auto, on, off"),
        (["--nightjar-overlap", "yes"], "--nightjar-overlap 'yes' is unknown; use one of: auto, on, off"),
        (["--nightjar-platform", "tpu"], "use one of: auto, cpu, cuda"),
        (["--nightjar-policy", "magic"], "unknown policy 'magic'; known policies: nightjar, paper, off, static:N"),
        (["--nightjar-policy", "static:-1"], "gamma must not be negative"),
        (["--nightjar-policy", "static:6"], "exceeds --nightjar-max-gamma 5"),
        (["--nightjar-policy", "static:4", "--nightjar-max-gamma", "3"], "exceeds --nightjar-max-gamma 3"),
    ],
)
def test_refusals_on_the_command_line(words: list[str], expected: str) -> None:
    assert expected in complaint(load_config, words, {})


def test_refusals_in_the_environment() -> None:
    assert "NIGHTJAR_POLCY is no option" in complaint(load_config, [], {"NIGHTJAR_POLCY": "off"})
    assert "NIGHTJAR_MAX_GAMMA" in complaint(load_config, [], {"NIGHTJAR_MAXGAMMA": "3"})  # lists what there is
    assert "--nightjar-threads 'many'" in complaint(load_config, [], {"NIGHTJAR_THREADS": "many"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold one JSON object, not a list"),
        ('{"polcy": "off"}', "unknown Nightjar option 'polcy'; known: policy"),
        ('{"config": "x.json"}', "unknown Nightjar option 'config'"),
        ('{"threads": "2.5"}', "--nightjar-threads '2.5' is not valid"),
        ('{"threads": true}', "--nightjar-threads True is not valid"),
        ('{"policy": 3}', "--nightjar-policy 3 is not valid"),
        ('{"max_gamma": null}', "--nightjar-max-gamma None is not valid"),
        ("\x00\x01", "is not valid JSON"),
    ],
)
def test_refusals_in_the_file(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(content)
    assert expected in complaint(load_config, ["--nightjar-config", str(path)], {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in complaint(load_config, [], {"NIGHTJAR_CONFIG": str(tmp_path / "none.json")})
    assert "Is a directory" in complaint(load_config, ["--nightjar-config", str(tmp_path)], {})


def test_unknown_keyword() -> None:
    assert "unknown Nightjar option 'gamma'" in complaint(make_config, {"gamma": 3}, {})


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        NightjarConfig().threads = 3  # type: ignore[misc]


def test_children_inherit_what_was_handed_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module._HANDOFF, raising=False)
    assert module.inherited_config() is None
    ours = NightjarConfig(policy="static:2", platform="cpu", threads=3)
    monkeypatch.setenv(module._HANDOFF, "")  # so that the test's end undoes what follows
    module.hand_to_children(ours)
    assert module.inherited_config() == ours


def test_every_option_is_documented_once() -> None:
    assert list(module._HELP) == [field.name for field in msgspec.structs.fields(NightjarConfig)]


def test_platform_asked_for_needs_no_torch() -> None:
    assert NightjarConfig(platform="cpu").resolved_platform() == "cpu"
    assert NightjarConfig(platform="cuda").resolved_platform() == "cuda"
