"""The Executor: a Program bound to processes, memory and threads, ready to run many times.

    executor = Executor(program, groups={"tp": dist.group.WORLD})
    executor.prepare()                  # every rank, together: agreement, proof, memory, binding
    (y,) = executor.run([x, w])
    executor.close()

`prepare` does all collective set-up; `run` does none. A failure poisons the Executor on every
rank of its teams: the error says what happened and where, and `reset()`, called by all, mends it.
Outside of teams there is nothing to mend: the next run may come.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import TeamComm, limit_s, team_of
from interlace.comm.teams import check_size, reset_in_turn
from interlace.cost import Timeline
from interlace.errors import ExecutorError, TeamError, UnsupportedError
from interlace.ir import Program, validate
from interlace.ir.called import refuse_others
from interlace.options import Options
from interlace.runtime.engine import BeforeOp, Context, Crew, Door, executor_for, runner_for
from interlace.runtime.flight import Flight
from interlace.runtime.inputs import Given
from interlace.runtime.prepare.agreement import Agreement, agree
from interlace.runtime.prepare.plan import backends_of, make_plan, with_backends
from interlace.runtime.prepare.ranks import program_rank
from interlace.runtime.prepare.registered import collect
from interlace.runtime.prepare.shares import Kept, Shared, share
from interlace.runtime.results import reader_of
from interlace.runtime.spans import measured
from interlace.runtime.values import Values


class Executor:
    """Runs one Program on this rank. All ranks of its teams make one, and use it alike."""

    def __init__(
        self,
        program: Program,
        *,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        device: str | torch.device = "cpu",
        options: Options | None = None,
        before_op: BeforeOp | None = None,
        host: Collection[str] = (),
        static_inputs: Collection[str] = (),
        registered: Mapping[str, torch.Tensor] | None = None,
        operators: Collection[str] = (),
    ) -> None:
        """`groups` has a process group for each team of the Program that this rank is in.

        `host` names buffers that stay on the CPU although the device is a GPU; only torch's own
        operators may touch them. `static_inputs` names inputs that, as a rule, are the same tensors
        in every run, such as parameters: a hint. `registered` has the tensor of each registered
        parameter, which the Executor keeps alive; every run is given that tensor, at that address.
        `operators` names operators, or namespaces of them, that the Program may call although they
        are not torch's own; a schedule from a file is a stranger's.
        `before_op(rank, index, op)` is called before each op, on the op's stream, for tests.
        """
        self.program = program
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        elif self.device.type == "cpu":
            self.device = torch.device("cpu")  # which no tensor calls cpu:0
        self.options = options or Options()
        self._groups = dict(groups or {})
        self.rank = program_rank(program, self._groups)
        self._before_op = before_op
        self.host, self.static_inputs = frozenset(host), frozenset(static_inputs)
        self._given = dict(registered or {})
        self._operators = frozenset(operators)
        self._engine_class = executor_for(self.device)
        if self.options.graph and self.device.type != "cuda":
            raise UnsupportedError(
                f"{program.name}: graph=True captures CUDA graphs, and its device is "
                f"{self.device.type!r}: leave the option out there"
            )
        self._lock = threading.Lock()
        self.limit_s = limit_s(self.options.time_out_s, self._groups.values())
        """The bound of every wait."""
        self._teams: dict[str, TeamComm] = {}
        self.agreement: Agreement | None = None
        self._shared = Shared({}, {}, ())
        self._runner: Any = None
        self._context: Context | None = None
        self._kept = Kept()
        self._finalizer: Any = weakref.finalize(self, self._kept.close)
        self._bound_resets: list[int] = []
        self._poison: tuple[str, list[int]] | None = None
        self._closed = False

    # -- set-up ----------------------------------------------------------------------------------

    def prepare(self) -> Executor:
        """Agrees with all ranks on the Program, checks it, and sets up what a run needs, once.

        Collective: every rank of the Program's teams calls it, in the same order for all Executors.
        """
        if self._context is not None:
            return self
        self._check_open()
        limit = self.limit_s
        validate(self.program)
        refuse_others(self.program, self._operators)
        members = self.program.where(self.rank).members
        for name in (team.name for team in self.program.teams if team.name in members):
            team = self._teams[name] = team_of(self._groups[name], name, limit)
            check_size(team, len(members[name].ranks))
            twin = next((n for n, t in self._teams.items() if t is team and n != name), None)
            if twin is not None:
                raise TeamError(
                    f"teams {twin} and {name} of {self.program.name} were given one process "
                    "group: give each team a group of its own (dist.new_group), or write the "
                    "Program with one team"
                )
        # Made in inference mode, memory could not be written by runs out of it.
        with self._alone(), torch.inference_mode(False), torch.no_grad():
            names = self._backend_name, self._teams
            program, used = with_backends(self.program, *names), backends_of(self.program, *names)
            found = collect(self.program, self.rank, self._given, self.device)
            self.agreement = agree(program, self.rank, [*self._teams.values()], limit, found, used)
            for team in self._ordered():
                team.setup(limit)
            try:
                plan = self._plan = make_plan(self.program, self.rank, self._backend_name)
                facts = self._teams, self.device, self.options.graph, limit, found.wanted
                self._shared = share(plan, *facts, self.agreement.backends, self._kept.shared)
                self._bind()
            except BaseException:
                self._kept.close()
                raise
        self._groups.clear()  # so that destroying a group frees what stands on it
        return self

    def _ordered(self) -> list[TeamComm]:
        """The teams in an order that all ranks share, whatever they are called in the Program."""
        teams = dict.fromkeys(self._teams.values())
        return sorted(teams, key=lambda team: team.key) if len(teams) > 1 else list(teams)

    def _backend_name(self, team: str, asked: str | None) -> str:
        if asked is None and self.options.transport != "auto":
            asked = self.options.transport
        return self._teams[team].backend_name(asked, self.device.type)

    @property
    def _engine(self) -> Any:
        return self._kept.engine

    def _bind(self) -> None:
        """Binds every op to the memory and the backends that are there. Needs no other rank."""
        plan, program = self._plan, self._plan.program
        shared, limit = self._shared, self.limit_s
        backends = shared.backends(self._teams, self.device, limit)
        known = self.host, shared.registered
        values = Values(program, plan.box, shared.slots, self.device, *known)
        crew = Crew(self._teams, shared.slots, shared.spaces, backends, {}, shared.graph_spaces)
        facts = self.options, self.device, Flight(program, self.rank), limit, self._before_op
        context = Context(plan, values, crew, *facts)
        self._kept.end_engine()
        self._kept.engine = engine = self._engine_class(context)
        of_kind = lambda kind: [b for b in program.params if b.kind == kind]  # noqa: E731
        self._inputs, self._outputs = (
            Given(program.name, kind, of_kind(kind), self.device, *known)
            for kind in ("input", "output")
        )
        self._results = reader_of(program.returned(), plan, values)
        alike = self.agreement is not None and not self.agreement.texts
        self._peer_text = Flight(self.program, self.rank).text if alike else None
        tag = self.agreement.tag if self.agreement is not None else 0
        ends = self._inputs, self._outputs, self._results
        door = Door(tag, self._peer_text)
        runner = runner_for(self.device, engine, ends, door)
        if self.options.graph:
            runner.warm_up(self._ordered())
        # Only now: what is bound in part is bound anew before it runs.
        self._context, self._runner, self._bound_resets = context, runner, self._resets()

    # -- runs ------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None
    ) -> tuple[Any, ...]:
        """One run: the Program's results for these inputs; `out` gives the output parameters."""
        runner = self._runner
        if runner is None or self._poison is not None:
            return self._look_and_run(inputs, out)
        try:
            found = runner.run(inputs, out)
        except BaseException as error:  # what cannot be issued stops the peers too
            self._fail(error)
            raise
        return self._look_and_run(inputs, out) if found is None else found

    def _look_and_run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """A run, once it is known that there may be one."""
        self._check_ready()
        self._inputs.check(inputs)
        if out is not None:
            self._outputs.check(out)
        getattr(self._runner, "look", tuple)()  # on CUDA: raises in a caller's capture
        with self._alone():
            if self._bound_resets != self._resets():
                with torch.inference_mode(False), torch.no_grad():
                    self._bind()  # a reset renewed the backends
            self._check_teams()
            try:
                found = None if self._runner is None else self._runner.issue(inputs, out)
            except BaseException as error:
                self._fail(error)
                raise
            if found is not None:
                return found
            return self._run(inputs, self._outputs.new() if out is None else out)

    def _run(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        context, engine, agreement = self._context, self._engine, self.agreement
        assert context is not None
        assert engine is not None
        assert agreement is not None
        teams, values, uses = context.crew.teams.values(), context.values, context.crew.uses
        for team in teams:
            team.control.enter(agreement.tag, self.program.name, self._peer_text)
        for buffer in self._plan.takes:
            uses[buffer] = context.crew.slots[buffer].next_use()
        given = dict(zip(self._inputs.names, inputs, strict=True))
        given.update(zip(self._outputs.names, out, strict=True))
        try:
            self._inputs.check_places(inputs)
            self._outputs.check_places(out)
            with torch.no_grad():
                values.begin(given, uses)
                for held in values.registered.values():
                    held.enter()
                engine.run()
                for held in values.registered.values():
                    held.leave()
                results = self._results()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            values.end()
        for team in teams:
            team.control.leave()
        return results

    def _fail(self, error: BaseException) -> None:
        if not self._teams:
            return  # nobody waits, and nothing is left over: the next run may come
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._poison = (first, self._resets())
        for team in self._teams.values():
            team.fail(error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """What this process does on a team, it does one after another."""
        taken: list[Any] = []
        try:
            for lock in (self._lock, *(team.lock for team in self._ordered())):
                if not lock.acquire(timeout=self.limit_s):
                    raise ExecutorError(
                        f"{self.program.name} waited {self.limit_s:g} s for another "
                        "thread's run on the same teams: call Executors from one thread"
                    )
                taken.append(lock)
            yield
        finally:
            for lock in reversed(taken):
                lock.release()

    # -- failures --------------------------------------------------------------------------------

    def _resets(self) -> list[int]:
        return [team.resets for team in self._teams.values()]

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorError(f"the Executor of {self.program.name} is closed: make another")

    def _check_ready(self) -> None:
        self._check_open()
        if self._context is None:
            raise ExecutorError(
                f"{self.program.name} was not prepared: every rank calls prepare() before run()"
            )
        if self._poison is not None:
            why, resets = self._poison
            if any(a == b for a, b in zip(resets, self._resets(), strict=True)):
                raise ExecutorError(
                    f"the Executor of {self.program.name} is out of order since a run failed "
                    f"({why}): every rank of its teams calls reset(), or interlace.reset() for all"
                )
            self._poison = None

    def _check_teams(self) -> None:
        """Raises what stopped a peer since the last run, or an earlier Executor of this rank."""
        found = getattr(self._engine, "failure", None)
        for error in (found, *(team.control.failure() for team in self._teams.values())):
            if error is not None:
                self._fail(error)
                raise error

    def reset(self) -> None:
        """After a failure: every rank of the teams calls it, and runs may go on."""
        self._check_open()
        if self._context is None:
            return
        getattr(self._engine, "settle", tuple)()
        reset_in_turn(self._ordered(), self.limit_s)
        self._poison = None

    def synchronize(self) -> None:
        """Returns when all runs have ended (on the CPU at once); raises what made one fail."""
        if self._engine is not None:
            self._engine.synchronize()

    # -- the rest --------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """When each op of the last run ran; needs the option `trace`."""
        if not self.options.trace:
            raise ExecutorError("there is no timeline: make the Executor with Options(trace=True)")
        spans = self._engine.spans if self._engine is not None else []
        return measured(self.program, self.rank, spans)

    def close(self) -> None:
        """Ends the threads and lets go of the memory."""
        self._closed = True
        self._finalizer()
        self._context = self._runner = None
        self._shared = Shared({}, {}, ())
        self._results, self._given = tuple, {}
        self._inputs = self._outputs = Given(self.program.name, "input", [], self.device)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
