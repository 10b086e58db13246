"""YAML as people expect it: 1e-6 is a number, `no` is a text, a key stands once, and every value knows its line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from relax.config.options import Given
from relax.errors import ConfigError

# The scalars of YAML 1.2's core schema, in decimal. PyYAML reads 1.1, where 1e-6 is a text and `no` is false.
SCALARS: Final[Mapping[str, re.Pattern[str]]] = {
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "null": re.compile(r"(?:~|null|Null|NULL|)$"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either version would read as something else."""


for _tag, _pattern in SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, None)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, None)


def dump(values: Mapping[str, object]) -> str:
    """One `name: value` a line, in order; sequences in brackets, paths as text."""
    return "".join(f"{name}: {_inline(value)}\n" for name, value in values.items())


def _inline(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    text: str = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")


def read(path: Path) -> list[Given]:
    """What the mapping in a YAML file sets, hyphens in names read as underscores.

    Errors: `ConfigError` naming file and line: not readable, not YAML, not a mapping, a name set twice.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"--config {path}: cannot be read: {reason}"]) from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"--config {path}{line}: not YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"--config {path}: not YAML: {error}"]) from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            [f"--config {path}: expected 'name: value' lines, got a {type(root).__name__.removesuffix('Node').lower()}"]
        )
    return _entries(path, root)


def _entries(path: Path, root: yaml.MappingNode) -> list[Given]:
    loader = _Loader("")
    entries: list[Given] = []
    lines: dict[str, int] = {}
    faults = []
    for key, node in root.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:
            faults.append(f"{name} ({path}, line {line}): set before, on line {lines[name]}")
        lines[name] = line
        origin = f"{name} ({path}, line {line})"
        try:
            entries.append(Given(name, loader.construct_object(node, deep=True), origin))
        except yaml.MarkedYAMLError as error:
            entries.append(Given(name, None, origin, fault=str(error.problem)))
    if faults:
        raise ConfigError(faults)
    return entries
