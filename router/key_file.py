"""Takes up a changed file of API keys, so that keys come and go without a restart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pdcore.errors import ConfigError
from pdcore.tracebacks import wordless
from router.api_keys import ApiKeys, Door
from security.files import Stamp, stamp_of

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


class KeyFile:
    """One file. While it is not right, the keys that were read last go on being taken, and the log says so once.

    Raises ConfigError when it is made, see `ApiKeys.load`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = stamp_of(path)
        self.keys = ApiKeys.load(path)

    async def watch(self, door: Door, every_s: float = LOOK_EVERY_S) -> None:
        """Give `door` the keys of each new version of the file. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                if await asyncio.to_thread(self._look):
                    door.replace(self.keys)
                    logger.info("the API keys in %s are used", self._path)
            except ConfigError as error:
                logger.error("the API keys that were read before are used on: %s", error)
            except Exception as error:  # a bug must not keep later versions from being read
                logger.exception("the file of API keys could not be looked at", exc_info=wordless(error))

    def _look(self) -> bool:
        """Whether there are new keys. Raises ConfigError, once for each version that is not right."""
        stamp: Stamp = stamp_of(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        self.keys = ApiKeys.load(self._path)
        return True
