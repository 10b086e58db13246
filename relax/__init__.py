"""The runtime: what injects processes, files and accelerators into :mod:`relax_core`."""
