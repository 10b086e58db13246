"""What a named setting accepts, whether it comes as text from the command line or as a value from YAML or Python."""

import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs

METAVARS: Final[Mapping[type, str]] = {int: "N", float: "X", str: "NAME", Path: "PATH"}
NOUNS: Final[Mapping[type, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


@attrs.frozen
class Kind:
    """The type of a setting: `base`, or None where `optional`, or several where `many`, or one of `choices`."""

    base: type
    optional: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, annotation: object) -> "Kind":
        """The kind that a type annotation of an attrs field means. Errors: TypeError for one that no setting has."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
            inner = next(argument for argument in arguments if argument is not type(None))
            return attrs.evolve(cls.of(inner), optional=True)
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return attrs.evolve(cls.of(arguments[0]), many=True)
        if origin is typing.Literal and all(isinstance(argument, str) for argument in arguments):
            return cls(str, choices=arguments)
        if isinstance(annotation, type) and annotation in NOUNS:
            return cls(annotation)
        raise TypeError(f"no setting can have the type {annotation!r}")

    @property
    def metavar(self) -> str:
        """How help texts show the value."""
        return "{" + ",".join(self.choices) + "}" if self.choices else METAVARS[self.base]

    @property
    def expected(self) -> str:
        """What error messages say a value must be."""
        noun = "one of " + ", ".join(self.choices) if self.choices else NOUNS[self.base]
        if self.many:
            noun = {"a text": "texts"}.get(noun, noun.removeprefix("a ").removeprefix("whole ") + "s")
        return f"{noun} or none" if self.optional else noun

    def read(self, text: str | list[str]) -> object:
        """The value that command-line text means. Errors: ValueError."""
        if isinstance(text, list):
            return tuple(self._read_one(item) for item in text)
        return None if self.optional and text == "none" else self._read_one(text)

    def conform(self, value: object) -> object:
        """`value` from YAML or Python, with lists as tuples and paths as Path. Errors: ValueError."""
        if value is None and self.optional:
            return None
        if not self.many:
            return self._conform_one(value)
        if not isinstance(value, list | tuple):
            raise ValueError(f"expects a list of {self.expected}, got {value!r}")
        return tuple(self._conform_one(item) for item in value)

    def _read_one(self, text: str) -> object:
        if self.base in (int, float):
            try:
                return self._conform_one(self.base(text))
            except (ValueError, OverflowError):
                raise ValueError(f"expects {self.expected}, got {text!r}") from None
        return self._conform_one(text)

    def _conform_one(self, value: object) -> object:
        if self.base is float and type(value) is int:
            value = float(value)
        if self.base is Path and isinstance(value, str) and value:
            value = Path(value)
        fits = isinstance(value, Path) if self.base is Path else type(value) is self.base
        if not fits or (self.choices and value not in self.choices):
            raise ValueError(f"expects {self.expected}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expects a finite number, got {value}")
        return value


@attrs.frozen
class Option:
    """A setting as the command line and YAML offer it. `algorithms`: whose hyperparameter it is, if any's."""

    name: str
    kind: Kind
    default: object
    help: str
    section: str
    algorithms: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")


@attrs.frozen
class Given:
    """A value that somebody set, and where: `origin` is the flag, or the key with its file and line.

    `fault` says why what was written there is no value at all.
    """

    name: str
    value: object
    origin: str
    fault: str | None = None


def options_of(cls: type[attrs.AttrsInstance], section: str = "") -> tuple[Option, ...]:
    """One option for every field of an attrs class, in order.

    Metadata: "help" is needed, "section" defaults to the argument. A field without a default, or whose default depends
    on other fields, shows "help" alone.
    """
    hints = typing.get_type_hints(cls)
    return tuple(
        Option(
            name=field.name,
            kind=Kind.of(hints[field.name]),
            default=None if isinstance(field.default, attrs.Factory) else field.default,  # type: ignore[arg-type]
            help=field.metadata["help"],
            section=field.metadata.get("section", section),
        )
        for field in attrs.fields(cls)
        if "help" in field.metadata
    )
