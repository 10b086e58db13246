"""Functions that a user names on the command line, and what importing costs."""

import gc
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax.errors import RelaxError


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Around imports that make objects by the hundred thousand, all of which stay.

    Python would look through them for garbage again and again, which costs a fifth of importing torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def users_code(where: str) -> Iterator[None]:
    """What a user's code raises, and it may raise anything, becomes a `RelaxError` that begins with `where`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise RelaxError(f"{where}: {type(error).__name__}: {error}") from error


def import_function(path: str, flag: str) -> Callable[..., object]:
    """The function at a dotted path such as `my_rewards.score`, looked for beside the user and on `PYTHONPATH`.

    Errors: `RelaxError` naming flag and path if it cannot be imported, is not callable, or could not be found again
    by name in another process (a lambda, a closure, a bound object).
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise RelaxError(f"{flag} {path}: expected module.function, for instance my_rewards.score")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a console script's own folder comes first there, not the user's
    with users_code(f"{flag} {path}: importing {module_name} failed"):
        module = importlib.import_module(module_name)
    function: object = getattr(module, name, None)
    if function is None:
        raise RelaxError(f"{flag} {path}: {module.__file__} has no {name!r}")
    if not callable(function):
        raise RelaxError(f"{flag} {path}: {name!r} is a {type(function).__name__}, not a function")
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RelaxError(
            f"{flag} {path}: another process could not import it by name ({error}); define it with def, at module level"
        ) from error
    return function
