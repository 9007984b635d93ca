"""Choose the methods of a benchmark: those that a user names, or all that fit the network."""

from collections.abc import Mapping, Sequence

from torch import nn

from ctta.benchmark.recipes import BenchmarkOptions, BenchmarkTask
from ctta.errors import ConfigError, first_line
from ctta.methods import METHODS
from ctta.nn.vit import is_vit

#: The name that stands for every method of the library.
ALL = "all"
_NEEDS_STATS = "without --source-stats FILE, made by 'ctta source-stats'"
_NEEDS_VIT = "for vision transformers only"


def choose_methods(
    names: Sequence[str], task: BenchmarkTask, options: BenchmarkOptions, net: nn.Module
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Check that the network can be adapted by the named methods, and replace ``"all"`` by those that it can.

    Args:
        names: Names of methods of the task, and perhaps ``"all"``.
        task: The task.
        options: The user's options, of which settings and source statistics matter.
        net: The network.

    Returns:
        The names of the methods, each once, and of those that ``"all"`` leaves out, with the reason.

    Raises:
        ConfigError: A named method, or one that the user has given settings for, cannot adapt the network; or none can.
    """
    chosen: list[str] = []
    left_out: dict[str, str] = {}
    for name in names:
        if name != ALL:
            _check_method(name, task, net)
            chosen.append(name)
            continue
        typed = (*options.settings, *(options.policies or ()))
        changed = {text.partition("=")[0].partition(".")[0] for text in typed}
        for each in (each for each in METHODS if each in task.methods and each not in names):
            spec = task.methods[each]
            if spec.method_class.info is not None and spec.method_class.info.needs_vit and not is_vit(net):
                left_out[each] = _NEEDS_VIT
                continue
            if spec.lacks_source_stats:
                left_out[each] = _NEEDS_STATS
                continue
            try:
                spec.build_model(net, 0)
            except ConfigError as error:
                if each in changed or (spec.needs_source_stats and options.source_stats is not None):
                    raise
                left_out[each] = first_line(error)
            else:
                chosen.append(each)
    if not chosen:
        raise ConfigError(f"no method of the library fits the network. {describe_left_out(left_out)}")
    return tuple(dict.fromkeys(chosen)), left_out


def describe_left_out(left_out: Mapping[str, str]) -> str:
    """Return one line about the methods that ``"all"`` leaves out.

    Args:
        left_out: The reasons by method.

    Returns:
        The line, empty if there are none.

    >>> describe_left_out({"rem": "for vision transformers only", "eata": "no statistics", "rmt": "no statistics"})
    'Left out: rem (for vision transformers only); eata, rmt (no statistics).'
    """
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return f"Left out: {'; '.join(parts)}." if parts else ""


def _check_method(name: str, task: BenchmarkTask, net: nn.Module) -> None:
    """Raise unless a named method can adapt the network."""
    spec = task.methods[name]
    if spec.lacks_source_stats:
        raise ConfigError(
            f"{name} needs statistics of source images: compute them once with 'ctta source-stats --model SPEC "
            "--images DIR --output FILE', and give them with --source-stats FILE (source_stats= in Python)"
        )
    spec.build_model(net, 0)
