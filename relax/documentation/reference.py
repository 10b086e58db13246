"""The pages of the API reference: what stands on them is drawn from the docstrings when the site is built."""

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Final

import relax_core
from relax.documentation.markdown import GENERATED, cell, table

MODULES: Final = tuple(sorted(found.name for found in pkgutil.iter_modules(relax_core.__path__) if not found.ispkg))
"""relax_core's modules; algorithms, one file each, have pages of another kind."""


def reference_page(module: str) -> str:
    """One module's page."""
    return f"{GENERATED}\n# relax_core.{module}\n\n::: relax_core.{module}\n"


def reference_index() -> str:
    """The names that `relax_core` has at the top, and every module in a line."""
    names = [name for name in relax_core.__all__ if not inspect.ismodule(getattr(relax_core, name))]
    links = [f"[`{name}`]({_home(name)}.md#relax_core.{_home(name)}.{name})" for name in names]
    modules = [(f"[`{name}`]({name}.md)", cell(_summary(_module(name)))) for name in MODULES]
    return f"""\
{GENERATED}
# relax_core

{inspect.getdoc(relax_core)}

At the top, after `import relax_core`: {", ".join(links)}, and the modules that a notebook calls. All modules:

{table(("module", "what it is for"), modules)}"""


def _home(name: str) -> str:
    """The module that defines what `relax_core` calls by that name."""
    value = getattr(relax_core, name)
    own = getattr(value, "__module__", None)  # a mapping has none
    holders = [module for module in MODULES if vars(_module(module)).get(name) is value]
    return next(module for module in holders if own in (None, f"relax_core.{module}"))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"relax_core.{name}")


def _summary(module: ModuleType) -> str:
    first, _, _ = (inspect.getdoc(module) or "").partition("\n\n")
    return " ".join(first.split())
