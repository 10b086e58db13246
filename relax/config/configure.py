"""From what was set, by flags, a file and a recipe, to one checked `Config`, or to the list of all that is wrong."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import attrs

from relax.config import checkpoint, checks
from relax.config.options import Given, Option, options_of
from relax.config.record import ALGORITHM, Config, config_options
from relax.errors import ConfigError, RelaxError, suggestion
from relax.recipes import RECIPES
from relax_core import ALGORITHMS, Algorithm

DEFAULT_RECIPE: Final = "arithmetic"
OWN_DATA: Final = frozenset({"prompt_data", "sft_data"})


@cache
def options() -> Mapping[str, Option]:
    """Every setting by name: the fields of `Config`, then the hyperparameters of all algorithms."""
    found = {option.name: option for option in config_options()}
    for name, algorithm in ALGORITHMS.items():
        for option in options_of(algorithm.hyperparameters, ALGORITHM):
            seen = found.get(option.name, option)
            if seen.kind != option.kind:
                raise TypeError(f"{name} declares {option.name} as {option.kind}, others as {seen.kind}")
            if seen.algorithms is not None or seen is option:
                found[option.name] = attrs.evolve(seen, algorithms=(*(seen.algorithms or ()), name))
    return found


def configure(file: Path | None = None, /, **values: object) -> Config:
    """The configuration with `values` over those of a YAML file, of the recipe and of the program.

    Errors: `ConfigError` that lists everything wrong.
    """
    return resolve([Given(name, value, f"--{name.replace('_', '-')}") for name, value in values.items()], file)


def resolve(flags: Sequence[Given], file: Path | None = None, faults: Sequence[str] = ()) -> Config:
    """The checked configuration. `faults` were found before and are reported with the rest. Errors: `ConfigError`."""
    draft = Draft(list(faults))
    entries = []
    if file is not None:
        from relax.config import yaml_text  # PyYAML comes with the extras; flags work without

        try:
            entries = yaml_text.read(file)
        except ConfigError as error:
            draft.faults.extend(error.faults)
    for given in (*entries, *flags):
        draft.accept(given)
    return draft.finish()


@attrs.define
class Draft:
    """Values being gathered. `invalid` names the settings that were given without a usable value."""

    faults: list[str] = attrs.field(factory=list)
    values: dict[str, object] = attrs.field(factory=dict)
    origins: dict[str, str] = attrs.field(factory=dict)
    invalid: set[str] = attrs.field(factory=set)

    def accept(self, given: Given) -> None:
        """Take a value over what was given before, or note why not."""
        option = options().get(given.name)
        if option is None:
            self.faults.append(f"{given.origin}: unknown setting{suggestion(given.name, options())}")
            return
        self.origins[given.name] = given.origin
        if given.fault is not None:
            self.reject(given.name, given.fault)
            return
        try:
            self.values[given.name] = option.kind.conform(given.value)
            self.invalid.discard(given.name)
        except ValueError as error:
            self.reject(given.name, str(error))

    def reject(self, name: str, reason: str) -> None:
        """Note that a given value cannot be used."""
        self.faults.append(f"{self.origins[name]}: {reason}")
        self.values.pop(name, None)
        self.invalid.add(name)

    def finish(self) -> Config:
        """The record, if nothing is wrong. Errors: `ConfigError`."""
        defaults = self._recipe_defaults()
        algorithm = self._algorithm(defaults)
        self._apply(defaults, algorithm)
        self._apply_checkpoint()
        self._refuse_foreign(algorithm)
        config = self._record(algorithm)
        self.faults.extend(checks.faults_of(config, without=self.invalid))
        if self.faults:
            raise ConfigError(dict.fromkeys(self.faults))
        return config

    def _recipe_defaults(self) -> Mapping[str, object]:
        own_data = OWN_DATA & self.origins.keys()
        name = self.values.setdefault("recipe", None if own_data or "recipe" in self.invalid else DEFAULT_RECIPE)
        if name is None:
            return {}
        if name not in RECIPES:
            self.reject("recipe", f"no recipe {name!r}; there are {', '.join(RECIPES)}{suggestion(str(name), RECIPES)}")
            return {}
        return RECIPES[str(name)].defaults

    def _algorithm(self, defaults: Mapping[str, object]) -> Algorithm[Any]:
        default = str(defaults.get("advantage_estimator", options()["advantage_estimator"].default))
        name = str(self.values.setdefault("advantage_estimator", default))
        if name not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            self.reject(
                "advantage_estimator", f"no algorithm {name!r}; there are {known}{suggestion(name, ALGORITHMS)}"
            )
            self.values["advantage_estimator"] = name = default
        return ALGORITHMS[name]

    def _apply(self, defaults: Mapping[str, object], algorithm: Algorithm[Any]) -> None:
        """The recipe's values where nothing was given, but for what the algorithm does not read, and for the warm start
        where there is a checkpoint: that model has learned from more than a recipe's demonstrations."""
        for name, value in defaults.items():
            option = options()[name]
            foreign = option.algorithms is not None and algorithm.name not in option.algorithms
            chosen = algorithm.traits.reads_components and not algorithm.traits.component_names
            unread = name == "gdpo_reward_keys" and not chosen
            learned = name == "warm_start_steps" and "hf_checkpoint" in self.values
            if name not in self.origins and not foreign and not unread and not learned:
                self.values.setdefault(name, option.kind.conform(value))

    def _apply_checkpoint(self) -> None:
        """The sizes of the checkpoint, if one is given; those that were given beside it must be the same."""
        directory = self.values.get("hf_checkpoint")
        if not isinstance(directory, Path):
            return
        try:
            sizes = checkpoint.sizes_of(directory)
        except RelaxError as error:
            self.reject("hf_checkpoint", str(error))
            self.invalid.update(checkpoint.SIZES)
            return
        for name, size in sizes.items():
            given = self.values.setdefault(name, size)
            fault = checkpoint.contradiction(directory, name, size, given)
            if fault is not None:
                self.faults.append(f"{self.origins[name]} {given}: {fault}")
                self.values[name] = size

    def _refuse_foreign(self, algorithm: Algorithm[Any]) -> None:
        """Hyperparameters that the algorithm does not have would have no effect, so they are refused."""
        if "advantage_estimator" in self.invalid:
            return
        for name in self.origins:
            having = options()[name].algorithms
            if having is not None and algorithm.name not in having:
                others = f"it belongs to {', '.join(having)}"
                self.faults.append(f"{self.origins[name]}: {algorithm.name} has no such hyperparameter; {others}")
                self.values.pop(name, None)

    def _record(self, algorithm: Algorithm[Any]) -> Config:
        """The record of all usable values; what a validator refuses is noted and left at its default."""
        own = attrs.fields_dict(Config)
        for name in list(self.values):
            validator = own[name].validator if name in own else None
            if validator is not None:
                self._try(name, partial(validator, None, own[name], self.values[name]))
        hyperparameters = self._hyperparameters(algorithm.hyperparameters)
        shared = {field.name for field in attrs.fields(algorithm.hyperparameters)} & own.keys()
        values = {name: getattr(hyperparameters, name) for name in shared}
        values |= {name: value for name, value in self.values.items() if name in own}
        return Config(**values, hyperparameters=hyperparameters)

    def _hyperparameters(self, cls: type[attrs.AttrsInstance]) -> attrs.AttrsInstance:
        """An instance of the algorithm's class; each value is tried alone first, so that every bad one is named."""
        names = [field.name for field in attrs.fields(cls) if field.name in self.values]
        for name in names:
            self._try(name, partial(cls, **{name: self.values[name]}))
        values = {name: self.values[name] for name in names if name in self.values}
        try:
            return cls(**values)
        except ValueError as error:  # values that are fine alone contradict each other
            self.faults.append(f"{', '.join(self.origins.get(name, name) for name in values)}: {error}")
            self.invalid.update(values)
            return cls()

    def _try(self, name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except ValueError as error:
            self.origins.setdefault(name, options()[name].flag)
            self.reject(name, str(error).removeprefix(f"{name} "))
