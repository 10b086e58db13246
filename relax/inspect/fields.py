"""Which fields of a row hold what: as the user says, else as the names and the first rows suggest."""

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from relax.errors import ConfigError, suggestion

Path = tuple[str, ...]
"""Where a value stands in a row: the field's name, and the key inside it where the field is a mapping."""
Row = Mapping[str, object]

GROUPS: Final = ("group_id", "group", "uid", "prompt_id", "prompt", "input", "question")
TEXTS: Final = ("prompt", "input", "question")  # come again in later steps, where they are another group
REWARDS: Final = ("rewards", "reward", "scores", "score")
LENGTHS: Final = ("response_length", "completion_length", "response_tokens", "num_tokens")
LOG_PROBS: Final = ("log_probs", "logprobs", "rollout_log_probs", "old_log_probs")
# What TRL's GRPOTrainer (log_completions) and verl's trainers (rollout_data_dir) write beside rewards.
TRL: Final = ("step", "prompt", "completion", "advantage", "mode", "images")
VERL: Final = ("input", "output", "score", "step", "gts", "request_id")


@attrs.frozen
class Choice:
    """What the user said; () and "" where nothing."""

    group: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    reward_key: str = ""
    length: str = ""
    log_probs: str = ""


@attrs.frozen
class Fields:
    """Where a row's values stand.

    Attributes:
        source: what wrote the file, as far as its fields tell: TRL, verl or "".
        group: the fields that name a row's group together.
        components: the reward components by name.
        scalar: the one reward of algorithms that read one; None: the weighted sum of the components.
        left_out: fields that look like rewards but were not taken for components, and why.
    """

    source: str
    group: tuple[Path, ...]
    components: Mapping[str, Path]
    scalar: Path | None = None
    length: Path | None = None
    log_probs: Path | None = None
    left_out: tuple[str, ...] = ()

    @property
    def numbers(self) -> dict[str, Path]:
        """All that must be a number, by the name that faults call it: components first, then the scalar."""
        found = dict(self.components)
        if self.scalar is not None and self.scalar not in found.values():
            found[dotted(self.scalar)] = self.scalar
        return found

    @property
    def paths(self) -> tuple[Path, ...]:
        """All that is read of a row."""
        extra = [path for path in (self.length, self.log_probs) if path is not None]
        return tuple(dict.fromkeys([*self.group, *self.numbers.values(), *extra]))


def dotted(path: Path) -> str:
    """A path as users write it."""
    return ".".join(path)


def find(rows: Sequence[Row], choice: Choice) -> Fields:
    """The fields of a file whose first rows these are.

    Errors: `ConfigError` for fields that none of the rows has, and where groups or rewards cannot be told.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    look = _Look(rows, keys)
    group = tuple(look.chosen("--group", name) for name in choice.group) or _group(keys)
    chosen = [look.chosen("--rewards", name) for name in choice.rewards]
    scalar = look.chosen("--reward-key", choice.reward_key) if choice.reward_key else None
    length = look.chosen("--length", choice.length) if choice.length else _first(LENGTHS, keys)
    log_probs = look.chosen("--log-probs", choice.log_probs) if choice.log_probs else _first(LOG_PROBS, keys)
    source = _source(keys)
    if not chosen:
        chosen = look.rewards(source, {path[0] for path in (*group, length, log_probs) if path})
        if source == "verl" and scalar is None and chosen != [("score",)]:
            scalar = ("score",)
    paths = look.expanded(chosen)
    if not group:
        look.faults.append(f"no field names the group of a row among {', '.join(keys)}; choose it with --group")
    if not paths:
        look.faults.append(f"no field holds rewards among {', '.join(keys)}; choose them with --rewards")
    if look.faults:
        raise ConfigError(look.faults)
    return Fields(source, group, _named(paths), scalar, length, log_probs, tuple(look.left_out))


@attrs.define
class _Look:
    """A look at the first rows: what is wrong with the user's choice, and what was not taken."""

    rows: Sequence[Row]
    keys: Sequence[str]
    faults: list[str] = attrs.Factory(list)
    left_out: list[str] = attrs.Factory(list)

    def chosen(self, flag: str, name: str) -> Path:
        """The path of a name that a flag gave."""
        if name in self.keys:
            return (name,)
        head, _, rest = name.partition(".")
        inside = self._keys_inside(head)
        if rest in inside:
            return (head, rest)
        known = [*self.keys, *(f"{head}.{key}" for key in inside)]
        self.faults.append(f"{flag} {name}: no such field among {', '.join(known)}{suggestion(name, known)}")
        return (name,)

    def rewards(self, source: str, taken: set[str]) -> list[Path]:
        """The fields that look like rewards."""
        if not source:
            whole = next((name for name in REWARDS if name in self.keys), None)
            named = [key for key in self.keys if key.startswith("reward_") or key.endswith("_reward")]
            return [(whole,)] if whole else [(key,) for key in named if self._numeric((key,), key)]
        known = {*taken, *(TRL if source == "TRL" else VERL)}
        found: list[Path] = [(key,) for key in self.keys if key not in known and self._numeric((key,), key)]
        return found or ([("score",)] if source == "verl" else [])

    def expanded(self, paths: Sequence[Path]) -> list[Path]:
        """Paths, each mapping replaced by those of its keys that hold numbers."""
        found: list[Path] = []
        for path in paths:
            inside = self._keys_inside(path[0]) if len(path) == 1 else []
            found += [p for key in inside if self._numeric(p := (path[0], key), dotted(p))] if inside else [path]
        return list(dict.fromkeys(found))

    def _keys_inside(self, key: str) -> list[str]:
        mappings = [value for row in self.rows if isinstance(value := row.get(key), Mapping)]
        return list(dict.fromkeys(str(inner) for mapping in mappings for inner in mapping))

    def _numeric(self, path: Path, name: str) -> bool:
        """Does any row hold a number there? A field of truths only is told, since it may have been meant."""
        kinds = {type(_value(row, path)) for row in self.rows} - {type(None)}
        if kinds == {bool}:
            self.left_out.append(f"{name} (true or false, not a number)")
        return bool(kinds & {int, float})


def _value(row: Row, path: Path) -> object:
    value: object = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    last = [path[-1] for path in paths]
    return {path[-1] if last.count(path[-1]) == 1 else dotted(path): path for path in paths}


def _source(keys: Sequence[str]) -> str:
    if {"step", "prompt", "completion"} <= {*keys}:
        return "TRL"
    return "verl" if {"input", "output", "score"} <= {*keys} else ""


def _group(keys: Sequence[str]) -> tuple[Path, ...]:
    name = next((name for name in GROUPS if name in keys), None)
    if name is None:
        return ()
    return (("step",), (name,)) if name in TEXTS and "step" in keys else ((name,),)


def _first(names: Sequence[str], keys: Sequence[str]) -> Path | None:
    return next(((name,) for name in names if name in keys), None)
