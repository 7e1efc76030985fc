"""Gang: engine processes, as a run sees them: in place of a crew of threads.

``processes=N`` runs N whole engines, each with reads in flight, decode threads and a loop of its own. The consumer's
process draws indices, puts batches in order, counts and resumes, as always; per batch it wakes up once, and per sample
it does nothing::

    CONSUMER'S PROCESS                                         ENGINE PROCESS p of N
                       begin, indices of a batch (pickled)
    run: number n ------------------------------------------>  share: number n // N, for p = n % N
                                                               reads, decode, rows of a slot, as ever
    thread "aioload-gang" <----------------------------------  done: segment, layout, errors
      | the batch, by its number                     (the segment's file, the first time)
    order, (copy to the device), hand-off
      | lend: views of the very same memory
    consumer, until the last view is gone ------------------>  freed: the slot is FREE for p again

- **What crosses.** The dataset and all else that loads, once, when a process begins, by pickle
  (:mod:`~aioload.engine.parcel`; with ``fork`` not even that), but for its arrays and tensors, of which all processes
  map one copy (:mod:`~aioload.engine.buffers`). Then small messages (:mod:`~aioload.engine.messages`)
  over one socket per process, each whole or not at all (:mod:`~aioload.engine.channel`). Batches do not: both sides map
  the memory of the slots (:mod:`~aioload.engine.segments`). What has no layout is pickled, and its arrays and tensors
  lie in such a slot (:mod:`~aioload.engine.packing`).
- **The beginning.** Processes are asked for first, all at once, and come to be while the dataset is pickled
  (:mod:`~aioload.engine.roster`); they are given it, and the first indices, by their sockets. What they have in common
  lies in few large pages (:mod:`~aioload.engine.pages`), so that a fork is quick. Of a server that may still be
  importing, they are asked for by the gang's thread, so that ``iter()`` waits for nothing but the pickling.
- **Who takes it in.** The thread ``aioload-gang``, while somebody waits for a batch, or came back at once for the
  latest, or where batches go to a device (:mod:`~aioload.engine.intake`); else messages lie in the sockets, and the
  training step keeps the interpreter to itself. Once awake, it takes in all that has come, so that the next batches are
  there without it.
- **Who takes in what a process is asked for.** Its main thread; but where one thread does all the work, that one,
  between two batches (:mod:`~aioload.engine.reception`).
- **The processor.** Where all are busy, a read that is done does not interrupt the step: the processes are of the
  scheduling policy SCHED_BATCH, with their share like others, but from the next tick on. (Interruptions of a step of
  2 ms beside 16 reads of 7 ms on two processors: 0.3 in place of 1.0.)
- **Who gets which batch** follows from its number alone. So the order is the sampler's, and what a process has in
  flight is bounded by its part of ``prefetch_bytes``.
- **Who owns a slot.** Its process, from which it is lent to the consumer's with the message *done*, and given back with
  *freed*. The consumer's process never writes to it. A mapping lives as long as any view of it, whatever becomes of the
  process. On its way to CUDA a batch is copied from there: the mapping is page-locked here, once, from its first batch
  until it goes, and the slot is given back when the event of the copy has passed.
- **The end.** Closing shuts the sockets at both ends: a process that finds its socket at its end ends, and is killed if
  it does not within two seconds. When the consumer's process is killed, the kernel closes a pipe, and sends SIGIO for
  it, which ends the process whatever it does. Nothing has a name, so nothing is left behind.
- **The death of a process** is seen at once, by the end of its socket or its sentinel. What it had finished is handed
  over; then the run is broken, with an error that says by which signal, and which samples were being loaded: the
  process keeps account of them in memory that outlives it (:mod:`~aioload.engine.marks`). A slot that was being
  written is not known here yet, and so never handed out.
- **Interrupts** are for the consumer: the processes ignore SIGINT. A message is sent by one system call, so that an
  interrupt leaves it sent or not; where nobody can tell, it is sent again, and known by its number. So are *freed* and
  what the consumer has taken, which go with the indices of the next batch where they can.
"""

import functools
import itertools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from aioload.engine import abroad, threads
from aioload.engine.batch import Batch
from aioload.engine.crew import Entrance, Runs, end_at_exit
from aioload.engine.death import died, died_at_once
from aioload.engine.demand import Demand
from aioload.engine.intake import Intake
from aioload.engine.marks import Span
from aioload.engine.member import Member
from aioload.engine.messages import Begin, Begun, Broken, Done, End, Load, Totals, Widen, received
from aioload.engine.portal import Portal
from aioload.engine.roster import Roster
from aioload.engine.settings import Part
from aioload.errors import AioloadError, EngineError, ProcessDiedError
from aioload.layout import Layout
from aioload.ring import Ring
from aioload.slot import Slot
from aioload.stats import Ledger, Tally

_END_S = 2.0
"""Seconds that processes get to end before they are killed; their threads get half of it."""

_MOST_LAYOUTS = 64


class Remote(Protocol):
    """The batches of one pass that processes load; see :class:`~aioload.engine.remote.RemoteFetcher`."""

    def arrive(self, process: int, done: Done, slot: Slot | None, layout: Layout | None) -> None:
        """Take in a batch. On the gang's thread."""
        ...

    def waiting_for(self, process: int) -> Batch | None:
        """Return the first batch that a process has not delivered."""
        ...

    def under_way(self, process: int) -> list[tuple[Batch, int]]:
        """Return the samples that a process is loading: their batches and positions, those farthest on first."""
        ...


class Waited(Runs, Protocol):
    """A run of batches that come from elsewhere."""

    @property
    def is_waited_for(self) -> bool:
        """Whether what has come is to be taken in at once."""
        ...


class ReadsElsewhere:
    """In place of a regulator, where the reads are other processes': their limits, as they tell them."""

    def __init__(self) -> None:
        self.limits: dict[int, int] = {}
        self.demand = Demand()
        self.maximum = 0

    @property
    def limit(self) -> int:
        """Reads that may be under way, in all processes."""
        return sum(self.limits.values())


class Gang:
    """The engine processes of one pass, or of all passes where workers persist: a crew, to whoever runs.

    Like a crew it refers to nothing of the user's once the processes have begun.

    Args:
        parts: What each process is to do.
        contents: What all are given; see :class:`~aioload.engine.child.Child`.
        context: How processes are started.
        ring: Lends what they fill.
        portal: The loop.
        ledger: Where what they do is counted.
        auto: Whether they find out by themselves how much to read.
        has_beginning: Whether nothing is handed over before all processes say that they have begun.
        epoch_told: What the dataset's ``set_epoch`` was last called with, before it was pickled.

    Raises:
        TransferError: Something cannot be pickled.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        contents: dict[str, Any],
        context: BaseContext,
        *,
        ring: Ring,
        portal: Portal,
        ledger: Ledger,
        auto: bool,
        has_beginning: bool,
        epoch_told: int | None,
    ) -> None:
        self._ring, self._loop, self._ledger, self._epoch_told = ring, portal, ledger, epoch_told
        self.portal = Entrance(portal, opened=not has_beginning)
        self.regulator: Any = ReadsElsewhere() if auto else None
        self.crashed = self._closed = self._given_up = self._have_all_begun = False
        self._pid = os.getpid()
        self._runs: weakref.WeakKeyDictionary[Waited, None] = weakref.WeakKeyDictionary()
        self._remotes: weakref.WeakValueDictionary[int, Remote] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._entered: set[int] = set()  # passes that the processes have not been told the end of
        self._layout_of: Callable[[bytes], Layout] = functools.lru_cache(_MOST_LAYOUTS)(pickle.loads)
        self._untold: BaseException | None = None  # an error that no run has been told of
        self._intake = Intake()
        self._roster = Roster(parts, ledger, self._intake.press)
        self.members: Sequence[Member] = self._roster.members
        """The processes."""
        self._thread = threading.Thread(target=self._serve, name="aioload-gang", daemon=True)
        self._unsent: tuple[dict[str, Any], BaseContext] | None = contents, context

    def start(self) -> None:
        """Have the processes started, and what they load taken in. Whoever calls it closes the gang.

        Raises:
            TransferError: Something cannot be pickled.
            OSError: Too few files may be open, or there is no memory.
            ProcessDiedError: A process ended before it was given anything.
            RuntimeError: The system has no thread to give.
        """
        assert self._unsent is not None
        (contents, context), self._unsent = self._unsent, None
        try:
            self._loop.acquire(self._loop_crashed, at_once=False)
            self._roster.begin(contents, context)
            threads.start(self._thread)
        except BaseException:
            self.stop()
            if self._thread.ident is None:
                self._reap()
            raise
        end_at_exit(self)

    def __repr__(self) -> str:
        return f"<Gang {self.members}>"

    @property
    def reads_limit(self) -> int:
        """Reads that may be under way at present, in all processes."""
        return 0 if self._closed else sum(member.reads_limit for member in self.members)

    @property
    def decode_limit(self) -> int:
        """Decode threads that may be awake at present, in all processes."""
        return sum(member.decode_limit for member in self.members)

    @property
    def num_bytes(self) -> int:
        """Bytes in flight in all processes when they told last."""
        return 0 if self._closed else sum(member.num_bytes for member in self.members)

    def enter(self, remote: Remote, epoch: int, base_seed: int, *, epoch_told: int | None, saved: Any) -> int:
        """Have the processes begin a pass, whose batches come to ``remote``; return its number."""
        of = next(self._numbers)
        self._remotes[of] = remote
        self._entered.add(of)
        news, self._epoch_told = None if epoch_told == self._epoch_told else epoch_told, epoch_told
        for member in self.members:
            member.send(Begin(of, epoch, base_seed, news, saved))
        return of

    def new_span(self, number: int, num_samples: int) -> Span:
        """Return where batch ``number`` of a pass has its marks; see :meth:`marks_of`."""
        marks = self.members[number % len(self.members)].marks
        assert marks is not None
        return marks.new_span(num_samples)

    def load(self, of: int, number: int, indices: list[Any], span: Span) -> None:
        """Have batch ``number`` of a pass loaded. In the consumer's thread."""
        inner, which = divmod(number, len(self.members))
        member = self.members[which]
        notes = member.notes()
        member.send(Load(of, inner, indices, *span, *notes))
        member.note_told(notes)

    def marks_of(self, number: int, span: Span) -> Sequence[int]:
        """Return how far each sample of batch ``number`` is: 0 if not begun or done, more for each stage."""
        marks = self.members[number % len(self.members)].marks
        return b"" if marks is None else marks.of(span)

    def note_taken(self, of: int, number: int) -> None:
        """Note that the consumer has a batch."""
        inner, which = divmod(number, len(self.members))
        self.members[which].taken.append((of, inner))

    def flush(self) -> None:
        """Have the processes told what they have not been told. In the consumer's thread."""
        self._ring.take_in()
        for member in self.members:
            if member.taken or len(member.freed) > 1:
                notes = member.notes()
                member.send(notes)
                member.note_told(notes)

    def attend(self) -> None:
        """Have what has come, and comes next, taken in: a consumer waits. Any thread; never waits."""
        self._intake.look()

    def release(self, slot: Slot) -> None:
        """Let a slot go that nobody wants."""
        self._ring.release(slot)

    def leave(self, of: int) -> None:
        """Have the processes give a pass up. Any thread."""
        self._remotes.pop(of, None)
        if of not in self._entered or self._closed or self._pid != os.getpid():
            return
        self._entered.discard(of)
        for member in self.members:
            member.send(End(of))

    # What a crew has, for runs, passes and the runtime.

    def attach(self, run: Waited) -> None:
        """Have ``run`` told when processes die or the gang is closed, or at once if that is so."""
        self._runs[run] = None
        if self.crashed:
            error, self._untold = self._untold, None
            run.break_(error or EngineError("An engine process failed."))
        elif self._closed:
            run.close()

    @property
    def is_single(self) -> bool:
        """Whether each process that has begun has but one thread to load with, so that none can sleep beside one."""
        return all(member.is_single for member in self.members)

    def begin(self) -> None:
        """Do nothing: each process sees to its first reads."""

    def widen_if_stuck(self) -> None:
        """Let every thread work where jobs wait and none gets done."""
        for member in self.members:
            if member.has_begun and not member.is_single:
                member.send(Widen())

    def close(self) -> None:
        """End the processes, and close all runs. Any thread, any time; never waits."""
        if self._given_up or self._pid != os.getpid():
            return
        self.stop()
        for run in self._living_runs():
            run.close()

    def stop(self) -> None:
        """End the processes. Whoever waits for a batch goes on waiting."""
        if self._pid != os.getpid():
            return
        self._closed = True
        self.portal.close()
        self._roster.shut()
        self._intake.shut()
        self._loop.release(self._loop_crashed)

    def join(self, timeout_s: float) -> None:
        """Wait until all processes have ended, at most ``timeout_s``."""
        if self._given_up or self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout_s
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._loop.join(deadline)

    def stop_at_exit(self) -> None:
        """As :meth:`stop`, for good."""
        self.stop()

    def end_at_exit(self, deadline: float) -> None:
        """Wait for the processes until ``deadline`` (monotonic), and never again."""
        self.join(max(0.0, deadline - time.monotonic()))
        self._given_up = True
        self._loop.give_up()

    def _living_runs(self) -> list[Waited]:
        # keyrefs() takes a copy in one step: another thread may attach a run at any time.
        return [run for ref in self._runs.keyrefs() if (run := ref()) is not None]

    def _loop_crashed(self, exc: BaseException) -> None:
        self._crash(exc)

    def _crash(self, exc: BaseException) -> None:
        """Have all runs raise ``exc``, behind what has been handed over, and end what is left."""
        if self.crashed or self._closed:
            return
        self._untold, self.crashed = exc, True
        if not self._loop.call(self._tell, exc):  # after what the loop has to take to the device
            self._tell(exc)
        self.stop()

    def _tell(self, exc: BaseException) -> None:
        runs = self._living_runs()
        # Not kept when it has been told: its traceback comes to refer to the iterator that raises it.
        self._untold = None if runs else exc
        for run in runs:
            run.break_(exc)

    # The gang's thread.

    def _serve(self) -> None:
        try:
            self._roster.await_start()
            for member, message, file in self._intake.messages(self.members, self._is_attended):
                if message is not None:
                    self._take(member, message, file)
                elif not self._closed:
                    self._crash(self._death_of(member))
        except (AioloadError, OSError) as exc:
            self._crash(exc)
        except BaseException as exc:
            error = EngineError(f"What came from an engine process could not be taken in: {exc!r}.")
            error.__cause__ = exc
            self._crash(error)
        finally:
            self.stop()
            self._reap()

    def _is_attended(self) -> bool:
        """Whether what comes is taken in at once."""
        if not self._have_all_begun:
            return True
        for ref in self._runs.keyrefs():
            run = ref()
            if run is not None and run.is_waited_for:
                return True
        return False

    def _take(self, member: Member, packed: bytes, file: int | None) -> None:
        message = received(packed)
        if isinstance(message, Done):
            self._take_done(member, message, file)
        elif isinstance(message, Begun):
            member.has_begun, member.is_single = True, message.is_single
            if all(each.has_begun for each in self.members):
                self._have_all_begun = True
                self.portal.open()
        else:
            assert isinstance(message, Broken)
            self._crash(abroad.unpack_error(message.error))

    def _take_done(self, member: Member, done: Done, file: int | None) -> None:
        for segment in done.dropped:
            member.forget(segment)
        if done.totals is not None:
            self._count(member, Totals(*done.totals))
        slot, layout = None, None
        if done.segment is not None:
            slot = member.slot(done.segment, file, self._ring)
            if done.layout is not None:
                self._ring.page_lock(slot)
                layout = self._layout_of(done.layout)
        remote = self._remotes.get(done.of)
        if remote is not None:
            remote.arrive(member.number, done, slot, layout)
        elif slot is not None:
            self._ring.release(slot)

    def _count(self, member: Member, totals: Totals) -> None:
        for name, value in zip(Tally.__slots__, totals.sums, strict=True):
            setattr(member.tally, name, value)
        member.reads_limit, member.decode_limit = totals.reads_limit, totals.decode_limit
        member.num_bytes, member.peak_bytes = totals.num_bytes, totals.peak_bytes
        peak_bytes = sum(each.peak_bytes for each in self.members)
        self._ledger.peak_bytes_elsewhere = max(self._ledger.peak_bytes_elsewhere, peak_bytes)
        if self.regulator is not None:
            self.regulator.limits[member.number] = totals.reads_limit

    def _death_of(self, member: Member) -> ProcessDiedError:
        member.process.join(_END_S)
        code = member.process.exitcode
        if code == 1 and not member.has_begun:
            return died_at_once(member.name)
        remotes = list(self._remotes.values())
        samples = [sample for remote in remotes for sample in remote.under_way(member.number)]
        waiting = [batch for remote in remotes if (batch := remote.waiting_for(member.number)) is not None]
        return died(member.name, code, samples, waiting)

    def _reap(self) -> None:
        """See all processes end, and kill those that do not."""
        self._roster.end(time.monotonic() + _END_S)
        self._intake.close()
