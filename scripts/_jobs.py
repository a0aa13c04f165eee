"""Jobs behind a progress bar: what is missing runs, errors show as they come, results stream out.

For commands whose work is a list of keyed jobs and which keep each result as it arrives, so that
a stopped run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Protocol

from regrasp.sim.workers import EpisodeError, run_episodes
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn


class Keyed(Protocol):
    """A job with a name that is the same in every run of the same command."""

    @property
    def key(self) -> str:
        """The name."""
        ...


def run_missing[Job: Keyed, Result](
    console: Console,
    jobs: Sequence[Job],
    done: Container[str | None],
    function: Callable[[Job], Result],
    *,
    workers: int,
    timeout_s: float,
    recycle_after: int,
    affinity: Callable[[Job], Hashable],
) -> Iterator[Result]:
    """Run the jobs whose key is not in ``done``; yield each result as it arrives.

    ``done`` is read once, before the first job. The other arguments are those of
    :func:`regrasp.sim.workers.run_episodes`. A job that fails is printed and yields nothing.

    Raises:
        SystemExit: after the last result, when some jobs did not run; running the command again
            tries them.
    """
    todo = [job for job in jobs if job.key not in done]
    console.print(f"{len(jobs) - len(todo)} episodes done before, {len(todo)} to go")
    errors = 0
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("episodes", total=len(todo))
        for index, result in run_episodes(
            todo,
            function,
            workers=workers,
            timeout_s=timeout_s,
            recycle_after=recycle_after,
            affinity=affinity,
        ):
            progress.advance(bar)
            if isinstance(result, EpisodeError):
                errors += 1
                # No markup: brackets in a traceback are not rich's.
                console.print(f"{todo[index].key}: {result}", style="red", markup=False)
            else:
                yield result
    if errors:
        raise SystemExit(f"{errors} episodes did not run; run the command again")
