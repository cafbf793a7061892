"""Many runs over several processes, with a progress bar."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def _apply(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    function, arguments = task
    return function(*arguments)


def run_all(function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, title: str) -> list[T]:
    """`function(*task)` of every task, in order; `jobs` processes. The first error ends it all."""
    work = [(function, task) for task in tasks]
    if jobs <= 1:
        return list(progress(map(_apply, work), len(work), title))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            return list(progress(pool.map(_apply, work, chunksize=1), len(work), title))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
