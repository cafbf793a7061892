"""Many runs over several processes, with a progress bar."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar

from sglang_nightjar.simulate.kept import Kept

T = TypeVar("T")


def _apply(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    function, arguments = task
    return function(*arguments)


def run_all(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, title: str, kept: Kept[T] | None = None
) -> list[T]:
    """`function(*task)` of every task, in order; `jobs` processes. The first error ends it all.

    With `kept`, runs found there are not repeated, and the others are added as they finish.
    """
    found = [kept.find(function, task) if kept else None for task in tasks]
    left = [task for task, result in zip(tasks, found, strict=True) if result is None]
    made = _made(function, left, jobs, title, kept)
    return [next(made) if result is None else result for result in found]


def _made(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, title: str, kept: Kept[T] | None
) -> Iterator[T]:
    work = [(function, task) for task in tasks]
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else None
    results = pool.map(_apply, work, chunksize=1) if pool else map(_apply, work)
    try:
        for task, result in zip(tasks, progress(results, len(work), title), strict=True):
            if kept:
                kept.add(function, task, result)
            yield result
    finally:
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)


def progress(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """`items`, with a bar on standard error; without tqdm, and where that is no terminal, without a bar."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        tqdm: Any = import_module("tqdm").tqdm
    except ImportError:
        yield from items
        return
    yield from tqdm(items, total=total, desc=title, unit="run")
