"""Bounded caches of what is compiled: the least recently used goes first, and is closed.

shelf = Shelf("a forward graph", options.cache_size)     # of bound Programs, by signature
shelf.put(key, bound, groups)
bound = shelf.get(key) or shelf.fitting({"s0": 128})
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.distributed import ProcessGroup

from interlace.errors import CacheWarning
from interlace.frontend.binding import Bound

log = logging.getLogger(__name__)

Item = TypeVar("Item")


class BoundedCache(Generic[Item]):
    """Keeps the most recently used; warns once, as it drops the first."""

    def __init__(self, name: str, capacity: int, close: Callable[[Item], None]) -> None:
        self.capacity = capacity
        self._name, self._close = name, close
        self._lock = threading.RLock()
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self._warned = False

    def get(self, key: Hashable) -> Item | None:
        """The item of this key."""
        with self._lock:
            item = self._items.get(key)
            if item is not None and len(self._items) > 1:
                self._items.move_to_end(key)
            return item

    def add(self, key: Hashable, item: Item) -> None:
        """Keeps an item, and closes the oldest until there are no more than may be."""
        with self._lock:
            self._items[key] = item
            while len(self._items) > self.capacity:
                _, dropped = self._items.popitem(last=False)
                log.info("evicted the oldest of %s, which keeps %d", self._name, self.capacity)
                self._close(dropped)
                self._warn()

    def all(self) -> list[Item]:
        """Every item, the most recently used last."""
        with self._lock:
            return list(self._items.values())

    def clear(self) -> None:
        """Closes them all."""
        with self._lock:
            items, self._items = list(self._items.values()), OrderedDict()
        for item in items:
            self._close(item)

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self._name} met more sizes (or layouts, dtypes, plain values) than {self.capacity}, "
            "which it keeps: one that was dropped is compiled anew when it comes again. Give "
            f'options={{"cache_size": {2 * self.capacity}}} or more, use torch.compile(..., '
            "dynamic=True), or pad to fewer lengths",
            CacheWarning,
            stacklevel=3,
        )


class Shelf(BoundedCache[Bound]):
    """Bound Programs by signature, freed with their process groups."""

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity, lambda bound: bound.executor.close())
        self._watches: dict[int, weakref.ref[ProcessGroup]] = {}
        self.last: tuple[Any, Bound, tuple[int, ...] | None] | None = None
        """The one that was called last, with what it was found by, and the values of its named
        sizes."""

    def fitting(self, symbols: Mapping[str, int]) -> Bound | None:
        """A bound Program for a class of sizes with these values of TorchDynamo's symbols."""
        with self._lock:
            for key, bound in self._items.items():
                if bound.imported.symbols and bound.fits(symbols):
                    return self.get(key)
        return None

    def put(self, key: Hashable, bound: Bound, groups: Sequence[ProcessGroup]) -> None:
        """Keeps a bound Program until there are too many, or one of its groups is gone."""
        with self._lock:
            self.add(key, bound)
            for group in groups:
                if id(group) not in self._watches:
                    self._watches[id(group)] = weakref.ref(group, lambda _: self.clear())

    def clear(self) -> None:
        """Frees them all."""
        with self._lock:
            self.last = None
            self._watches.clear()
        super().clear()
