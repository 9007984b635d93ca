"""Settings for all tests."""

import hypothesis
import pytest
import torch

# Small networks run faster on one thread, and two workers share the machine.
torch.set_num_threads(1)

# The machines are shared, so no example is timed; the same examples are tried each time.
hypothesis.settings.register_profile("ctta", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ctta")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skipped test is a failure: what cannot run here must be made to run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line("skipped tests count as failures", red=True)
