"""How Ray says that the process behind an actor is gone. Not all of these are RayActorErrors."""

from ray.exceptions import ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RayActorError

DEAD = (RayActorError, OutOfMemoryError, NodeDiedError, ActorUnschedulableError)
"""OutOfMemoryError: Ray's own monitor has killed it, because its node was short of memory."""
