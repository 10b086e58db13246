"""One file for each algorithm; `relax_core.registry` lists them."""
