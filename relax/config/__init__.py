"""The configuration of a run: what can be set, what it means, and what must not be set together."""

from relax.config.configure import configure, options, resolve
from relax.config.record import Config
from relax.errors import ConfigError

__all__ = ["Config", "ConfigError", "configure", "options", "resolve"]
