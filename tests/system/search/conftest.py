"""A PostgreSQL server and a browser for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.system)


@dataclass(frozen=True)
class Server:
    """A server that listens on a socket in `folder`, and runs as the user `postgres` if this one is root."""

    folder: Path

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.folder}"

    def control(self, *words: str) -> None:
        """Run a program of PostgreSQL."""
        program = str(BINARIES[-1] / words[0])
        command = [program, *words[1:]]
        if os.geteuid() == 0:
            command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", *command]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off"
        self.control(
            "pg_ctl", "start", "--wait", "--silent", "-D", f"{self.folder}/data", "-o", options, "-l",
            f"{self.folder}/log",
        )  # fmt: skip

    def stop(self) -> None:
        """Stop it, and end all connections."""
        self.control("pg_ctl", "stop", "--wait", "--silent", "--mode=immediate", "-D", f"{self.folder}/data")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    """A running server with an empty database."""
    if not BINARIES or (os.geteuid() == 0 and shutil.which("setpriv") is None):
        pytest.skip("PostgreSQL: apt-get install postgresql")
    with tempfile.TemporaryDirectory() as name:  # a short path: sockets have at most 107 characters
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        server = Server(folder)
        server.control("initdb", "--username=postgres", "--auth=trust", "--no-sync", "-D", f"{folder}/data")
        server.start()
        yield server
        server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    """Chromium without a window; it records its console and its requests."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("a browser: apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless", "--disable-dev-shm-usage", *["--no-sandbox"] * (os.geteuid() == 0)):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = Chrome(options, ChromeService(driver))
    yield started
    started.quit()
