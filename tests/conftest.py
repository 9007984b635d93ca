"""Settings of all tests."""

import hypothesis
import pytest
import torch

# Small networks run faster on one thread, and several test processes share the machine.
torch.set_num_threads(1)

# No deadline, because machines are shared; the same examples in every run.
hypothesis.settings.register_profile("ctta", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ctta")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a skipped test fail the session, so that no test is skipped unnoticed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line("skipped tests count as failures", red=True)
