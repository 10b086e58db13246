"""Pages of the documentation that follow from records and docstrings. `python -m relax.documentation` writes them."""
