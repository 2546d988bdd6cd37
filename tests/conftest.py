"""Settings all tests share."""

from hypothesis import settings

# Examples are the same on every run, and a busy machine's slowness is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
