"""Shapes and types are checked where values enter: one decorator for functions, one for records."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import TypeCheckError, jaxtyped

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check a function's jaxtyping annotations at every call (some 20 microseconds for a handful).

    The named axes of one call must agree with each other. While `torch.compile` traces, the plain function is taken:
    a trace fixes the shapes anyway.

    Raises (in the decorated function): jaxtyping.TypeCheckError, a TypeError that names parameter and expected shape.
    """
    guarded: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        nonlocal guarded
        if guarded is None:
            guarded = _guarded(function)
        return guarded(*args, **kwargs)

    return call


def _guarded(function: Callable[P, R]) -> Callable[P, R]:
    # Imported and generated at the first call: most of what importing this package would cost otherwise.
    from beartype import BeartypeConf, beartype
    from beartype.roar import BeartypeCallHintParamViolation

    # With the numeric tower an int is a float.
    typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_return_type=TypeCheckError))
    quick = typechecker(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with jaxtyped("context"):  # the scope of the named axes
                return quick(*args, **kwargs)
        except BeartypeCallHintParamViolation:
            # jaxtyping's own wrapper takes twice as long as the checks, but says more about what they found.
            jaxtyped(typechecker=typechecker)(_parameters_of(function))(*args, **kwargs)
            raise

    return call


def _parameters_of(function: Callable[P, object]) -> Callable[P, None]:
    """A function with the same parameters that does nothing: none may run again for an explanation."""

    def parameters(*args: P.args, **kwargs: P.kwargs) -> None:
        pass

    functools.update_wrapper(parameters, function)
    # setattr, since a type checker knows no signature of a function.
    setattr(parameters, "__signature__", inspect.signature(function).replace(return_annotation=None))  # noqa: B010
    parameters.__annotations__ = {**function.__annotations__, "return": None}
    return parameters


def checked_record(cls: type[R]) -> type[R]:
    """Check an attrs class's annotated fields when an instance is built, which jaxtyping does not do by itself."""
    verified, names = checked(cls.__init__), cls.__init__.__code__.co_varnames[1:]

    @functools.wraps(cls.__init__)
    def fill(self: R, *args: object, **kwargs: object) -> None:
        if torch.compiler.is_compiling():  # which cannot trace how attrs fills a frozen instance
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                object.__setattr__(self, name, value)
        else:
            verified(self, *args, **kwargs)

    # setattr, since a type checker rightly refuses an assignment to `__init__`.
    setattr(cls, "__init__", fill)  # noqa: B010
    return cls
