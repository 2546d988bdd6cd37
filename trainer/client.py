"""SkyRL's inference client, patient: an engine that dies is waited for, brought up to date, and asked again.

With LoRA the adapter of the last weight sync lies on disk, so that one engine can be given it while the others serve.
An engine that was started anew does not know the adapter and refuses requests for it, so it can't serve stale weights.
Full weights go through a collective of all engines: there is no patience, and the loss of one ends the attempt.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from skyrl.backends.skyrl_train.inference_servers import common
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    SKYRL_LORA_ADAPTER_NAME,
    RemoteInferenceClient,
)

from checkpointing.errors import WorkerLost

LOOK_SECONDS = 0.5
SENSELESS = 5
"""Times that a request is sent again although no engine was missing anything; after 1, 2, 4 ... seconds, since an
engine whose core has died answers for a moment longer."""

_log = logging.getLogger(__name__)


class PatientClient(RemoteInferenceClient):
    """`adapter`: where the last weight sync has left it. `patience`: seconds to wait for an engine."""

    adapter: str = ""
    patience: float = 600.0
    _waiting: asyncio.Future[bool] | None = None

    @classmethod
    def of(cls, client: RemoteInferenceClient, adapter: str, patience: float) -> "PatientClient":
        patient = cls.__new__(cls)
        patient.__dict__.update(client.__dict__)
        patient.adapter, patient.patience = adapter, patience
        return patient

    def __getstate__(self) -> dict[str, Any]:
        """For the rank that syncs weights, which has a loop of its own."""
        return {**super().__getstate__(), "_waiting": None}

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        return await self.again(lambda: super(PatientClient, self).generate(input_batch, model))

    async def load_lora_adapter(self, lora_name: str, lora_path: str | None = None, *, in_memory: bool = False) -> Any:
        """A weight sync: complete when every engine has the adapter, however long one takes to come back."""

        async def load() -> Any:
            return await super(PatientClient, self).load_lora_adapter(lora_name, lora_path, in_memory=in_memory)

        return await self.again(load)

    async def _call_server(self, *args: Any, **kwargs: Any) -> Any:
        return await self.again(lambda: super(PatientClient, self)._call_server(*args, **kwargs))

    async def again[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns, asked again after engines that were lost serve again.

        Raises:
            WorkerLost: one did not come back in time.
            aiohttp.ClientError: an engine that has all it needs refuses.
        """
        senseless = 0
        while True:
            try:
                return await ask()
            except (aiohttp.ClientError, orjson.JSONDecodeError) as error:
                if not engine_was_lost(error):
                    raise
                if not await self.until_all_serve():
                    if senseless == SENSELESS:
                        raise
                    await asyncio.sleep(2.0**senseless)
                    senseless += 1
                _log.warning("asked again after %r", error)

    async def until_all_serve(self) -> bool:
        """Wait for every engine, and give the adapter to those that lack it. True if one was missing something.

        However many requests have missed an engine, one of them waits for all.
        """
        if self._waiting is None or self._waiting.done():  # as it is when the loop that it belonged to was closed
            self._waiting = asyncio.ensure_future(self._all_serve())
        return await asyncio.shield(self._waiting)

    async def _all_serve(self) -> bool:
        return any(await asyncio.gather(*(self._until_it_serves(url) for url in self.server_urls)))

    async def _until_it_serves(self, url: str) -> bool:
        began, missed = time.monotonic(), False
        while True:
            try:
                missed |= await self._complete(url)
            except (aiohttp.ClientError, TimeoutError) as error:
                missed = True
                if time.monotonic() - began > self.patience:
                    raise WorkerLost(f"the engine at {url} was gone for {self.patience:.0f} s: {error!r}") from error
                await asyncio.sleep(LOOK_SECONDS)
                continue
            return missed

    async def _complete(self, url: str) -> bool:
        """Give the engine at `url` the adapter if it lacks it: then True."""
        http = await self._get_session()
        limit = aiohttp.ClientTimeout(total=60)
        async with http.get(f"{url}/v1/models", timeout=limit) as response:
            response.raise_for_status()
            known = {model["id"] for model in (await response.json())["data"]}
        if SKYRL_LORA_ADAPTER_NAME in known or not self.adapter:
            return False
        body = {"lora_name": SKYRL_LORA_ADAPTER_NAME, "lora_path": self.adapter}
        async with http.post(f"{url}/skyrl/v1/load_lora_adapter", json=body, timeout=limit) as response:
            response.raise_for_status()
        return True


def let_router_start() -> None:
    """SkyRL 0.4.0 asks its router for a setting that the vllm-router it is installed with no longer has: every run with
    several engines would end there. The setting was off unless somebody turned it on, which SkyRL does not.

    And it would have the router, which asks nobody for a token, listen everywhere. It listens at the node's address: on
    loopback in a cluster of our own."""
    common.default_bind_host = lambda node_ip: node_ip
    from vllm_router.router_args import RouterArgs  # only a driver has a use for it, and ranks import this module

    if not hasattr(RouterArgs, "pd_disaggregation"):
        RouterArgs.pd_disaggregation = False


def engine_was_lost(error: Exception) -> bool:
    """Whether `error` may come of an engine that died, or came back without the adapter; else it refused for good."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status == 404 or error.status >= 500
    return True
