"""Run ``ctta adapt`` in processes that are killed, for tests that the next run goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: Runs the command repeatedly in processes that are killed in the middle of writing rows, or between the rows and the
#: state; after each, prints its exit code and how many rows of the table are complete.
KILL_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch, typer
from ctta.adapt import run
from ctta.adapt.predictions import PredictionFile
from ctta.cli.adapt import adapt

append, save = PredictionFile.append, run.save

def write_half_a_row(file, rows):
    with file.path.open("a") as stream:
        stream.write("000.png,1")

def kill_at_call(number, function, before=lambda *given: None):
    calls = 0
    def replacement(*given):
        nonlocal calls
        calls += 1
        if calls == number:
            before(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)
    return replacement

def child(where, number, seconds_between_saves, arguments):
    torch.set_num_threads(1)
    run.SECONDS_BETWEEN_SAVES = seconds_between_saves
    if where == "rows":
        PredictionFile.append = kill_at_call(number, append, write_half_a_row)
    else:
        run.save = kill_at_call(number, save)
    app = typer.Typer()
    app.command()(adapt)
    app(args=arguments)

kills, table, *arguments = sys.argv[1:]
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports a lot, here once for all
for kill in json.loads(kills):
    process = os.fork()
    if process == 0:
        child(*kill, arguments)
    _, status = os.waitpid(process, 0)
    print(os.waitstatus_to_exitcode(status), Path(table).read_text().count(chr(10)) - 1)
"""

#: Where a process is killed ("rows" or "state"), at which call, and the seconds between saves.
Kill = tuple[str, int, int]


def kill_repeatedly(kills: Mapping[Kill, int], table: Path, *arguments: object) -> None:
    """Run the command once per kill, and check how many rows the table then has."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILL_SCRIPT, json.dumps(list(kills)), table, *arguments]
    ended = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    assert ended.stdout == "".join(f"{-signal.SIGKILL} {rows}\n" for rows in kills.values()), ended.stderr
