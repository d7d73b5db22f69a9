"""The Executor: a Program bound to processes, memory and threads, ready to run many times.

`prepare` does all collective set-up; `run` does none. A failure poisons the Executor on every
rank of its teams: the error says what happened and where, and `reset()`, called by all, mends it.
Outside of teams there is nothing to mend: the next run may come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import TeamComm, limit_s, team_of
from interlace.comm.resets import reset_in_turn
from interlace.comm.teams import check_alive, check_process, check_size
from interlace.cost import Timeline
from interlace.cost.memory import lasting_bytes
from interlace.errors import ExecutorError, SizeError, TeamError
from interlace.ir import Program, validate
from interlace.ir.mirror import mirrored
from interlace.ir.program import exchanged_sizes, lasting_sizes, no_collections
from interlace.ir.sizes import FIXED, named, settled
from interlace.ir.types import Member
from interlace.ir.validate import refuse_others
from interlace.options import BACKENDS, Options
from interlace.runtime.arena import arena_of
from interlace.runtime.calling.calls import Outputs, reader_of
from interlace.runtime.engine import (
    BeforeOp,
    Engine,
    EngineContext,
    GraphUse,
    ShareRequest,
    TeamResources,
    engine_for,
)
from interlace.runtime.flight import Flight, measured
from interlace.runtime.inputs import Measure, Parameters, measured_sizes, measures
from interlace.runtime.prepare.agreement import Agreement, Proof, agree_and_prove, program_rank
from interlace.runtime.prepare.plan import Plan, backends_of, with_backends
from interlace.runtime.run_sizes import RunSizes
from interlace.runtime.values import ValueTable, laid_out

MIXER, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Multiplier that spreads 32 bits over the 64 of a tag, and the mask of 64 bits."""


class RunLabel:
    """Label that peers use to identify a run."""

    def __init__(
        self,
        name: str,
        tag_at: Callable[[tuple[int, ...]], int],
        sizes: RunSizes,
        peer_text: Callable[[int], str] | None = None,
    ) -> None:
        """`peer_text` tells the ops of peers by index, where they are the same as this rank's."""
        self._name, self._tag_at, self._sizes = name, tag_at, sizes
        self.peer_text = peer_text
        self.origin = ""
        """Mark of what the next runs belong to, beside their Program."""
        sizes.follow(list(map(named, sizes.values)), self._turned)

    def _turned(self, _: tuple[int, ...]) -> None:
        told = [f", {name} = {value}" for name, value in self._sizes.values.items()]
        self.name, self.tag = f"{self._name}{''.join(told)}", self._tag_at(self._sizes.at)
        self.carry(self.origin)

    def carry(self, origin: str) -> None:
        """Says what the next runs belong to, beside their Program: runs of equal Programs that
        belong to something else are others to the peers."""
        self.origin, tag, name = origin, self.tag, self.name
        if origin:
            tag ^= (zlib.crc32(origin.encode()) * MIXER) & MASK
            name = f"{name} {origin}"
        self.entry = tag, name, self.peer_text
        """As `Control.enter` takes it. The tag is the same on all ranks that run these sizes."""


class Teardown:
    """Resources that an Executor gives back. Outlives it: a finalizer may not hold an Executor."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.shared = contextlib.ExitStack()
        self.engine: Engine | None = None

    def end_engine(self) -> None:
        """Ends the engine, once."""
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.close()
            finally:
                engine.context.let_go()

    def close(self) -> None:
        """Ends all: first the runs, then what they used. What is gone is not ended again."""
        ends, engine = Teardown(), self.engine
        ends.engine, ends.shared, self.engine = engine, self.shared.pop_all(), None
        if os.getpid() != self.process:
            return  # all of it is the parent's

        def end() -> None:
            try:
                ends.end_engine()
            finally:
                ends.shared.close()

        if engine is None or not engine.later(end):
            end()


class TeamLocks:
    """The locks of several teams as one; all threads take them in the same order."""

    def __init__(self, teams: Sequence[TeamComm]) -> None:
        self._locks = [team.lock for team in teams]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes all of them, or none."""
        with contextlib.ExitStack() as taken:
            for lock in self._locks:
                if not lock.acquire(blocking, timeout):
                    return False
                taken.callback(lock.release)
            taken.pop_all()
        return True

    def release(self) -> None:
        for lock in self._locks:
            lock.release()


class Executor:
    """Runs one Program on this rank; all ranks of its teams make one, and use it alike.

    Use it in a `with` statement, or call `close()`.
    """

    def __init__(
        self,
        program: Program,
        *,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        device: str | torch.device = "cpu",
        options: Options | None = None,
        before_op: BeforeOp | None = None,
        host: Collection[str] = (),
        operators: Collection[str] = (),
        graph_use: GraphUse | None = None,
    ) -> None:
        """Keeps what `prepare` needs, and communicates nothing.

        Args:
            program: for one rank or, before `instantiate`, for every rank.
            groups: a process group for each team of the Program that this rank is in, by name.
            device: `cpu`, `cuda`, or a device of torch; inputs and outputs are on it.
            options: those that concern runs: `timeout_s`, `trace`, `graph`, `transport`, ...
            before_op: called as `before_op(rank, index, op)` before each op on its stream; for
                tests.
            host: buffers that stay on the CPU although the device is a GPU; only torch's own
                operators may touch them.
            operators: operators, or namespaces of them, that the Program may call although they are
                not torch's own. A schedule from a file is a stranger's.
            graph_use: what CUDA graphs may rely on, as the compiler knows it.

        Raises:
            TeamError: a process group is missing or gone, or this rank is not in the Program.
            BackendError, UnsupportedError: the device is missing or unknown, or has no graphs.

        Examples:
            >>> with interlace.Executor(program, groups={"tp": mesh.get_group()}) as executor:
            ...     (y,) = executor.prepare().run([x, w])
            >>> y.shape
            torch.Size([32, 32])
        """
        self.program = program
        self.options = options or Options()
        self._engine_class, self.device = engine_for(device, self.options.graph)
        self._groups = dict(groups or {})
        for name, group in self._groups.items():
            check_alive(group, name)
        self.rank = program_rank(program, self._groups)
        self.before_op = before_op
        self.host = frozenset(host)
        self._operators = frozenset(operators)
        self._graph_use = graph_use or GraphUse()
        self.limit_s = limit_s(self.options.timeout_s, self._groups.values())
        self._teams: dict[str, TeamComm] = {}
        self._lock: Any = threading.RLock()
        self.agreement: Agreement | None = None
        self.known_proof: Proof | None = None
        """The proof of the Program that an earlier process made, if one did."""
        self._shared = TeamResources({}, {}, {})
        self._backends: list[tuple[str, str]] = []
        self.engine: Engine | None = None
        """Once prepared: what runs the Program on the device."""
        self._kept = Teardown()
        self._finalizer = weakref.finalize(self, self._kept.close)
        self._bound_resets: list[int] = []
        self.sizes = FIXED
        """Once prepared: the sizes that it runs, where the Program has named ones."""
        self.single = ""
        """Once prepared: why it runs one size alone, if it does and the Program has named ones."""
        self._measures: tuple[Measure | None, ...] = ()
        self._size_values: tuple[int, ...] = ()
        """The values of the named sizes that runs are of."""
        self._poison: tuple[str, list[int]] | None = None
        self._closed = False

    def prepare(self) -> Executor:
        """Agrees with all ranks on the Program, proves it and sets up what a run needs, once.

        Collective: every rank of the Program's teams calls it, in the same order for all Executors.

        Returns:
            The Executor itself.

        Raises:
            ProgramError, SoundnessError: the Program is invalid, or unsound.
            TeamError: a team has another size than the Program says, or two have one process group.
            AgreementError, CommTimeoutError, PeerError: another rank prepares another Program, is
                late, or fails.
        """
        if self.engine is not None:
            return self
        self._check_open()
        limit = self.limit_s
        if self.known_proof is None:
            validate(self.program)
        refuse_others(self.program, self._operators)
        members = self.program.where(self.rank).members
        for name in (team.name for team in self.program.teams if team.name in members):
            team = self._team_of(name, members)
            for twin in (n for n, other in self._teams.items() if other is team and n != name):
                raise TeamError(
                    f"teams {twin} and {name} of {self.program.name} were given one process "
                    "group: give each team a group of its own (dist.new_group), or write the "
                    "Program with one team"
                )
            self._teams[name] = team
            if self.options.transport not in ("auto", "peer"):  # also where no op needs it
                self._backend_name(name, None)
        if teams := self._ordered():
            self._lock = teams[0].lock if len(teams) == 1 else TeamLocks(teams)
        self._wait_for_lock()
        # Made in inference mode, memory could not be written by runs out of it.
        with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
            stack.callback(self._lock.release)
            names = self._backend_name, self._teams
            program, used = with_backends(self.program, *names), backends_of(self.program, *names)
            given = [*self._teams.values()], limit, used, self.options, self.known_proof
            self.agreement = agree_and_prove(program, self.rank, *given)
            for team in teams:
                team.setup(limit)
            own = self._classed(self.agreement)
            try:
                with settled(self.sizes):
                    plan = self._plan = Plan(self.program, own, self._backend_name)
                needed = zip(self._teams, self.agreement.backends, strict=True)
                pairs = [(team, name) for team, names in needed for name in names]
                pairs.sort(key=lambda pair: (BACKENDS.index(pair[1]), pair[0]))
                facts = self.device, self.options.graph, limit, pairs
                together = functools.partial(self._together, program)
                request = ShareRequest(plan, self._teams, *facts, together, self._kept.shared)
                with settled(self.sizes):
                    self._shared, self._backends = self._engine_class.share(request), pairs
                    _, nbytes = laid_out(plan.buffers)
                arena = self._arena = arena_of(self.device)
                if nbytes and not self.options.graph:
                    arena.hold(nbytes)
                    self._kept.shared.callback(arena.let_go, nbytes)
                self._bind(self.sizes.values)
            except BaseException:
                self._kept.close()
                raise
        self._groups.clear()  # so that destroying a group frees what stands on it
        return self

    def _team_of(self, name: str, members: Mapping[str, Member]) -> TeamComm:
        """The team of a process group."""
        team = team_of(self._groups[name], name, self.limit_s)
        check_size(team, len(members[name].ranks))
        return team

    def _together(self, program: Program) -> list[Program]:
        """The Programs of all ranks, for the sizes at hand."""
        assert self.agreement is not None
        found = self.agreement.programs(program, self.rank)
        return [each.at(self.sizes.values) for each in found]

    def _ordered(self) -> list[TeamComm]:
        """The teams in an order that all ranks share, whatever they are called in the Program."""
        teams = dict.fromkeys(self._teams.values())
        return sorted(teams, key=lambda team: team.key) if len(teams) > 1 else list(teams)

    def _backend_name(self, team: str, asked: str | None) -> str:
        if asked is None and self.options.transport != "auto":
            asked = self.options.transport
        return self._teams[team].backend_name(asked, self.device.type)

    def _classed(self, agreement: Agreement) -> Program:
        """This rank's own Program, for the class of sizes that all ranks run, or for the sizes at
        hand where these have no class in common. The sizes that any rank's exchanges depend on are
        the same on all of them, whose tags and bounds are then alike."""
        mirrors = any(team.mirrors for team in self._teams.values())
        text = mirrored(self.program) if mirrors else self.program
        own, report = text.instantiate(self.rank), agreement.report
        programs = [own] if own.sizes.sizes or report.sizes.sizes else []
        if programs and agreement.texts:
            programs = agreement.programs(self.program, self.rank)
        self._exchanged = frozenset[str]().union(*map(exchanged_sizes, programs))
        lasting = frozenset[str]().union(*map(lasting_sizes, programs))
        self.sizes = report.sizes.bucket(self._exchanged | lasting)
        captured = "CUDA graphs are for one size" if programs and self.options.graph else ""
        self.single = report.single or captured
        if any(program.sizes.values != own.sizes.values for program in programs):
            self.single = "the ranks' Programs differ in their sizes, as those of uneven shards do"
        if self.single:
            self._exchanged, self.sizes = frozenset(), self.program.sizes.alone()
        self._measures = measures(own, self.sizes)
        return own.at(self.sizes.values) if self.single else own

    @no_collections()
    def _bind(self, values: Mapping[str, int]) -> Engine:
        """Binds every op to the memory and the backends that are there, with these values of the
        named sizes at hand. Needs no other rank."""
        with torch.inference_mode(False), torch.no_grad(), settled(self.sizes):
            self._assert_bound(self._plan)
            context = self._context(RunSizes(values))
            self._kept.end_engine()
            self._kept.engine = engine = self._engine_class(context)
            engine.warm_up(self._ordered())
        # Only now: what is bound in part is bound anew before it runs.
        self.engine, self._bound_resets = engine, self._resets()
        self._size_values = context.values.sizes.at
        return engine

    def _assert_bound(self, plan: Plan) -> None:
        """The memory that is set aside is what `cost/memory.py` counts from the Program. Slots may
        be larger: other ranks and Programs have them too."""
        arena, slots = lasting_bytes(plan.program, self.rank)
        _, laid = laid_out(plan.buffers)
        assert laid == arena, f"an arena of {laid} bytes, where {arena} are counted"
        for name, slot in self._shared.slots.items():
            wanted = slots[plan.takes[name], plan.slot_of(name)]
            assert slot.nbytes >= wanted, f"{name} has a slot of {slot.nbytes} bytes, not {wanted}"

    def _context(self, run_sizes: RunSizes) -> EngineContext:
        agreement, plan = self.agreement, self._plan
        assert agreement is not None
        program = plan.program
        connected = {
            (team, name): self._teams[team].backend(name, self.device.type, self.limit_s)
            for team, name in self._backends
        }
        resources = dataclasses.replace(self._shared, backends=connected, takes={})
        values = ValueTable(program, plan.box, resources.slots, self.device, run_sizes, self.host)
        params = [[b for b in program.params if b.kind == k] for k in ("input", "output")]
        facts = self.device, self.host, run_sizes
        # Sizes that no exchange depends on may be others on each rank.
        met = [name in self._exchanged for name in run_sizes.values]
        tag_at = functools.partial(agreement.tag_at, met)
        text = None if agreement.texts else Flight(self.program, self.rank).text
        label = RunLabel(program.name, tag_at, run_sizes, text)
        if self.engine is not None:
            label.carry(self.engine.context.label.origin)
        return EngineContext(
            plan=plan,
            values=values,
            resources=resources,
            options=self.options,
            device=self.device,
            flight=Flight(program, self.rank),
            timeout_s=self.limit_s,
            before_op=self.before_op,
            inputs=Parameters(program.name, "input", params[0], *facts),
            outputs=Parameters(program.name, "output", params[1], *facts),
            results=reader_of(program.returned(), plan, values),
            label=label,
            arena=self._arena,
            graph_use=self._graph_use,
        )

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        origin: str | None = None,
        boxed: bool = False,
    ) -> Outputs:
        """Runs the Program once.

        Every rank of the Program's teams calls it, in the same order. On GPUs results are ready in
        the order of the current stream, as torch's own are.

        Args:
            inputs: a tensor for each input parameter, in order, on this Executor's device, of the
                Program's dtypes, shapes and strides.
            out: a tensor for each output parameter, which the run writes; by default new ones.
            sizes: the named sizes that are no dimension of an input; by default the last run's.
            origin: what this run and the next ones belong to, the same on all ranks; runs of two
                origins that meet give an AgreementError.
            boxed: `inputs` is a list, which the run empties (but for one by a CUDA graph), so that
                what the Program frees dies there.

        Returns:
            The Program's results, in order.

        Raises:
            ExecutorError: tensors do not fit, or it is not prepared or is closed; nothing ran.
            CommTimeoutError, PeerError, AgreementError: a rank is late, failed or runs another
                Program. `reset()`, called by all, lets runs go on.
        """
        wanted = None if sizes is None else self.wanted(sizes)
        boxes: Sequence[list[torch.Tensor]] = ()
        if boxed:
            if not isinstance(inputs, list):
                raise ExecutorError(
                    f"{self.program.name} was given a {type(inputs).__name__} of inputs to empty. "
                    "fix: with boxed=True give a list"
                )
            boxes = (inputs,)
        results = self.run_as_before(inputs, out, wanted, origin, boxes)
        return self.run_anew(inputs, out, wanted, origin, boxes) if results is None else results

    def run_anew(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        wanted: tuple[int, ...] | None,
        origin: str | None,
        boxes: Sequence[list[Any]],
    ) -> Outputs:
        """`run`, after a look at all that may have changed; takes what `run_as_before` does."""
        self._wait_for_lock()
        begun = False  # a refusal concerns no peer
        try:
            engine = self._ready_for(inputs, out, wanted)
            begun = True
            if origin is not None:
                engine.context.label.carry(origin)
            return engine.issue(inputs, out, None, boxes)
        except BaseException as error:  # what cannot be issued stops the peers too
            if begun:
                self._fail(error)
            raise
        finally:
            self._lock.release()

    def run_as_before(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        wanted: tuple[int, ...] | None,
        origin: str | None,
        boxes: Sequence[list[Any]],
    ) -> Outputs | None:
        """`run`, where nothing changed since the last one; None, and nothing is done, where the
        tensors do not fit that, `wanted` are other values of the named sizes, or something else is
        to be looked at first. `boxes` are lists that hold the inputs, and are emptied."""
        lock = self._lock
        if not lock.acquire(False):
            self._wait_for_lock()
        try:
            engine, admitted = self.engine, None  # another thread may have closed it
            if self._poison is None and wanted in (None, self._size_values):
                admitted = engine and engine.admit(inputs, out)
            if engine is None or admitted is None:
                return None
            if origin is not None and origin != engine.context.label.origin:
                engine.context.label.carry(origin)
            return engine.issue(inputs, out, admitted, boxes)
        except BaseException as error:  # what cannot be issued stops the peers too
            self._fail(error)
            raise
        finally:
            lock.release()

    def wanted(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The values of the named sizes, in their order."""
        try:
            return tuple([sizes[name] for name in self.sizes.values])
        except KeyError as error:
            raise ExecutorError(
                f"{self.program.name} has the named sizes {', '.join(self.sizes.values)}, and "
                f"`sizes` has no {error}. fix: give them all, or none"
            ) from None

    def _ready_for(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        wanted: tuple[int, ...] | None,
    ) -> Engine:
        """The engine, made ready for a run that it did not admit at once; raises what is wrong
        with the run before anything of it is done."""
        self._check_open()
        if (engine := self.engine) is None:
            raise ExecutorError(
                f"{self.program.name} was not prepared: every rank calls prepare() before run()"
            )
        for team in self._teams.values():
            team.check_alive()
        controls = [team.control for team in self._teams.values()]  # unless they were released
        if self._poison is not None:
            why, resets = self._poison
            if any(a == b for a, b in zip(resets, self._resets(), strict=True)):
                raise ExecutorError(
                    f"the Executor of {self.program.name} is out of order since a run failed "
                    f"({why}): every rank of its teams calls reset(), or interlace.reset() for all"
                )
            self._poison = None
        if not self._measures:
            engine.context.check(inputs, out)
        engine.look()
        if self._bound_resets != self._resets():  # a reset renewed the backends
            engine = self._bind(self._values(self._size_values))
        if self._measures:
            at = measured_sizes(self._measures, inputs, wanted or self._size_values)
            if at != self._size_values:
                self._turn_to(engine, at)
            engine.context.check(inputs, out)
        for error in (engine.failure, *(control.failure() for control in controls)):
            if error is not None:  # it stopped a peer since the last run, or an earlier Executor
                self._fail(error)
                raise error
        return engine

    def _turn_to(self, engine: Engine, at: tuple[int, ...]) -> None:
        """Makes the next runs those of these values of the named sizes."""
        values = self._values(at)
        if not self.sizes.holds(values):
            told = ", ".join(f"{name} = {value}" for name, value in values.items())
            raise ExecutorError(
                f"{self.program.name} is for sizes where {self.sizes}, and these inputs have "
                f"{told}: prepare another Program for them"
            )
        try:
            engine.turn(at)
        except SizeError:  # of all ranks alike
            raise
        except BaseException as error:  # such as one of a compiler: peers are in the run
            self._fail(error)
            raise
        self._size_values = at

    def _fail(self, error: BaseException) -> None:
        if not self._teams:
            return  # nobody waits, and nothing is left over: the next run may come
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._poison = (first, self._resets())
        for team in self._teams.values():
            team.fail(error)

    def _wait_for_lock(self) -> None:
        """Serializes the work of this process on a team, by its lock."""
        self._check_open()  # in a forked child, nobody would give it back
        if not self._lock.acquire(timeout=self.limit_s):
            shared = " on the same teams" if self._teams else ""
            raise ExecutorError(
                f"{self.program.name} waited {self.limit_s:g} s for another thread's run{shared}: "
                "call Executors from one thread"
            )

    def _resets(self) -> list[int]:
        return [team.resets for team in self._teams.values()]

    def _check_open(self) -> None:
        if self._teams:
            check_process()
        if self._closed:
            raise ExecutorError(f"the Executor of {self.program.name} is closed: make another")

    def _values(self, at: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self.sizes.values, at, strict=True))

    def reset(self) -> None:
        """After a failure: every rank of the teams calls it, and runs may go on."""
        self._check_open()
        if self.engine is None:
            return
        self.engine.settle()
        reset_in_turn(self._ordered(), self.limit_s)
        self._poison = None

    def synchronize(self) -> None:
        """Returns when all runs of this Executor have ended; on a CPU they have."""
        if self.engine is not None:
            self.engine.synchronize()

    def timeline(self) -> Timeline:
        """The measured timeline of the last run on this rank: when each op ran.

        Raises:
            ExecutorError: the Executor was made without the option `trace`.
        """
        if not self.options.trace:
            raise ExecutorError("there is no timeline: make the Executor with Options(trace=True)")
        spans = self.engine.spans if self.engine is not None else []
        return measured(self.program, self.rank, spans)

    def close(self) -> None:
        """Ends the threads and lets go of the memory and the teams.

        Process groups end only when nothing holds their backends.
        """
        self._closed = True
        self._finalizer()
        self.engine, self._teams = None, {}
        self._shared = TeamResources({}, {}, {})

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
