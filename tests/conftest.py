"""Settings of all tests."""

import getpass
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

# Small networks run faster on one thread, and several test processes share the machine.
torch.set_num_threads(1)

# No deadline, because machines are shared; the same examples in every run.
hypothesis.settings.register_profile("ctta", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ctta")

FOLDER = pytest.StashKey[Path]()
#: What begins the names of folders that this project's code makes; engines such as Ray and torchrun leave their own.
OWN_PREFIXES = ("ctta-", "tmp")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a temporary folder, which every process that it starts inherits."""
    if hasattr(config, "workerinput"):  # a process of xdist
        return
    system = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", system)  # where pytest keeps tmp_path of the last sessions
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(system, f"torchinductor_{getpass.getuser()}"))
    config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="ctta-"))  # short, for the paths of sockets
    os.environ["TMPDIR"], tempfile.tempdir = str(config.stash[FOLDER]), None


@pytest.hookimpl(trylast=True)  # after the processes of xdist have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a session fail whose tests left temporary files, or were skipped, so that neither is unnoticed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    folder, problems = session.config.stash.get(FOLDER, None), []
    if folder is not None and (left := sorted(p.name for p in folder.iterdir() if p.name.startswith(OWN_PREFIXES))):
        problems.append(f"temporary files were left: {', '.join(left)}")
    if reporter and reporter.stats.get("skipped"):
        problems.append("skipped tests count as failures")
    for problem in problems:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if reporter:
            reporter.write_line(problem, red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary folder of the session."""
    if (folder := config.stash.get(FOLDER, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
