"""pytest's plugin: under the mark `schedule_sound` whatever a test compiles is checked.

    @pytest.mark.schedule_sound(world_size=4)
    def test_layer():
        torch.compile(layer)(x)     # rank 0 of four, without GPUs or peers

Without the mark a test costs one look-up, and torch is not imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator

import pytest

MARK = "schedule_sound"
NOTHING = (
    f"{MARK}: nothing was checked: the test made no graph by torch.compile and no schedule of "
    "torch.distributed.pipelining; fix: call what is compiled, within the test"
)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(world_size=2, order='auto', ...): the test runs on rank 0 of a fake process "
        "group, and fails if a graph or a pipeline schedule made in it can race or deadlock; the "
        "options are those of interlace.check_graph",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Runs a marked test under the checks, and fails it if one of them does."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return (yield)
    with warnings.catch_warnings(action="ignore"):  # torch's, which some tests make errors
        from interlace_check.capturing import capturing

    with capturing(*mark.args, **mark.kwargs) as reports:
        own_error = True
        try:
            result = yield
            own_error = False
        except (KeyboardInterrupt, pytest.exit.Exception):
            reports.clear()  # the session ends
            raise
        finally:
            unsound = [report for report in reports if not report.sound]
            if unsound:
                count = f"{len(unsound)} of {len(reports)} graphs and schedules"
                text = f"{MARK}: {count} can go wrong; the first:\n{unsound[0]}"
                pytest.fail(text, pytrace=own_error)  # where that was raised stands before it
    if not reports:
        pytest.fail(NOTHING, False)
    return result
