"""A seeded simulation of whole runs that drives the product's own code. See docs/drills.md, "Simulation"."""
