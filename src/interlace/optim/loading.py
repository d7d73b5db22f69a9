"""Loading states of an optimizer without torch's cast to the dtypes of parameters.

class Own(KeepsStates):
    def _fit(self, name, value, param, group): ...       # a loaded value as this class keeps it
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

Group = Mapping[str, Any]
"""Options of a group of parameters, and those as `params`."""
ParamGroup = dict[str, Any]
"""The same as an optimizer holds it."""
State = dict[str, Any]
"""State of a parameter, or of an optimizer as torch saves it."""


class KeepsStates(Optimizer):
    """An optimizer whose own storage stays when it is loaded, unpickled or copied."""

    kept: ClassVar[tuple[str, ...]]
    """Options of a group that loading leaves alone: how this optimizer stores and runs."""

    def load_state_dict(self, state_dict: State) -> None:
        """Loads what this class, or torch.optim's of the same name, saved; each tensor in its own
        dtype. Options that say how states are stored and run stay as they are; see the class.

        Raises ValueError where groups differ, and OptimizerError where a group is of another kind;
        a state that does not fit its parameter is one at the next step, when it is first needed.
        """

        def hold(_: Optimizer, given: State) -> State:
            for own, group in zip(self.param_groups, given["param_groups"], strict=False):
                self._check_loaded(own, group)
            self._arrived = given
            return {**given, "state": {}}  # torch would cast it to the parameters' dtype

        handle = self.register_load_state_dict_pre_hook(hold)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._arrived = None

    def __setstate__(self, state: State) -> None:
        """Part of loading, of unpickling and of copying."""
        state = dict(state)
        own = self.__dict__.get("param_groups") or [{} for _ in state["param_groups"]]
        arrived = self.__dict__.get("_arrived")
        defaults = state.get("defaults") or self.defaults
        for group, before in zip(state["param_groups"], own, strict=True):
            for name, value in {**defaults, **before}.items():
                group.setdefault(name, value)
            group.update({name: before[name] for name in self.kept if name in before})
        super().__setstate__(state)
        self._forget()
        if arrived is not None:
            self._take_state(arrived)

    def _take_state(self, given: State) -> None:
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        homes = ((param, group) for group in self.param_groups for param in group["params"])
        owners = dict(zip(numbers, homes, strict=True))
        for number, values in given["state"].items():
            if number not in owners:
                self.state[number] = values
                continue
            param, group = owners[number]
            self.state[param] = {
                name: self._fit(name, value, param, group) for name, value in values.items()
            }

    def _check_loaded(self, own: Group, group: Group) -> None:
        """Raises OptimizerError for a group that cannot be loaded into `own`."""

    def _fit(self, name: str, value: Any, param: Tensor, group: Group) -> Any:
        """A loaded value as it is kept here."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Nothing is known any more of where tensors lie."""
