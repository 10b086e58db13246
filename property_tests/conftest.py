"""One profile for all laws: no deadline, since machines differ, and few enough examples to be run every time."""

from hypothesis import settings

settings.register_profile("laws", max_examples=50, deadline=None)
settings.load_profile("laws")
