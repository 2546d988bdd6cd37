"""Defects planted into real drills: each must turn its drill red, under its right name. `python -m tests.planted`."""
