"""Ownership of KV blocks, by block number. Handles neither tensors nor tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from kvrelay.engine.kvcache.block_eviction import CachedBlocks
from kvrelay.engine.kvcache.cache_listener import CacheListener
from kvrelay.engine.kvcache.change_journal import ChangeJournal
from kvrelay.engine.kvcache.window_parts import BlockUnits, PartMemory, WindowParts
from kvrelay.types.block_keys import block_key

_WHOLE_BLOCKS = BlockUnits()


class OutOfBlocks(Exception):
    """Less memory is available than was requested, in units. The pool is unchanged; the scheduler
    waits or preempts.
    """

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} units of blocks wanted, {available} available")
        self.wanted = wanted
        self.available = available


class IntegrityError(Exception):
    """The pool's indexes disagree, or a block was released that is not held. Always a bug in the
    caller or in the pool.
    """


class BlockPool:
    """Blocks 0 to num_blocks - 1, each in one of three states.

        free ──allocate──▶ held ──release, unnamed──▶ free
                            │ ▲
              release, named│ │hold
                            ▼ │
                           cached ──allocate evicts, see `CachedBlocks`──▶ free

    Free blocks are kept as maximal runs, since attention over a run of adjacent blocks needs no
    gather.

    A named block is found by its hash if its content equals the requested content. Content is
    opaque to the pool, which compares contents and gives each a serial number.

    The memory is counted in units. Without windows a block is one unit, and there are as many units
    as blocks. With windows a block may lack its windowed part (`WindowParts`), and there are more
    blocks than the memory holds with both parts.
    """

    def __init__(
        self,
        num_blocks: int,
        units: BlockUnits = _WHOLE_BLOCKS,
        *,
        capacity: int | None = None,
        memory: PartMemory | None = None,
    ) -> None:
        """capacity: units of memory. memory: of the parts of blocks, in pools with windows; told
        before a method returns that took or gave up some.
        """
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.units = units
        self.capacity = num_blocks * units.unwindowed if capacity is None else capacity
        self._windows = WindowParts(num_blocks) if units.windowed else None
        self._memory = memory
        # Blocks without content, and blocks without their windowed part, since the last report.
        self._vacated: list[int] = []
        self._unwindowed: list[int] = []
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Contents of named blocks.
        self._contents: dict[int, Hashable] = {}
        # Serial numbers of the blocks' contents; 0 for an unnamed block.
        self._serials = [0] * num_blocks
        # Contents that have been named so far. A match may be longer once there are more.
        self.num_contents = 0
        # Lookups and names whose hash belonged to a block with other content.
        self.collisions = 0
        # Changes of the findable hashes.
        self.journal = ChangeJournal()
        self.listeners: list[CacheListener] = [self.journal]
        # The tenant whose tokens a named block holds.
        self._owners = [""] * num_blocks
        self._cached = CachedBlocks()
        # Free runs [start, end).
        self._run_end: dict[int, int] = {0: num_blocks}
        self._run_start: dict[int, int] = {num_blocks: 0}
        self.num_free = num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks that are named and not held."""
        return len(self._cached)

    def cached_of(self, owner: str) -> int:
        """Cached blocks of one owner."""
        return self._cached.of(owner)

    @property
    def num_named(self) -> int:
        """Blocks that a lookup can find, cached or held."""
        return len(self._hash_of)

    @property
    def named_hashes(self) -> Iterable[bytes]:
        """The hashes of all findable blocks."""
        return self._block_of.keys()

    def hashes(self, start: int, end: int) -> list[bytes]:
        """The hashes of the findable blocks among the blocks `start` to `end` - 1."""
        found = map(self._hash_of.get, range(start, min(end, self.num_blocks)))
        return [hash for hash in found if hash is not None]

    @property
    def num_held(self) -> int:
        """Blocks with at least one hold."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def units_held(self) -> int:
        """Units of blocks in use. Each hold of a windowed part counts, so that a sequence whose
        window moves on needs no more units, whoever shares its blocks.
        """
        held = self.num_held * self.units.unwindowed
        return held + self._window_holds * self.units.windowed

    @property
    def units_available(self) -> int:
        """Units that are free, or that `allocate` and `hold_windows` may free: cached blocks, and
        idle windowed parts.
        """
        return max(0, self.capacity - self.units_held)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The pool's size, the part in use, and the cached part, in blocks with both parts."""
        held, whole = self.units_held, self.units.all
        cached = self._units_present - held
        return (
            self.capacity // whole,
            min(-(-held // whole), self.capacity // whole),
            max(0, cached) // whole,
        )

    @property
    def _window_holds(self) -> int:
        return 0 if self._windows is None else self._windows.num_holds

    @property
    def _units_present(self) -> int:
        """Units of memory that blocks take, in use or cached."""
        blocks = (self.num_blocks - self.num_free) * self.units.unwindowed
        parts = 0 if self._windows is None else self._windows.num_present
        return blocks + parts * self.units.windowed

    def has_window(self, block: int) -> bool:
        """Whether the block has its windowed part, if it can have one."""
        return self._windows is None or self._windows.is_present(block)

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Allocates `n` blocks with one hold each, in as few runs as the free blocks allow, each
        run ascending. They have no windowed parts.

        If the blocks that follow the held block `after` are free, they come first, so that a
        growing sequence stays one run. Raises OutOfBlocks.
        """
        wanted = n * self.units.unwindowed
        if wanted > self.units_available:
            raise OutOfBlocks(wanted, self.units_available)
        self._make_room_for(wanted)
        following: list[int] = []
        if after is not None and after + 1 in self._run_end:
            following += self._take(after + 1, n)
        others: list[int] = []
        while (missing := n - len(following) - len(others)) > 0:
            others += self._take(self._best_run(missing), missing)
        blocks = following + sorted(others)
        for block in blocks:
            self._references[block] = 1
            self._generations[block] += 1
            self._serials[block] = 0
        self._report_vacated()
        if self._memory is not None:
            self._memory.take(blocks, windowed=False)
        return blocks

    def hold_windows(self, blocks: Iterable[int]) -> None:
        """Adds a hold to the windowed part of each held block. A part that was absent has no
        content, so its block must be unnamed. The caller makes sure that the units are available.
        """
        assert self._windows is not None, "a pool without windows"
        taken = []
        # Present parts first, so that none of them makes room for another.
        for block in sorted(blocks, key=self._windows.is_present, reverse=True):
            if self._references[block] == 0:
                raise IntegrityError(f"the windowed part of block {block} is held before the block")
            if not self._windows.is_present(block):
                if block in self._hash_of:
                    raise IntegrityError(f"the windowed part of named block {block} is absent")
                self._make_room_for(self.units.windowed)
                taken.append(block)
            self._windows.hold(block, self._owners[block])
        self._report_vacated()
        if self._memory is not None:
            self._memory.take(taken, windowed=True)

    def release_windows(self, blocks: Iterable[int]) -> None:
        """Removes a hold from the windowed part of each block. Raises IntegrityError for a part
        that is not held.
        """
        assert self._windows is not None, "a pool without windows"
        for block in reversed(list(blocks)):
            if not self._windows.num_holds_of(block):
                raise IntegrityError(f"the windowed part of block {block} is not held")
            if self._windows.release(block):
                if block in self._hash_of:
                    self._windows.rest(block, self._owners[block])
                else:
                    self._drop_window(block)
        self._report_vacated()

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a hold to each block. A cached block becomes held. Raises IntegrityError for a free
        block.
        """
        for block in blocks:
            if self._references[block] == 0:
                if not self._cached.remove(block, self._owners[block]):
                    raise IntegrityError(f"block {block} is acquired, but it is free")
                if self._windows is not None:
                    self._windows.rest(block, self._owners[block])
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a hold from each block. Later blocks in `blocks` are evicted earlier, since fewer
        requests share the end of a prefix.

        Raises IntegrityError for a block that is not held.
        """
        for block in reversed(list(blocks)):
            if self._references[block] == 0:
                raise IntegrityError(f"block {block} is released, but no sequence holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._windows is not None:
                    self._check_no_window_hold(block)
                    self._windows.wake(block, self._owners[block])
                if block in self._hash_of:
                    self._cached.add(block, self._owners[block])
                    for listener in self.listeners:
                        listener.cached(block)
                else:
                    self._free(block)
        self._report_vacated()

    def name(self, block: int, hash: bytes, content: Hashable, owner: str = "") -> int:
        """Makes a held block findable by `hash` and equal `content`, on behalf of `owner`.

        If another findable block has that content, this block stays unnamed. Exception: if the
        other block lacks its windowed part and this one has it, this one takes the name over.
        If the hash belongs to other content, the block of that content loses its name: a collision
        costs a recomputation.
        Returns the content's serial number. Raises IntegrityError if the block is not held or is
        named for other content.
        """
        if self._references[block] == 0:
            raise IntegrityError(f"block {block} gets a hash, but no sequence holds it")
        if block in self._hash_of:
            if self._contents[block] != content:
                raise IntegrityError(
                    f"block {block} gets a hash, but it has the hash of other content"
                )
            return self._serials[block]
        other, serial = self._block_of.get(hash), 0
        if other is not None:
            if self._contents[other] == content:
                serial = self._serials[other]
                if self.has_window(other) or not self.has_window(block):
                    self._serials[block] = serial
                    return serial
            else:
                self.collisions += 1
            self._drop_name(other)
        self._hash_of[block] = hash
        self._block_of[hash] = block
        self._contents[block] = content
        self._owners[block] = owner
        self.num_contents += 1
        self._serials[block] = serial or self.num_contents
        for listener in self.listeners:
            listener.named(hash)
        self._report_vacated()
        return self._serials[block]

    def unname(self, block: int) -> None:
        """Removes the name of a held block whose KV is in doubt, if it has one. Raises
        IntegrityError if the block is not held.
        """
        if self._references[block] == 0:
            raise IntegrityError(
                f"the hash of block {block} is removed, but no sequence holds the block"
            )
        if block in self._hash_of:
            for listener in self.listeners:
                listener.withdrawn(block)
            self._forget(block)
            self._report_vacated()
        self._serials[block] = 0

    def lookup(self, hash: bytes, content: Hashable) -> int | None:
        """The block of that hash if it has equal content, else None."""
        block = self._block_of.get(hash)
        if block is None or self._contents[block] == content:
            return block
        self.collisions += 1
        return None

    def serial(self, block: int) -> int:
        """Serial number of the content that the block is named for; 0 if it is unnamed."""
        return self._serials[block]

    def hash_of(self, block: int) -> bytes | None:
        """The hash that the block is named by; None if it is unnamed."""
        return self._hash_of.get(block)

    def is_cached(self, block: int) -> bool:
        """True if the block is named and not held."""
        return self._references[block] == 0 and block in self._hash_of

    def num_holds(self, block: int) -> int:
        """Number of holds of the block."""
        return self._references[block]

    def generation(self, block: int) -> int:
        """How often the block has been allocated. A write for an earlier owner carries a lower
        number.
        """
        return self._generations[block]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each block is in exactly one state and the indexes agree."""
        free = {block for start, end in self._run_end.items() for block in range(start, end)}
        held = {block for block, count in enumerate(self._references) if count > 0}
        cached = set(self._cached)
        for text, wrong in (
            ("both free and cached or held", free & (cached | held)),
            ("both cached and held", cached & held),
            ("lost", set(range(self.num_blocks)) - free - held - cached),
            (
                "held a negative number of times",
                {b for b, holds in enumerate(self._references) if holds < 0},
            ),
            ("cached without a name", cached - self._hash_of.keys()),
            ("free with a name", free & self._hash_of.keys()),
            (
                "cached as another's",
                {b for b in cached if not self._cached.has(b, self._owners[b])},
            ),
            (
                "named one way only",
                {b for b, h in self._hash_of.items() if self._block_of.get(h) != b},
            ),
            ("named without a content", self._hash_of.keys() ^ self._contents.keys()),
            ("named without a serial", {b for b in self._hash_of if not self._serials[b]}),
        ):
            if wrong:
                raise IntegrityError(f"blocks {text}: {sorted(wrong)}")
        if wrong_count := self._cached.check_integrity():
            raise IntegrityError(wrong_count)
        self._check_windows(held)
        if len(self._block_of) != len(self._hash_of):
            raise IntegrityError(
                f"{len(self._block_of)} hashes for {len(self._hash_of)} hashed blocks"
            )
        checksum = 0
        for hash in self._block_of:
            checksum ^= block_key(hash)
        if checksum != self.journal.checksum:
            raise IntegrityError("the checksum of the findable blocks is not that of their hashes")
        if self._run_start != {end: start for start, end in self._run_end.items()}:
            raise IntegrityError("the two indexes of free runs differ")
        if len(free) != self.num_free:
            raise IntegrityError(
                f"{len(free)} blocks are free, but {self.num_free} are counted as free"
            )

    def _best_run(self, n: int) -> int:
        """Start of the shortest free run that holds `n` blocks, else of the longest run."""
        fitting = [(end - start, start) for start, end in self._run_end.items() if end - start >= n]
        if fitting:
            return min(fitting)[1]
        return max(self._run_end, key=lambda start: self._run_end[start] - start)

    def _take(self, start: int, n: int) -> range:
        """Takes up to `n` blocks from the head of the free run at `start`."""
        end = self._run_end.pop(start)
        taken = range(start, min(start + n, end))
        if taken.stop < end:
            self._run_end[taken.stop] = end
            self._run_start[end] = taken.stop
        else:
            del self._run_start[end]
        self.num_free -= len(taken)
        return taken

    def _free(self, block: int) -> None:
        """Adds the block to the free runs and joins it with its neighbours."""
        if self._windows is not None:
            self._windows.drop(block)
            self._vacated.append(block)
        start = self._run_start.pop(block, block)
        end = self._run_end.pop(block + 1, block + 1)
        self._run_end[start] = end
        self._run_start[end] = start
        self.num_free += 1

    def _make_room_for(self, units: int) -> None:
        """Frees memory until so many units take none. There must be as many available."""
        while self.capacity - self._units_present < units:
            if self._windows is not None and self._windows.num_idle:
                self._unwindowed.append(self._windows.pop_idle())
            else:
                self._evict()

    def _evict(self) -> None:
        block = self._cached.pop()
        self._forget(block)
        self._free(block)

    def _drop_window(self, block: int) -> None:
        """Frees the memory of a windowed part that nobody holds, if it has any."""
        if self._windows is not None and self._windows.drop(block):
            self._unwindowed.append(block)

    def _report_vacated(self) -> None:
        for blocks, only_windowed in ((self._vacated, False), (self._unwindowed, True)):
            if blocks:
                if self._memory is not None:
                    self._memory.give_up(tuple(blocks), only_windowed=only_windowed)
                blocks.clear()

    def _check_no_window_hold(self, block: int) -> None:
        assert self._windows is not None, "a pool without windows"
        if self._windows.num_holds_of(block):
            raise IntegrityError(f"block {block} is released before its windowed part")

    def _check_windows(self, held: set[int]) -> None:
        """Raises IntegrityError if the windowed parts do not fit the blocks `held`."""
        if self._windows is None:
            return
        if flaw := self._windows.flaw():
            raise IntegrityError(flaw)
        idle = self._windows.idle()
        resting = {
            block
            for block in held
            if self._windows.is_present(block) and not self._windows.num_holds_of(block)
        }
        if idle != resting or not idle <= self._hash_of.keys():
            raise IntegrityError(f"windowed parts are idle on the wrong blocks: {idle ^ resting}")
        if self._units_present > self.capacity:
            raise IntegrityError(
                f"blocks take {self._units_present} of {self.capacity} units of memory"
            )

    def _drop_name(self, block: int) -> None:
        """Removes a block's name. Requests that hold the block keep it."""
        self._forget(block)
        if self._cached.remove(block, self._owners[block]):
            self._free(block)

    def _forget(self, block: int) -> None:
        if self._windows is not None and self._references[block]:
            self._windows.wake(block, self._owners[block])
            if not self._windows.num_holds_of(block):
                self._drop_window(block)
        hash = self._hash_of.pop(block)
        del self._block_of[hash], self._contents[block]
        for listener in self.listeners:
            listener.forgotten(hash)
