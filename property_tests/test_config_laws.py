"""Laws of the configuration: what is written can be read, flags and files say the same, and nothing crashes."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax import cli
from relax.config import Config, ConfigError, configure, options, resolve
from relax.config.command_line import add_arguments
from relax.config.command_line import given as given_by_flags
from relax.config.options import Option
from relax.config.yaml_text import dump
from relax_core import ALGORITHMS

LAW = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
# Paths would have to exist, and recipes to be there.
FREE = {
    name: option
    for name, option in options().items()
    if option.kind.base is not Path and name not in ("recipe", "output")
}


def values_of(option: Option) -> st.SearchStrategy[object]:
    """Values of the right type, usually in range."""
    kind = option.kind
    if kind.choices:
        one: st.SearchStrategy[object] = st.sampled_from(kind.choices)
    elif option.name == "advantage_estimator":
        one = st.sampled_from(list(ALGORITHMS))
    elif option.name.endswith("_path"):
        one = st.sampled_from(["signal", "my_rewards.score", "a.b.c"])
    else:
        one = {
            bool: st.booleans(),
            int: st.integers(-1, 300),
            float: st.one_of(st.floats(0, 2), st.floats(allow_nan=False, allow_infinity=False)),
            str: TEXT,
        }[kind.base]
    if kind.many:
        # A word that begins with a hyphen is a flag to any shell user.
        one = one.filter(lambda item: not str(item).startswith("-") or isinstance(item, float))
        one = st.lists(one, min_size=1, max_size=4).map(tuple)
    return st.none() | one if kind.optional else one


GIVEN = st.lists(st.sampled_from(sorted(FREE)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(FREE[name]) for name in names})
)


def outcome(configured: object) -> object:
    """The record, or what is wrong with it, without where it was said."""
    try:
        return configured()  # type: ignore[operator]
    except ConfigError as error:
        return sorted(fault.partition(": ")[2] or fault for fault in error.faults)


@LAW
@given(values=GIVEN)
def test_every_configuration_is_accepted_or_refused_by_name(values: dict[str, object]) -> None:
    try:
        config = configure(**values)
    except ConfigError as error:
        flags = {option.flag for option in options().values()}
        for fault in error.faults:
            assert any(word.rstrip(":,;") in flags for word in fault.split()), fault
            assert "\n" not in fault
    else:
        assert isinstance(config, Config)
        assert config.global_batch_size * config.num_steps_per_rollout == config.samples_per_rollout


@LAW
@given(values=GIVEN)
def test_what_is_written_can_be_run_again(values: dict[str, object], tmp_path: Path) -> None:
    try:
        config = configure(**values)
    except ConfigError:
        return
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    assert configure(file) == config
    assert configure(file).to_yaml() == config.to_yaml()


@LAW
@given(values=GIVEN)
def test_a_file_says_what_flags_say(values: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(values), encoding="utf-8")
    parser = cli.Parser(prog="relax train", allow_abbrev=False)
    add_arguments(parser)
    namespace, rest = parser.parse_known_args(_as_flags(values))
    assert rest == []
    assert outcome(lambda: resolve(given_by_flags(namespace))) == outcome(lambda: configure(file))


def _as_flags(values: dict[str, object]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = options()[name].flag
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={'none' if value is None else value}")
    return words


@pytest.mark.parametrize("name", [name for name, option in FREE.items() if option.kind.base in (int, float)])
def test_no_number_lets_nan_or_text_through(name: str) -> None:
    for value in (float("nan"), float("inf"), "1", None, [None], {}, object()):
        if value is None and FREE[name].kind.optional:
            continue
        with pytest.raises(ConfigError) as caught:
            configure(**{name: value})
        assert any(fault.startswith(FREE[name].flag) for fault in caught.value.faults)
