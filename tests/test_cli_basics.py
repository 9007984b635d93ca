"""What every command line has: a version, -h, corrections of typing errors, progress in logs."""

import inspect
import re
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import ctta
from ctta.cli import console
from ctta.cli.app import MAX_WIDTH, app, first_line_of_help
from ctta.errors import did_you_mean


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code and everything that the command prints, without line breaks."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, " ".join(result.output.split())


def commands() -> list[tuple[str, ...]]:
    root: Any = get_command(app)
    names = [(name,) for name in root.commands if name != "data"]
    return [(), *names, ("data",), ("data", "get"), ("data", "list")]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_has_a_line_per_option_that_says_how_to_type_it(
    command: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the terminal, each option starts a line of its own, no line is cut, and a flag takes no value."""
    text = read_help(command, width, monkeypatch, capsys)
    lines = text.splitlines()
    assert max(map(len, lines)) <= min(width, MAX_WIDTH) and "…" not in text and "<" not in text
    options = [parameter for parameter in find(command).params if parameter.param_type_name == "option"]
    for option in (each for each in options if not each.hidden):
        (line,) = [line for line in lines if re.match(rf"  (-h, )?{option.opts[0]}\b", line)]
        typed = " / ".join([option.opts[0], *option.secondary_opts]) + (f" {option.metavar}" if option.metavar else "")
        assert typed in line and bool(option.metavar) != option.is_flag, line
    assert "  -h, --help" in text


def read_help(
    command: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the help text for a terminal of some width, which CliRunner ignores."""
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit, match="0"):
        app(args=[*command, "--help"], prog_name="ctta")
    return capsys.readouterr().out


def find(command: tuple[str, ...]) -> Any:
    found: Any = get_command(app)
    for name in command:
        found = found.commands[name]
    return found


def test_the_list_of_commands_says_the_first_line_of_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = " ".join(read_help((), 100, monkeypatch, capsys).split())
    root: Any = get_command(app)
    for name, command in root.commands.items():
        assert f" {name} {first_line_of_help(command)} " in listed


def functions() -> list[Any]:
    """Return the commands of which each is one function."""
    root: Any = get_command(app)
    return [command for command in root.commands.values() if not hasattr(command, "commands")]


def test_options_are_listed_by_subject_with_their_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = read_help(("serve",), 120, monkeypatch, capsys)
    sections = dict(re.findall(r"^([A-Z]\w+):\n(.*?)(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == ["Options", "Server", "Streams", "Limits"]
    assert re.search(r"--port N +Listen on this port; 0 picks a free one\. Default: 8000\.\n", sections["Server"])
    assert "Default: --guard." in " ".join(sections["Options"].split())
    _, text = run("advise", "-h")
    assert "--seed N Seed the choice of images, the corruptions and the order. Default: 0." in text


def test_version() -> None:
    code, text = run("--version")
    assert code == 0 and text.startswith(f"ctta {ctta.__version__} (Python 3.") and "torch" in text


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_short_help_equals_long_help(command: tuple[str, ...]) -> None:
    assert run(*command, "-h") == run(*command, "--help")
    code, text = run(*command, "-h")
    assert code == 0 and text.startswith("Usage: ")


@pytest.mark.parametrize("command", functions(), ids=lambda command: command.name)
def test_help_texts_are_phrases_in_the_imperative(command: Any) -> None:
    annotations = {name: each for name, each in command.callback.__annotations__.items() if name != "return"}
    for name, annotation in annotations.items():
        (option,) = annotation.__metadata__
        if option.hidden:  # accepted for compatibility
            continue
        assert option.help and option.help.endswith("."), f"{name}: {option.help}"
        assert option.help.split()[0] in VERBS, f"{name}: {option.help!r} does not start with a verb"


@pytest.mark.parametrize("command", functions(), ids=lambda command: command.name)
def test_help_says_the_default_of_every_option(command: Any) -> None:
    """Typer prints it, unless it is None; then the text says what that means."""
    for name, parameter in inspect.signature(command.callback).parameters.items():
        (option,) = parameter.annotation.__metadata__
        if parameter.default is None and not option.hidden and name not in NOTHING_BY_DEFAULT:
            assert "Default: " in option.help, f"{name}: {option.help}"


#: Options that do nothing unless they are given.
NOTHING_BY_DEFAULT = {"settings", "classes", "class_names", "std"}
VERBS = set(
    [
        "Accept",
        "Adapt",
        "Also",
        "Apply",
        "Average",
        "Call",
        "Compare",
        "Compute",
        "Corrupt",
        "Describe",
        "Detect",
        "Divide",
        "Download",
        "Fail",
        "Give",
        "Go",
        "Keep",
        "Let",
        "Listen",
        "Load",
        "Monitor",
        "Normalize",
        "Print",
        "Process",
        "Read",
        "Reject",
        "Remember",
        "Repeat",
        "Report",
        "Reset",
        "Resize",
        "Run",
        "Reserve",
        "Save",
        "Serve",
        "Score",
        "Seed",
        "Set",
        "Show",
        "Shuffle",
        "Skip",
        "Spend",
        "Spread",
        "Stop",
        "Take",
        "Test",
        "Try",
        "Update",
        "Use",
        "Write",
    ]
)


@pytest.mark.parametrize(
    ("arguments", "correction"),
    [
        (("bnch",), "Did you mean 'bench'?"),
        (("data", "lst"), "Did you mean 'list'?"),
        (("adapt", "--metod", "tent"), "No such option: --metod. Did you mean --method?"),
        (("data", "list", "--jsn"), "No such option: --jsn. Did you mean --json?"),
    ],
)
def test_typing_errors_are_corrected(arguments: tuple[str, ...], correction: str) -> None:
    code, text = run(*arguments)
    assert code == 2 and correction in text


def test_names_that_resemble_nothing_get_no_correction() -> None:
    assert did_you_mean("xyz", ["tent", "cotta"]) == ""
    assert did_you_mean("CoTTA", ["tent", "cotta"]) == " (did you mean 'cotta'?)"


def test_progress_is_printed_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 12.0, 13.0, 75.0])
    monkeypatch.setattr("ctta.io.progress.time.monotonic", lambda: next(clock))
    with console.progress_bar("adapting") as update:
        for done in (400, 1000, 1001, 4000):
            update(done, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "adapting: 1,000 of 4,000 (25 %) after 0:00:12, about 0:01:00 left",
        "adapting: 4,000 of 4,000 (100 %) after 0:01:15",
    ]
