"""Items of a preparation as tasks of a Ray cluster, which schedules them, and does again what was lost with a worker or
a node. All nodes need this program and the same paths of sources and prepared data.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from llmrecipes.data.preparation.executor import in_order
from llmrecipes.errors import UserError
from llmrecipes.packages import find_spec

_RETRIES = 10
"""Of an item: workers and nodes that may be lost while they do it."""


class Ray:
    """Does them in the cluster of RAY_ADDRESS, or else in one that runs on this machine: an item a CPU.

    Args:
        workers: items at a time; None: one for each CPU of the cluster, also of nodes that join it later.

    Raises:
        UserError: ray is not installed, or no cluster answers.
    """

    remote = True

    def __init__(self, workers: int | None) -> None:
        if find_spec("ray") is None:
            raise UserError(
                "ray is not installed",
                where="--on ray",
                rule="the program that starts the items, and all nodes, need the package ray",
                fix="pip install 'ray[default]>=2.60,<2.61', or in a checkout --no-deps -r requirements/ray.txt",
            )
        import ray

        self._ray = ray
        self._workers = workers
        address = os.environ.get("RAY_ADDRESS") or "auto"
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cannot connect to a Ray cluster: {str(error).strip().splitlines()[0]}",
                where=f"RAY_ADDRESS={address}",
                fix="start one with `ray start --head`, and set RAY_ADDRESS to its HOST:PORT",
            ) from error
        for number, handler in handlers.items():  # Ray's own would end the program with another exit code
            signal.signal(number, handler)
        self._do = ray.remote(num_cpus=1, max_retries=_RETRIES)(_do)

    @property
    def workers(self) -> int:
        """Items at a time."""
        return self._workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def map[T, R](self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        """As tasks of the cluster."""
        stored = self._ray.put(function)
        yield from in_order(
            items,
            lambda: self.workers,
            lambda item: self._do.remote(stored, item),
            lambda begun: self._result(begun[0]),
            lambda task: self._ray.cancel(task, force=True),
        )

    def _result(self, task: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except errors.RayError as error:
            raise UserError(
                f"Ray gave an item up: {str(error).strip().splitlines()[0]}",
                where="--on ray",
                rule=f"an item may be lost {_RETRIES} times, with its worker or its node",
                fix="look at `ray status` and the logs of the cluster, then run it again to continue",
                again=True,
            ) from error

    def close(self) -> None:
        """Leave the cluster, which ends what it does of this preparation."""
        self._ray.shutdown()


def _do[T, R](function: Callable[[T], R], item: T) -> R:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the items are the parallelism
    return function(item)
